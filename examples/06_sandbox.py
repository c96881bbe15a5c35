"""An environment that runs the policy's programs in a sandbox. It needs Linux and bubblewrap.

    python examples/06_sandbox.py

If a program fails, loops or tries to reach the network, the policy gets an ordinary observation. If the sandbox breaks,
that is an infrastructure failure: the episode is played again, and never counts as reward 0.

Prints the results of an expert's program and of a dangerous one, and the expert's success rate.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import agentrl
from agentrl.sandbox import Sandbox, open_sandbox

SANDBOX = {"type": "local", "limits": {"seconds": 2, "memory_bytes": 256 * 2**20}}


class WriteProgram(agentrl.AsyncEnv):
    """Write a Python program that prints a sum; three attempts."""

    action_hint = "a Python program, such as: print(1 + 1)"
    sandbox: Sandbox | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await self.close()
        self.sandbox = open_sandbox(SANDBOX)
        await self.sandbox.start()
        self.limit, self.attempts = random.Random(seed).randrange(10, 1000), 0
        return f"Write a program that prints the sum of all squares below {self.limit}, such as 0 + 1 + 4 + 9.", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.sandbox is not None
        self.attempts += 1
        result = await self.sandbox.exec(["python3", "-c", action])
        printed = "it took too long" if result.timed_out else result.stdout.decode(errors="replace").strip()
        expected = sum(number**2 for number in range(self.limit) if number**2 < self.limit)
        solved = printed == str(expected)
        problem = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return printed or problem, float(solved), solved, self.attempts == 3, {"success": solved}

    async def close(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()
            self.sandbox = None

    def expert(self) -> WriteProgram:
        return self

    def act(self, observation: Any) -> str:
        """Return the expert's program."""
        return f"print(sum(n * n for n in range({self.limit}) if n * n < {self.limit}))"


async def try_programs() -> None:
    environment = WriteProgram()
    print(await environment.reset(seed=0))
    try:
        for program in ("import socket; socket.create_connection(('192.0.2.1', 80))", environment.act("")):
            print(program, "->", await environment.step(program))
    finally:
        await environment.close()


def main() -> None:
    asyncio.run(try_programs())
    print(agentrl.evaluate(WriteProgram, policy="expert", tasks=4))


if __name__ == "__main__":
    main()
