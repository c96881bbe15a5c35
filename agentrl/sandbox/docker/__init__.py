"""The back end ``docker``."""
