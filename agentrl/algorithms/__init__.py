"""Advantage estimators, losses, corrections and reward shapings: pure functions of tensors."""
