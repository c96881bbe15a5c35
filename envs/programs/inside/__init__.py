"""Programs that run inside sandboxes. Their source is sent there, so they import only the standard library."""
