"""Puzzles and games: one file of rules each, and one environment around all of them."""
