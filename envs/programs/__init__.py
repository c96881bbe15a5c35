"""Running and judging untrusted programs: shared code of the environments with sandboxes."""
