"""Placeholders for GPU packages that can only be imported; servers launched on a CPU have this folder on their path."""
