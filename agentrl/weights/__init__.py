"""Weights from the trainer into the engines, verified."""
