"""Runs that users start: reinforcement learning, supervised fine-tuning, preferences, the demo."""
