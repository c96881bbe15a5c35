"""Random faults in real training runs, and an exact account of what became of every episode.

    campaign ──► runs `agentrl train` as a child process, injects planned faults, resumes it
       │             │
       │             ├── environment (`world.LedgerEnv`) ──────► ledger.jsonl: every reset and step
       │             └── trainer (`witness.record_trained`) ───► ledger.jsonl: the returns of every update
       ▼
    check: ledger against the run's folder ──► lost, duplicated, mislabelled; the campaign adds hung and unclear

The account does not rely on the code under test: an episode is identified by its return, which the environment makes
unique, and what was trained is what the trainer handed to a reward shaping.
"""
