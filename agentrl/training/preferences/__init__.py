"""Learning from pairs: DPO and its kin, and reward models."""
