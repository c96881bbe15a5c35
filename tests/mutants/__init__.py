"""Mutation tests: small wrong changes of the sources that the tests should notice."""
