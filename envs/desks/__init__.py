"""Shared parts of the service desks `retail` and `airline`: records, calls as text, and the expert's skeleton."""
