"""Training on real traffic: clients open the episodes through a gateway, and reward them afterwards."""

from agentrl.rollout.live.scheduler import LiveScheduler, first_step_to_read
from agentrl.rollout.live.sessions import LIVE, LiveSessions

__all__ = ["LIVE", "LiveScheduler", "LiveSessions", "first_step_to_read"]
