"""The contract of an agent loop, which connects a policy and an environment in one episode.

A loop is a short async function over an `Episode`. It handles messages; the episode handles tokens, budgets, timings,
deadlines and outcomes. A complete loop:

    class Echo(AgentLoop):
        async def run(self, episode: Episode) -> None:
            observation = await episode.reset()
            conversation = episode.open([system(episode.spec.instructions), user(observation)])
            while True:
                answer = await conversation.generate()
                result = await episode.step(answer.text)
                if result.done:
                    return
                conversation.add(user(result.observation))

When a budget runs out, `generate`, `step` or `call_tool` raises `EpisodeEnd`. Loops do not catch it, nor infrastructure
errors, which the runtime records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from agentrl.engine import StopReason
from agentrl.env import EnvironmentSpec, StepResult
from agentrl.errors import Outcome, UsageError, did_you_mean
from agentrl.message import Content, Message, Role, ToolCall, plainly_written
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.trajectory import SOLE_ROLE


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRole:
    """One of several agents of an episode, as configured in ``agent.roles``. See docs/roles.md."""

    name: str
    system_prompt: str | None = None
    """System message of the role's conversations, which replaces the loop's."""
    tools: Mapping[str, Tool] | None = None
    """Tools of the role by name; ``None`` for those of the episode. A tool with another role's name calls that role."""
    trained: bool = True
    """``False``: the role's tokens carry no loss, and its own rewards are ignored."""
    max_answer_tokens: int | None = None
    """Maximum number of tokens in an answer, if lower than the episode's limits."""


class EpisodeEnd(Exception):
    """The end of the episode before the loop has ended; carries the outcome and, if known, the reason."""

    def __init__(self, outcome: Outcome, detail: str | None = None) -> None:
        super().__init__(outcome.value)
        self.outcome, self.detail = outcome, detail


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""JSON schema of all objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """Required format of an answer (structured output): JSON of a schema, or forced tool calls.

    Raises:
        ValueError: neither a schema nor calls, or both.
    """

    schema: Mapping[str, Any] | None = None
    """JSON schema of the answer's content."""
    calls: tuple[str, ...] = ()
    """Tools; the answer must be a call of exactly one of them, without other content."""
    or_calls: bool = False
    """True if the answer may call tools instead of matching the schema."""
    or_text: bool = False
    """True if the answer may be text instead of a call; calls of other tools than `calls` are not allowed."""

    def __post_init__(self) -> None:
        if (self.schema is None) == (not self.calls):
            raise ValueError("a required format needs either a schema or calls")


class UnsupportedOption(UsageError):
    """One of the `TurnOptions` is not possible with this policy; nothing was sampled.

    Args:
        message: Description of what is not possible.
        option: Name of the option.
        parts: ``got``, ``expected`` and ``hint`` of the error.
    """

    def __init__(self, message: str, *, option: Literal["form", "logprobs", "images"], **parts: Any) -> None:
        super().__init__(message, **parts)
        self.option = option


class FormMissed(UnsupportedOption):
    """None of the sampled answers had the required format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token of an answer's content."""

    text: str
    """Text of the token; empty if its character continues in the next token."""
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn of the policy, parsed."""

    message: Message
    """Parsed message, with content, tool calls and thinking in separate fields."""
    raw_text: str
    """Text of the whole answer, without special tokens."""
    after_thinking: str | None = None
    """Text after the thinking, with tool calls as written; ``None`` if it is all of `raw_text`."""
    opening: str = ""
    """Thinking mark at the end of the prompt, which precedes `raw_text`."""
    is_scripted: bool = False
    """True if a scripted policy wrote the answer; False if a model sampled it."""
    problems: tuple[str, ...] = ()
    """Descriptions of malformed parts for the model; empty for a valid answer."""
    repairs: tuple[str, ...] = ()
    """Deviations from the model's notation, one for each repaired call."""
    stop_reason: StopReason = StopReason.STOP
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that the engine had cached."""
    answer_tokens: int = 0
    turn: int | None = None
    """Number of the turn in the episode, from 0."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Tokens of the content, if requested by `TurnOptions.logprobs`."""

    @property
    def text(self) -> str:
        """Text of the content."""
        return self.message.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls that could be parsed."""
        return self.message.tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSoFar:
    """Part of an answer that later tokens do not change, while it is sampled."""

    prompt_tokens: int
    reasoning: str
    text: str
    """Content up to the possible start of a tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Options of one turn."""

    max_tokens: int | None = None
    """Maximum number of tokens in the answer, if lower than the episode's limits."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, in addition to the run's. The answer ends with the text."""
    trained: bool = True
    """``False``: the tokens are recorded as forced, without loss."""
    temperature: float | None = None
    """Temperature, if not the run's; not allowed in training, which needs the run's temperature."""
    top_p: float | None = None
    """Top-p, if not the run's; not allowed in training."""
    seed: int | None = None
    """Seed of the sampling; not allowed in training. Only engines with `capabilities.seeded` reproduce samples."""
    form: AnswerForm | None = None
    """Required format of the answer; not allowed in trained turns, because it constrains the policy's tokens."""
    logprobs: bool = False
    """Return the log-probabilities of the sampled tokens in `Answer.logprobs`."""
    on_progress: Callable[[AnswerSoFar], None] | None = None
    """Called during sampling, by policies that know the answer's tokens."""
    demonstration: Callable[[], str] | None = None
    """Returns the text of a scripted policy for a turn without an action, instead of the environment's next action."""
    role: str = SOLE_ROLE
    """Role that answers; set by the conversation of a role."""
    for_environment: bool = False
    """True if a role of the environment answers, such as its user: the turn does not belong to the agent, and a
    scripted policy returns its action unchanged."""


PLAIN_TURN = TurnOptions()
"""Options of a turn without any."""


class Conversation(ABC):
    """A growing list of messages, which is one sequence of the ledger."""

    @abstractmethod
    def add(self, *messages: Message) -> None:
        """Append messages of the environment, tools or user; they are tokenized by the next `generate`."""

    @abstractmethod
    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Sample the policy's next answer.

        Args:
            prefill: Start of the answer, recorded as forced tokens.
            options: Options of this turn.

        Raises:
            EpisodeEnd: a budget is spent.
            EngineError: the engine failed.
            UnsupportedOption: the policy does not support one of the options.
        """

    @abstractmethod
    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Start a conversation whose history is rewritten to `messages`; common leading tokens are stored once."""


def example_call(tool: Tool) -> ToolCall:
    """Return an example call of a tool, with values of the right types."""
    parameters = tool.schema["function"]["parameters"]
    needed = {name: parameters["properties"][name] for name in parameters.get("required", ())}
    values: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    arguments = {name: values.get(str(schema.get("type")), f"({name})") for name, schema in needed.items()}
    return ToolCall(name=tool.name, arguments=arguments)


class Episode(ABC):
    """Interface of a running episode for its agent loop. One object per episode."""

    task: Task
    spec: EnvironmentSpec
    tools: Mapping[str, Tool]
    """Configured tools and the environment's, by name."""
    action_hint: str
    """The environment's description of an action."""
    goal: str | None
    """The environment's description of the goal; ``None`` if it has no separate one."""
    roles: Mapping[str, AgentRole] = MappingProxyType({})
    """Roles of the loop by name, and roles that they call; empty for a single agent."""
    player_names: Sequence[str] = ()
    """The environment's players, in their order; empty for a single player."""
    player: str | None = None
    """Player that acts next, and reads the latest observation."""
    players: Mapping[str, str] = MappingProxyType({})
    """Roles of players in ``info["rewards"]`` whose role has another name than the player."""

    @abstractmethod
    async def reset(self) -> Content:
        """Reset the environment; return the first observation, after the task's prompt if it has one."""

    @abstractmethod
    async def step(self, action: str) -> StepResult:
        """Take an action; its reward goes to the latest turn. A long observation is cut, with a visible mark.

        ``info["rewards"]`` of the step, by player, goes to the roles of these players (see `give_reward`).
        """

    @abstractmethod
    async def try_action(self, action: str) -> StepResult:
        """Return the result that an action would have. The environment's state is restored, and no reward is given.

        Raises:
            UsageError: the environment has no ``snapshot()`` and ``restore()``, or has roles, which would act.
        """

    @abstractmethod
    async def call_tool(self, call: ToolCall) -> Message:
        """Call a tool; errors that the model should read are returned as the result's text.

        Raises:
            EpisodeEnd: the tool ends the episode.
        """

    @abstractmethod
    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Call several tools of one answer; the results are in the order of the calls.

        Adjacent calls of parallel tools run concurrently; other calls run one after the other. No tool is called after
        a call that ends the episode (`EpisodeEnd`).
        """

    @abstractmethod
    def open(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, role: str = SOLE_ROLE
    ) -> Conversation:
        """Start a conversation; the schemas of `tools` are rendered into the prompt, and answers are parsed for calls.

        Args:
            messages: First messages of the prompt.
            tools: Tools that may be called, usually ``list(episode.tools.values())``; a loop with `offers_tools` passes
                ``()`` for a conversation without tools.
            role: Role that answers, one of the loop's `AgentLoop.roles`. Its system prompt replaces a leading system
                message, and its tools are the default of `tools`.

        Raises:
            UsageError: no such role; or a loop with `offers_tools` does not pass `tools` although there are some.
        """

    @abstractmethod
    def tools_of(self, role: str = SOLE_ROLE) -> Mapping[str, Tool]:
        """Return the tools of a role; by default, `tools`.

        Raises:
            UsageError: no such role.
        """

    def write_answer(self, message: Message) -> str:
        """Return an answer, including tool calls, in the notation of the policy's model, for use in a prompt."""
        return plainly_written(message)

    @abstractmethod
    def count_invalid(self, reason: str) -> None:
        """Count an unusable answer, and mark its turn as invalid; too many end the episode."""

    @abstractmethod
    def count_tokens(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return the number of prompt tokens of a conversation with these messages and tool schemas.

        Raises:
            UsageError: the policy has no tokens.
        """

    @abstractmethod
    def split_text(self, text: str, max_tokens: int) -> list[str]:
        """Split a text into parts of at most `max_tokens` tokens, between words if possible."""

    @abstractmethod
    def give_reward(
        self, reward: float, *, turn: int | None = None, role: str | None = None, success: bool | None = None
    ) -> None:
        """Add to the reward of a turn, for loops whose episodes are not scored by the environment.

        Args:
            reward: Reward to add.
            turn: Number of the turn; default: the latest.
            role: Role that gets the reward, at its latest turn; default: all roles.
            success: True if the episode succeeded; default: unchanged.

        Raises:
            UsageError: no such turn, or no such role.
        """

    @abstractmethod
    def keep_log(self, text: str) -> None:
        """Store a program's output with the trajectory; replaces earlier text."""

    @abstractmethod
    async def admissible_actions(self) -> list[str] | None:
        """Return the actions that the environment accepts now; ``None`` if it does not list them."""


class AgentLoop(ABC):
    """Player of episodes. Constructed once per run with the config's ``agent.options``; holds no episode state."""

    offers_tools: ClassVar[bool] = False
    """True if the policy may call `Episode.tools`; in other loops ``agent.tools`` is an error."""
    text_loop: ClassVar[str | None] = None
    """Name of the loop that takes this one's place if the model cannot call tools; ``None`` if it need not."""
    follow_ups: ClassVar[tuple[Role, ...]] = ("user",)
    """Roles of the messages that follow an answer in the same conversation. Before a run starts, the chat template is
    checked to leave earlier turns unchanged when they follow. Empty if each turn has its own conversation."""

    repairs_calls: bool | None = None
    """``True`` to also accept unambiguous calls that deviate from the model's notation, ``False`` to accept only those
    that an inference server accepts; ``None`` for the value of `offers_tools`. May be set by the constructor."""
    opens_with_task: ClassVar[bool] = True
    """True if conversations begin with the messages of a task whose prompt has several, of which `Episode.reset`
    returns the last. ``False`` for loops that build their own conversations: `Episode.reset` returns the text of all
    messages."""

    roles: Sequence[str] = ()
    """Names of the loop's agents; empty for a loop with one agent. May be set by the constructor."""
    sequence_per_turn: ClassVar[bool] = False
    """True if every turn is a separate sequence; in other loops an episode is one growing sequence."""
    turns_are_steps: ClassVar[bool] = True
    """True if there is at most one turn per step, so that the environment's step limit bounds the turns, too."""

    plays_one_step: ClassVar[bool] = False
    """True if every episode ends after one answer to the environment, whatever ``agent.max_turns`` allows."""

    is_deterministic: ClassVar[bool] = True
    """True if the loop makes the same requests and takes the same actions whenever it reads the same answers and
    observations. After a kill of the run, an episode of another loop starts again."""

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """Play one episode to its end."""

    @property
    def reads_repaired_calls(self) -> bool:
        """Value of `repairs_calls`, with its default resolved."""
        return self.offers_tools if self.repairs_calls is None else self.repairs_calls

    async def close(self) -> None:
        """Release the loop's resources at the end of the run, when no episode is running. Idempotent."""
        return

    def check_tool_names(self, names: Collection[str]) -> None:
        """Check, before a run starts, that no configured tool has a name that the loop reserves.

        Args:
            names: Names of the tools of all agents, and of agents that others call.

        Raises:
            UsageError: a name is reserved.
        """
        return

    @classmethod
    def answer_forms(cls, answer_format: str) -> Sequence[Mapping[str, Any]]:
        """Return options that may help a model to keep to the answer format, the plainest first.

        Args:
            answer_format: The environment's own answer format; empty if it has none.
        """
        return ({},)

    def demonstration_problem(self) -> str | None:
        """Return the reason why `demonstrate` does not work with the loop's options; ``None`` if it works."""
        if type(self).demonstrate is not AgentLoop.demonstrate:
            return None
        return f"agent loop {type(self).__name__} has no demonstrate(action)"

    def demonstrate(self, action: str) -> Message:
        """Return the assistant message of an ideal policy that takes `action` in this loop.

        Warm starts and scripted policies use these messages; `run` must parse `action` from them.

        Raises:
            UsageError: the loop cannot be demonstrated.
        """
        raise UsageError(
            f"agent loop {type(self).__name__} cannot play the actions of a scripted policy",
            got=f"action {action!r}",
            expected="a loop that defines demonstrate(action)",
        )


def unknown_role(loop: AgentLoop, name: str, roles: Collection[str] = ()) -> UsageError:
    """Return the error for a role that is not one of the `roles` of an episode with this loop."""
    return UsageError(
        f"agent loop {type(loop).__name__} has no role {name!r}",
        got=f"role={name!r}",
        expected=", ".join(roles) or "a loop whose `roles` names its roles",
        hint=did_you_mean(name, list(roles)),
    )
