"""One episode: what is done at the desk and said to the customer, and what it is worth.

Knows no customer: whoever holds one passes what it answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson

from agentrl.errors import ToolError, UsageError

from ..task_ids import TRAIN, asked_task
from .database import Database
from .hearing import figures_in
from .options import RetailOptions
from .phrases import STOP
from .tasks import ENVIRONMENT, Case, RetailTasks, case_of
from .tools import RESPOND, Toolbox, parse_call

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]


class ToolAction(NamedTuple):
    """What an action came to."""

    words: str | None = None
    """What was said to the customer, who has to answer; ``None`` when a tool was called."""
    result: str = ""
    """What the tool answered."""
    valid: bool = True
    """True if the call was understood, and allowed."""


class RetailEpisode:
    """Carries out calls, hears what is said, judges the end.

    Args:
        case: Who calls, and what solving it means.
        options: Of the environment.
        toolbox: Gets the episode's database.
        changes: What was changed in the database so far.
    """

    def __init__(
        self, case: Case, options: RetailOptions, toolbox: Toolbox, changes: Mapping[str, Any] | None = None
    ) -> None:
        self.case = case
        self.options = options
        self.database = toolbox.desk.database = Database(case.store, changes)
        self.answers: list[tuple[str, ...]] = []
        """Answers that were given to the customer's question, right and wrong ones."""
        self.steps = 0
        self.gone = False
        """The customer has left."""
        self._toolbox = toolbox

    def take(self, action: str, asked: Sequence[str]) -> ToolAction:
        """Carry out a call that is written as text, or say something; `observe` or `hear` then ends the step.

        Args:
            action: What the agent does.
            asked: The right answer to what the customer may be asking now; empty when that is no question.

        Raises:
            UsageError: the episode is over.
        """
        if self.gone or self.steps >= self.options.max_steps:
            raise UsageError("the retail episode is over", expected="reset before the next step")
        try:
            call = parse_call(action)
            if call is None:
                return self._say(action, asked)
            if call.name == RESPOND:
                return self._say(str(call.arguments.get("content", "")), asked)
            return ToolAction(result=self._toolbox.call(call))
        except ToolError as error:
            return ToolAction(result=f"Error: {error}", valid=False)

    def hear(self, reply: str) -> Step:
        """Return the step that the customer answered."""
        self.gone = reply.endswith(STOP)
        return self.observe(reply)

    def observe(self, text: str, *, valid: bool = True) -> Step:
        """Return the step that led to an observation."""
        self.steps += 1
        solved = self.gone and self._is_solved()
        truncated = not self.gone and self.steps >= self.options.max_steps
        return text, float(solved), self.gone, truncated, {**self.info(), "success": solved, "valid": valid}

    def info(self) -> dict[str, Any]:
        """What is told from the start on."""
        return {"success": False, "task_type": self.case.scenario.task_type.value}

    def key(self, customer: Mapping[str, Any]) -> str:
        """Return a key of the state: the database, the customer, and what was said."""
        records = [self.database.key(), sorted(self.database.identified)]
        state = [self.case.task_id, records, customer, self.answers, self.gone]
        return hashlib.blake2b(orjson.dumps(state), digest_size=16).hexdigest()

    def to_plain(self, customer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the episode as JSON types, with its customer."""
        return {
            "task_id": self.case.task_id,
            "changes": self.database.changes(),
            "customer": customer,
            "answers": [list(answer) for answer in self.answers],
            "steps": self.steps,
            "gone": self.gone,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], options: RetailOptions, toolbox: Toolbox) -> RetailEpisode:
        """Return the episode that `to_plain` described."""
        episode = cls(case_of(plain["task_id"], options.users), options, toolbox, plain["changes"])
        episode.answers = [tuple(answer) for answer in plain["answers"]]
        episode.steps, episode.gone = plain["steps"], plain["gone"]
        return episode

    def _say(self, words: str, asked: Sequence[str]) -> ToolAction:
        figures = figures_in(words)
        if asked and figures.answers(asked):
            self.answers.append(figures.answer(asked))
        return ToolAction(words=words)

    def _is_solved(self) -> bool:
        is_known = self.case.scenario.user_id in self.database.identified
        return is_known and self.database.key() == self.case.gold_key and self._has_answered()

    def _has_answered(self) -> bool:
        """Return True if the last answer is the right one.

        A model that plays the customer does not tell which request the agent speaks about. With a second request, an
        amount of that one may look like an answer to the question: of two different answers one must be right.
        """
        right = self.case.outputs
        if not right:
            return True
        if len(self.case.scenario.requests) == 1:
            return self.answers[-1:] == [right]
        return right in self.answers and len(set(self.answers)) <= 2


def begin(options: RetailOptions, toolbox: Toolbox, seed: int, reset_options: Mapping[str, Any]) -> RetailEpisode:
    """Return the episode that a reset asks for: of its ``task_id``, or of a training task that the seed draws.

    Raises:
        UsageError: a reset option is unknown, or names no task.
    """
    task_id = asked_task(reset_options, ENVIRONMENT) or RetailTasks(TRAIN, options).draw(seed)
    return RetailEpisode(case_of(task_id, options.users), options, toolbox)
