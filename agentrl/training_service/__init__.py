"""Server with the API of the public ``tinker`` client: the user's training loop runs elsewhere and sends its data here.

requests (JSON, protocol buffers) ─► server ─► service: sessions, order, futures ─┬─► training thread: runs
                                                                                  └─► sampling thread: samplers
"""

from agentrl.training_service.runs import ALPHA, BaseWeights
from agentrl.training_service.server import KEY_PREFIX, KEY_VARIABLE, TrainingServer
from agentrl.training_service.service import TrainingServiceSettings
from agentrl.training_service.wire import TINKER

__all__ = ["ALPHA", "KEY_PREFIX", "KEY_VARIABLE", "TINKER", "BaseWeights", "TrainingServer", "TrainingServiceSettings"]
