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
turn you take one action, and the shop shows you the next page.

Actions:
- search[words] finds products, for example: search[blue cotton shirt]. It works on the first page only.
- click[text] clicks a button, a product's id or the value of an option that is on the page, for example: click[Buy Now]

First search for the product. Then click the id of a product that fits. On its page, click the values of options that
the instruction asks for, one per turn. Then click[Buy Now], which ends the shopping. Description and Features tell more
about a product, and "< Prev" leads back. After an action that cannot be carried out you see the same page again."""


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
