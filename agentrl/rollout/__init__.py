"""The runtime that plays episodes.

A `Speaker` (an engine, a text service, an expert) and an `EnvironmentHost` are joined by an agent loop in an
`EpisodeRunner`; a `GroupScheduler` keeps groups of episodes running for a trainer, `play_all` plays a list of them.
"""
