"""Log-probabilities and entropies of sampled tokens: how sequences lie in forward passes, and what the head says."""
