"""Import-only stand-ins for GPU packages; a launched server on a CPU has this folder on its path."""
