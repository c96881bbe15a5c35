"""Submission of an answer: the environment judges it, and the episode ends."""

from __future__ import annotations

from agentrl import ToolContext, tool


@tool(stop=True)
async def submit(answer: str, context: ToolContext) -> str:
    """Submits the final answer. This ends the task.

    Args:
        answer: Only the answer, in the form that the task asks for.
    """
    return await context.act(answer)
