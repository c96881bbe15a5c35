"""The retail desk as environments, with the scripted customer or one that a language model plays."""

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
    """Create the environment for the options; with a ``customer``, the runtime or a service plays the customer.

    Raises:
        UsageError: an option is not valid.
    """
    customer = options.get("customer")
    if customer == ROLE:
        return RoleRetailDesk(**options)
    return RetailDesk(**options) if customer is None else LiveRetailDesk(**options)


class RetailDesk(gymnasium.Env[str, str]):
    """Environment in which an agent serves a customer in a conversation, with tools, under a policy.

    An action is text for the customer, or a tool call as text: ``{"name": …, "arguments": {…}}``. Agents that call
    tools natively use `tools`; their other text goes to the customer. The customer ends the episode; the reward is 1 if
    the customer was identified, the database has the state after the right actions, and the answer to a question was
    right, else 0. `reset` takes the option ``task_id``; without it the seed draws a training task.

    Args:
        options: Options of `parse_options`, without ``customer``.
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
        """Start an episode with the customer's first words.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._episode = begin(self.options, self._toolbox, drawn, options or {})
        self._customer = Customer(self.case.scenario, self.case.expected)
        return self._customer.open(), self._episode.info()

    def step(self, action: str) -> Step:
        """Speak to the customer, or call a tool.

        Raises:
            UsageError: the episode is over.
        """
        episode = self.episode
        outcome = episode.take(action, self._customer.request.outputs)
        if outcome.words is None:
            return episode.observe(outcome.result, valid=outcome.valid)
        return episode.hear(self._customer.answer(outcome.words, episode.database))

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action, with a tool call if it is one."""
        return tool_message(action)

    def expert(self) -> RetailExpert:
        """Return a policy that serves every customer."""
        return RetailExpert()

    def state_key(self) -> str:
        """Return a key of the database, the customer's mood, and the agent's answers."""
        return self.episode.key(self._customer.to_plain())

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return self.episode.to_plain(self._customer.to_plain())

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._episode = RetailEpisode.from_plain(snapshot, self.options, self._toolbox)
        self._customer = Customer(self.case.scenario, self.case.expected, snapshot["customer"])


class LiveRetailDesk(AsyncEnv):
    """`RetailDesk` with a customer that a language model plays; its failures are environment failures.

    It has no expert: the expert of `RetailDesk` understands only the script's sentences.

    Args:
        options: Options of `parse_options`, with ``customer``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = parse_options(**options)
        if not isinstance(self.options.customer, CustomerOptions):
            raise UsageError(
                "this retail desk needs a model for the customer", expected="option customer with url and model"
            )
        self._customer_options = self.options.customer
        self.action_space = Text(512, charset=string.printable)
        self._toolbox = Toolbox()
        self.tools = self._toolbox.tools
        self._service = ChatService(self._customer_options.service)
        self._episode: RetailEpisode | None = None
        self._customer: ModelCustomer | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode with the customer's first words; the default seed is 0.

        Raises:
            UsageError: an option is unknown, the task does not exist, or the service refuses the key or the model.
            EnvironmentFailure: the service failed.
        """
        self._episode = self._customer = None
        episode = begin(self.options, self._toolbox, seed or 0, options or {})
        customer = self._customer_of(episode, seed=seed or 0)
        opening = await customer.open()
        self._episode, self._customer = episode, customer
        return opening, episode.info()

    async def step(self, action: str) -> Step:
        """Speak to the customer, or call a tool.

        Raises:
            UsageError: the episode is over, or the service refuses the key or the model.
            EnvironmentFailure: the service failed.
        """
        episode, customer = _begun(self._episode), _begun(self._customer)
        outcome = episode.take(action, episode.case.outputs)
        if outcome.words is None:
            return episode.observe(outcome.result, valid=outcome.valid)
        return episode.hear(await customer.answer(outcome.words, episode.database))

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action, with a tool call if it is one."""
        return tool_message(action)

    def state_key(self) -> str:
        """Return a key of the database, the conversation, and the agent's answers."""
        return _begun(self._episode).key(_begun(self._customer).to_plain())

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return _begun(self._episode).to_plain(_begun(self._customer).to_plain())

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._episode = RetailEpisode.from_plain(snapshot, self.options, self._toolbox)
        self._customer = self._customer_of(self._episode, **snapshot["customer"])

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    def _customer_of(self, episode: RetailEpisode, *, seed: int, talk: Sequence[str] = ()) -> ModelCustomer:
        return ModelCustomer(episode.case, self._customer_options, self._service, seed=seed, talk=talk)


def _begun(part: T | None) -> T:
    if part is None:
        raise UsageError("the retail environment has no episode yet", expected="reset before anything else")
    return part
