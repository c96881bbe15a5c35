"""Running and judging programs that nobody vouches for: what the environments with sandboxes share."""
