"""Episodes that have ended, for tests of what is counted over them."""

from agentrl.errors import Outcome
from agentrl.trajectory import TokenSequence, Trajectory, Turn


def episode(reward=0.0, success=None, *, outcome=Outcome.FINISHED, error=None, answer=1, turns=1, invalid=0):
    sequence = TokenSequence()
    sequence.extend_sampled([answer] * turns, logprobs=[-1.0] * turns, versions=[0] * turns)
    sequence.turns.extend(Turn(index=i, start=i, end=i + 1) for i in range(turns))
    found = Trajectory(id="a", task_id="a", environment="e", seed=0, group_id="g", sequences=[sequence])
    found.reward, found.success, found.outcome, found.error = reward, success, outcome, error
    found.metrics["invalid_actions"] = invalid
    return found
