"""The web shop's entry in the registry."""

from __future__ import annotations

from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from .environment import WebShopEnv
from .options import MAX_STEPS, parse_options
from .pictures import shows_pictures
from .tasks import ENVIRONMENT, SPLITS, WebShopTasks

INSTRUCTIONS = """\
You shop online. The instruction on every page says what to buy, with which options, and for what price at most. Each
turn, give one action; the shop answers with the next page.

Actions:
- search[words] finds products
- click[text] clicks a button, a product's id, or an option's value

Search first. Click a product's id to see its options; click the values that the instruction asks for, one at a time.
Description and Features tell more about a product, "< Prev" leads back. "Buy Now" ends the shopping: buy the product
that meets the instruction best. An action that cannot be carried out shows the page again."""


def tasks(split: str, **options: Any) -> WebShopTasks:
    """The task source of a split, under the environment's options."""
    return WebShopTasks(split, parse_options(**options))


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=WebShopEnv,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "WebShop: find a product that an instruction describes, choose its options and buy it, rewarded by how much of"
        " the instruction it meets. A generated catalogue of 6,000 products in five categories, or WebShop's own files"
        " (option data), with its pages, search and reward."
    ),
    instructions=INSTRUCTIONS,
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    images_of=shows_pictures,
    scores={"random": 0.008, "expert": 1.0},
)
