"""Builders of a run's parts from its config: environments, episodes, model, engine, trainer."""
