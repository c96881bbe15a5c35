"""The code environment's entry in the registry."""

from __future__ import annotations

from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from ..task_ids import SPLITS
from .environment import CodeEnv
from .options import MAX_STEPS, parse_options
from .tasks import ENVIRONMENT, CodeTasks

INSTRUCTIONS = """\
You solve a problem by writing a Python function. Answer with the whole function in one code block, like this:

```python
def add(a, b):
    return a + b
```

Your code is run on the examples of the problem. If an example fails, you read what went wrong, and you answer with
better code. When all examples pass, your code is graded by tests that you cannot see, and the episode ends. If you run
out of turns, your last code is graded."""
TOOL_INSTRUCTIONS = """\
You solve a problem by writing a Python function. The tool run_python runs a program, and the tool run_tests tries a
solution on the examples. To submit your solution, do not call a tool: answer with the whole function in one code
block, like this:

```python
def add(a, b):
    return a + b
```

If all examples pass, it is graded by tests that you cannot see, and the episode ends."""


def tasks(split: str, **options: Any) -> CodeTasks:
    """Return the task source of a split, under the environment's options."""
    return CodeTasks(split, parse_options(**options))


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=CodeEnv,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Writing Python functions, with examples in one sandbox and hidden tests in a second one: generated functions"
        " of one line or of several steps, or problems of JSONL files in the format of MBPP or HumanEval."
    ),
    instructions=INSTRUCTIONS,
    answer_format="free",
    tool_instructions=TOOL_INSTRUCTIONS,
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    version=1,
    isolation=Isolation.INLINE,
    scores={"random": 0.0, "expert": 1.0},
)
