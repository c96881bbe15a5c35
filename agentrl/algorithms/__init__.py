"""Advantage estimators, losses and corrections: pure functions of tensors."""
