"""Sandbox in which a policy acts: opened on first use, closed at the end of the episode."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping

from agentrl.errors import SandboxError
from agentrl.sandbox import Command, ExecResult, Limits, Sandbox, SandboxSpec, open_sandbox
from agentrl.sandbox.contract import NO_VARIABLES

from .pipes import begin

PROGRAM_CLOSE_S = 20.0
"""Seconds for closing a sandbox."""
ACTION_GRACE_S = 8.0
"""Seconds after a command's own limit before a sandbox that does not answer counts as lost."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")
_SHELL = 'command -v bash >/dev/null && exec bash -c "$0"; exec sh -c "$0"'


class ActingSandbox:
    """Sandbox of an episode.

    Args:
        spec: Specification of the sandbox.
        prepare: Coroutine function that fills a new sandbox.
    """

    def __init__(self, spec: SandboxSpec, prepare: Callable[[Sandbox], Awaitable[None]] | None = None) -> None:
        self.spec = spec
        self.prepare = prepare
        self._sandbox: Sandbox | None = None
        self._opening = asyncio.Lock()

    async def get(self) -> Sandbox:
        """Return the episode's sandbox.

        Raises:
            SandboxError: it does not start.
        """
        async with self._opening:
            if self._sandbox is None:
                sandbox = open_sandbox(self.spec)
                try:
                    await begin(sandbox, self.prepare)
                except BaseException:
                    await sandbox.close()
                    raise
                self._sandbox = sandbox
        return self._sandbox

    async def close(self) -> None:
        """Close the episode's sandbox; the next `get` opens a new one."""
        sandbox, self._sandbox, self._opening = self._sandbox, None, asyncio.Lock()
        if sandbox is not None:
            await asyncio.shield(asyncio.wait_for(sandbox.close(), PROGRAM_CLOSE_S))


async def run_command(
    sandbox: Sandbox,
    command: Command,
    *,
    seconds: float,
    stdin: bytes = b"",
    cwd: str | None = None,
    env: Mapping[str, str] = NO_VARIABLES,
) -> ExecResult:
    """Run a command to its end or its limit.

    Raises:
        SandboxError: the sandbox is lost, or did not enforce the limit.
    """
    limits = Limits(seconds=seconds)
    try:
        async with asyncio.timeout(seconds + ACTION_GRACE_S):
            return await sandbox.exec(command, stdin=stdin, cwd=cwd, env=env, limits=limits)
    except TimeoutError as error:
        raise SandboxError("a sandbox hangs", got=f"a command did not end in {seconds + ACTION_GRACE_S:g} s") from error


def in_bash(command: str) -> list[str]:
    """Return the argument list that runs a command in bash, or in ``sh`` if the sandbox has no bash."""
    return ["sh", "-c", _SHELL, command]


async def visible(sandbox: Sandbox, *, seconds: float) -> dict[str, str]:
    """Return the data that code in a sandbox can read: files, variables, process arguments; no system files."""
    script = (
        'find . "${TMPDIR:-/tmp}" -type f -size -64k 2>/dev/null |'
        ' while read -r path; do echo "@@ $path"; cat "$path"; done;'
        " echo '@@ variables'; env; echo '@@ processes'; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
    )
    result = await run_command(sandbox, script, seconds=seconds)
    parts = result.stdout.decode(errors="replace").split("@@ ")[1:]
    return {place: text for place, _, text in (part.partition("\n") for part in parts)}


def show_result(result: ExecResult, *, seconds: float, most: int = 4000) -> str:
    """Return the result of a command for the policy: output, errors, and the exit status if it failed."""
    text = result.stdout.decode(errors="replace") + result.stderr.decode(errors="replace")
    parts = [cut(text.rstrip(), most)]
    if result.timed_out:
        parts.append(f"[stopped after {seconds:g} seconds]")
    elif result.out_of_memory:
        parts.append("[killed: too much memory]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(part for part in parts if part) or "[no output]"


def cut(text: str, most: int) -> str:
    r"""Return a text with a mark in place of its middle if it is longer than `most` characters.

    >>> cut("abcdefghij", 4)
    'ab\n[6 characters left out]\nij'
    """
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n[{len(text) - most} characters left out]\n{text[len(text) - most + most // 2 :]}"


def without_colours(output: str) -> str:
    r"""Remove the colours of a terminal from the output of a program, such as pytest with ``--color=yes``.

    >>> without_colours("\x1b[32mPASSED\x1b[0m a.py::b")
    'PASSED a.py::b'
    """
    return _COLOUR.sub("", output)
