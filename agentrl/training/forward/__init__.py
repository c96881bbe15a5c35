"""Forward passes: layout of sequences, and log-probabilities and entropies of sampled tokens."""
