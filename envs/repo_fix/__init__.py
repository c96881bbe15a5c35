"""Small repositories with a mistake and tests that fail because of it."""
