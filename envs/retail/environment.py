"""The retail desk as environments: with the scripted customer, or with one that a language model plays."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import gymnasium
from gymnasium.spaces import Text

from agentrl.env import AnyEnv, AsyncEnv
from agentrl.errors import UsageError
from agentrl.message import Message
from agentrl.remote.chat import ChatService

from .customer import Customer
from .customer_options import ROLE, CustomerOptions
from .episode import RetailEpisode, Step, begin
from .expert import RetailExpert
from .model_customer import ModelCustomer
from .options import parse_options
from .role_desk import RoleRetailDesk
from .tasks import Case
from .tools import Toolbox, tool_message

T = TypeVar("T")


def make_retail(**options: Any) -> AnyEnv:
    """Return the environment that the options ask for: with a ``customer``, the runtime or a service plays it.

    Raises:
        UsageError: an option is wrong.
    """
    customer = options.get("customer")
    if customer == ROLE:
        return RoleRetailDesk(**options)
    return RetailDesk(**options) if customer is None else LiveRetailDesk(**options)


class RetailDesk(gymnasium.Env[str, str]):
    """Serve a customer who talks, with tools, under a policy.

    An action is what is said to the customer, or a call of a tool as text: ``{"name": …, "arguments": {…}}``. Agents
    that call tools use `tools`, and say the rest. The customer ends the episode; the reward is then 1 if the customer
    was identified, the database is as the right actions leave it, and the answer to a question was right,
    else 0. `reset` takes the option ``task_id``; without it the seed draws a training task.

    Args:
        options: As `parse_options` describes them, without ``customer``.
    """

    action_hint = ""

    def __init__(self, **options: Any) -> None:
        self.options = parse_options(**options)
        if self.options.customer is not None:
            raise UsageError("this class has a scripted customer", got="customer", hint="use make_retail")
        self.observation_space = Text(16384, charset=string.printable)
        self.action_space = Text(512, charset=string.printable)
        self._toolbox = Toolbox()
        self.tools = self._toolbox.tools
        self._episode: RetailEpisode | None = None

    @property
    def episode(self) -> RetailEpisode:
        """The current episode.

        Raises:
            UsageError: `reset` was not called yet.
        """
        return _begun(self._episode)

    @property
    def case(self) -> Case:
        """The current task."""
        return self.episode.case

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return a customer calls.

        Raises:
            UsageError: an option is unknown, or names no task.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._episode = begin(self.options, self._toolbox, drawn, options or {})
        self._customer = Customer(self.case.scenario, self.case.expected)
        return self._customer.open(), self._episode.info()

    def step(self, action: str) -> Step:
        """Say something, or call a tool.

        Raises:
            UsageError: the episode is over.
        """
        episode = self.episode
        deed = episode.take(action, self._customer.request.outputs)
        if deed.words is None:
            return episode.observe(deed.result, valid=deed.valid)
        return episode.hear(self._customer.answer(deed.words, episode.database))

    def tool_message(self, action: str) -> Message:
        """Return the assistant message that takes a text action by calling tools."""
        return tool_message(action)

    def expert(self) -> RetailExpert:
        """Return a policy that serves every customer."""
        return RetailExpert()

    def state_key(self) -> str:
        """Return a key of the database, of the customer's mood, and of what was said."""
        return self.episode.key(self._customer.to_plain())

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return self.episode.to_plain(self._customer.to_plain())

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on where a snapshot was taken, in this environment or another with the same options."""
        self._episode = RetailEpisode.from_plain(snapshot, self.options, self._toolbox)
        self._customer = Customer(self.case.scenario, self.case.expected, snapshot["customer"])


class LiveRetailDesk(AsyncEnv):
    """`RetailDesk` with a customer that a language model plays; its failures are the machinery's, never the policy's.

    It has no expert: the one of `RetailDesk` understands the script's sentences only.

    Args:
        options: As `parse_options` describes them, with ``customer``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = parse_options(**options)
        if not isinstance(self.options.customer, CustomerOptions):
            raise UsageError("this retail desk has no model to ask", expected="option customer with url and model")
        self._asked = self.options.customer
        self.action_space = Text(512, charset=string.printable)
        self._toolbox = Toolbox()
        self.tools = self._toolbox.tools
        self._service = ChatService(self._asked.service)
        self._episode: RetailEpisode | None = None
        self._customer: ModelCustomer | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return a customer calls; without a seed, as with seed 0.

        Raises:
            UsageError: an option is unknown, or names no task; the service refuses the key, or the model's name.
            EnvironmentFailure: the service failed.
        """
        self._episode = self._customer = None
        episode = begin(self.options, self._toolbox, seed or 0, options or {})
        customer = self._customer_of(episode, seed=seed or 0)
        opening = await customer.open()
        self._episode, self._customer = episode, customer
        return opening, episode.info()

    async def step(self, action: str) -> Step:
        """Say something, or call a tool.

        Raises:
            UsageError: the episode is over; the service refuses the key, or the model's name.
            EnvironmentFailure: the service failed.
        """
        episode, customer = _begun(self._episode), _begun(self._customer)
        deed = episode.take(action, episode.case.outputs)
        if deed.words is None:
            return episode.observe(deed.result, valid=deed.valid)
        return episode.hear(await customer.answer(deed.words, episode.database))

    def tool_message(self, action: str) -> Message:
        """Return the assistant message that takes a text action by calling tools."""
        return tool_message(action)

    def state_key(self) -> str:
        """Return a key of the database, of the conversation, and of what was said."""
        return _begun(self._episode).key(_begun(self._customer).to_plain())

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return _begun(self._episode).to_plain(_begun(self._customer).to_plain())

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on where a snapshot was taken, in this environment or another with the same options."""
        self._episode = RetailEpisode.from_plain(snapshot, self.options, self._toolbox)
        self._customer = self._customer_of(self._episode, **snapshot["customer"])

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    def _customer_of(self, episode: RetailEpisode, *, seed: int, talk: Sequence[str] = ()) -> ModelCustomer:
        return ModelCustomer(episode.case, self._asked, self._service, seed=seed, talk=talk)


def _begun(part: T | None) -> T:
    if part is None:
        raise UsageError("the retail environment has no episode yet", expected="reset before anything else")
    return part
