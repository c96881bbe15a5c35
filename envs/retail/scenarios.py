"""Scenarios drawn from a shop: the customer, the requests, and the actions that fulfil them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from random import Random

from ..desks.records import Action, Row
from . import phrases
from .database import Store
from .generator import GIFT_CARD, new_address
from .ledger import DELIVERED, PENDING, REASONS, total_of
from .requests import Fact, Persona, Request, RequestKind, Scenario, Topic

_SHARE_OF_TWO = 0.3
"""Share of scenarios with a second request."""


def draw_scenario(store: Store, random: Random, kind: RequestKind) -> Scenario:
    """Draw a scenario whose first request has a given kind."""
    while True:
        user = store.users[random.choice(list(store.users))]
        persona = random.choice(list(Persona))
        writer = _Writer(store, random, user, forgetful=persona is Persona.FORGETFUL)
        first = writer.write(kind, taken=())
        if not first:
            continue
        requests = [*first, *_second(writer, random, first)]
        name, zip_code = user["name"], user["address"]["zip"]
        return Scenario(
            user_id=user["user_id"],
            by_email=f"My email address is {user['email']}.",
            by_name=f"My name is {name['first_name']} {name['last_name']}, and my zip code is {zip_code}.",
            persona=persona,
            requests=tuple(requests),
        )


def _second(writer: _Writer, random: Random, first: Sequence[Request]) -> list[Request]:
    """Draw a second request about another order, for a share of the scenarios."""
    if len(first) > 1 or first[0].kind is RequestKind.TRANSFER or random.random() >= _SHARE_OF_TWO:
        return []
    kinds = [kind for kind in RequestKind if kind not in (RequestKind.REFUSED, RequestKind.TRANSFER, first[0].kind)]
    return writer.write(random.choice(kinds), taken=[request.order_id for request in first])


class _Writer:
    """Writer of the requests of one user.

    Args:
        store: The shop.
        random: Random generator.
        user: The customer.
        forgetful: True if the customer does not know order numbers.
    """

    def __init__(self, store: Store, random: Random, user: Row, *, forgetful: bool) -> None:
        self._store, self._random, self._user, self._forgetful = store, random, user, forgetful

    def write(self, kind: RequestKind, *, taken: Sequence[str | None]) -> list[Request]:
        """Draw a request of a kind about an order that is not taken, and the request after a refused one.

        The list is empty if the user cannot have such a request.
        """
        writers: Mapping[RequestKind, tuple[str | None, Callable[[Row], Request | None]]] = {
            RequestKind.CANCEL: (PENDING, self._cancel),
            RequestKind.ITEMS: (PENDING, self._modify_items),
            RequestKind.ADDRESS: (PENDING, self._modify_address),
            RequestKind.PAYMENT: (PENDING, self._modify_payment),
            RequestKind.RETURN: (DELIVERED, self._return),
            RequestKind.EXCHANGE: (DELIVERED, self._exchange),
            RequestKind.QUESTION: (None, self._question),
            RequestKind.REFUSED: (DELIVERED, self._refused_cancel),
            RequestKind.TRANSFER: (None, self._transfer),
        }
        status, writer = writers[kind]
        orders = [self._store.orders[order_id] for order_id in self._user["orders"] if order_id not in taken]
        fitting = [order for order in orders if status in (None, order["status"])]
        request = writer(self._random.choice(fitting)) if fitting else None
        if request is None:
            return []
        if kind is not RequestKind.REFUSED:
            return [request]
        order = self._store.orders[str(request.order_id)]
        return [request, self._return_items(order, order["items"], opening=phrases.INSTEAD_RETURN)]

    def _cancel(self, order: Row) -> Request:
        reason, other = self._random.sample(REASONS, 2)
        fact = Fact(Topic.REASON, phrases.REASONS[reason], at_first=phrases.REASONS[other])
        action = Action("cancel_pending_order", {"order_id": order["order_id"], "reason": reason})
        return self._request(RequestKind.CANCEL, order, [fact], [action])

    def _refused_cancel(self, order: Row) -> Request:
        fact = Fact(Topic.REASON, phrases.REASONS[self._random.choice(REASONS)])
        return self._request(RequestKind.REFUSED, order, [fact], [])

    def _modify_address(self, order: Row) -> Request:
        address, other = new_address(self._random), new_address(self._random)
        text = phrases.ADDRESS.format(line=phrases.describe_address(address))
        at_first = phrases.ADDRESS.format(line=phrases.describe_address(other))
        action = Action("modify_pending_order_address", {"order_id": order["order_id"], **address})
        return self._request(RequestKind.ADDRESS, order, [Fact(Topic.ADDRESS, text, at_first=at_first)], [action])

    def _modify_payment(self, order: Row) -> Request | None:
        original = order["payment_history"][0]["payment_method_id"]
        methods = [key for key in self._paying_methods(total_of(order)) if key != original]
        if not methods:
            return None
        method_id = self._random.choice(methods)
        arguments = {"order_id": order["order_id"], "payment_method_id": method_id}
        facts = [self._payment_fact(method_id, methods)]
        return self._request(RequestKind.PAYMENT, order, facts, [Action("modify_pending_order_payment", arguments)])

    def _modify_items(self, order: Row) -> Request | None:
        return self._swap(RequestKind.ITEMS, order, "modify_pending_order_items")

    def _exchange(self, order: Row) -> Request | None:
        return self._swap(RequestKind.EXCHANGE, order, "exchange_delivered_order_items")

    def _swap(self, kind: RequestKind, order: Row, tool: str) -> Request | None:
        item = self._random.choice(order["items"])
        variants = self._store.products[item["product_id"]]["variants"].values()
        others = [row for row in variants if row["available"] and row["item_id"] != item["item_id"]]
        if len(others) < 2:
            return None
        new, other = self._random.sample(others, 2)
        methods = self._paying_methods(max(new["price"], other["price"]) - item["price"])
        method_id = self._random.choice(methods)
        facts = [
            Fact(Topic.ITEM, phrases.ITEM.format(items=phrases.describe_item(item))),
            Fact(Topic.WISH, _wish(new), at_first=_wish(other)),
            self._payment_fact(method_id, methods),
        ]
        arguments = {
            "order_id": order["order_id"],
            "item_ids": [item["item_id"]],
            "new_item_ids": [new["item_id"]],
            "payment_method_id": method_id,
        }
        return self._request(kind, order, facts, [Action(tool, arguments)])

    def _return(self, order: Row) -> Request:
        items = self._random.sample(order["items"], self._random.randint(1, min(2, len(order["items"]))))
        return self._return_items(order, items)

    def _return_items(self, order: Row, items: Sequence[Row], opening: str | None = None) -> Request:
        original = order["payment_history"][0]["payment_method_id"]
        methods = [key for key in self._user["payment_methods"] if key == original or key.startswith(GIFT_CARD)]
        method_id = self._random.choice(methods)
        listed = Fact(Topic.ITEM, phrases.ITEM.format(items=" and the ".join(map(phrases.describe_item, items))))
        arguments = {
            "order_id": order["order_id"],
            "item_ids": [item["item_id"] for item in items],
            "payment_method_id": method_id,
        }
        facts = [*([] if opening else [listed]), self._payment_fact(method_id, methods)]
        action = Action("return_delivered_order_items", arguments)
        request = self._request(RequestKind.RETURN, order, facts, [action])
        return request if opening is None else dataclasses.replace(request, opening=opening, facts=request.facts[1:])

    def _question(self, order: Row) -> Request:
        product = self._store.products[self._random.choice(order["items"])["product_id"]]
        prices = [variant["price"] for variant in product["variants"].values() if variant["available"]]
        if not prices or self._random.random() < 0.5:
            request = self._request(RequestKind.QUESTION, order, [], [], opening=phrases.HOW_MUCH)
            return dataclasses.replace(request, outputs=(f"{total_of(order):.2f}",))
        asked = phrases.IN_STOCK.format(product=product["name"])
        return Request(kind=RequestKind.QUESTION, opening=asked, outputs=(str(len(prices)), f"{min(prices):.2f}"))

    def _transfer(self, order: Row) -> Request:
        opening = self._random.choice(phrases.OPENINGS[RequestKind.TRANSFER])
        action = Action("transfer_to_human_agents", {"summary": opening})
        return Request(kind=RequestKind.TRANSFER, opening=opening, actions=(action,))

    def _request(
        self,
        kind: RequestKind,
        order: Row,
        facts: Sequence[Fact],
        actions: Sequence[Action],
        *,
        opening: str | None = None,
    ) -> Request:
        """Return a request about an order, whose number is the first fact."""
        product = self._random.choice(order["items"])["name"]
        known = phrases.FORGOTTEN_ORDER if self._forgetful else phrases.ORDER
        named = Fact(Topic.ORDER, known.format(order_id=order["order_id"], product=product))
        return Request(
            kind=kind,
            opening=opening or self._random.choice(phrases.OPENINGS[kind]),
            facts=(named, *facts),
            actions=tuple(actions),
            order_id=order["order_id"],
        )

    def _payment_fact(self, method_id: str, methods: Sequence[str]) -> Fact:
        others = [key for key in methods if key != method_id]
        at_first = self._payment_text(others[0]) if others else None
        return Fact(Topic.PAYMENT, self._payment_text(method_id), at_first=at_first)

    def _payment_text(self, method_id: str) -> str:
        method = self._user["payment_methods"][method_id]
        return phrases.PAYMENT.format(method=phrases.describe_method(method))

    def _paying_methods(self, amount: float) -> list[str]:
        """Return the methods that can pay an amount."""
        methods = self._user["payment_methods"]
        return [key for key, method in methods.items() if method.get("balance", amount) >= amount]


def _wish(variant: Row) -> str:
    return phrases.WISH.format(options=phrases.describe_options(variant["options"]))
