"""Ranks and engines of a run as Ray actors. Only this package imports Ray, and only for runs on a cluster.

    Cluster                one per run: the connection, one placement group, the nodes
    ├ RankActors           ranks 1, 2, … of the trainer: the same code as processes on this machine
    ├ ServerActor          one per vLLM or SGLang server: a launcher on the actor's node
    └ LocalEngineActor     one per engine of ``engine: local``; `ActorServer` is its client

Actors contain no logic: they run code that also runs without Ray. The process of the run is rank 0, plays the episodes
and writes the files.
"""

from agentrl.builders.ray.actors import RankActors, watch_actors
from agentrl.builders.ray.connection import (
    Cluster,
    ClusterNode,
    ClusterPlace,
    connect,
)
from agentrl.builders.ray.engines import ActorServer, LocalEngineActor, ServerActor

__all__ = [
    "ActorServer",
    "Cluster",
    "ClusterNode",
    "ClusterPlace",
    "LocalEngineActor",
    "RankActors",
    "ServerActor",
    "connect",
    "watch_actors",
]
