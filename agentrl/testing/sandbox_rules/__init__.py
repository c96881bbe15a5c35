"""The rules of a sandbox, by theme; `catalogue` lists them."""
