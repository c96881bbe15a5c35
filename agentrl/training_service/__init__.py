"""A server that the public ``tinker`` client takes for its vendor's: users keep a loop of their own, and train here.

requests (JSON, protocol buffers) ─► server ─► service: sessions, order, futures ─┬─► training thread: runs
                                                                                  └─► sampling thread: samplers
"""
