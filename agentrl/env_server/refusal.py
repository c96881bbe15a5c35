"""Why the server itself does not do what a request asks."""

from __future__ import annotations

from agentrl.errors import AgentRLError, EnvironmentFailure, ToolError, UsageError
from agentrl.remote.wire import Problem


class Refusal(Exception):
    """Answered to the client.

    Args:
        problem: What it is about.
        message: For a person.
    """

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


def problem_of(error: Exception) -> Problem:
    """What an error is about, for the client."""
    match error:
        case Refusal():
            return error.problem
        case ToolError():
            return Problem.TOOL
        case UsageError():
            return Problem.USAGE
        case _:
            return Problem.ENVIRONMENT


def message_of(error: Exception) -> str:
    """An error's text: our own say everything, others need their type's name."""
    return str(error) if isinstance(error, Refusal | AgentRLError) else f"{type(error).__name__}: {error}"


def is_fatal(error: Exception) -> bool:
    """Whether the environment may be broken, and must not be used for another episode."""
    return isinstance(error, EnvironmentFailure) or not isinstance(error, Refusal | AgentRLError)
