"""Puzzles about programs that a role of the episode proposes and another one solves (Absolute Zero)."""
