"""The runtime that plays episodes."""
