"""Mutation runs: small wrong changes of the sources, and whether the tests notice them."""
