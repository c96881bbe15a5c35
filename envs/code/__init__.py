"""Writing Python functions: generated problems or problems of JSONL files, graded by hidden tests."""
