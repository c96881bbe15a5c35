"""The household world: the ALFWorld text game as a pure-Python engine."""
