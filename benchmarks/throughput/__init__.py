"""Throughput of the runtime on a real server, compared with a bare client of the server: `agentrl bench rollout`."""
