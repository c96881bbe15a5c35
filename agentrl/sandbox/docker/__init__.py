"""Back end ``docker``."""
