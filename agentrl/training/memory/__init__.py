"""What training takes of memory: counted while it runs, found without data, and planned before a run."""
