"""Settings: models, files, overrides."""
