"""The retail desk as an environment, with the scripted customer or one that the runtime plays."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agentrl.errors import UsageError
from agentrl.message import Content, Message

from ..desks.calls import tool_message
from .customer import Customer
from .episode import RetailEpisode, Step, begin
from .expert import RetailExpert
from .options import parse_options
from .role_customer import RoleCustomer
from .tasks import Case
from .tools import Toolbox


class RetailDesk(gymnasium.Env[str, str]):
    """Environment in which an agent serves a customer in a conversation, with tools, under a policy.

    An action is text for the customer, or a tool call as text: ``{"name": …, "arguments": {…}}``. Agents that call
    tools natively use `tools`; their other text goes to the customer. The customer ends the episode; the reward is 1 if
    the customer was identified, the database has the state after the right actions, and the answer to a question was
    right, else 0. `reset` takes the option ``task_id``; without it the seed draws a training task.

    With ``customer: role``, it is a game of two players: the player `user` reads the agent's words, and its actions are
    the customer's answers. It begins.

    Args:
        options: Options of `parse_options`.
    """

    action_hint = ""

    def __init__(self, **options: Any) -> None:
        self.options = parse_options(**options)
        self.observation_space = Text(16384, charset=string.printable)
        self.action_space = Text(512, charset=string.printable)
        self._toolbox = Toolbox()
        self.tools = self._toolbox.tools
        self._episode: RetailEpisode | None = None
        self._customer: Customer | RoleCustomer

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
    def case(self) -> Case:
        """The current task."""
        return self.episode.case

    @property
    def role(self) -> RoleCustomer | None:
        """The customer, if the runtime plays it."""
        return self._customer if isinstance(self._customer, RoleCustomer) else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with the customer's first words, or with the text that a customer played as a role reads.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._episode = begin(self.options, self._toolbox, drawn, options or {})
        self._customer = self._make_customer()
        briefing = {} if self.role is None else self.role.briefing()
        return self._customer.open(), {**self._with_player(self._episode.info()), **briefing}

    def step(self, action: str) -> Step:
        """Speak to the customer, or call a tool; or answer as the customer, if it acts next.

        Raises:
            UsageError: the episode is over.
            EnvironmentFailure: the customer has given several unusable answers in a row.
        """
        episode, role = self.episode, self.role
        if role is not None and role.is_asked:
            reply = role.hear(action)
        else:
            outcome = episode.take(action, self._customer.question)
            if outcome.words is None:
                return self._finish(episode.observe(outcome.result, valid=outcome.valid))
            reply = self._customer.answer(outcome.words, episode.database)
        if role is not None and role.holds_step:
            return reply, 0.0, False, False, self._with_player(episode.info())
        return self._finish(episode.hear(reply))

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action, with a tool call if it is one."""
        return tool_message(action)

    def expert(self) -> RetailExpert | TwoSidedExpert:
        """Return a policy that serves every customer; if the customer is a role, it plays it with the script."""
        return RetailExpert() if self.options.customer is None else TwoSidedExpert(self)

    def state_key(self) -> str:
        """Return a key of the database, the customer's state, and the agent's answers."""
        return self.episode.key(self._customer.to_plain())

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return self.episode.to_plain(self._customer.to_plain())

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._episode = RetailEpisode.from_plain(snapshot, self.options, self._toolbox)
        self._customer = self._make_customer(snapshot["customer"])

    def _make_customer(self, state: Mapping[str, Any] | None = None) -> Customer | RoleCustomer:
        if self.options.customer is None:
            return Customer(self.case.scenario, self.case.expected, state)
        return RoleCustomer(self.case, **(state or {}))

    def _finish(self, step: Step) -> Step:
        observation, reward, terminated, truncated, info = step
        return observation, reward, terminated, truncated, self._with_player(info)

    def _with_player(self, info: dict[str, Any]) -> dict[str, Any]:
        """Add who acts next, if the customer is a role."""
        return info if self.role is None else {**info, "player": self.role.next_player}


class TwoSidedExpert:
    """Expert that plays the agent like `RetailExpert`, and the customer like the script.

    Args:
        desk: The environment, with ``customer: role``.
    """

    def __init__(self, desk: RetailDesk) -> None:
        self._desk = desk
        self._agent = RetailExpert()
        self._customer: Customer | None = None

    def act(self, observation: Content) -> str:
        """Return the next action of the player whose turn it is.

        Raises:
            UsageError: the customer's request is unknown to the expert.
        """
        episode, role = self._desk.episode, self._desk.role
        if role is None or not role.is_asked:
            return self._agent.act(observation)
        if self._customer is None:
            self._customer = Customer(episode.case.scenario, episode.case.expected)
            return self._customer.open()
        return self._customer.answer(observation if isinstance(observation, str) else "", episode.database)
