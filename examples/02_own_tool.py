"""Your own tool, with state: each episode gets its own notebook.

    python examples/02_own_tool.py

Prints the schema that the policy reads, calls the tool as an episode would, and evaluates an untrained model that may
call it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Self

import agentrl


@agentrl.tool
class Notebook:
    """A notebook for one episode."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.notes.clear()

    def __call__(self, note: str = "") -> list[str]:
        """Writes down a note and returns all notes so far.

        Args:
            note: The note; leave it out to only read the notes.
        """
        if len(note) > 200:
            raise agentrl.ToolError("the note is too long", got=f"{len(note)} characters", expected="at most 200")
        if note:
            self.notes.append(note)
        return self.notes


async def write_two_notes() -> str:
    async with AsyncExitStack() as stack:
        notebook = await Notebook.open(stack)
        await Notebook.call(notebook, {"note": "not 50"})
        return await Notebook.call(notebook, {"note": "not 75"})


def main() -> None:
    print(json.dumps(Notebook.schema, indent=2))
    print(asyncio.run(write_two_notes()))
    small = ["agent.max_turns=3", "agent.max_answer_tokens=16"]
    print(agentrl.evaluate("guess_number", model="scratch", tools=[Notebook], tasks=2, overrides=small))


if __name__ == "__main__":
    main()
