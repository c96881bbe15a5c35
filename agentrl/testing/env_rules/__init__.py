"""The rules of an environment, by theme; `agentrl.testing.env_check` lists them."""
