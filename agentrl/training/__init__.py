"""Training: RL updates from trajectories, SFT, preference learning, reward models."""
