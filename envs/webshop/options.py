"""Options of the WebShop environment and of its tasks."""

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
    """Form of a page."""

    TEXT = "text"
    """Texts of the page, separated by ``[SEP]``; chosen options are not marked."""
    TEXT_RICH = "text_rich"
    """A line per text, with marks on clickable and clicked texts."""
    HTML = "html"
    URL = "url"
    """Only the address of the page."""


class RewardKind(enum.StrEnum):
    """Kind of reward for a purchase."""

    SCORE = "score"
    """Share of the goal that the purchase meets, from 0 to 1."""
    SUCCESS = "success"
    """1 if the purchase meets the whole goal, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopOptions:
    """Checked options of the environment and its task source."""

    data: Path | None
    products: int | None
    goals: GoalKind
    observation: Observation
    show_attributes: bool
    compat: bool
    nouns: NounTagger
    """Resolved method, never `NounTagger.AUTO`."""
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
    """Check the options of a config.

    Raises:
        UsageError: a value is not allowed, or the data folder does not exist.
    """
    for name, number in (("products", products), ("max_steps", max_steps)):
        if number is not None and number < 1:
            raise UsageError(f"webshop {name} is too small", got=number, expected="at least 1")
    if valid_goals < 0:
        raise UsageError("webshop valid_goals is negative", got=valid_goals, expected="0 or more")
    if data is not None and not Path(data).expanduser().is_dir():
        raise UsageError("the webshop data folder does not exist", got=data, expected="a folder with WebShop's files")
    if pictures and (data is None or observation not in (Observation.TEXT, Observation.TEXT_RICH)):
        raise UsageError(
            "webshop has no pictures to show with these options",
            got=f"observation {observation}, and {'the generated catalogue' if data is None else 'data'}",
            expected="data with picture files, and observation text or text_rich",
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
    """Resolve the method to find nouns; it does not depend on installed packages, so that rewards are reproducible."""
    if wanted is not NounTagger.AUTO:
        return wanted
    return NounTagger.RULE if is_generated else NounTagger.SPACY
