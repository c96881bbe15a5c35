"""What a run leaves on disk and tells others: its folder, metrics, trackers, trajectories."""
