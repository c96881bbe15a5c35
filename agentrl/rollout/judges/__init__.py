"""Judges: language models that score episodes, fill in rubrics, or rank the episodes of a group.

transcripts ─► question + answer format ─► client (cache, budget, service) ─► verdict ─► reward

`agentrl.config.judge` has the types of questions and their default prompts.
"""

from agentrl.rollout.judges.client import JudgeClient, build_judge, judge_metrics, judge_service_settings
from agentrl.rollout.judges.scorers import judge_rows, make_judge
from agentrl.rollout.judges.transcripts import Decode, require_tokens, transcript

__all__ = [
    "Decode",
    "JudgeClient",
    "build_judge",
    "judge_metrics",
    "judge_rows",
    "judge_service_settings",
    "make_judge",
    "require_tokens",
    "transcript",
]
