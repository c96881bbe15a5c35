"""Calling conventions of reward functions: agentrl's own, and those of TRL, verl and verifiers.

The library that a function was written for is recognized by the names of its parameters:

========== ======================================================================================================
TRL        ``f(prompts, completions, **columns)`` with lists of one item; returns a list of one number. Prompts and
           completions are texts if the row's prompt is text, otherwise lists of messages
verl       ``f(data_source, solution_str, ground_truth, extra_info)``; returns a number, or ``{"score": …}``.
           With ``solution_strs``, the same with lists of one item, as verl's batch reward manager calls it
verifiers  ``f(prompt, completion, answer, state, info, task, parser)``, and columns; the function takes any of them
========== ======================================================================================================

>>> library_of(inspect.signature(lambda completions, solution, **columns: [0.0]))
'trl'
>>> library_of(inspect.signature(lambda state: 0.0))
'verifiers'
>>> library_of(inspect.signature(lambda response, ground_truth: 0.0)) is None
True
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from agentrl.errors import shorten
from agentrl.message import Message
from agentrl.task import Task
from agentrl.trajectory import Trajectory

Library = Literal["agentrl", "trl", "verl", "verl_batch", "verifiers"]

MARKERS: Mapping[Library, frozenset[str]] = {
    "trl": frozenset(
        {"completions", "prompts", "completion_ids", "environments", "trainer_state", "log_metric", "log_extra"}
    ),
    "verl_batch": frozenset({"solution_strs", "data_sources", "extra_infos"}),
    "verl": frozenset({"solution_str", "data_source", "extra_info"}),
    "verifiers": frozenset({"completion", "prompt", "answer", "state", "info", "parser"}),
}
"""Parameters that identify functions for a library; the first library with a match wins."""
OWN = (("trajectory", "Trajectory"), ("task", "Task"))
"""Name and annotation of each parameter of agentrl's own functions."""
EXPECTED = (
    "def reward(trajectory, task) -> float, or the parameters of a function for TRL (completions), verl (solution_str) "
    "or verifiers (completion, answer, info, state, prompt, parser)"
)

MESSAGES = Sequence[Mapping[str, Any]]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def library_of(signature: inspect.Signature) -> Library | None:
    """Return the library whose convention a signature follows; ``None`` if it cannot be told from the signature.

    The first two parameters of agentrl's own functions are named or annotated as in `OWN`; an unused one may be called
    ``_``. Parameters that can only be passed by position, such as ``*args``, also indicate agentrl: the other libraries
    pass arguments by name.
    """
    if _is_own(signature):
        return "agentrl"
    names = set(signature.parameters)
    return next((library for library, markers in MARKERS.items() if names & markers), None)


def is_reversed(signature: inspect.Signature) -> bool:
    """Return True if the function takes a task first and a trajectory second."""
    first = [parameter for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL][:2]
    return len(first) == 2 and all(map(_matches, first, OWN[::-1]))


def _is_own(signature: inspect.Signature) -> bool:
    parameters = list(signature.parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds and not any(parameter.kind in _POSITIONAL for parameter in parameters):
        return inspect.Parameter.VAR_KEYWORD not in kinds  # with **kwargs, it may wrap a function for any library
    first = [parameter for parameter in parameters if parameter.kind in _POSITIONAL][:2]
    return len(first) == 2 and all(map(_fits, first, OWN))


def _fits(parameter: inspect.Parameter, own: tuple[str, str]) -> bool:
    is_unnamed = not parameter.name.strip("_0123456789")
    return is_unnamed or parameter.kind is inspect.Parameter.POSITIONAL_ONLY or _matches(parameter, own)


def _matches(parameter: inspect.Parameter, own: tuple[str, str]) -> bool:
    name, annotation = own
    given = parameter.annotation
    words = given if isinstance(given, str) else getattr(given, "__name__", str(given))
    return parameter.name.strip("_") == name or re.search(rf"\b{annotation}\b", words) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Calling convention of one library's functions."""

    arguments: Callable[[Trajectory, Task], dict[str, Any]]
    """Function that returns all available arguments by parameter name."""
    read: Callable[[Any], Any]
    """Function that extracts the number from the returned value."""
    always: frozenset[str] = frozenset()
    """Arguments that every task has, whatever its row's columns."""
    may_abstain: bool = False


def _trl_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    conversation = _split(trajectory)
    is_text = task.prompt is not None and not task.messages
    columns = {"ground_truth": task.ground_truth, **task.columns}
    return {
        **{name: [value] for name, value in columns.items()},
        "prompts": [task.prompt if is_text else conversation.prompt],
        "completions": [_text(trajectory, conversation.completion) if is_text else conversation.completion],
        "completion_ids": [[int(i) for s in trajectory.sequences for i in s.token_ids[s.loss_mask]]],
        "trainer_state": TRLTrainerState(global_step=_newest_version(trajectory)),
        "log_metric": _ignore,
        "log_extra": _ignore,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TRLTrainerState:
    """State of the trainer for functions written for TRL."""

    global_step: int
    """Training step of the newest weights that sampled the episode; 0 if nothing was sampled."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not available to reward functions, only trainer_state.global_step is: give the "
            "function a parameter with a default value, and set it as an option in agent.reward"
        )


def _newest_version(trajectory: Trajectory) -> int:
    versions = [int(found.max()) for s in trajectory.sequences if (found := s.versions[s.loss_mask]).size]
    return max(versions, default=0)


def _ignore(_name: str, _value: Any) -> None:
    """Ignore a value that a function for TRL logs."""


def _text(trajectory: Trajectory, completion: Sequence[Mapping[str, Any]]) -> str:
    """Return a completion as text: the only answer, or all messages from the first answer on."""
    if len(completion) == len(trajectory.completions) == 1:
        return trajectory.completions[0]
    return "\n".join(str(message["content"]) for message in completion)


def _only(returned: Any) -> Any:
    if isinstance(returned, Iterator):
        returned = list(returned)
    if isinstance(returned, str | Mapping) or not hasattr(returned, "__len__") or len(returned) != 1:
        raise TypeError(f"it returned {shorten(returned)}, expected a list of one number for the one episode")
    return returned[0]


def _score(returned: Any) -> Any:
    if not isinstance(returned, Mapping):
        return returned
    if "score" not in returned:
        raise TypeError(f"it returned {shorten(returned)}, expected a number, or a dictionary with a score")
    return returned["score"]


def _verl_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    source, extra = task.columns.get("data_source"), task.columns.get("extra_info")
    if extra is None or isinstance(extra, Mapping):  # verl's reward managers add these two
        extra = {**(extra or {}), "num_turns": _count_turns(trajectory), "rollout_reward_scores": {}}
    return {
        "data_source": task.type if source is None else source,
        "solution_str": trajectory.completions[-1] if trajectory.completions else "",
        "ground_truth": task.ground_truth,
        "extra_info": extra,
    }


def _count_turns(trajectory: Trajectory) -> int:
    """Return the number of turns as verl counts them: the prompt, each answer, and the messages after an answer."""
    whose: list[bool] = [message["role"] == "assistant" for message in _split(trajectory).completion]
    return 1 + sum(mine or before for before, mine in zip([True, *whose], whose, strict=False))


def _verl_batch_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    found = _verl_arguments(trajectory, task)
    plural = {"data_source": "data_sources", "solution_str": "solution_strs", "ground_truth": "ground_truths"}
    return {plural.get(name, "extra_infos"): [value] for name, value in found.items()}


def _verifiers_arguments(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    conversation = _split(trajectory)
    columns = {name: value for name, value in task.columns.items() if value is not None}
    truth = "" if task.ground_truth is None else task.ground_truth
    found = {
        "prompt": conversation.prompt,
        "completion": conversation.completion,
        "answer": columns.get("answer", truth),
        "info": _information(columns),
        "task": columns.get("task", task.type or "default"),
    }
    return {**columns, **found, "state": verifiers_state(found, trajectory, columns), "parser": AnswerParser()}


def _information(columns: Mapping[str, Any]) -> Any:
    """Return the column ``info``, which may be JSON text; all columns if there is none."""
    info = columns.get("info", dict(columns))
    return json.loads(info) if isinstance(info, str) else info


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConversation:
    """Conversation as messages with roles and contents."""

    prompt: list[dict[str, Any]]
    """Messages before the policy's first answer."""
    completion: list[dict[str, Any]]
    """Messages from the policy's first answer on."""


def _split(trajectory: Trajectory) -> SplitConversation:
    whole = {id(answer): text for answer, text in zip(trajectory.answers, trajectory.completions, strict=True)}
    messages = trajectory.messages
    first = next((i for i, message in enumerate(messages) if id(message) in whole), len(messages))
    rows = [_to_trl(message, whole.get(id(message))) for message in messages]
    return SplitConversation(prompt=rows[:first], completion=rows[first:])


def _to_trl(message: Message, completion: str | None) -> dict[str, Any]:
    """Convert a message to TRL's form: an answer without tool calls is the whole text, including thinking."""
    if completion is None or message.tool_calls:
        return message.to_template()
    return {"role": message.role, "content": completion}


class VerifiersRecord(dict[str, Any]):
    """Mapping whose missing keys raise an error that lists the available ones."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._name = name

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(_explain(f"{self._name}[{key!r}]", f"its keys are {', '.join(self)}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersSpan:
    """Time that an activity took, summed over the episode's turns."""

    duration: float
    """Seconds."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_explain(f"{name} of a time span", "only its duration is"))


class VerifiersTiming(VerifiersRecord):
    """Durations of an episode: in milliseconds by key (verifiers 0.1), and in seconds by attribute (later versions).

    Scoring has not ended, so it takes 0 and the total is that of the generation. Points in time are not available.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        timings = [turn.timings for turn in trajectory.turns]
        self.model = VerifiersSpan(duration=sum(turn.queue + turn.prefill + turn.decode for turn in timings))
        self.env = VerifiersSpan(duration=sum(turn.tool + turn.env for turn in timings))
        self.total: float = self.model.duration + self.env.duration
        self.generation = VerifiersSpan(duration=self.total)
        self.setup = self.scoring = VerifiersSpan(duration=0.0)
        milliseconds = 1000 * self.total
        super().__init__(
            "state['timing']", {"generation_ms": milliseconds, "scoring_ms": 0.0, "total_ms": milliseconds}
        )

    def __getattr__(self, name: str) -> NoReturn:
        parts = ", ".join(part for part in vars(self) if not part.startswith("_"))
        raise AttributeError(_explain(f"state['timing'].{name}", f"its parts are {parts}"))


def _explain(what: str, available: str) -> str:
    return (
        f"{what} is not available to reward functions: {available}; give the function a parameter, and set it as an "
        "option in agent.reward or as a column of the task's row"
    )


def verifiers_state(arguments: Mapping[str, Any], trajectory: Trajectory, row: Mapping[str, Any]) -> VerifiersRecord:
    """Make the state of a finished episode that has not been scored.

    Args:
        arguments: Arguments of the function that the state contains as well, such as ``completion``.
        trajectory: The episode.
        row: Columns of the task's row.
    """
    answers = [message for message in arguments["completion"] if message["role"] == "assistant"]
    steps = [VerifiersRecord(f"state['trajectory'][{i}]", {"completion": [m]}) for i, m in enumerate(answers)]
    return VerifiersRecord(
        "state",
        {
            **arguments,
            "id": trajectory.task_id,
            "example_id": row.get("example_id", trajectory.task_id),
            "input": dict(row),
            "turn": len(steps),
            "trajectory": steps,
            "is_completed": True,
            "is_truncated": trajectory.outcome is not None and trajectory.outcome.is_truncated,
            "error": None,
            "reward": None,
            "advantage": None,
            "metrics": None,
            "timing": VerifiersTiming(trajectory),
        },
    )


class AnswerParser:
    """Default parser of functions for verifiers; returns texts unchanged."""

    def parse(self, text: str) -> str:
        """Return the text."""
        return text

    def get_assistant_messages(self, completion: MESSAGES) -> list[Mapping[str, Any]]:
        """Return the answers of a completion."""
        return [message for message in completion if message["role"] == "assistant"]

    def parse_answer(self, completion: str | MESSAGES) -> str | None:
        """Return the text of the last answer; ``None`` without one."""
        if isinstance(completion, str):
            return self.parse(completion)
        answers = self.get_assistant_messages(completion)
        return self.parse(str(answers[-1]["content"])) if answers else None


NATIVE = Convention(arguments=lambda trajectory, task: {}, read=lambda returned: returned)
VERIFIERS = Convention(
    arguments=_verifiers_arguments,
    read=lambda returned: returned,
    always=frozenset({"prompt", "completion", "state", "info", "task", "parser"}),
)
TRL = Convention(
    arguments=_trl_arguments,
    read=_only,
    always=frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}),
    may_abstain=True,
)
CONVENTIONS: Mapping[Library, Convention] = {
    "agentrl": NATIVE,
    "trl": TRL,
    "verl": Convention(
        arguments=_verl_arguments, read=_score, always=frozenset({"data_source", "solution_str", "extra_info"})
    ),
    "verl_batch": Convention(
        arguments=_verl_batch_arguments,
        read=lambda returned: _score(_only(returned)),
        always=frozenset({"data_sources", "solution_strs", "extra_infos"}),
    ),
    "verifiers": VERIFIERS,
}
