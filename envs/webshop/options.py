"""The options of the WebShop environment and of its tasks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UsageError

from ..choices import choose
from ..option_types import typed_options
from .goals import GoalKind
from .nouns import NounTagger

MAX_STEPS = 15
GENERATED_PRODUCTS = 6000
VALID_GOALS = 1000


class Observation(enum.StrEnum):
    """How a page is told."""

    TEXT = "text"
    """Its texts, separated by ``[SEP]``; a chosen option does not show."""
    TEXT_RICH = "text_rich"
    """A line per text; what can be clicked, and what was clicked, is marked."""
    HTML = "html"
    URL = "url"
    """The page's address only."""


class RewardKind(enum.StrEnum):
    """Kind of reward for a purchase."""

    SCORE = "score"
    """Share of the goal that it meets, from 0 to 1."""
    SUCCESS = "success"
    """1 if it meets the whole goal, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopOptions:
    """What the environment and its task source are made with."""

    data: Path | None
    products: int | None
    goals: GoalKind
    observation: Observation
    show_attributes: bool
    compat: bool
    nouns: NounTagger
    """Never `NounTagger.AUTO`."""
    max_steps: int
    pictures: bool
    placeholder: bool
    reward: RewardKind
    valid_goals: int


@typed_options("webshop")
def parse_options(
    *,
    data: str | None = None,
    products: int | None = None,
    goals: str = GoalKind.HUMAN,
    observation: str = Observation.TEXT,
    show_attributes: bool = False,
    compat: bool = True,
    nouns: str = NounTagger.AUTO,
    max_steps: int = MAX_STEPS,
    pictures: bool = False,
    placeholder: bool = False,
    reward: str = RewardKind.SCORE,
    valid_goals: int = VALID_GOALS,
) -> ShopOptions:
    """Check options as they stand in a config.

    Raises:
        UsageError: a value is not allowed, or the data folder is not there.
    """
    for name, number in (("products", products), ("max_steps", max_steps)):
        if number is not None and number < 1:
            raise UsageError(f"webshop {name} is too small", got=number, expected="at least 1")
    if valid_goals < 0:
        raise UsageError("webshop valid_goals is negative", got=valid_goals, expected="0 or more")
    if data is not None and not Path(data).expanduser().is_dir():
        raise UsageError("the webshop data folder is not there", got=data, expected="a folder with WebShop's files")
    if pictures and (data is None or observation not in (Observation.TEXT, Observation.TEXT_RICH)):
        raise UsageError(
            "webshop has no pictures to show with these options",
            got=f"observation {observation}, and {'the generated catalogue' if data is None else 'data'}",
            expected="data with files of pictures, shown beside text or text_rich",
        )
    return ShopOptions(
        data=None if data is None else Path(data).expanduser().resolve(),
        products=GENERATED_PRODUCTS if data is None and products is None else products,
        goals=choose(GoalKind, goals, "webshop goals"),
        observation=choose(Observation, observation, "webshop observation"),
        show_attributes=show_attributes,
        compat=compat,
        nouns=_tagger(choose(NounTagger, nouns, "webshop nouns"), is_generated=data is None),
        max_steps=max_steps,
        pictures=pictures,
        placeholder=placeholder,
        reward=choose(RewardKind, reward, "webshop reward"),
        valid_goals=valid_goals,
    )


def _tagger(wanted: NounTagger, *, is_generated: bool) -> NounTagger:
    """Who finds nouns. What is installed has no part in it: rewards are the same everywhere."""
    if wanted is not NounTagger.AUTO:
        return wanted
    return NounTagger.RULE if is_generated else NounTagger.SPACY
