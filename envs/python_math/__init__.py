"""Problems of mathematics with a Python interpreter that remembers."""
