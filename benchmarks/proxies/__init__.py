"""Proxies in front of one server, which `agentrl bench gateway --versus` compares."""
