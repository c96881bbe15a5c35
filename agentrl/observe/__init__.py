"""What a run writes down: metrics, trajectories, trackers."""
