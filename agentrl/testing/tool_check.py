"""The conformance check of a tool: `check_tool` describes it, calls it wrongly and rightly, and says what breaks rules.

report = check_tool(midpoint, examples=[{"low": 1, "high": 9}])
assert report.passed, report
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.builders.episodes import find_tool
from agentrl.errors import UsageError
from agentrl.message import ToolCall
from agentrl.rollout.tools import Called, EpisodeTools, tool_session
from agentrl.testing.report import CheckRow, CheckStatus
from agentrl.tool import Tool

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""What OpenAI-style services take."""
LONGEST_DESCRIPTION = 1024
"""Characters; services cut or refuse more."""
BLOCKED_S = 0.05
"""For so long a call may keep the event loop from everything else."""
NO_VALUE = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCheckReport:
    """Report of `check_tool`."""

    tool: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """No rule is broken."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.check) for row in self.rows)
        lines = [f"{row.status:<8} {row.check:<{width}}  {row.detail}".rstrip() for row in self.rows]
        return "\n".join([f"tool {self.tool}", *lines])


class _Broken(Exception):
    """A rule is broken."""


class _Missing(Exception):
    """There is nothing to check."""


def check_tool(
    tool: Tool | str | Mapping[str, Any],
    *,
    examples: Sequence[Mapping[str, Any]] = (),
    sandbox: Mapping[str, Any] | str | None = None,
    timeout_s: float = 30.0,
) -> ToolCheckReport:
    """Check that a tool keeps the rules of its contract. Only `examples` are really called.

    Args:
        tool: The tool, or an entry of ``agent.tools``.
        examples: Arguments of calls that must succeed.
        sandbox: Where it works if it needs a sandbox, as ``agent.sandbox`` says it.
        timeout_s: Deadline of each call.

    Raises:
        UsageError: no such tool, or wrong options.
    """
    found = tool if isinstance(tool, Tool) else find_tool(tool)
    if not isinstance(found, Tool):
        raise UsageError("several tools cannot be checked as one", got=str(tool), hint="name one: NAME/TOOL")
    return asyncio.run(check_tool_here(found, examples=examples, sandbox=sandbox, timeout_s=timeout_s))


async def check_tool_here(
    tool: Tool,
    *,
    examples: Sequence[Mapping[str, Any]] = (),
    sandbox: Mapping[str, Any] | str | None = None,
    timeout_s: float = 30.0,
) -> ToolCheckReport:
    """`check_tool` in a running event loop."""
    async with tool_session(sandbox=sandbox, timeout_s=timeout_s) as session:
        subject = _Subject(tool, examples, session)
        rows = [await _row(name, look(subject)) for name, look in RULES.items()]
    return ToolCheckReport(tool=tool.name, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class _Subject:
    tool: Tool
    examples: Sequence[Mapping[str, Any]]
    session: EpisodeTools

    async def call(self, arguments: Mapping[str, Any]) -> Called:
        call = ToolCall(name=self.tool.name, arguments=arguments)
        return await self.session.carry_out(call, {self.tool.name: self.tool})

    async def call_well(self, arguments: Mapping[str, Any]) -> str:
        """The text of a call that must succeed."""
        called = await self.call(arguments)
        if called.failed:
            raise _Broken(f"{json.dumps(dict(arguments), default=str)}: {called.result.text}{_cause(called)}")
        return called.result.text

    def required_examples(self) -> Sequence[Mapping[str, Any]]:
        if not self.examples:
            raise _Missing("no example was given")
        return self.examples


async def _row(name: str, looking: Coroutine[Any, Any, str]) -> CheckRow:
    began = time.perf_counter()
    status = CheckStatus.PASSED
    try:
        detail = await looking
    except _Missing as missing:
        status, detail = CheckStatus.SKIPPED, str(missing)
    except _Broken as broken:
        status, detail = CheckStatus.FAILED, str(broken)
    except Exception as error:
        status, detail = CheckStatus.FAILED, f"{type(error).__name__}: {error}"
    return CheckRow(check=name, status=status, detail=detail, seconds=time.perf_counter() - began)


async def _is_described(subject: _Subject) -> str:
    function = subject.tool.schema["function"]
    json.dumps(function)
    properties = function["parameters"]["properties"]
    if silent := [name for name, told in properties.items() if not told.get("description")]:
        raise _Broken(f"no description of {', '.join(silent)}")
    if len(function["description"]) > LONGEST_DESCRIPTION:
        raise _Broken(f"the description has {len(function['description'])} characters of {LONGEST_DESCRIPTION}")
    return f"{len(properties)} arguments"


async def _name_can_be_sent(subject: _Subject) -> str:
    if not NAME.fullmatch(subject.tool.name):
        raise _Broken(f"{subject.tool.name!r} is not 1 to 64 letters, digits, _ and -")
    return subject.tool.name


async def _wrong_arguments_are_told(subject: _Subject) -> str:
    parameters = subject.tool.schema["function"]["parameters"]
    wrong: list[dict[str, Any]] = [{"no_such_argument": 1}]
    if parameters.get("required"):
        wrong.append({})
    wrong += [{name: _unfit(told)} for name, told in parameters["properties"].items() if _unfit(told) is not NO_VALUE]
    for arguments in wrong:
        called = await subject.call(arguments)
        if not called.failed:
            raise _Broken(f"{json.dumps(arguments)} was taken")
        name = next(iter(arguments), next(iter(parameters.get("required", [])), ""))
        if name not in called.result.text:
            raise _Broken(f"{json.dumps(arguments)}: {called.result.text!r} does not name {name}")
    return f"{len(wrong)} wrong calls"


def _unfit(told: Mapping[str, Any]) -> Any:
    """A value that an argument cannot take."""
    unfit = {"integer": "x", "number": "x", "boolean": "x", "array": 7, "object": 7}
    return unfit.get(told.get("type", ""), NO_VALUE) if isinstance(told.get("type"), str) else NO_VALUE


async def _examples_succeed(subject: _Subject) -> str:
    texts = [await subject.call_well(example) for example in subject.required_examples()]
    return f"{len(texts)} calls, at most {max(map(len, texts))} characters"


async def _event_loop_goes_on(subject: _Subject) -> str:
    worst = 0.0
    for example in subject.required_examples():
        watch = asyncio.create_task(_longest_pause())
        await asyncio.sleep(0)
        await subject.call(example)
        watch.cancel()
        worst = max(worst, await watch)
    if worst > BLOCKED_S:
        raise _Broken(f"a call blocked the event loop for {1000 * worst:.0f} ms: leave out inline, or await")
    return f"blocked for at most {1000 * worst:.1f} ms"


async def _longest_pause() -> float:
    """The longest time between two turns of the event loop, until cancelled."""
    worst, last = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            worst, last = max(worst, now - last), now
    except asyncio.CancelledError:
        return max(worst, time.thread_time() - last)


async def _pure_means_pure(subject: _Subject) -> str:
    if not subject.tool.rules.pure:
        raise _Missing("the tool is not declared pure")
    for example in subject.required_examples():
        checked = subject.tool.validate(example)
        texts = {(await subject.tool.run(subject.tool.target, checked)).text for _ in range(3)}
        if len(texts) > 1:
            raise _Broken(f"{json.dumps(dict(example), default=str)} gave {len(texts)} results")
    return "the same three times"


async def _parallel_calls_agree(subject: _Subject) -> str:
    if not subject.tool.rules.is_parallel:
        raise _Missing("the tool is not declared parallel")
    examples = subject.required_examples()
    alone = [await subject.call_well(example) for example in examples]
    together = await asyncio.gather(*(subject.call_well(example) for example in examples))
    if alone != together:
        raise _Broken("calls at the same time gave other results than calls one after another")
    return f"{len(examples)} at once"


def _cause(called: Called) -> str:
    return "" if called.cause is None else f" ({type(called.cause).__name__}: {called.cause})"


RULES: Mapping[str, Callable[[_Subject], Coroutine[Any, Any, str]]] = {
    "arguments are described": _is_described,
    "name can be sent": _name_can_be_sent,
    "wrong arguments are told": _wrong_arguments_are_told,
    "examples succeed": _examples_succeed,
    "event loop goes on": _event_loop_goes_on,
    "pure means pure": _pure_means_pure,
    "parallel calls agree": _parallel_calls_agree,
}
