"""The token ledger: the exact tokens that one episode sent to the engine and received from it.

Invariants (each is a property test):

- The ids sent to the engine for a turn are the ledger's prefix at that moment. Sampled tokens are never decoded and
  encoded again; later text is appended as a suffix.
- The loss mask is ``source == SAMPLED``, and only sampled tokens have a log-probability and a weight version.
- A rewritten history forks: the child shares its parent's first tokens, which are stored once and trained once.

A worked example. After three prompt tokens, the policy samples two (the second ends its turn), and the environment
answers with one token; then the policy samples one more:

>>> sequence = TokenSequence()
>>> sequence.extend([5, 6, 7], Source.PROMPT)
>>> sequence.extend_sampled([8, 2], logprobs=[-0.5, -0.1], versions=[3, 3])
>>> sequence.extend([9], Source.OBSERVATION)
>>> sequence.extend_sampled([4], logprobs=[-1.0], versions=[4])
>>> sequence.token_ids.tolist()
[5, 6, 7, 8, 2, 9, 4]
>>> sequence.loss_mask.tolist()
[False, False, False, True, True, False, True]
>>> sequence.versions.tolist()
[-1, -1, -1, 3, 3, -1, 4]
>>> branch = sequence.fork(5)                  # history is rewritten after the first turn
>>> branch.extend([9, 9], Source.OBSERVATION)
>>> branch.token_ids.tolist(), branch.loss_mask.any().item()
([5, 6, 7, 8, 2, 9, 9], False)
"""

from __future__ import annotations

import copy
import enum
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import LedgerError, Outcome, UsageError
from agentrl.message import (
    EpisodeMessages,
    ImagePart,
    Message,
    ToolCall,
    Transcript,
    transcript,
)
from agentrl.message.image import PlacedImage, place_from_record, place_record
from agentrl.models.routed_experts import SequenceRoutes

NOT_SAMPLED = -1
"""Version of a token that was not sampled."""


REPAIRED_CALLS = "calls/repaired"
"""Metric of trajectories and steps: tool calls that were parsed although they deviate from the model's notation."""
SOLE_ROLE = "assistant"
"""Role of every turn in an episode with one agent."""
ATTEMPT = "#"
"""Separator of a role's name and the number of its attempt, as in ``solver#2``."""


class Source(enum.IntEnum):
    """Origin of a token."""

    PROMPT = 0
    """Rendered first messages of a sequence."""
    TEMPLATE = 1
    """Tokens of the chat template around messages: role headers, turn boundaries."""
    OBSERVATION = 2
    """Text of the environment, a tool or a user, after the first turn."""
    SAMPLED = 3
    """Sampled by the policy; the only source that carries loss."""
    FORCED = 4
    """Written for the policy, not sampled: demonstrations, prefilled answers."""
    MISTAKE = 5
    """Answer that is not trained on: a deliberate mistake in a demonstration, or an answer with weight 0 in a file."""


@dataclass(slots=True, kw_only=True)
class TurnTimings:
    """Seconds of a turn, by activity."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    tool: float = 0.0
    env: float = 0.0
    scoring: float = 0.0
    """Scoring of the episode, or of its group, after the last turn."""
    started: float | None = None
    """Beginning of the turn, in seconds since that of the episode; ``None`` if it is not known."""

    @property
    def engine(self) -> float:
        """Seconds of the answer: queue, prefill and decode."""
        return self.queue + self.prefill + self.decode


@dataclass(slots=True, kw_only=True)
class Turn:
    """One answer of the policy, and its results."""

    index: int
    """Number of the turn within the episode, from 0, counted over all sequences."""
    start: int
    """Index in the sequence of the answer's first token."""
    end: int
    role: str = SOLE_ROLE
    """Role that answered; with several agents, the agent's name."""
    adapter: str | None = None
    """Adapter that sampled the turn, whose versions its tokens have, in a run with several adapters."""
    reward: float = 0.0
    """Reward that the environment gave for this turn, before any shaping."""
    own_reward: float = 0.0
    """Part of `reward` that counts only for this turn's role; the rest counts for every role."""
    stop_reason: str = "stop"
    """Reason why the engine stopped: a value of `agentrl.engine.StopReason`."""
    valid: bool = True
    """True if the answer was parsed and the environment accepted the action."""
    repaired_calls: int = 0
    """Number of tool calls that were parsed although they deviate from the model's notation."""
    state_key: str | None = None
    """Key of the state before the turn (step groups of GiGPO)."""
    counted_tokens: int | None = None
    """Number of tokens of a text answer, as its service counted them; ``None`` if the tokens are in the sequence, or
    the number is unknown."""
    timings: TurnTimings = field(default_factory=TurnTimings)


_NO_LOGPROB = array("f", [float("nan")])
_BYTE_OF = {source: bytes([source]) for source in Source}
"""Records of one token as an array and as bytes, which are repeated and appended faster than lists."""


class _Runs:
    """Append-only integers, stored as runs of equal values: an episode has few weight versions, and many tokens."""

    __slots__ = ("_ends", "_values")

    def __init__(self) -> None:
        self._values, self._ends = array("i"), array("i")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def repeat(self, value: int, count: int) -> None:
        """Append `count` times the same value."""
        if not count:
            return
        end = len(self) + count
        if self._values and self._values[-1] == value:
            self._ends[-1] = end
        else:
            self._values.append(value)
            self._ends.append(end)

    def extend(self, values: Sequence[int]) -> None:
        """Append values."""
        if len(values) and min(values) == max(values):
            self.repeat(values[0], len(values))
            return
        for value in values:
            self.repeat(value, 1)

    def limit(self, most: int) -> None:
        """Replace larger values."""
        self._values = array("i", (min(value, most) for value in self._values))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        ends = self._ends[:]  # while a frame of np.diff is alive (a profiler may hold it), its argument cannot grow
        return np.repeat(np.array(self._values, dtype), np.diff(ends, prepend=0))


def id_array(ids: Sequence[int]) -> array[int]:
    """Return token ids as an array of 32-bit integers, without a copy if they are one."""
    return ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)


class TokenSequence:
    """Parallel arrays over the tokens of one branch of an episode, append-only.

    A fork shares the first `shared` tokens of its `parent`.
    """

    __slots__ = (
        "_ids",
        "_images",
        "_logprobs",
        "_sources",
        "_versions",
        "parent",
        "routes",
        "shared",
        "turns",
    )

    def __init__(self, parent: TokenSequence | None = None, shared: int = 0) -> None:
        self.parent = parent
        self.shared = shared
        self.turns: list[Turn] = []
        self._ids = array("i")
        self._sources = array("B")
        self._logprobs = array("f")
        self._versions = _Runs()
        self._images: list[PlacedImage] = []
        self.routes: SequenceRoutes = SequenceRoutes(None if parent is None else parent.routes, shared)

    def __len__(self) -> int:
        return self.shared + len(self._ids)

    def extend(self, token_ids: Sequence[int], source: Source | bytes) -> None:
        """Append tokens that were not sampled: ids [n], and one source for all tokens or one for each, as bytes [n]."""
        count = len(token_ids)
        sources = _BYTE_OF[source] * count if isinstance(source, Source) else source
        if Source.SAMPLED in sources:
            raise LedgerError("sampled tokens need log-probabilities and versions", hint="use extend_sampled")
        if len(sources) != count:
            raise LedgerError(
                "tokens and sources differ in number", got=(count, len(sources)), expected="equal lengths"
            )
        self._ids.fromlist(list(token_ids))  # faster than extend
        self._sources.frombytes(sources)
        self._logprobs.extend(_NO_LOGPROB * count)
        self._versions.repeat(NOT_SAMPLED, count)

    def extend_sampled(self, token_ids: Sequence[int], *, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append sampled tokens: ids [n], log-probabilities [n] and weight versions [n]."""
        if not len(token_ids) == len(logprobs) == len(versions):
            raise LedgerError(
                "sampled tokens, log-probabilities and versions differ in number",
                got=(len(token_ids), len(logprobs), len(versions)),
                expected="three equal lengths",
            )
        self._ids.fromlist(list(token_ids))
        self._sources.frombytes(_BYTE_OF[Source.SAMPLED] * len(token_ids))
        self._logprobs.fromlist(list(logprobs))
        self._versions.extend(versions)

    def limit_versions(self, version: int) -> None:
        """Give own tokens of newer weights this version: of live traffic whose weights were lost with a killed run."""
        self._versions.limit(version)

    def place(self, image: PlacedImage) -> None:
        """Mark appended tokens that were not sampled as an image.

        Raises:
            LedgerError: the sequence has no such tokens, or they belong to another image.
        """
        free = self._images[-1].end if self._images else self.shared
        sources = self._sources[image.start - self.shared : image.end - self.shared]
        if not free <= image.start < image.end <= len(self) or Source.SAMPLED in sources:
            raise LedgerError(
                "an image has no tokens",
                got=f"tokens {image.start} to {image.end}",
                expected=f"some between {free} and {len(self)} that were not sampled",
            )
        self._images.append(image)

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """Images in this sequence, in order."""
        if self.parent is None:
            return tuple(self._images)
        return (*(image for image in self.parent.images if image.end <= self.shared), *self._images)

    def fork(self, length: int) -> TokenSequence:
        """Start a new sequence with this one's first `length` tokens, which are stored once."""
        if not 0 <= length <= len(self):
            raise LedgerError("fork outside the sequence", got=length, expected=f"0 to {len(self)}")
        if any(image.start < length < image.end for image in self._images):
            raise LedgerError("fork inside an image", got=length)
        if length <= self.shared and self.parent is not None:
            return self.parent.fork(length)
        return TokenSequence(parent=self, shared=length)

    def with_turns(self, turns: Sequence[Turn]) -> TokenSequence:
        """Return the same tokens with other turns."""
        other = copy.copy(self)
        other.turns = list(turns)
        return other

    def ids_array(self, start: int = 0) -> array[int]:
        """Copy the token ids from index `start` on; much faster than a list, which needs an object for each id."""
        if self.parent is None:
            return self._ids[start:]
        own = self._ids[max(0, start - self.shared) :]
        return own if start >= self.shared else self.parent.ids_array(start)[: self.shared - start] + own

    def ids_list(self, start: int = 0) -> list[int]:
        """Return the token ids from index `start` on as a list."""
        return self.ids_array(start).tolist()

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Token ids, int32 [T]."""
        return self._gather("_ids", np.int32)

    @property
    def sources(self) -> npt.NDArray[np.uint8]:
        """Values of `Source`, uint8 [T]."""
        return self._gather("_sources", np.uint8)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities, float32 [T]; NaN unless sampled."""
        return self._gather("_logprobs", np.float32)

    @property
    def versions(self) -> npt.NDArray[np.int32]:
        """Weight versions, int32 [T]; `NOT_SAMPLED` unless sampled."""
        return self._gather("_versions", np.int32)

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """Mask of tokens that are sampled and not shared with the parent, bool [T]."""
        mask: npt.NDArray[np.bool_] = np.equal(self.sources, Source.SAMPLED)
        mask[: self.shared] = False
        return mask

    def _gather(self, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        own = np.array(getattr(self, name), dtype=dtype)
        if self.parent is None:
            return own
        return np.concatenate([self.parent._gather(name, dtype)[: self.shared], own])

    def own_arrays(self, start: int = 0) -> dict[str, list[Any]]:
        """Return the sequence's own tokens (without shared ones) from their index `start` on, as plain lists.

        NaN becomes ``None``. ``images`` and ``routes``, if any, are the placed images among them and the routed experts
        reported since they were appended.
        """
        images = [place_record(image) for image in self._images if image.start >= self.shared + start]
        routes = self.routes.records(self.shared + start if start else 0)
        return {
            **({"images": images} if images else {}),
            **({"routes": routes} if routes else {}),
            "token_ids": self._ids[start:].tolist(),
            "sources": self._sources[start:].tolist(),
            "logprobs": [value if value == value else None for value in self._logprobs[start:]],
            "versions": np.asarray(self._versions)[start:].tolist(),
        }

    def own_images(self, start: int = 0) -> list[ImagePart]:
        """Return the images among the tokens of `own_arrays`."""
        return [placed.image for placed in self._images if placed.start >= self.shared + start]

    def load_arrays(
        self, arrays: Mapping[str, Sequence[Any]], images: Mapping[str, ImagePart] = MappingProxyType({})
    ) -> None:
        """Append the result of `own_arrays`; `images` are given by checksum."""
        self._images.extend(place_from_record(place, images) for place in arrays.get("images", ()))
        self._ids.extend(arrays["token_ids"])
        self._sources.extend(arrays["sources"])
        self._logprobs.extend(float("nan") if v is None else v for v in arrays["logprobs"])
        self._versions.extend(arrays["versions"])
        self.routes.load(arrays.get("routes", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """Origin of an episode that shares its first turns with another one, from which it was continued.

    The episode's own ledger is complete: it repeats the tokens, log-probabilities and versions of the shared turns.
    """

    parent: str
    """Id of the other episode's trajectory."""
    turn: int
    """Number of shared turns; the first turn of its own has this number, unless the parent ended there."""


class StoredSequence(TokenSequence):
    """A sequence whose tokens are loaded from a store when they are first used."""

    __slots__ = ("_load",)

    def __init__(self, parent: TokenSequence | None, shared: int, load: Callable[[TokenSequence], None]) -> None:
        self.parent, self.shared, self.turns, self._load = parent, shared, [], load

    def __getattr__(self, name: str) -> Any:
        """Load the tokens; called for an attribute without a value."""
        if name not in TokenSequence.__slots__ or name == "turns":
            raise AttributeError(name)
        turns = self.turns
        super().__init__(self.parent, self.shared)
        self.turns = turns
        self._load(self)
        return getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnContext:
    """Conversation in which a turn was sampled."""

    messages: Sequence[Message]
    """Messages of the conversation, which grow with it."""
    position: int
    """Index of the turn's answer among the messages; the policy had read those before it."""
    tools: Sequence[Mapping[str, Any]]
    """Schemas of the offered tools."""


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The ledger of one episode."""

    id: str
    """Id that is unique in the run: task, member of the group, attempt."""
    task_id: str
    environment: str
    seed: int
    group_id: str
    """Id of the group, whose members share task and environment seed."""
    attempt: int = 0
    """Number of earlier attempts at this episode, which ended with infrastructure failures."""
    branches_from: BranchPoint | None = None
    """Origin of an episode that continues another one; ``None`` for an episode from its start."""
    sequences: list[TokenSequence] = field(default_factory=list)
    outcome: Outcome | None = None
    """Ending of the episode; ``None`` while it runs."""
    error: str | None = None
    reward: float | None = None
    """Return of the episode after scoring; ``None`` if there is none, which does not mean 0."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Measured parts of the reward by name, without weights; they need not add up to it."""
    reward_sources: dict[str, float] = field(default_factory=dict)
    """Weighted amounts that add up to `reward`, by source (docs/rewards.md)."""
    environment_sources: dict[str, float] = field(default_factory=dict)
    """Amounts that add up to `environment_reward`, by source."""
    success: bool | None = None
    """True if the task was solved; ``None`` if unknown."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts and measurements: invalid actions, parse errors, tool calls, seconds."""
    task_type: str | None = None
    """Kind of task, for tables per type."""
    proposals: list[dict[str, Any]] = field(default_factory=list)
    """Tasks that the episode proposed (``info["proposals"]``), as the environment's task source reads them."""
    log: str = ""
    """Output of the external program that played the episode."""
    transcript: Transcript = field(default_factory=list, repr=False)
    """Text of a scored episode without tokens, which a scripted policy or a chat service played."""
    conversations: list[list[Message]] = field(default_factory=list, repr=False, compare=False)
    """Messages of each conversation, in the order in which they were opened or rewritten. This field and the next two
    are available until the episode is scored; a run's store keeps them on disk."""
    answers: list[Message] = field(default_factory=list, repr=False, compare=False)
    """Parsed answers of the policy, one for each turn."""
    completions: list[str] = field(default_factory=list, repr=False, compare=False)
    """Full texts of the answers, with thinking and the markup of tool calls, without special tokens."""
    contexts: dict[int, TurnContext] = field(default_factory=dict, repr=False, compare=False)
    """Conversation of each turn, by its index, if the renderer keeps them; never stored on disk."""

    @property
    def is_trainable(self) -> bool:
        """True if the episode can be trained on: without an infrastructure failure, and scored."""
        return self.outcome is not None and self.outcome.is_trainable and self.reward is not None

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages of the conversation opened last (usually the only one), until the episode is scored."""
        self._require_messages()
        return tuple(self.conversations[-1]) if self.conversations else ()

    @property
    def final_text(self) -> str:
        """Text of the last answer, without thinking and tool calls, until the episode is scored.

        Empty for an answer that only calls tools: the arguments of a call are not an answer, and should not be
        rewarded as one. See `tool_calls`.
        """
        self._require_messages()
        return self.answers[-1].text if self.answers else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """All parsed tool calls, in order, until the episode is scored."""
        self._require_messages()
        return tuple(call for answer in self.answers for call in answer.tool_calls)

    @property
    def environment_reward(self) -> float:
        """Sum of the rewards of the environment and tools, without those of single roles."""
        return sum(turn.reward - turn.own_reward for turn in self.turns)

    def add_reward(self, turn: Turn, source: str, amount: float) -> None:
        """Add to the reward of a turn that counts for every role, and record the source."""
        turn.reward += amount
        if amount:
            self.environment_sources[source] = self.environment_sources.get(source, 0.0) + amount

    @property
    def own_rewards(self) -> dict[str, float]:
        """Sum of the rewards that count only for one role, for each role that has any."""
        found: dict[str, float] = {}
        for turn in self.turns:
            if turn.own_reward:
                found[turn.role] = found.get(turn.role, 0.0) + turn.own_reward
        return found

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles with sampled tokens; all roles if no token was sampled."""
        sampled = dict.fromkeys(turn.role for s in self.sequences if s.loss_mask.any() for turn in s.turns)
        return tuple(sampled or dict.fromkeys(turn.role for turn in self.turns)) or (SOLE_ROLE,)

    @property
    def role_returns(self) -> dict[str, float]:
        """Return of each trained role: the episode's, without rewards that count only for other roles."""
        if self.reward is None:
            return {}
        own, total = self.own_rewards, self.reward
        return {
            role: total - math.fsum(value for other, value in own.items() if other != role)
            for role in self.trained_roles
        }

    @property
    def episode_messages(self) -> EpisodeMessages:
        """The three fields that are only needed for scoring."""
        return EpisodeMessages(conversations=self.conversations, answers=self.answers, completions=self.completions)

    @episode_messages.setter
    def episode_messages(self, messages: EpisodeMessages) -> None:
        self.conversations, self.answers = messages.conversations, messages.answers
        self.completions = messages.completions

    def forget_messages(self) -> None:
        """Drop the fields that are only needed for scoring; keep the text of an episode without tokens."""
        if self.conversations and not any(len(sequence) for sequence in self.sequences):
            self.transcript = transcript(self.conversations, self.answers, len(self.turns))
        self.conversations, self.answers, self.completions = [], [], []

    def _require_messages(self) -> None:
        if not self.conversations and any(sequence.turns for sequence in self.sequences):
            raise UsageError(
                f"the messages of episode {self.id} are not available",
                got="an episode that was scored, or read from disk without its messages",
                expected="an episode during scoring",
                hint="its tokens are in trajectory.sequences, and agentrl view shows them as text",
            )

    @property
    def turns(self) -> list[Turn]:
        """All turns, in order."""
        return sorted((t for s in self.sequences for t in s.turns), key=lambda turn: turn.index)

    @property
    def engine_s(self) -> float:
        """Seconds in which the engine answered, summed over all turns."""
        return math.fsum(turn.timings.engine for sequence in self.sequences for turn in sequence.turns)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return sum(int(s.loss_mask.sum()) for s in self.sequences)

    @property
    def repeated_tokens(self) -> int:
        """Number of tokens that carry loss and were sampled in the episode from which this one branches."""
        turns = 0 if self.branches_from is None else self.branches_from.turn
        repeated = ((s, t) for s in self.sequences for t in s.turns if t.index < turns)
        return sum(int(s.loss_mask[t.start : t.end].sum()) for s, t in repeated)

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version among the sampled tokens; ``None`` if nothing was sampled."""
        versions = [int(v.min()) for s in self.sequences if (v := s.versions[s.loss_mask]).size]
        return min(versions, default=None)

    def staleness(self, version: int, adapters: Mapping[str, int] = MappingProxyType({})) -> int | None:
        """Return the age of the oldest sampled token in versions; ``None`` if nothing was sampled.

        `adapters` has the current versions of several adapters, for tokens that they sampled.
        """
        ages = []
        for sequence in self.sequences:
            if (own := sequence.versions[sequence.loss_mask]).size:
                adapter = sequence.turns[0].adapter if sequence.turns else None
                ages.append((version if adapter is None else adapters[adapter]) - int(own.min()))
        return max(ages, default=None)


def base_role(role: str) -> str:
    """Return the name of a role without the number of its attempt.

    >>> base_role("solver#2")
    'solver'
    """
    return role.partition(ATTEMPT)[0]


def role_of(member: Trajectory) -> str:
    """Return the role of an episode with one role, such as the part of a role in an episode."""
    return member.sequences[0].turns[0].role if member.sequences and member.sequences[0].turns else SOLE_ROLE
