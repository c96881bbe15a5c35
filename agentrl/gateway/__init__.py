"""A recording gateway: programs that speak to OpenAI or Anthropic are answered by the policy, and recorded exactly."""

from agentrl.gateway.server import Gateway
from agentrl.gateway.session import GatewaySession
from agentrl.gateway.work import UntrainedRequestRules

__all__ = ["Gateway", "GatewaySession", "UntrainedRequestRules"]
