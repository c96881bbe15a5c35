"""Pool of inference servers that acts as one policy engine."""

from agentrl.serving.pool.member import PoolSettings as PoolSettings
from agentrl.serving.pool.pool import ServerPool as ServerPool

__all__ = ["PoolSettings", "ServerPool"]
