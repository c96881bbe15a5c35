"""Math problems with a Python interpreter that keeps its state."""
