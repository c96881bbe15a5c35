"""The shipped configs: data, not code. Read them with `agentrl.config.load_config`."""
