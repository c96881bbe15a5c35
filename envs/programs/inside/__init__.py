"""Programs that run inside sandboxes. Their text is sent there: they import the standard library only."""
