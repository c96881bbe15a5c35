"""Writing functions: generated problems or those of JSONL files, graded by tests that the policy never sees."""
