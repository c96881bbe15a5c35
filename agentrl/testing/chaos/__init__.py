"""Random faults in real training runs, and an exact check of what happened to every episode.

    campaign ──► runs `agentrl train` as a child process, injects planned faults, resumes it
       │             │
       │             ├── environment (`world.LedgerEnv`) ──────► ledger.jsonl: every reset and step
       │             └── trainer (`witness.record_trained`) ───► ledger.jsonl: the returns of every update
       ▼
    check: ledger against the run's folder ──► lost, duplicated, mislabelled; the campaign adds hung and unclear

The check does not rely on the code under test: an episode is identified by its return, which the environment makes
unique, and the trained episodes are those that the trainer passed to a reward shaping function.
"""
