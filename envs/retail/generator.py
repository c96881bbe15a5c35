"""The shop of a split: its products, users and orders, generated from a seed."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import json
from random import Random
from typing import Any

from ..desks.records import Row
from ..task_ids import TEST, TRAIN, VALID, check_split
from .database import Store

USERS = {TRAIN: 500, VALID: 100, TEST: 100}
FIRST_NUMBER = {TRAIN: 1, VALID: 5, TEST: 7}
"""Leading digit of the numbers of users, orders and items of each split, so that different splits share none."""
VARIANTS = 8
"""Maximum number of variants of a product."""
GIFT_CARD, CREDIT_CARD, PAYPAL = SOURCES = ("gift_card", "credit_card", "paypal")
_SHARE_IN_STOCK = 0.8


@functools.cache
def store_of(split: str, users: int | None = None) -> Store:
    """Return the records of a split; they are generated once per process.

    Args:
        split: Name of the split.
        users: Maximum number of users of the shop; all of `USERS` by default.

    Raises:
        UsageError: the split does not exist.
    """
    check_split(split, "retail")
    maker = _Maker(split, min(users or USERS[split], USERS[split]))
    products = maker.products()
    people, orders = maker.users_and_orders(products)
    return Store(users=people, products=products, orders=orders)


def new_address(random: Random) -> Row:
    """Draw an address."""
    words = _words()
    city, state, digits = random.choice(words["cities"])
    return {
        "address1": f"{random.randint(10, 990)} {random.choice(words['streets'])}",
        "address2": f"Apt {random.randint(1, 60)}" if random.random() < 0.5 else "",
        "city": city,
        "state": state,
        "country": "USA",
        "zip": f"{digits}{random.randint(10, 99)}",
    }


@functools.cache
def _words() -> Any:
    return json.loads(importlib.resources.files(__package__).joinpath("data/catalogue.json").read_text("utf-8"))


class _Maker:
    """Generator of a shop, which draws everything from one random stream in a fixed order.

    Args:
        split: Name of the split, which is the seed.
        n_users: Number of users.
    """

    def __init__(self, split: str, n_users: int) -> None:
        self._split = split
        self._n_users = n_users
        self._random = Random(f"retail {split}")
        self._taken: set[str] = set()

    def products(self) -> dict[str, Row]:
        """Return the products, each with some of its possible variants."""
        products = {}
        for name, facts in _words()["products"].items():
            combinations = list(itertools.product(*facts["options"].values()))
            chosen = self._random.sample(combinations, min(VARIANTS, len(combinations)))
            variants = [self._variant(facts, combination) for combination in sorted(chosen)]
            product_id = self._number(10)
            by_id = {variant["item_id"]: variant for variant in variants}
            products[product_id] = {"name": name, "product_id": product_id, "variants": by_id}
        return products

    def _variant(self, facts: Row, combination: tuple[str, ...]) -> Row:
        return {
            "item_id": self._number(10),
            "options": dict(zip(facts["options"], combination, strict=True)),
            "available": self._random.random() < _SHARE_IN_STOCK,
            "price": round(facts["price"] * self._random.uniform(0.8, 1.2), 2),
        }

    def users_and_orders(self, products: dict[str, Row]) -> tuple[dict[str, Row], dict[str, Row]]:
        """Return users with unique names, each with two to four orders of different products."""
        words = _words()
        names = self._random.sample(list(itertools.product(words["first_names"], words["last_names"])), self._n_users)
        users, orders = {}, {}
        for first, last in names:
            user = self._user(first, last)
            users[user["user_id"]] = user
            for order in self._orders(user, products):
                orders[order["order_id"]] = order
                user["orders"].append(order["order_id"])
        return users, orders

    def _user(self, first: str, last: str) -> Row:
        number = self._number(4)
        sources = self._random.sample(SOURCES, self._random.randint(2, 3))
        methods = [self._payment_method(source) for source in sources]
        return {
            "user_id": f"{first}_{last}_{number}".lower(),
            "name": {"first_name": first, "last_name": last},
            "email": f"{first}.{last}{number}@example.com".lower(),
            "address": new_address(self._random),
            "payment_methods": {method["id"]: method for method in methods},
            "orders": [],
        }

    def _payment_method(self, source: str) -> Row:
        method: Row = {"source": source, "id": f"{source}_{self._number(7)}"}
        if source == GIFT_CARD:
            method["balance"] = float(self._random.randint(20, 400))
        if source == CREDIT_CARD:
            method["last_four"] = f"{self._random.randint(0, 9999):04}"
        return method

    def _orders(self, user: Row, products: dict[str, Row]) -> list[Row]:
        statuses = ["pending", "delivered", *self._random.choices(["pending", "delivered", "processed"], k=2)]
        statuses = statuses[: self._random.randint(2, 4)]
        self._random.shuffle(statuses)
        wanted = self._random.sample(list(products), 3 * len(statuses))
        return [self._order(user, status, products, [wanted.pop() for _ in range(3)]) for status in statuses]

    def _order(self, user: Row, status: str, products: dict[str, Row], wanted: list[str]) -> Row:
        items = [self._item(products[product_id]) for product_id in wanted[: self._random.randint(1, 3)]]
        method = self._random.choice([key for key in user["payment_methods"] if not key.startswith(GIFT_CARD)])
        total = round(sum(item["price"] for item in items), 2)
        return {
            "order_id": f"#W{self._number(7)}",
            "user_id": user["user_id"],
            "address": dict(user["address"]),
            "items": items,
            "status": status,
            "payment_history": [{"transaction_type": "payment", "amount": total, "payment_method_id": method}],
        }

    def _item(self, product: Row) -> Row:
        variant = self._random.choice(list(product["variants"].values()))
        return {
            "name": product["name"],
            "product_id": product["product_id"],
            "item_id": variant["item_id"],
            "options": dict(variant["options"]),
            "price": variant["price"],
        }

    def _number(self, digits: int) -> str:
        """Return a new number, which was not drawn before; its first digit depends on the split."""
        least = FIRST_NUMBER[self._split] * 10 ** (digits - 1)
        while True:
            number = str(self._random.randrange(least, least + 2 * 10 ** (digits - 1)))
            if number not in self._taken:
                self._taken.add(number)
                return number
