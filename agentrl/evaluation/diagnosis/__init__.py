"""Diagnosis of runs and evaluations: rules that find what is wrong, with the evidence and the remedy.

    metrics, episodes, failures ─► RunSummary ─► rules ─► findings, the root cause first

The same rules warn while a run trains (`watch`), close a run and an evaluation, and serve `agentrl diagnose` (`read`).
"""
