"""Ranks and engines of a run as actors of Ray; the only room that imports it, and only once a run asks for a cluster.

    Cluster                one per run: the connection, one placement group, the nodes
    ├ RankActors           ranks 1, 2, … of the trainer: the same code as processes of this machine
    ├ ServerActor          one per vLLM or SGLang server: a launcher on the actor's node
    └ LocalEngineActor     one per engine of ``engine: local``; `ActorServer` is its client

An actor here holds no logic of its own: it is where something runs that runs without Ray, too. The process of the run
stays rank 0, plays the episodes and writes the files.
"""

from agentrl.builders.ray.actors import RankActors, watching_actors
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
    "watching_actors",
]
