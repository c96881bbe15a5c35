"""Environments on other machines: the protocol and a client that presents a served environment as a local one.

The protocol is described in ``docs/environments/remote.md``; its server is `agentrl.remote.server`.
"""
