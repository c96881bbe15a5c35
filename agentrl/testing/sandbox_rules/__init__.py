"""The rules of a sandbox, by theme; `agentrl.testing.sandbox_check` lists them."""
