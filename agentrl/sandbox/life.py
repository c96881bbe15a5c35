"""Whether a program that is silent, or gone, is itself to blame."""

from __future__ import annotations

import asyncio

from agentrl.errors import SandboxError
from agentrl.sandbox.contract import Sandbox

SIGN_OF_LIFE_S = 3.0
"""How long a sandbox may take to run nothing before it counts as lost, or its machine as too busy to judge by."""


async def require_life(sandbox: Sandbox) -> None:
    """Ask a sandbox for a sign of life: only a quick one makes a program to blame for its silence.

    Raises:
        SandboxError: there is none, or it takes so long that the program may have waited for the machine, too.
    """
    try:
        async with asyncio.timeout(SIGN_OF_LIFE_S):
            result = await sandbox.exec(["true"])
    except TimeoutError as error:
        raise SandboxError("a sandbox hangs", got=f"no sign of life in {SIGN_OF_LIFE_S:g} s") from error
    if not result.succeeded:
        raise SandboxError("a sandbox cannot run anything", got=f"exit code {result.exit_code} of true")
