"""Rules of environments by topic; `agentrl.testing.env_check` lists them."""
