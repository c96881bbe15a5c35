"""Conversion of messages to tokens and back: chat templates, turn boundaries, tool-call parsers."""
