"""Puzzles and games: the rules of each in one file, one environment around them all."""
