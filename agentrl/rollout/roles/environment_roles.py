"""Roles that an environment names and the runtime plays, such as a simulated user.

The agent's loop does not see them: they answer within `Episode.reset` and `Episode.step`. Their answers are recorded
but never trained, and do not count against the agent's budget of turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.agent_loop import AgentRole, Conversation, TurnOptions
from agentrl.config.config import Config
from agentrl.env.lookup import resolve_environment
from agentrl.errors import EngineError, EnvironmentFailure, UsageError
from agentrl.message import Content, Message, system, user

ATTEMPTS = 3
"""Maximum number of consecutive empty answers."""
MAX_IN_A_ROW = 16
"""Maximum number of answers of these roles between two consecutive turns of the agent."""
INSTRUCTIONS = "instructions"
_OPTIONS = TurnOptions(trained=False, for_environment=True)


class EnvironmentRoles:
    """Conversations of an environment's roles in one episode."""

    def __init__(
        self,
        environment: str,
        roles: Mapping[str, AgentRole],
        open: Callable[[AgentRole, Sequence[Message]], Conversation],
    ) -> None:
        self.roles = roles
        self._environment = environment
        self._open = open
        self._instructions: dict[str, str] = {}
        self._conversations: dict[str, Conversation] = {}
        self._messages: dict[str, list[Message]] = {}
        self._in_a_row = 0

    def take_instructions(self, info: dict[str, Any]) -> None:
        """Remove the instructions of these roles from the info of `reset`, and keep them.

        Raises:
            EnvironmentFailure: the instructions are not texts by role name.
            UsageError: some instructions are for a player that the spec does not name.
        """
        given = info.pop(INSTRUCTIONS, {})
        if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
            raise EnvironmentFailure(
                f'info["{INSTRUCTIONS}"] of environment {self._environment} cannot be used',
                got=repr(given),
                expected="a text for each role, by name",
            )
        if unknown := [name for name in given if name not in self.roles]:
            raise UsageError(
                f"environment {self._environment} has instructions for {unknown[0]}, which the runtime does not play",
                got=", ".join(self.roles) or "no roles",
                expected=f"roles_of in its EnvironmentSpec to include {unknown[0]}",
            )
        self._instructions = dict(given)

    def note_agent_turn(self) -> None:
        """Reset the count of consecutive answers, because the agent has acted."""
        self._in_a_row = 0

    async def respond(self, name: str, observation: Content) -> str:
        """Let a role answer an observation.

        Raises:
            EpisodeEnd: the episode's time is over, or the role's conversation is full.
            EngineError: the role's engine failed, or gave only empty answers.
            EnvironmentFailure: the environment asked its roles too often without a turn of the agent.
        """
        self._in_a_row += 1
        if self._in_a_row > MAX_IN_A_ROW:
            raise EnvironmentFailure(
                f"environment {self._environment} asks role {name} repeatedly without a turn of the agent",
                got=f"{MAX_IN_A_ROW} answers in a row",
                expected="a turn of the agent",
            )
        self._add(name, user(observation))
        for _ in range(ATTEMPTS):
            answer = await self._conversations[name].generate(options=_OPTIONS)
            if answer.text.strip():
                self._messages[name].append(answer.message)
                return answer.text
            self._conversations[name] = self._conversations[name].fork(self._messages[name])
        raise EngineError(
            f"role {name} of environment {self._environment} gave no answer",
            got=f"{ATTEMPTS} empty answers",
            expected="text",
            hint=f"try another model for agent.roles.{name}, a temperature above 0, or more tokens for its answers",
        )

    def _add(self, name: str, message: Message) -> None:
        """Append a message to a role's conversation; the first one opens it."""
        if name in self._conversations:
            self._messages[name].append(message)
            self._conversations[name].add(message)
            return
        role = self.roles[name]
        prompt = "\n\n".join(part for part in (role.system_prompt, self._instructions.get(name)) if part)
        self._messages[name] = [*([system(prompt)] if prompt else []), message]
        self._conversations[name] = self._open(role, list(self._messages[name]))


def roles_of_environment(config: Config) -> tuple[str, ...]:
    """Return the roles that the runtime plays for the environment of a config, such as its user."""
    environment = config.sole_environment
    return resolve_environment(environment.name).roles_under(environment.options)
