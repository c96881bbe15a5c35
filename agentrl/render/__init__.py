"""Messages to tokens and back: chat templates by suffix, turn boundaries, tool-call parsers."""
