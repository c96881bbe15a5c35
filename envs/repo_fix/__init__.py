"""Small repositories with a mistake in them, and tests that fail because of it."""
