"""Training on real traffic: clients open the episodes through a gateway, and reward them afterwards."""

from agentrl.rollout.live.environment import LIVE
from agentrl.rollout.live.scheduler import LiveScheduler, first_step_to_read
from agentrl.rollout.live.sessions import LiveSessions

__all__ = ["LIVE", "LiveScheduler", "LiveSessions", "first_step_to_read"]
