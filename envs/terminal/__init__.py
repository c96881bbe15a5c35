"""Tasks for a shell: generated ones, and folders in the forms of Harbor and terminal-bench."""
