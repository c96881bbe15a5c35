"""Modules that vLLM's processes import; only they have this folder on their path."""
