"""Throughput of the runtime on a real server, beside a bare client of the same server: `agentrl bench rollout`."""
