"""The retail desk with a customer that the runtime plays, as the role `user`."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import Content, Message

from . import phrases
from .briefing import GREETING, brief
from .customer import Customer
from .customer_options import DEFAULTS, ROLE
from .episode import RetailEpisode, Step, begin
from .expert import RetailExpert
from .model_customer import agent_words, customer_words
from .options import parse_options
from .phrases import STOP
from .tools import Toolbox, tool_message

AGENT, USER = "agent", "user"
ATTEMPTS = 3
"""Maximum number of unusable answers of a customer in a row."""
BEGIN = '(You begin with: "{}")'
"""Line below the greeting. The notes contain it, too, but small models find it only here."""
AGAIN = "(That could not be understood. Say in plain words what the customer says now.)"
NOT_YET = f"(The conversation has only just begun. Say what you want, without {STOP}.)"


def roles_of(*, customer: object = None, **_options: Any) -> tuple[str, ...]:
    """Return the roles that the runtime plays for the desk."""
    return (USER,) if customer == ROLE else ()


class RoleRetailDesk(gymnasium.Env[str, str]):
    """`RetailDesk` as a game of two players: the player `user` reads the agent's words and answers as the customer.

    Args:
        options: Options of `parse_options`, with ``customer: role``.
    """

    action_hint = ""

    def __init__(self, **options: Any) -> None:
        self.options = parse_options(**options)
        if self.options.customer != ROLE:
            raise UsageError("this class needs a customer that the runtime plays", expected=f"option customer {ROLE}")
        self.observation_space = Text(16384, charset=string.printable)
        self.action_space = Text(512, charset=string.printable)
        self._toolbox = Toolbox()
        self.tools = self._toolbox.tools
        self._episode: RetailEpisode | None = None
        self._talk: list[str] = []
        """The conversation so far, alternating: the customer first, then the agent."""
        self._failed = 0
        """Number of unusable answers of the customer since then."""

    @property
    def episode(self) -> RetailEpisode:
        """The current episode.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._episode is None:
            raise UsageError("the retail environment has no episode yet", expected="reset before anything else")
        return self._episode

    @property
    def is_asked(self) -> bool:
        """True if the customer acts next."""
        return len(self._talk) % 2 == 0 and not self.episode.gone

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; the customer reads a greeting.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._episode = begin(self.options, self._toolbox, drawn, options or {})
        self._talk, self._failed = [], 0
        scenario = self._episode.case.scenario
        facts = {"players": [AGENT, USER], "instructions": {USER: brief(scenario)}}
        return f"{GREETING}\n\n{BEGIN.format(scenario.requests[0].opening)}", {**self._info(), **facts}

    def step(self, action: str) -> Step:
        """Take an action of the agent or of the customer, whose turn it is.

        Raises:
            UsageError: the episode is over.
            EnvironmentFailure: the customer has given several unusable answers in a row.
        """
        if self.is_asked:
            return self._hear(action)
        episode = self.episode
        outcome = episode.take(action, episode.case.outputs)
        if outcome.words is None:
            return self._end_step(episode.observe(outcome.result, valid=outcome.valid))
        self._talk.append(agent_words(outcome.words))
        if episode.database.transfers:
            return self._take_reply(phrases.HANDED_OVER)
        if len(self._talk) // 2 > DEFAULTS["patience"]:
            return self._take_reply(phrases.OUT_OF_TIME)
        return self._prompt_customer(self._talk[-1])

    def _hear(self, words: str) -> Step:
        reply = customer_words(words)
        if reply and (self._talk or not reply.endswith(STOP)):
            return self._take_reply(reply)
        self._failed += 1
        if self._failed == ATTEMPTS:
            raise EnvironmentFailure(
                f"the customer of {self.episode.case.task_id} gave no usable answer",
                got=repr(words[:200]),
                expected="words" if self._talk else f"first words, without {STOP}",
                hint=f"try another model for agent.roles.{USER}",
            )
        return self._prompt_customer(NOT_YET if reply else AGAIN)

    def _take_reply(self, words: str) -> Step:
        self._talk.append(words)
        self._failed = 0
        if len(self._talk) == 1:
            return words, 0.0, False, False, self._info()
        return self._end_step(self.episode.hear(words))

    def _prompt_customer(self, text: str) -> Step:
        """Return the text that the customer reads; the agent's step is not over yet."""
        return text, 0.0, False, False, self._info()

    def _end_step(self, step: Step) -> Step:
        observation, reward, terminated, truncated, info = step
        return observation, reward, terminated, truncated, {**info, "player": AGENT}

    def _info(self) -> dict[str, Any]:
        return {**self.episode.info(), "player": USER if self.is_asked else AGENT}

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action, with a tool call if it is one."""
        return tool_message(action)

    def expert(self) -> RoleRetailExpert:
        """Return a policy that plays the agent with the expert and the customer with the script."""
        return RoleRetailExpert(self)

    def state_key(self) -> str:
        """Return a key of the database, the conversation, and the agent's answers."""
        return self.episode.key(self._customer())

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return self.episode.to_plain(self._customer())

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._episode = RetailEpisode.from_plain(snapshot, self.options, self._toolbox)
        self._talk, self._failed = list(snapshot["customer"]["talk"]), snapshot["customer"]["failed"]

    def _customer(self) -> dict[str, Any]:
        return {"talk": list(self._talk), "failed": self._failed}


class RoleRetailExpert:
    """Expert that plays the agent like `RetailExpert`, and the customer like the script.

    Args:
        desk: The environment.
    """

    def __init__(self, desk: RoleRetailDesk) -> None:
        self._desk = desk
        self._agent = RetailExpert()
        self._customer: Customer | None = None

    def act(self, observation: Content) -> str:
        """Return the next action of the player whose turn it is.

        Raises:
            UsageError: the customer's request is unknown to the expert.
        """
        episode = self._desk.episode
        if not self._desk.is_asked:
            return self._agent.act(observation)
        if self._customer is None:
            self._customer = Customer(episode.case.scenario, episode.case.expected)
            return self._customer.open()
        return self._customer.answer(observation if isinstance(observation, str) else "", episode.database)
