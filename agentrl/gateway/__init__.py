"""A gateway through which clients of OpenAI and Anthropic talk to the policy; it records every sampled token."""

from agentrl.gateway.pending import UntrainedRequestRules
from agentrl.gateway.server import Gateway
from agentrl.gateway.session import GatewaySession

__all__ = ["Gateway", "GatewaySession", "UntrainedRequestRules"]
