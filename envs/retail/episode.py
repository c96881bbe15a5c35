"""One episode: the agent's calls and words, and their reward.

It is independent of the kind of customer: its caller passes the customer's replies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson

from agentrl.errors import ToolError, UsageError

from ..desks.calls import read_action
from ..task_ids import TRAIN, asked_task
from .database import Database
from .hearing import figures_in
from .options import RetailOptions
from .phrases import STOP
from .tasks import ENVIRONMENT, Case, RetailTasks, case_of
from .tools import Toolbox

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]


class ToolAction(NamedTuple):
    """Result of an action."""

    words: str | None = None
    """Words to the customer, who has to answer; ``None`` if a tool was called."""
    result: str = ""
    """Result of the tool."""
    valid: bool = True
    """True if the call was valid and allowed."""


class RetailEpisode:
    """Execution of an episode's calls, record of the agent's answers, and judgement at the end.

    Args:
        case: The scenario and its solution.
        options: Options of the environment.
        toolbox: Tools, which get the episode's database.
        changes: Changes of the database so far.
    """

    def __init__(
        self, case: Case, options: RetailOptions, toolbox: Toolbox, changes: Mapping[str, Any] | None = None
    ) -> None:
        self.case = case
        self.options = options
        self.database = toolbox.desk.database = Database(case.store, changes)
        self.answers: list[tuple[str, ...]] = []
        """Answers to the customer's question, right and wrong ones."""
        self.steps = 0
        self.gone = False
        """True if the customer has left."""
        self._toolbox = toolbox

    def take(self, action: str, asked: Sequence[str]) -> ToolAction:
        """Execute a call in text form, or record words to the customer; `observe` or `hear` then ends the step.

        Args:
            action: The agent's action.
            asked: The right answer to the customer's current question; empty without a question.

        Raises:
            UsageError: the episode is over.
        """
        if self.gone or self.steps >= self.options.max_steps:
            raise UsageError("the retail episode is over", expected="reset before the next step")
        try:
            act = read_action(action)
            if isinstance(act, str):
                return self._say(act, asked)
            return ToolAction(result=self._toolbox.call(act))
        except ToolError as error:
            return ToolAction(result=f"Error: {error}", valid=False)

    def hear(self, reply: str) -> Step:
        """End a step with the customer's reply."""
        self.gone = reply.endswith(STOP)
        return self.observe(reply)

    def observe(self, text: str, *, valid: bool = True) -> Step:
        """End a step with an observation."""
        self.steps += 1
        solved = self.gone and self._is_solved()
        truncated = not self.gone and self.steps >= self.options.max_steps
        return text, float(solved), self.gone, truncated, {**self.info(), "success": solved, "valid": valid}

    def info(self) -> dict[str, Any]:
        """Return the info of every step."""
        return {"success": False, "task_type": self.case.scenario.task_type.value}

    def key(self, customer: Mapping[str, Any]) -> str:
        """Return a key of the state: the database, the customer, and the agent's answers."""
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
        """Restore an episode from `to_plain`."""
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
        """Return True if the customer's question was answered correctly.

        With one request, the last answer counts. With two requests and a model as the customer, it is unknown which
        request an amount belongs to, so one of at most two different answers must be right.
        """
        right = self.case.outputs
        if not right:
            return True
        if len(self.case.scenario.requests) == 1:
            return self.answers[-1:] == [right]
        return right in self.answers and len(set(self.answers)) <= 2


def begin(options: RetailOptions, toolbox: Toolbox, seed: int, reset_options: Mapping[str, Any]) -> RetailEpisode:
    """Begin an episode with the ``task_id`` of the reset options, or with a training task that the seed draws.

    Raises:
        UsageError: a reset option is unknown, or the task does not exist.
    """
    task_id = asked_task(reset_options, ENVIRONMENT) or RetailTasks(TRAIN, options).draw(seed)
    return RetailEpisode(case_of(task_id, options.users), options, toolbox)
