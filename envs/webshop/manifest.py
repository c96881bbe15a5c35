"""The splits of the generated catalogue as shipped data: numbers and checksums of tasks.

``python -m agentrl.envs.webshop.manifest`` writes the manifest; a test compares it with the code.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ..manifests import checksum
from .goals import GoalKind
from .options import GENERATED_PRODUCTS
from .shop import CatalogueSource, open_shop
from .tasks import SPLITS, split_goals


def build_manifest() -> dict[str, Any]:
    """Build the manifest: products per category, and the goals of each split with their SHA-256."""
    shop = open_shop(CatalogueSource(data=None, products=GENERATED_PRODUCTS))
    goals = shop.goals(GoalKind.HUMAN)
    found = [shop.goal(goals, number) for number in range(len(goals))]
    lines = [f"{goal.asin} {goal.instruction} {goal.attributes} {goal.options}" for goal in found]
    ranges = {split: split_goals(split, len(goals)) for split in SPLITS}
    return {
        "products": len(shop),
        "categories": dict(sorted(Counter(product.category for product in shop.products()).items())),
        "products_sha256": checksum(json.dumps(product.to_plain()) for product in shop.products()),
        "splits": {
            split: {
                "tasks": len(numbers),
                "first_goal": numbers.start,
                "by_category": dict(sorted(Counter(found[number].category for number in numbers).items())),
                "goals_sha256": checksum(lines[number] for number in numbers),
            }
            for split, numbers in ranges.items()
        },
    }


if __name__ == "__main__":
    print(json.dumps(build_manifest(), indent=1))
