"""Rules of sandboxes by topic; `agentrl.testing.sandbox_check` lists them."""
