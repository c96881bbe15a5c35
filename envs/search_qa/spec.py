"""The search environment's entry in the registry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from ..task_ids import SPLITS
from .environment import make_search_qa, make_search_react
from .options import ENVIRONMENT, MAX_STEPS, TOPK, parse_options
from .tasks import SearchTasks

INSTRUCTIONS = """\
Answer a question. You can look things up with a search engine. Each turn, do one of two things.

To search, write the words to look for inside <search> </search>. For example:
<search>capital of Norway</search>
You then read the best passages inside <information> </information>. Search as often as you need, for one thing at a
time: the answer may need facts from several passages.

To answer, write only the answer, without an explanation, inside <answer> </answer>. This ends the episode. For example:
<answer>Oslo</answer>

You may think inside <think> </think> first."""
REACT_INSTRUCTIONS = """\
Answer a question. You can look things up with a search engine. Each turn, take one action.

To search, write for example: search[capital of Norway]
You then read the best passages. Search for one thing at a time: the answer may need facts from several passages.

To answer, write only the answer, without an explanation, for example: finish[Oslo]
This ends the episode."""
TOOL_INSTRUCTIONS = """\
Answer a question. You can look things up with the tool search. Search as often as you need, for one thing at a time:
the answer may need facts from several passages. Once you know the answer, do not call a tool: write only the answer,
without an explanation, inside <answer> </answer>. For example:
<answer>Oslo</answer>"""


def tasks(split: str, **options: Any) -> SearchTasks:
    """Return the task source of a split, under the environment's options."""
    return SearchTasks(split, parse_options(**options))


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=make_search_qa,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Questions of one to three hops, answered by searching with Search-R1's protocol, in a generated fact world"
        " (each split has its own names), in your own JSONL files, or with any HTTP retriever. Exact match or F1."
    ),
    instructions=INSTRUCTIONS,
    answer_format="free",
    tool_instructions=TOOL_INSTRUCTIONS,
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    options={"topk": TOPK},
    scores={"random": 0.0, "expert": 1.0},
)

REACT_SPEC = replace(
    SPEC,
    name="search_react",
    make=make_search_react,
    description=(
        "The questions of search_qa with ReAct's actions, search[words] and finish[answer], inside the tags of the"
        " loop: easier for small models."
    ),
    instructions=REACT_INSTRUCTIONS,
    answer_format="",
    tool_instructions="",
)
