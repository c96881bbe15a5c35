"""The runtime that plays episodes.

An `EpisodePolicy` (an engine, a chat service, an expert) and an `EnvPool` are joined by an agent loop in an
`EpisodeRunner`; a `GroupScheduler` keeps groups of episodes running for a trainer, `play_all` plays a list of them.
"""
