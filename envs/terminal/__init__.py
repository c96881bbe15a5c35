"""Shell tasks: generated ones, and task folders in the formats of Harbor and terminal-bench."""
