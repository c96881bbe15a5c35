"""Evaluation: many episodes of one policy on fixed tasks, with intervals, resumable."""
