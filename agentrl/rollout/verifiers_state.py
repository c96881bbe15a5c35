"""State and parser that functions for verifiers receive, with the keys that exist while verifiers scores an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.trajectory import Trajectory

MESSAGES = Sequence[Mapping[str, Any]]


class VerifiersRecord(dict[str, Any]):
    """Mapping whose missing keys raise an error that lists the available ones.

    Args:
        name: Name of the mapping in messages.
        values: Contents.
    """

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
