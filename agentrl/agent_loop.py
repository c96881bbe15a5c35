"""The contract of an agent loop: how a policy talks to an environment in one episode.

A loop is a short async function over an `Episode`. It speaks in messages; tokens, budgets, timings, deadlines and
outcomes are the episode's business. A whole loop:

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

When a budget runs out, `generate`, `step` or `call_tool` raises `EpisodeEnd`; loops let it pass. Infrastructure errors
pass as well: the runtime records them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from agentrl.engine import StopReason
from agentrl.env import EnvironmentSpec, StepResult
from agentrl.errors import Outcome, UsageError
from agentrl.message import Content, Message, Role, ToolCall, plainly_written
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.trajectory import SOLE_ROLE


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRole:
    """One of several agents of an episode, as ``agent.roles`` describes it. See docs/roles.md."""

    name: str
    system_prompt: str | None = None
    """Replaces the system message of the role's conversations."""
    tools: Mapping[str, Tool] | None = None
    """Its tools by name; ``None`` for those of the episode. A tool with the name of another role calls that role."""
    trained: bool = True
    """``False``: its tokens carry no loss, and its own rewards count for nobody."""
    max_answer_tokens: int | None = None
    """Most tokens of an answer, where that is fewer than the episode's limits leave."""


class EpisodeEnd(Exception):
    """The episode is over although the loop would go on; carries the outcome, and where it is known the reason."""

    def __init__(self, outcome: Outcome, detail: str | None = None) -> None:
        super().__init__(outcome.value)
        self.outcome, self.detail = outcome, detail


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""JSON schema of all objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form that an answer is held to, whatever the policy would say: the engine samples nothing else.

    Raises:
        ValueError: it has to be two things at once.
    """

    schema: Mapping[str, Any] | None = None
    """JSON schema of its content."""
    calls: tuple[str, ...] = ()
    """Tools of which it calls one, and says nothing besides."""
    or_calls: bool = False
    """With a schema: it may call tools instead."""

    def __post_init__(self) -> None:
        if (self.schema is None) == (not self.calls):
            raise ValueError("an answer is held to a schema, or to calls")


class UnsupportedOption(UsageError):
    """One of the `TurnOptions` is not possible with this policy; nothing was sampled.

    Args:
        message: What is not possible.
        option: Name of the option.
        parts: ``got``, ``expected`` and ``hint``, as all errors have them.
    """

    def __init__(self, message: str, *, option: Literal["form", "logprobs", "images"], **parts: Any) -> None:
        super().__init__(message, **parts)
        self.option = option


class FormMissed(UnsupportedOption):
    """None of the answers that were sampled had the form that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token of an answer's content."""

    text: str
    """Empty where a character goes on in the next token."""
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn of the policy, parsed."""

    message: Message
    """Content without tool calls and thinking; the calls and the thinking in their own fields."""
    raw_text: str
    """The whole answer as text, special tokens left out."""
    opening: str = ""
    """The mark with which the prompt itself opened the thinking; `raw_text` goes on after it."""
    problems: tuple[str, ...] = ()
    """What was malformed, in words that the model can act on; empty when all is well."""
    repairs: tuple[str, ...] = ()
    """For each of the calls that is not in the model's own notation, how it differs from it."""
    stop_reason: StopReason = StopReason.STOP
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those that the engine had computed before."""
    answer_tokens: int = 0
    turn: int | None = None
    """Its number among the episode's turns, from 0."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The tokens of its content, where `TurnOptions.logprobs` asked for them."""

    @property
    def text(self) -> str:
        """The content's text."""
        return self.message.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that could be parsed."""
        return self.message.tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSoFar:
    """An answer while it is sampled: what no later token changes."""

    prompt_tokens: int
    reasoning: str
    text: str
    """Content, up to where a tool call may begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Options of one turn."""

    max_tokens: int | None = None
    """Most tokens of the answer, where that is fewer than the episode's limits leave."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, besides those of the run. The answer holds the text, and nothing after it."""
    trained: bool = True
    """``False``: the tokens are recorded as forced ones, which carry no loss."""
    temperature: float | None = None
    """In place of the run's; never in training, where the run's is what the policy is trained at."""
    top_p: float | None = None
    """Likewise."""
    seed: int | None = None
    """Likewise. Only engines whose `capabilities.seeded` says so repeat their samples with it; others sample anew."""
    form: AnswerForm | None = None
    """What the answer has to be. Never in a turn that is trained: its tokens would not be the policy's own choice."""
    logprobs: bool = False
    """Tell the log-probabilities of the sampled tokens in `Answer.logprobs`."""
    on_progress: Callable[[AnswerSoFar], None] | None = None
    """Called while the answer is sampled, by policies that know its tokens."""
    demonstration: Callable[[], str] | None = None
    """What a scripted policy says in a turn that takes no action, in place of the environment's next action."""
    role: str = SOLE_ROLE
    """Who speaks; set by the conversation of a role."""
    for_environment: bool = False
    """A role of the environment speaks, such as its user: the turn is none of the agent's, and a scripted policy says
    its action as it is."""


PLAIN_TURN = TurnOptions()


class Conversation(ABC):
    """One growing sequence of messages: one sequence of the ledger."""

    @abstractmethod
    def add(self, *messages: Message) -> None:
        """Append messages of the environment, tools or user; they are tokenised with the next `generate`."""

    @abstractmethod
    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Let the policy take a turn.

        Args:
            prefill: Text put in the policy's mouth first (recorded as forced tokens).
            options: What is special about this turn.

        Raises:
            EpisodeEnd: a budget is spent.
            EngineError: the engine failed.
            UnsupportedOption: the policy cannot do what `options` ask for.
        """

    @abstractmethod
    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Start a conversation whose history is rewritten to `messages`; common leading tokens are stored once."""


def example_call(tool: Tool) -> ToolCall:
    """Return a call of a tool with values of the right types, to show how one is written."""
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
    """The configured tools and the environment's own, by name."""
    action_hint: str
    """What an action looks like, in the environment's words."""
    goal: str | None
    """What there is to do, in the environment's words; ``None`` when it does not say so apart."""
    roles: Mapping[str, AgentRole]
    """The loop's roles by name, and those that they call; empty for one agent alone."""
    player_names: Sequence[str]
    """The environment's players, in their order; empty where one plays alone."""
    player: str | None
    """Which of them acts next, and reads the latest observation."""
    players: Mapping[str, str]
    """Role of each player that the environment names in ``info["rewards"]``, where it is not the player's name."""

    @abstractmethod
    async def reset(self) -> Content:
        """Reset the environment; return the first observation, after the task's own prompt if it has one."""

    @abstractmethod
    async def step(self, action: str) -> StepResult:
        """Take an action; its reward goes to the latest turn. The observation is cut to its token budget, visibly.

        ``info["rewards"]`` of the step, by player, goes to the roles of these players (see `give_reward`).
        """

    @abstractmethod
    async def try_action(self, action: str) -> StepResult:
        """Return what an action would lead to now. The environment is then as before, and nobody gets the reward.

        Raises:
            UsageError: the environment has no ``snapshot()`` and ``restore()``, or roles of its own, who would speak.
        """

    @abstractmethod
    async def call_tool(self, call: ToolCall) -> Message:
        """Call a tool; errors that the model should read come back as the result's text.

        Raises:
            EpisodeEnd: the tool ends the episode.
        """

    @abstractmethod
    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Call several tools of one answer; the results are in the order of the calls.

        Tools that declare it run at the same time as their neighbours; others wait for what comes before them. Nothing
        is called after a call that ends the episode (`EpisodeEnd`).
        """

    @abstractmethod
    def open(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, role: str = SOLE_ROLE
    ) -> Conversation:
        """Start a conversation; the schemas of `tools` are rendered into the prompt and answers searched for calls.

        Args:
            messages: What the policy reads first.
            tools: What it may call here, usually ``list(episode.tools.values())``; a loop with `offers_tools` passes
                ``()`` for a conversation without tools.
            role: Who speaks: one of the loop's `AgentLoop.roles`. Its system prompt takes the place of a leading system
                message, and its own tools are offered where `tools` is left out.

        Raises:
            UsageError: there is no such role, or a loop with `offers_tools` leaves `tools` out although there are some.
        """

    @abstractmethod
    def tools_of(self, role: str = SOLE_ROLE) -> Mapping[str, Tool]:
        """Return what a role may call: its own tools, or else `tools`.

        Raises:
            UsageError: there is no such role.
        """

    def written(self, message: Message) -> str:
        """Return an answer as the policy's model writes it, tool calls included, to show it in a prompt."""
        return plainly_written(message)

    @abstractmethod
    def invalid(self, reason: str) -> None:
        """Count an answer that could not be used, and mark its turn; too many end the episode."""

    @abstractmethod
    def count_tokens(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return how many tokens a conversation with these messages and schemas of tools would begin with.

        Raises:
            UsageError: the policy has no tokens.
        """

    @abstractmethod
    def parts(self, text: str, max_tokens: int) -> list[str]:
        """Split a text into parts of at most `max_tokens` tokens, between words where there are some."""

    @abstractmethod
    def give_reward(
        self, reward: float, *, turn: int | None = None, role: str | None = None, success: bool | None = None
    ) -> None:
        """Add to the reward of a turn, for loops whose episodes are judged elsewhere than in the environment.

        Args:
            reward: What is added.
            turn: Number of the turn; the latest when left out.
            role: Whose reward it is: it counts for this role alone, at its latest turn. Everybody's when left out.
            success: Whether the episode succeeded; unchanged when left out.

        Raises:
            UsageError: there is no such turn, or no such role.
        """

    @abstractmethod
    def keep_log(self, text: str) -> None:
        """Keep text with the trajectory, for people: what a program wrote. The latest counts."""

    @abstractmethod
    async def admissible_actions(self) -> list[str] | None:
        """Return the actions that the environment accepts now; ``None`` when it does not list them."""


class AgentLoop(ABC):
    """Drives one episode. Constructed once per run with the config's ``agent.options``; holds no episode state."""

    offers_tools: ClassVar[bool] = False
    """The policy may call `Episode.tools`; in other loops ``agent.tools`` is an error."""
    follow_ups: ClassVar[tuple[Role, ...]] = ("user",)
    """Who speaks after an answer in the same conversation: before a run starts, the chat template is checked to leave
    earlier turns as they are then. Empty where each turn has a conversation of its own."""

    repairs_calls: bool | None = None
    """``True`` reads also unambiguous calls that are not quite in the model's notation, ``False`` only those that an
    inference server would read; ``None`` stands for the value of `offers_tools`. May be set by the constructor."""
    opens_with_task: ClassVar[bool] = True
    """Conversations begin with the messages of a task whose prompt is several, and `Episode.reset` returns the last of
    them. ``False`` for loops whose conversations are written elsewhere: `Episode.reset` returns the text of all."""

    roles: Sequence[str] = ()
    """Names of the agents that this loop lets speak; empty for a loop of one agent. May be set by the constructor."""
    sequence_per_turn: ClassVar[bool] = False
    """Every turn is a sequence of its own; in other loops an episode is one growing sequence."""
    turns_are_steps: ClassVar[bool] = True
    """No more than one turn per step: the environment's step limit then bounds the turns, too."""

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """Play one episode to its end."""

    @property
    def reads_repaired_calls(self) -> bool:
        """Return `repairs_calls`, or what it stands for."""
        return self.offers_tools if self.repairs_calls is None else self.repairs_calls

    async def close(self) -> None:
        """Release what the loop holds for the whole run. No episode is running. Idempotent."""
        return

    def check_tool_names(self, names: Collection[str]) -> None:
        """Check, before a run starts, that no configured tool has a name that the loop itself needs.

        Args:
            names: Of the tools of all agents, and of the agents that others call.

        Raises:
            UsageError: One has.
        """
        return

    def demonstration_problem(self) -> str | None:
        """Return why `demonstrate` does not work with the loop's options; ``None`` where it does."""
        if type(self).demonstrate is not AgentLoop.demonstrate:
            return None
        return f"agent loop {type(self).__name__} has no demonstrate(action)"

    def demonstrate(self, action: str) -> Message:
        """Write the assistant message of a perfect policy that takes `action` in this loop.

        Warm starts and scripted policies play through the loop with it; `run` must read `action` back from it.

        Raises:
            UsageError: the loop cannot be demonstrated.
        """
        raise UsageError(
            f"agent loop {type(self).__name__} cannot play the actions of a scripted policy",
            got=f"action {action!r}",
            expected="a loop that defines demonstrate(action)",
        )
