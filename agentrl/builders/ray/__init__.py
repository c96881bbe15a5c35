"""Ranks, engines and environments of a run as Ray actors. Only this package imports Ray.

    Cluster                one per run: the connection, one placement group, the nodes
    ├ RankActors           ranks 1, 2, … of the trainer: the same code as processes on this machine
    ├ ServerActor          one per vLLM or SGLang server: a launcher on the actor's node
    ├ LocalEngineActor     one per engine of ``engine: local``; `ActorServer` is its client
    └ EnvironmentActor     one per environment node: worker processes and sandboxes; `EnvironmentNode` is its client

Actors contain no logic: they run code that also runs without Ray. The process of the run is rank 0, plays the episodes
and writes the files.
"""

from agentrl.builders.ray.actors import ActorEnvironment, GpuReservation, PlacedActor, RankActors, set_variables
from agentrl.builders.ray.connection import MAX_CALLS, RAY, Cluster, ClusterPlace, connect, gloo_variables
from agentrl.builders.ray.engines import ActorServer, LocalEngineActor, ServerActor, answer_of
from agentrl.builders.ray.environments import EnvironmentActor, EnvironmentNode, NodeWorkers

__all__ = [
    "MAX_CALLS",
    "RAY",
    "ActorEnvironment",
    "ActorServer",
    "Cluster",
    "ClusterPlace",
    "EnvironmentActor",
    "EnvironmentNode",
    "GpuReservation",
    "LocalEngineActor",
    "NodeWorkers",
    "PlacedActor",
    "RankActors",
    "ServerActor",
    "answer_of",
    "connect",
    "gloo_variables",
    "set_variables",
]
