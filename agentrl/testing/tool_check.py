"""Conformance check of tools: `check_tool` reads a tool's schema and calls it with valid and invalid arguments.

report = check_tool(midpoint, examples=[{"low": 1, "high": 9}])
assert report.passed, report
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from agentrl.builders.tools import find_tool
from agentrl.errors import UsageError
from agentrl.message import ToolCall
from agentrl.rollout.env_workers import call_own_tool
from agentrl.rollout.tools import EpisodeTools, ToolCallResult, tool_session
from agentrl.testing.report import CheckReport, CheckRule, RuleFailed, RuleSkipped, check_rule
from agentrl.tool import Tool

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Pattern of names that OpenAI-style services accept."""
MAX_DESCRIPTION_CHARS = 1024
"""Maximum number of characters of a description; services truncate or reject longer ones."""
TOOL_BLOCKS_S = 0.05
"""Maximum number of seconds for which a call may block the event loop."""


def check_tool(
    tool: Tool | str | Mapping[str, Any],
    *,
    examples: Sequence[Mapping[str, Any]] = (),
    sandbox: Mapping[str, Any] | str | None = None,
    timeout_s: float = 30.0,
) -> CheckReport:
    """Check that a tool keeps the rules of its contract; it runs only with the arguments in `examples`.

    Args:
        tool: Tool, or an entry as in ``agent.tools``.
        examples: Arguments of calls that must succeed.
        sandbox: Sandbox for a tool that needs one, in the form of ``agent.sandbox``.
        timeout_s: Deadline of each call.

    Raises:
        UsageError: the tool does not exist, or its options are wrong.
    """
    found = tool if isinstance(tool, Tool) else find_tool(tool)
    if not isinstance(found, Tool):
        raise UsageError("only a single tool can be checked", got=str(tool), hint="name one: NAME/TOOL")
    with ThreadPoolExecutor(1) as thread:  # the caller may run an event loop, as notebooks do
        work = check_tool_here(found, examples=examples, sandbox=sandbox, timeout_s=timeout_s)
        return thread.submit(asyncio.run, work).result()


async def check_tool_here(
    tool: Tool,
    *,
    examples: Sequence[Mapping[str, Any]] = (),
    sandbox: Mapping[str, Any] | str | None = None,
    timeout_s: float = 30.0,
) -> CheckReport:
    """Run `check_tool` in a running event loop."""
    async with tool_session(sandbox=sandbox, timeout_s=timeout_s) as session:
        subject = _CheckedTool(tool, examples, session)
        rows = [await check_rule(rule, subject) for rule in RULES]
    return CheckReport(kind="tool", name=tool.name, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class _CheckedTool:
    tool: Tool
    examples: Sequence[Mapping[str, Any]]
    session: EpisodeTools

    async def call(self, arguments: Mapping[str, Any]) -> ToolCallResult:
        call = ToolCall(name=self.tool.name, arguments=arguments)
        return await self.session.carry_out(call, {self.tool.name: self.tool})

    async def call_well(self, arguments: Mapping[str, Any]) -> str:
        """Return the result text of a call that must succeed."""
        called = await self.call(arguments)
        if called.failed:
            fault = f" ({called.fault})" if called.fault else ""
            raise RuleFailed(f"{json.dumps(dict(arguments), default=str)}: {called.result.text}{fault}")
        return called.result.text

    def required_examples(self) -> Sequence[Mapping[str, Any]]:
        if not self.examples:
            raise RuleSkipped("no example was given")
        return self.examples


async def arguments_are_described(subject: _CheckedTool) -> str:
    """Every argument has a description, and the tool's own description is not too long."""
    function = subject.tool.schema["function"]
    json.dumps(function)
    properties = function["parameters"]["properties"]
    if silent := [name for name, described in properties.items() if not described.get("description")]:
        raise RuleFailed(f"no description of {', '.join(silent)}")
    if len(function["description"]) > MAX_DESCRIPTION_CHARS:
        raise RuleFailed(
            f"the description has {len(function['description'])} characters, maximum {MAX_DESCRIPTION_CHARS}"
        )
    return f"{len(properties)} arguments"


async def name_can_be_sent(subject: _CheckedTool) -> str:
    """Services accept the tool's name."""
    if not NAME.fullmatch(subject.tool.name):
        raise RuleFailed(f"{subject.tool.name!r} is not 1 to 64 letters, digits, _ and -")
    return subject.tool.name


async def wrong_arguments_are_refused(subject: _CheckedTool) -> str:
    """Unknown, missing and wrongly typed arguments are refused with a message that names them."""
    parameters = subject.tool.schema["function"]["parameters"]
    takes_any = parameters.get("additionalProperties", False) is not False  # possible for tools of MCP servers
    wrong: list[dict[str, Any]] = [] if takes_any else [{"no_such_argument": 1}]
    if parameters.get("required"):
        wrong.append({})
    for name, described in parameters["properties"].items():
        if (kind := described.get("type")) in ("integer", "number", "boolean", "array", "object"):
            wrong.append({name: 7 if kind in ("array", "object") else "x"})
    for arguments in wrong:
        called = await subject.call(arguments)
        if not called.failed:
            raise RuleFailed(f"{json.dumps(arguments)} was accepted")
        name = next(iter(arguments), next(iter(parameters.get("required", [])), ""))
        if name not in called.result.text:
            raise RuleFailed(f"{json.dumps(arguments)}: {called.result.text!r} does not name {name}")
    return f"{len(wrong)} wrong calls"


async def examples_succeed(subject: _CheckedTool) -> str:
    """Calls with the given examples succeed."""
    texts = [await subject.call_well(example) for example in subject.required_examples()]
    calls = "1 call" if len(texts) == 1 else f"{len(texts)} calls"
    return f"{calls}, at most {max(map(len, texts))} characters"


async def event_loop_goes_on(subject: _CheckedTool) -> str:
    """No call blocks the event loop."""
    worst = 0.0
    for example in subject.required_examples():
        watch = asyncio.create_task(_longest_pause())
        await asyncio.sleep(0)
        await subject.call(example)
        watch.cancel()
        worst = max(worst, await watch)
    if worst > TOOL_BLOCKS_S:
        raise RuleFailed(f"a call blocked the event loop for {1000 * worst:.0f} ms: remove inline, or await")
    return f"blocked for at most {1000 * worst:.1f} ms"


async def _longest_pause() -> float:
    """Return the longest time between two event loop iterations until this task is cancelled."""
    worst, last = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            worst, last = max(worst, now - last), now
    except asyncio.CancelledError:
        return max(worst, time.thread_time() - last)


async def pure_means_pure(subject: _CheckedTool) -> str:
    """A tool that is declared pure gives the same result for the same arguments."""
    if not subject.tool.rules.pure:
        raise RuleSkipped("the tool is not declared pure")
    for example in subject.required_examples():
        texts = {(await call_own_tool(subject.tool, example)).text for _ in range(3)}
        if len(texts) > 1:
            raise RuleFailed(f"{json.dumps(dict(example), default=str)} gave {len(texts)} results")
    return "equal results of three calls"


async def parallel_calls_agree(subject: _CheckedTool) -> str:
    """A tool that is declared parallel gives the same results when its calls run concurrently."""
    if not subject.tool.rules.is_parallel:
        raise RuleSkipped("the tool is not declared parallel")
    examples = subject.required_examples()
    one_by_one = [await subject.call_well(example) for example in examples]
    together = await asyncio.gather(*(subject.call_well(example) for example in examples))
    if one_by_one != together:
        raise RuleFailed("concurrent calls gave other results than calls one after another")
    return f"{len(examples)} concurrent calls"


RULES = tuple(
    CheckRule(check)
    for check in (
        arguments_are_described,
        name_can_be_sent,
        wrong_arguments_are_refused,
        examples_succeed,
        event_loop_goes_on,
        pure_means_pure,
        parallel_calls_agree,
    )
)
