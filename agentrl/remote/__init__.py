"""Environments that run elsewhere: the protocol's words and values, and the client that plays a served one as if local.

The protocol is described in ``docs/environments/remote.md``; its server is `agentrl.remote.server`.
"""
