"""The telephone company's support desk as an environment."""

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
from ..task_ids import TRAIN, asked_task
from .customer import Caller
from .expert import TelecomExpert
from .faults import Fault, ProblemKind, keeps_settings
from .options import ENVIRONMENT, parse_options
from .phrases import OUT_OF_TIME, STOP
from .records import TABLES, TelecomDatabase, TelecomStore
from .system import CustomerSystem
from .tasks import TelecomCase, TelecomTasks, case_of

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]


@functools.cache
def declared_tools() -> dict[str, Tool]:
    """Return all tools by name, bound to a system without records."""
    return declare_tools(_empty_system())


def _empty_system() -> CustomerSystem:
    return CustomerSystem(TelecomDatabase(TelecomStore(**{name: {} for name in TABLES})))


class TelecomDesk(gymnasium.Env[str, str]):
    """Environment in which an agent helps a customer whose phone does not work, in a conversation and with tools.

    The agent's tools act on the company's records; on the phone, only the customer acts, as the agent says. An action
    is text for the customer, or a tool call as text: ``{"name": …, "arguments": {…}}``. Agents that call tools natively
    use `tools`; their other text goes to the customer. The customer ends the episode; the reward is 1 if the problem is
    gone (or was transferred for the right reason, which the agent has found out), the records are as after the right
    actions, and the phone's other settings are as before; else 0. `reset` takes the option ``task_id``; without it the
    seed draws a training task.

    Args:
        options: Options of `parse_options`.
    """

    action_hint = ""

    def __init__(self, **options: Any) -> None:
        self.options = parse_options(**options)
        self.observation_space = Text(16384, charset=string.printable)
        self.action_space = Text(512, charset=string.printable)
        self._system = _empty_system()
        self.tools = tuple(DeskTool(tool, getattr(self._system, name)) for name, tool in declared_tools().items())
        self._named = {tool.name: tool for tool in self.tools}
        self._case: TelecomCase | None = None
        self._caller: Caller
        self._steps, self._gone = 0, False

    @property
    def case(self) -> TelecomCase:
        """The current task.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._case is None:
            raise UsageError("the telecom environment has no episode yet", expected="reset before anything else")
        return self._case

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with the customer's first words.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        task_id = asked_task(options, ENVIRONMENT) or TelecomTasks(TRAIN, self.options).draw(drawn)
        self._begin(task_id)
        return self._caller.open(), self._info()

    def _begin(self, task_id: str, changes: Mapping[str, Any] | None = None, **caller: Any) -> None:
        self._case = case = case_of(task_id)
        self._system.database = TelecomDatabase(case.store, case.trouble.changes if changes is None else changes)
        self._caller = Caller(case.trouble, case.store, **caller)
        self._steps, self._gone = 0, False

    def step(self, action: str) -> Step:
        """Speak to the customer, or call a tool.

        Raises:
            UsageError: the episode is over.
        """
        if self.case and (self._gone or self._steps >= self.options.max_steps):
            raise UsageError("the telecom episode is over", expected="reset before the next step")
        try:
            act = read_action(action)
            if isinstance(act, ToolCall):
                return self._observe(self._call(act))
        except ToolError as error:
            return self._observe(f"Error: {error}", valid=False)
        reply = self._caller.answer(act, self._system.database)
        self._gone = reply.endswith(STOP)
        return self._observe(reply)

    def _observe(self, text: str, *, valid: bool = True) -> Step:
        self._steps += 1
        solved = self._gone and text != OUT_OF_TIME and self._is_solved()
        truncated = not self._gone and self._steps >= self.options.max_steps
        return text, float(solved), self._gone, truncated, {**self._info(), "success": solved, "valid": valid}

    def _call(self, call: ToolCall) -> str:
        tool = self._named.get(call.name)
        if tool is None:
            raise ToolError(
                f"there is no tool {call.name!r}",
                expected=", ".join(self._named),
                hint="only the customer can use the phone: tell the customer in plain words what to do",
            )
        text: str = tool(**tool.validate(call.arguments))
        return text

    def _is_solved(self) -> bool:
        trouble, database = self.case.trouble, self._system.database
        if trouble.customer_id not in database.seen or database.key() != self.case.gold_key:
            return False
        if not keeps_settings(trouble, self._caller.phone):
            return False
        if trouble.kind is not ProblemKind.UNSOLVABLE:
            return self._caller.missing(database) is None
        if Fault.LOCKED_SIM in trouble.faults:
            return self._caller.state.has_seen_lock
        return trouble.line_id in database.seen

    def _info(self) -> dict[str, Any]:
        return {"success": False, "task_type": self.case.trouble.kind.value}

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action, with a tool call if it is one."""
        return tool_message(action)

    def expert(self) -> TelecomExpert:
        """Return a policy that helps every customer."""
        return TelecomExpert()

    def state_key(self) -> str:
        """Return a key of the records, the phone and the customer's state."""
        return hashlib.blake2b(orjson.dumps(self.snapshot()), digest_size=16).hexdigest()

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return {
            "task_id": self.case.task_id,
            "changes": self._system.database.changes(),
            "caller": self._caller.to_plain(),
            "steps": self._steps,
            "gone": self._gone,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._begin(snapshot["task_id"], snapshot["changes"], **snapshot["caller"])
        self._steps, self._gone = snapshot["steps"], snapshot["gone"]
