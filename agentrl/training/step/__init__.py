"""The parts of a training step: which episodes train, their batch, rewards and guides, the updates, and the report."""
