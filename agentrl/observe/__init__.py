"""Storage and observation of runs: folders, checkpoints, metrics, trackers, trajectories."""
