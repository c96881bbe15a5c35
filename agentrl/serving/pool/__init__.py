"""Several inference servers as one policy engine."""

from agentrl.serving.pool.pool import ServerPool as ServerPool
from agentrl.serving.pool.settings import PoolSettings as PoolSettings

__all__ = ["PoolSettings", "ServerPool"]
