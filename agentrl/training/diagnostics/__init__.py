"""Diagnostics of training: numerical alarms, replay of skipped updates, engine agreement, memory plans."""
