"""The web shop's entry in the registry."""

from __future__ import annotations

from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from .environment import WebShopEnv
from .options import MAX_STEPS, parse_options
from .pictures import shows_pictures
from .tasks import ENVIRONMENT, SPLITS, WebShopTasks

INSTRUCTIONS = """\
You shop online. The instruction on every page says what to buy, which options to choose, and the highest price. Each
turn, take one action. The shop then shows you the next page.

There are two kinds of actions:
- To search for products, write for example: search[blue cotton shirt]. This works on every page.
- To click something that the page shows, write for example: click[Buy Now]. You can click a button, the id of a product
  such as B000VKB640, or the value of an option.

First search for the product. Then click the id of a product that fits the instruction. On its page, click each option
value that the instruction asks for, one per turn. Last, click[Buy Now]: this ends the shopping. Description and
Features tell you more about a product, and < Prev goes back. If an action is not possible, you see the same page
again."""


def tasks(split: str, **options: Any) -> WebShopTasks:
    """Return the task source of a split, under the environment's options."""
    return WebShopTasks(split, parse_options(**options))


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=WebShopEnv,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "WebShop: find a product that an instruction describes, choose its options and buy it; the reward is the share"
        " of the instruction that the purchase meets. A generated catalogue of 6,000 products in five categories, or"
        " WebShop's own files (option data), with its pages, search and reward. Most of the reward is easy: buying the"
        " first hit of a search for the instruction, with the options that it names, returns 0.63 on average but"
        " succeeds in only 16 % of the tasks, so compare the success rate."
    ),
    instructions=INSTRUCTIONS,
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    images_of=shows_pictures,
    scores={"random": 0.008, "expert": 1.0},
)
