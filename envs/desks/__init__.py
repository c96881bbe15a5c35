"""Shared parts of the service desks `retail`, `airline` and `telecom`: records, tools, calls, the expert's skeleton."""
