"""Runs that people start: reinforcement learning, supervised fine-tuning, preferences, the demo."""
