"""The rules of an environment, by theme; `catalogue` lists them."""
