"""Proxies before one server, which `agentrl bench gateway --versus` compares."""
