"""Ranks and engines of a run as Ray actors. Only this package imports Ray, and only for runs on a cluster.

    Cluster                one per run: the connection, one placement group, the nodes
    ├ RankActors           ranks 1, 2, … of the trainer: the same code as processes on this machine
    ├ ServerActor          one per vLLM or SGLang server: a launcher on the actor's node
    └ LocalEngineActor     one per engine of ``engine: local``; `ActorServer` is its client

Actors contain no logic: they run code that also runs without Ray. The process of the run is rank 0, plays the episodes
and writes the files.
"""

from agentrl.builders.ray.actors import (
    ActorEnvironment,
    GpuReservation,
    RankActors,
    check_actor,
    set_variables,
    watch_actors,
)
from agentrl.builders.ray.connection import MOST_CALLS, RAY, Cluster, ClusterPlace, connect, gloo_variables
from agentrl.builders.ray.engines import ActorServer, LocalEngineActor, ServerActor, answer_of

__all__ = [
    "MOST_CALLS",
    "RAY",
    "ActorEnvironment",
    "ActorServer",
    "Cluster",
    "ClusterPlace",
    "GpuReservation",
    "LocalEngineActor",
    "RankActors",
    "ServerActor",
    "answer_of",
    "check_actor",
    "connect",
    "gloo_variables",
    "set_variables",
    "watch_actors",
]
