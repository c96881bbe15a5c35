"""Roles that an environment names and the runtime plays for it, such as a simulated user.

The agent's loop knows nothing of them: they speak within `Episode.reset` and `Episode.step`. What they say is recorded
and never trained; their turns are none of the agent's budget of turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.agent_loop import AgentRole, Conversation, TurnOptions
from agentrl.errors import EngineError, EnvironmentFailure, UsageError
from agentrl.message import Content, Message, system, user

ATTEMPTS = 3
"""Answers of which one has to say something."""
MAX_IN_A_ROW = 16
"""Answers of such roles between two of the agent's."""
INSTRUCTIONS = "instructions"
_OPTIONS = TurnOptions(trained=False, for_environment=True)


class EnvironmentRoles:
    """The conversations of these roles in one episode.

    Args:
        environment: Name, for messages.
        roles: By name.
        open: Starts the conversation of one of them.
    """

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
        self._said: dict[str, list[Message]] = {}
        self._in_a_row = 0

    def take_instructions(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what the info of `reset` tells these roles alone; return the rest, for everybody.

        Raises:
            EnvironmentFailure: the instructions are no texts by name.
            UsageError: some are for a player whom the spec does not name.
        """
        given = info.get(INSTRUCTIONS, {})
        if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
            raise EnvironmentFailure(
                f'info["{INSTRUCTIONS}"] of environment {self._environment} cannot be used',
                got=repr(given),
                expected="a text for each role, by name",
            )
        if unknown := [name for name in given if name not in self.roles]:
            raise UsageError(
                f"environment {self._environment} has instructions for {unknown[0]}, whom the runtime does not play",
                got=", ".join(self.roles) or "no roles",
                expected=f"roles_of of its EnvironmentSpec to name {unknown[0]}",
            )
        self._instructions = dict(given)
        return {name: value for name, value in info.items() if name != INSTRUCTIONS}

    def agents_turn(self) -> None:
        """Count from here: the agent has acted."""
        self._in_a_row = 0

    async def speak(self, name: str, observation: Content) -> str:
        """Let a role answer what it reads.

        Raises:
            EpisodeEnd: the time of the episode is over, or the role's conversation is full.
            EngineError: its engine failed, or says nothing.
            EnvironmentFailure: the environment never comes back to the agent.
        """
        self._in_a_row += 1
        if self._in_a_row > MAX_IN_A_ROW:
            raise EnvironmentFailure(
                f"environment {self._environment} asks role {name} again and again",
                got=f"{MAX_IN_A_ROW} answers in a row",
                expected="a turn of the agent",
            )
        self._listen(name, user(observation))
        for _ in range(ATTEMPTS):
            answer = await self._conversations[name].generate(options=_OPTIONS)
            if answer.text.strip():
                self._said[name].append(answer.message)
                return answer.text
            self._conversations[name] = self._conversations[name].fork(self._said[name])
        raise EngineError(
            f"role {name} of environment {self._environment} says nothing",
            got=f"{ATTEMPTS} empty answers",
            expected="words",
            hint=f"try another model for agent.roles.{name}, a temperature above 0, or more tokens for its answers",
        )

    def _listen(self, name: str, message: Message) -> None:
        if name in self._conversations:
            self._said[name].append(message)
            self._conversations[name].add(message)
            return
        role = self.roles[name]
        prompt = "\n\n".join(part for part in (role.system_prompt, self._instructions.get(name)) if part)
        self._said[name] = [*([system(prompt)] if prompt else []), message]
        self._conversations[name] = self._open(role, list(self._said[name]))
