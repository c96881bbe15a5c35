"""From a config to parts that fit together: environments, episodes, model, engine, trainer."""
