"""Conformance kits and small models, for the tests of users and of agentrl."""
