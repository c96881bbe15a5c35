"""What vLLM's own processes import; this folder is put on their path and on no other."""
