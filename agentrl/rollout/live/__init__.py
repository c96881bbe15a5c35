"""Training on real traffic: clients open the episodes through a gateway, and reward them afterwards."""

from agentrl.rollout.live.environment import LIVE
from agentrl.rollout.live.scheduler import LiveScheduler
from agentrl.rollout.live.sessions import LiveSessions

__all__ = ["LIVE", "LiveScheduler", "LiveSessions"]
