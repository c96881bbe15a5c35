"""A server with the API of the public ``tinker`` client: users write their own training loop and train here.

requests (JSON, protocol buffers) ─► server ─► service: sessions, order, futures ─┬─► training thread: runs
                                                                                  └─► sampling thread: samplers
"""
