"""Comparisons with other frameworks: `agentrl bench rollout --versus …` and `agentrl bench e2e --versus …`."""
