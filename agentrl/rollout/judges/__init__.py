"""Judges: language models that score episodes, fill in rubrics, or rank the episodes of a group.

transcripts ─► question + form ─► client (cache, budget, service) ─► verdict ─► reward
"""

from agentrl.rollout.judges.client import JudgeClient
from agentrl.rollout.judges.ranking import ROUNDS, pairs_of
from agentrl.rollout.judges.scorers import make_judge
from agentrl.rollout.judges.transcripts import Decode, require_tokens, transcript

__all__ = [
    "ROUNDS",
    "Decode",
    "JudgeClient",
    "make_judge",
    "pairs_of",
    "require_tokens",
    "transcript",
]
