"""Submission of an answer: the environment judges it, and the episode ends."""

from __future__ import annotations

from agentrl import ToolContext, tool


@tool(stop=True)
async def submit(answer: str, context: ToolContext) -> str:
    """Hands in the final answer; nothing can be done after it.

    Args:
        answer: Only the answer, in the form that the task asks for.
    """
    return await context.act(answer)
