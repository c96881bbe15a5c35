"""Published tasks of tau2-bench's telecom desk as an environment."""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping
from typing import Any, TypeAlias

import gymnasium
from gymnasium.spaces import Text

from agentrl.errors import ToolError, UsageError
from agentrl.message import Message, ToolCall
from agentrl.tool import Tool, ToolResult

from ...desks.calls import DeskTool, read_action, tool_message
from ...task_ids import asked_task
from ..options import ENVIRONMENT, parse_options
from .customer import GREETING, PhoneCustomer, ends_conversation
from .expert import PublishedExpert
from .grading import MadeCall, grade
from .handset import SYMBOLS
from .instructions import DONE, agent_tools, customer_tools
from .reading import PublishedTask
from .schema import Requestor
from .task_source import PublishedTasks, published_task, splits_with_tasks
from .world import PHONE_TOOLS, PublishedWorld, hash_json

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
MAX_ERRORS = 10
"""Number of failed calls, of both sides together, with which an episode ends unsolved, as in tau2-bench."""
ENDED = "The ticket is closed."
NO_CUSTOMER = "there is no customer to talk to"


class PublishedDesk(gymnasium.Env[str, str]):
    """Environment with published tasks, in which the agent has the phone itself, or talks to a customer who has it.

    An action is a tool call as text, ``{"name": …, "arguments": {…}}``, or text for the customer. Agents that call
    tools natively use `tools`. The tool `done`, or else the customer, ends the episode; the reward is 1 if all parts of
    the task's published reward are met, else 0. `reset` takes the option ``task_id``; without it the seed draws a task.

    With ``customer: role``, it is a game of two players: the actions of the player `user` are the customer's answers,
    which are words, or calls of the phone's tools. It begins.

    Args:
        options: Options of `parse_options`, with `data`.
    """

    action_hint = ""

    def __init__(self, **options: Any) -> None:
        self.options = parse_options(**options)
        if self.options.data is None:
            raise UsageError("published telecom tasks need a folder", expected="the option data")
        self.observation_space = Text(65536, charset="".join(dict.fromkeys(string.printable + SYMBOLS)))
        self.action_space = Text(512, charset=string.printable)
        self._declared = agent_tools(self.options)
        self.tools = tuple(self._native_tool(tool) for tool in self._declared.values())
        self._task: PublishedTask | None = None
        self._task_id = ""
        self._world: PublishedWorld
        self.customer: PhoneCustomer | None = None
        """The customer, if the runtime plays it."""
        self._calls: list[MadeCall] = []
        self._said: list[str] = []
        self._steps, self._errors, self._is_over = 0, 0, False

    @property
    def task(self) -> PublishedTask:
        """The current task.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._task is None:
            raise UsageError("the telecom environment has no episode yet", expected="reset before anything else")
        return self._task

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with the ticket, or with the text that a customer played as a role reads.

        Raises:
            UsageError: an option is unknown, the task does not exist, or it has no ticket.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        task_id = asked_task(options, ENVIRONMENT)
        self._begin(task_id or PublishedTasks(splits_with_tasks(self.options)[0], self.options).draw(drawn))
        if self.customer is not None:
            return GREETING, {**self._info(), **self.customer.briefing()}
        if self.task.row.ticket is None:
            raise UsageError(
                f"task {self._task_id} has no ticket", got=self.task.row.id, hint="set the option customer: role"
            )
        return self.task.row.ticket, self._info()

    def _begin(
        self, task_id: str, world: PublishedWorld | None = None, customer: Mapping[str, Any] | None = None
    ) -> None:
        self._task, self._task_id = published_task(task_id, self.options), task_id
        self._world = self.task.begin() if world is None else world
        self.customer = None if self.options.customer is None else PhoneCustomer(self.task, **(customer or {}))
        self._calls, self._said = [], []
        self._steps, self._errors, self._is_over = 0, 0, False

    def step(self, action: str) -> Step:
        """Call a tool, or speak to the customer; or answer as the customer, if it acts next.

        Raises:
            UsageError: the episode is over.
            EnvironmentFailure: the customer has given several unusable answers in a row.
        """
        self._check_open()
        if self.customer is not None and self.customer.is_asked:
            return self._hear(self.customer, action)
        return self._act(action)

    def _act(self, action: str | ToolCall) -> Step:
        """Take an action of the agent: a call, or a text that may be one."""
        try:
            act = read_action(action) if isinstance(action, str) else action
            if isinstance(act, ToolCall):
                if act.name == DONE and DONE in self._declared:
                    return self._observe(ENDED, solved=self._end())
                return self._observe(self._call("assistant", act.name, act.arguments, self._declared))
            if self.customer is None:
                raise ToolError(NO_CUSTOMER, expected=f"a tool call, or {DONE} when you are done")
        except ToolError as error:
            self._errors += 1
            return self._observe(f"Error: {error}", valid=False)
        self._said.append(act)
        return self.customer.answer(act), 0.0, False, False, self._info()

    def _check_open(self) -> None:
        if self.task and (self._is_over or self._steps >= self.options.max_steps):
            raise UsageError("the telecom episode is over", expected="reset before the next step")

    def _hear(self, customer: PhoneCustomer, answer: str) -> Step:
        """Take the customer's answer; only its words end the agent's step."""
        begins = customer.has_just_begun
        act = customer.act(answer)
        if act.words and not begins:
            solved = ends_conversation(act.words) and self._end()
            return self._observe(act.words, solved=solved)
        text = act.words or act.request
        if act.call is not None:
            try:
                text = self._call("user", act.call.name, act.call.arguments, customer_tools(self.task))
            except ToolError as error:
                self._errors += 1
                text = f"Error: {error}"
        self._is_over = self._errors >= MAX_ERRORS
        return text, 0.0, self._is_over, False, self._info()

    def _call(self, side: Requestor, name: str, arguments: Mapping[str, Any], tools: Mapping[str, Tool]) -> str:
        """Carry out a call of one side with the tools that it has.

        Raises:
            ToolError: the tool is unknown, its arguments are wrong, or it refuses.
        """
        self._calls.append(MadeCall(name, dict(arguments)))
        if name not in tools:
            raise ToolError(f"there is no tool {name!r}", expected=", ".join(tools))
        owner: Requestor = "user" if side == "user" or name in PHONE_TOOLS else "assistant"
        try:
            return self._world.call(owner, name, tools[name].validate(arguments))
        finally:
            self._world.sync()

    def _end(self) -> bool:
        """End the episode as published; return True if the task is solved."""
        self._is_over = True
        return all(grade(self.task, self._world, self._calls, self._said).values())

    def _observe(self, text: str, *, solved: bool = False, valid: bool = True) -> Step:
        self._steps += 1
        self._is_over = self._is_over or self._errors >= MAX_ERRORS
        truncated = not self._is_over and self._steps >= self.options.max_steps
        return text, float(solved), self._is_over, truncated, {**self._info(), "success": solved, "valid": valid}

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"success": False, "task_type": self.task.kind, "published_id": self.task.row.id}
        return info if self.customer is None else {**info, "player": self.customer.next_player}

    def _native_tool(self, declared: Tool) -> DeskTool:
        """Return a tool of this desk for agents that call tools natively; a failed call counts as one in `step`."""

        @functools.wraps(declared.target)
        def target(**arguments: Any) -> ToolResult:
            self._check_open()
            call = ToolCall(name=declared.name, arguments=arguments)
            text, reward, ended, truncated, info = self._act(call)
            if not info["valid"] and not ended:
                raise ToolError(text.removeprefix("Error: "))
            stop = ended or truncated
            success = bool(info["success"]) if stop else None
            return ToolResult(text, reward=reward, stop=stop, truncated=truncated, success=success)

        return DeskTool(declared, target)

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action, with a tool call if it is one of the agent's."""
        message = tool_message(action)
        is_own = all(call.name in self._declared for call in message.tool_calls)
        return message if is_own else Message(role="assistant", content=action)

    def expert(self) -> PublishedExpert:
        """Return a policy that makes the published actions; if the customer is a role, it plays both sides."""
        return PublishedExpert(self)

    def state_key(self) -> str:
        """Return a key of the records, the phone, the conversation and the calls."""
        return hash_json(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return {
            "task_id": self._task_id,
            "task": self.task.row.id,
            "world": self._world.to_plain(),
            "customer": None if self.customer is None else self.customer.to_plain(),
            "calls": [[call.name, dict(call.arguments)] for call in self._calls],
            "said": list(self._said),
            "steps": self._steps,
            "errors": self._errors,
            "over": self._is_over,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._begin(snapshot["task_id"], PublishedWorld.from_plain(snapshot["world"]), snapshot["customer"])
        self._calls = [MadeCall(name, arguments) for name, arguments in snapshot["calls"]]
        self._said, self._steps = list(snapshot["said"]), snapshot["steps"]
        self._errors, self._is_over = snapshot["errors"], snapshot["over"]
