"""The airline's desk as an environment."""

from __future__ import annotations

import functools
import hashlib
import string
from collections.abc import Mapping
from typing import Any, TypeAlias

import gymnasium
import orjson
from gymnasium.spaces import Text

from agentrl.errors import ToolError, UsageError
from agentrl.message import Message, ToolCall
from agentrl.tool import Tool

from ..desks.calls import DeskTool, read_action, tool_message
from ..desks.toolset import declare_tools
from ..retail import phrases as role_phrases
from ..retail.hearing import figures_in
from ..task_ids import TEST, TRAIN, asked_task
from .customer import Customer
from .desk import Desk
from .expert import AirlineExpert
from .phrases import OUT_OF_TIME, STOP
from .published import PublishedCase, PublishedCustomer
from .records import Database, Store
from .tasks import ENVIRONMENT, AirlineTasks, Case, case_of, parse_options, published_case

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
_OUT_OF_TIME = (OUT_OF_TIME, role_phrases.OUT_OF_TIME)
"""Last words of customers who were neither served nor refused, by a script or for a role."""


@functools.cache
def declared_tools() -> dict[str, Tool]:
    """Return all tools by name, bound to a desk without records."""
    return declare_tools(_empty_desk())


def _empty_desk() -> Desk:
    return Desk(Database(Store(users={}, flights={}, reservations={})))


class AirlineDesk(gymnasium.Env[str, str]):
    """Environment in which an agent serves a customer of an airline in a conversation, with tools, under a policy.

    An action is text for the customer, or a tool call as text: ``{"name": …, "arguments": {…}}``. Agents that call
    tools natively use `tools`; their other text goes to the customer. The customer ends the episode; the reward is 1 if
    the database has the state after the right actions, and the answer to a question was right, else 0. `reset` takes
    the option ``task_id``; without it the seed draws a training task, or with published data one of these.

    Args:
        options: Options of `parse_options`.
    """

    action_hint = ""

    def __init__(self, **options: Any) -> None:
        self.options = parse_options(**options)
        self.observation_space = Text(32768, charset=string.printable)
        self.action_space = Text(512, charset=string.printable)
        self._desk = _empty_desk()
        self.tools = tuple(DeskTool(tool, getattr(self._desk, name)) for name, tool in declared_tools().items())
        self._named = {tool.name: tool for tool in self.tools}
        self._case: Case | PublishedCase | None = None
        self._customer: Customer | PublishedCustomer
        self._said: list[str] = []
        self._steps, self._gone = 0, False

    @property
    def case(self) -> Case | PublishedCase:
        """The current task.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._case is None:
            raise UsageError("the airline environment has no episode yet", expected="reset before anything else")
        return self._case

    @property
    def role(self) -> PublishedCustomer | None:
        """The customer, if the runtime plays it."""
        return self._customer if isinstance(self._customer, PublishedCustomer) else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with the customer's first words, or with the text that a customer played as a role reads.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        split = TRAIN if self.options.data is None else TEST
        task_id = asked_task(options, ENVIRONMENT) or AirlineTasks(split, self.options).draw(drawn)
        self._begin(task_id, {}, {})
        briefing = {} if self.role is None else self.role.briefing()
        return self._customer.open(), {**self._info(), **briefing}

    def _begin(self, task_id: str, changes: Mapping[str, Any], customer: Mapping[str, Any]) -> None:
        data = self.options.data
        self._case = case = case_of(task_id) if data is None else published_case(task_id, data)
        self._desk.database = Database(case.store, changes)
        self._said, self._steps, self._gone = [], 0, False
        if isinstance(case, PublishedCase):
            self._customer = PublishedCustomer(case, **customer)
        else:
            self._customer = Customer(case.scenario, case.gold_key, customer)

    def step(self, action: str) -> Step:
        """Speak to the customer, or call a tool; or answer as the customer, if it acts next.

        Raises:
            UsageError: the episode is over.
            EnvironmentFailure: the customer has given several unusable answers in a row.
        """
        role = self.role if self._case is not None else None
        if role is not None and role.is_asked:
            return self._hear(role.hear(action))
        if self.case and (self._gone or self._steps >= self.options.max_steps):
            raise UsageError("the airline episode is over", expected="reset before the next step")
        try:
            act = read_action(action)
            if isinstance(act, ToolCall):
                return self._observe(self._call(act))
        except ToolError as error:
            return self._observe(f"Error: {error}", valid=False)
        self._said.append(act)
        return self._hear(self._customer.answer(act, self._desk.database))

    def _hear(self, reply: str) -> Step:
        """End a step with the customer's reply; a role's turn does not end the agent's step."""
        if self.role is not None and self.role.holds_step:
            return reply, 0.0, False, False, self._info()
        self._gone = reply.endswith(STOP)
        return self._observe(reply)

    def _observe(self, text: str, *, valid: bool = True) -> Step:
        self._steps += 1
        solved = self._gone and text not in _OUT_OF_TIME and self._is_solved()
        truncated = not self._gone and self._steps >= self.options.max_steps
        return text, float(solved), self._gone, truncated, {**self._info(), "success": solved, "valid": valid}

    def _call(self, call: ToolCall) -> str:
        tool = self._named.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}", expected=", ".join(self._named))
        text: str = tool(**tool.validate(call.arguments))
        return text

    def _is_solved(self) -> bool:
        case, database = self.case, self._desk.database
        if isinstance(case, PublishedCase):
            said = " ".join(self._said).replace(",", "").lower()
            has_said = all(output.replace(",", "").lower() in said for output in case.outputs)
            return has_said and database.key(with_transfers=False) == case.gold_key
        if case.scenario.user_id not in database.seen or database.key() != case.gold_key:
            return False
        answers = [
            found.amounts for text in self._said if (found := figures_in(text)).answers(case.scenario.outputs or ("",))
        ]
        return not case.scenario.outputs or answers[:1] == [case.scenario.outputs]

    def _info(self) -> dict[str, Any]:
        case = self.case
        kind = "published" if isinstance(case, PublishedCase) else case.scenario.kind.value
        player = {} if self.role is None else {"player": self.role.next_player}
        return {"success": False, "task_type": kind, **player}

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action, with a tool call if it is one."""
        return tool_message(action)

    def expert(self) -> AirlineExpert:
        """Return a policy that serves every scripted customer.

        Raises:
            UsageError: the customer is a model.
        """
        if self.options.data is not None:
            raise UsageError("published tasks have no expert", expected="generated tasks")
        return AirlineExpert()

    def state_key(self) -> str:
        """Return a key of the database, the customer's state, and the agent's words."""
        return hashlib.blake2b(orjson.dumps(self.snapshot()), digest_size=16).hexdigest()

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return {
            "task_id": self.case.task_id,
            "changes": self._desk.database.changes(),
            "customer": self._customer.to_plain(),
            "said": list(self._said),
            "steps": self._steps,
            "gone": self._gone,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._begin(snapshot["task_id"], snapshot["changes"], snapshot["customer"])
        self._said, self._steps, self._gone = list(snapshot["said"]), snapshot["steps"], snapshot["gone"]
