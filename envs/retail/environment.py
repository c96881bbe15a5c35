"""The retail desk as a Gymnasium environment."""

from __future__ import annotations

import contextlib
import hashlib
import string
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import gymnasium
import orjson
from gymnasium.spaces import Text

from agentrl.errors import ToolError, UsageError
from agentrl.message import Message, ToolCall
from agentrl.tool import Tool

from .customer import Customer
from .database import Database, Store
from .desk import Desk
from .expert import RetailExpert
from .generator import TRAIN
from .hearing import says_amount
from .options import MAX_STEPS, parse_options
from .tasks import Case, RetailTasks, case_of
from .tools import RESPOND, parse_call, tools_of

Step = tuple[str, float, bool, bool, dict[str, Any]]


class RetailDesk(gymnasium.Env[str, str]):
    """Serve a customer who talks, with tools, under a policy.

    An action is what is said to the customer, or a call of a tool as text: ``{"name": …, "arguments": {…}}``. Agents
    that call tools use `tools`, and say the rest. The customer ends the episode; the reward is then 1 if the database
    is as the right actions leave it and all that had to be said was said, else 0. `reset` takes the option
    ``task_id``; without it the seed draws a training task.

    Args:
        max_steps: Calls and utterances after which an episode is truncated.
        task_types: Types of tasks that the seed draws among; all when left out.
        personas: Customers that the seed draws among; all when left out.
        users: How many users the shop has; all when left out.
    """

    action_hint = ""

    def __init__(
        self,
        *,
        max_steps: int = MAX_STEPS,
        task_types: Iterable[str] | None = None,
        personas: Iterable[str] | None = None,
        users: int | None = None,
    ) -> None:
        self.options = parse_options(max_steps=max_steps, task_types=task_types, personas=personas, users=users)
        self.observation_space = Text(16384, charset=string.printable)
        self.action_space = Text(512, charset=string.printable)
        self._desk = Desk(Database(Store(users={}, products={}, orders={})))
        self.tools: tuple[Tool, ...] = tools_of(self._desk)
        self._tool_named = {tool.name: tool for tool in self.tools}
        self._case: Case | None = None

    @property
    def case(self) -> Case:
        """The current task.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._case is None:
            raise UsageError("the retail environment has no episode yet", expected="reset before anything else")
        return self._case

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """A customer calls.

        Raises:
            UsageError: an option is unknown, or names no task.
        """
        super().reset(seed=seed)
        if set(options or {}) - {"task_id"}:
            raise UsageError("retail cannot reset with these options", got=", ".join(options or {}), expected="task_id")
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        case = case_of((options or {}).get("task_id") or self._draw(drawn), self.options.users)
        self._enter(case, Database(case.store), Customer(case.scenario, case.expected), said=[], steps=0)
        return self._customer.open(), self._info()

    def _draw(self, seed: int) -> str:
        tasks = RetailTasks(TRAIN, self.options)
        return tasks[int(Random(f"task {seed}").random() * len(tasks))].id

    def step(self, action: str) -> Step:
        """Say something, or call a tool.

        Raises:
            UsageError: the episode is over.
        """
        if self.case and (self._customer.mood.gone or self._steps >= self.options.max_steps):
            raise UsageError("the retail episode is over", expected="reset before the next step")
        try:
            call = parse_call(action)
            if call is not None and call.name != RESPOND:
                return self._observe(self._call(call))
            words = action if call is None else str(call.arguments.get("content", ""))
        except ToolError as error:
            return self._observe(f"Error: {error}", valid=False)
        return self._say(words)

    def _say(self, words: str) -> Step:
        self._said += [amount for amount in self.case.outputs if says_amount(words, amount)]
        reply = self._customer.answer(words, self._desk.database)
        return self._observe(reply)

    def _call(self, call: ToolCall) -> str:
        tool = self._tool_named.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}", expected=", ".join(self._tool_named))
        text: str = tool(**tool.validate(call.arguments))
        return text

    def _observe(self, text: str, *, valid: bool = True) -> Step:
        self._steps += 1
        gone = self._customer.mood.gone
        solved = gone and self._is_solved()
        truncated = not gone and self._steps >= self.options.max_steps
        return text, float(solved), gone, truncated, {**self._info(), "success": solved, "valid": valid}

    def _is_solved(self) -> bool:
        right = self._desk.database.key() == self.case.gold_key
        return right and set(self.case.outputs) <= set(self._said)

    def tool_message(self, action: str) -> Message:
        """The assistant message that takes a text action: a call, or words (a broken call is those, too)."""
        with contextlib.suppress(ToolError):
            if (call := parse_call(action)) is not None:
                return Message(role="assistant", tool_calls=(call,))
        return Message(role="assistant", content=action)

    def expert(self) -> RetailExpert:
        """A policy that serves every customer."""
        return RetailExpert()

    def state_key(self) -> str:
        """Key of the database, of the customer's mood, and of what was said."""
        mood = self._customer.to_plain()
        state = [self.case.task_id, self._desk.database.key(), mood, sorted(set(self._said))]
        return hashlib.blake2b(orjson.dumps(state), digest_size=16).hexdigest()

    def snapshot(self) -> dict[str, Any]:
        """The episode as JSON types."""
        return {
            "task_id": self.case.task_id,
            "changes": self._desk.database.changes(),
            "customer": self._customer.to_plain(),
            "said": list(self._said),
            "steps": self._steps,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on where a snapshot was taken, in this environment or another with the same options."""
        case = case_of(snapshot["task_id"], self.options.users)
        customer = Customer(case.scenario, case.expected, snapshot["customer"])
        database = Database(case.store, snapshot["changes"])
        self._enter(case, database, customer, said=list(snapshot["said"]), steps=snapshot["steps"])

    def _enter(self, case: Case, database: Database, customer: Customer, *, said: list[str], steps: int) -> None:
        self._case, self._customer, self._said, self._steps = case, customer, said, steps
        self._desk.database = database

    def _info(self) -> dict[str, Any]:
        return {"success": False, "task_type": self.case.scenario.task_type.value}
