"""Questions: drawn from a fact world, or read from a file such as NQ or HotpotQA, also in Search-R1's format."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from random import Random
from typing import NamedTuple

from agentrl.errors import UsageError
from agentrl.message.data_file import Row, read_rows

from .. import verl_rows
from ..split_files import file_of
from ..task_ids import TEST, TRAIN, VALID, check_split
from .options import ENVIRONMENT, HOPS, SearchOptions
from .relations import Chain
from .world import World, world_of

QUESTIONS_PER_HOPS = {TRAIN: 3000, VALID: 100, TEST: 300}
"""Number of generated questions of each split for each number of hops."""
TYPES = {1: "one_hop", 2: "two_hops", 3: "three_hops"}
FROM_FILE = "file"
"""Type of a question whose file does not give one."""


class Question(NamedTuple):
    """A question, which is one task."""

    id: str
    text: str
    golden: tuple[str, ...]
    """Answers that count as right."""
    type: str


def questions_of(split: str, options: SearchOptions) -> tuple[Question, ...]:
    """Return the questions of a split that the options allow.

    Raises:
        UsageError: the split does not exist, its file cannot be read, or it has no question.
    """
    check_split(split, ENVIRONMENT)
    if options.questions is not None:
        return _load(file_of(options.questions, split, "questions of search_qa"), split)
    allowed = {TYPES[hops] for hops in options.hops}
    return tuple(question for question in generated_questions(split) if question.type in allowed)


@functools.lru_cache(maxsize=8)
def by_id(split: str, options: SearchOptions) -> Mapping[str, Question]:
    """Return the questions of a split by their ids."""
    return {question.id: question for question in questions_of(split, options)}


@functools.cache
def generated_questions(split: str) -> tuple[Question, ...]:
    """Return the fact world's questions of a split; those with one, two and three hops alternate.

    Raises:
        UsageError: the split does not exist.
    """
    check_split(split, ENVIRONMENT)
    world, random = world_of(split), Random(f"questions {split}")
    drawn = {hops: _draw(world, random, hops, QUESTIONS_PER_HOPS[split]) for hops in HOPS}
    turns = range(QUESTIONS_PER_HOPS[split])
    rows = [(hops, drawn[hops][turn]) for turn in turns for hops in HOPS]
    return tuple(
        Question(f"{split}-{number}", chain.text(), (world.follow(chain)[-1],), TYPES[hops])
        for number, (hops, chain) in enumerate(rows)
    )


def _draw(world: World, random: Random, hops: int, count: int) -> list[Chain]:
    """Draw different chains without repeated things, so that no question contains its answer."""
    chains: dict[Chain, None] = {}
    while len(chains) < count:
        chain = world.draw_chain(random, hops)
        if len(set(world.follow(chain))) == hops + 1:
            chains[chain] = None
    return list(chains)


@functools.lru_cache(maxsize=8)
def _load(path: str, split: str) -> tuple[Question, ...]:
    rows = read_rows(path, "question file")
    questions = tuple(_read(row, f"{split}-{row.number - 1}") for row in rows)
    if not questions:
        raise UsageError(f"the question file {path} is empty", expected="one JSON object per line")
    return questions


def _read(row: Row, question_id: str) -> Question:
    text = row.first("question") or verl_rows.question(row)
    golden = row.first("golden_answers", "answer")
    golden = verl_rows.ground_truth(row) if golden is None else golden
    got = f"the columns {', '.join(row.columns)}"
    try:
        answers = () if golden is None else verl_rows.answers_in(golden)
    except ValueError as error:
        answers, got = (), f"golden_answers: {error}"
    if not isinstance(text, str) or not text.strip() or not answers or not all(one.strip() for one in answers):
        raise UsageError(
            f"{row.location} is not a question",
            got=got,
            expected='"question" and "golden_answers", a list of texts or numbers; or a row for verl, as of Search-R1',
        )
    kind = verl_rows.row_type(row, "type") or FROM_FILE
    return Question(question_id, text.strip(), answers, kind)
