"""One episode: question, queries and answer. It is independent of the retriever: its caller passes the passages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import orjson

from agentrl.errors import ToolError, UsageError
from agentrl.remote.retrieval import Passage

from .options import RewardKind, SearchOptions
from .protocol import TAGS, Move, MoveKind, Protocol
from .questions import Question
from .scoring import contains, exact_match, f1
from .tasks import question_of

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]


class SearchEpisode:
    """Steps, queries and judgement of an episode.

    Args:
        question: The question.
        options: Options of the environment.
        protocol: Form of the moves.
    """

    def __init__(self, question: Question, options: SearchOptions, protocol: Protocol = TAGS) -> None:
        self.question = question
        self.options = options
        self.protocol = protocol
        self.queries: list[str] = []
        self.steps = 0
        self.answer: str | None = None

    @property
    def is_over(self) -> bool:
        """True if the question was answered, or no step is left."""
        return self.answer is not None or self.steps >= self.options.max_steps

    def read(self, action: str) -> Move:
        """Return the move of an action.

        Raises:
            UsageError: the episode is over.
        """
        if self.is_over:
            raise UsageError("the search_qa episode is over", expected="reset before the next step")
        return self.protocol.read(action)

    def take(self, move: Move, found: Sequence[Passage]) -> Step:
        """Take a step; `found` are the retriever's passages for a search."""
        self.steps += 1
        if move.kind is MoveKind.ANSWER:
            return self._judge(move.text)
        if move.kind is MoveKind.NOTHING:
            return (
                f"This is neither a search nor an answer, so nothing happened. {self.protocol.rule}",
                0.0,
                False,
                self.is_over,
                self._info(valid=False),
            )
        self.queries.append(move.text)
        if self.options.reward is RewardKind.RANK:
            return self._judge_query(move.text, found)
        return self.protocol.show(found), 0.0, False, self.is_over, self._info(valid=True)

    def begin_search(self, query: str) -> None:
        """Count a search with the tool; the last step is reserved for the answer.

        Raises:
            ToolError: only the answer is left, or the query is empty.
        """
        if not query.strip():
            raise ToolError("the query is empty", expected="some words")
        if self.steps >= self.options.max_steps - 1:
            raise ToolError("no search is left", hint="give the final answer with <answer> answer </answer>")
        self.steps += 1
        self.queries.append(query.strip())

    def key(self) -> str:
        """Return a key of the state: the question, the queries and the answer."""
        state = [self.question.id, self.question.text, self.queries, self.answer]
        return hashlib.blake2b(orjson.dumps(state), digest_size=16).hexdigest()

    def to_plain(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return {"task_id": self.question.id, "queries": list(self.queries), "steps": self.steps, "answer": self.answer}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], options: SearchOptions, protocol: Protocol = TAGS) -> SearchEpisode:
        """Restore an episode from `to_plain`."""
        episode = cls(question_of(plain["task_id"], options), options, protocol)
        episode.queries, episode.steps, episode.answer = list(plain["queries"]), plain["steps"], plain["answer"]
        return episode

    def _judge_query(self, query: str, found: Sequence[Passage]) -> Step:
        self.answer = query
        ranks = (rank for rank, passage in enumerate(found, 1) if contains(passage.text, self.question.golden))
        first = next(ranks, None)
        reward = 0.0 if first is None else 1 / first
        info = {**self._info(valid=True), "success": first == 1, "reward_components": {RewardKind.RANK.value: reward}}
        return self.protocol.show(found), reward, True, False, info

    def _judge(self, answer: str) -> Step:
        self.answer = answer
        if self.options.reward is RewardKind.RANK:
            return "There was no query.", 0.0, True, False, self._info(valid=False)
        scores = {
            RewardKind.EXACT_MATCH.value: exact_match(answer, self.question.golden),
            RewardKind.F1.value: f1(answer, self.question.golden),
        }
        right = scores[RewardKind.EXACT_MATCH.value] == 1
        info = {**self._info(valid=True), "success": right, "reward_components": scores}
        return "That is right." if right else "That is not the answer.", scores[self.options.reward], True, False, info

    def _info(self, *, valid: bool) -> dict[str, Any]:
        return {"success": False, "task_type": self.question.type, "valid": valid}
