"""A scripted agent that serves every scripted customer from the texts only, and follows the policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentrl.errors import UsageError

from ..desks.calls import call_text
from ..desks.expert import COLLEAGUE, DONE, Conversation, DeskExpert, Reading, Steps
from . import phrases
from .ledger import DELIVERED
from .requests import RequestKind, Topic

_QUESTIONS = {
    Topic.ORDER: "What is the order number?",
    Topic.REASON: "What is the reason?",
    Topic.ITEM: "Which item is it about?",
    Topic.WISH: "Which option would you like?",
    Topic.PAYMENT: "Which payment method would you like to use?",
    Topic.ADDRESS: "What is the new address?",
}
_ANSWERS: Mapping[Topic, re.Pattern[str]] = {
    Topic.ORDER: re.compile(f"{phrases.ORDER_NUMBER.pattern}|{phrases.FORGOTTEN.pattern}"),
    Topic.REASON: re.compile("no longer need|by mistake"),
    Topic.ITEM: phrases.DESCRIBED,
    Topic.WISH: phrases.WISHED,
    Topic.PAYMENT: phrases.METHOD,
    Topic.ADDRESS: phrases.ADDRESS_LINE,
}
_NEEDED: Mapping[RequestKind, tuple[Topic, ...]] = {
    RequestKind.CANCEL: (Topic.ORDER, Topic.REASON),
    RequestKind.ITEMS: (Topic.ORDER, Topic.ITEM, Topic.WISH, Topic.PAYMENT),
    RequestKind.ADDRESS: (Topic.ORDER, Topic.ADDRESS),
    RequestKind.PAYMENT: (Topic.ORDER, Topic.PAYMENT),
    RequestKind.RETURN: (Topic.ORDER, Topic.ITEM, Topic.PAYMENT),
    RequestKind.EXCHANGE: (Topic.ORDER, Topic.ITEM, Topic.WISH, Topic.PAYMENT),
    RequestKind.TRANSFER: (),
}


class _Conversation(Conversation):
    def __init__(self, opening: str) -> None:
        super().__init__(opening)
        self.user_id = ""
        self.user: dict[str, Any] = {}
        """Record of the customer, read on first use."""
        self.order: dict[str, Any] = {}

    def steps(self) -> Steps:
        """Identify the customer, then serve one request after the other."""
        yield from self._identify()
        while True:
            kind = self._kind()
            if kind is RequestKind.QUESTION:
                yield from self._tell()
            elif kind is RequestKind.TRANSFER:
                yield call_text("transfer_to_human_agents", {"summary": self.heard[:200]})
                yield COLLEAGUE
            else:
                yield from self._change(kind)

    def _identify(self) -> Steps:
        while not (found := phrases.EMAIL.search(self.heard) or phrases.NAME_AND_ZIP.search(self.heard)):
            yield from self.ask("Please tell me your email address, or your name and zip code.")
        if found.re is phrases.EMAIL:
            self.user_id = yield call_text("find_user_id_by_email", {"email": found[0]})
        else:
            first, last, zip_code = found.groups()
            arguments = {"first_name": first, "last_name": last, "zip": zip_code}
            self.user_id = yield call_text("find_user_id_by_name_zip", arguments)

    def _kind(self) -> RequestKind:
        for kind, openings in phrases.OPENINGS.items():
            if any(opening in self.heard for opening in openings):
                return kind
        if phrases.INSTEAD_RETURN in self.heard:
            return RequestKind.RETURN
        if phrases.HOW_MUCH in self.heard or phrases.PRODUCT_ASKED.search(self.heard):
            return RequestKind.QUESTION
        raise UsageError("the retail expert does not know this request", got=repr(self.heard))

    def _tell(self) -> Steps:
        """Look up the answer to the customer's question, and state it."""
        if phrases.HOW_MUCH in self.heard:
            yield from self._find_order()
            amount = f"{self.order['payment_history'][0]['amount']:.2f} dollars"
        else:
            product = yield from self._product(str(self.last(phrases.PRODUCT_ASKED)[1]))
            prices = [variant["price"] for variant in product["variants"].values() if variant["available"]]
            amount = f"{len(prices)}, and {min(prices):.2f} dollars"
        self.heard = yield f"It is {amount}. Is there anything else?"

    def _change(self, kind: RequestKind) -> Steps:
        """Collect the facts, let the customer confirm until nothing changes, and make the change."""
        yield from self._find_order()
        if kind is RequestKind.CANCEL and self.order["status"] == DELIVERED:
            order_id = self.order["order_id"]
            reply = yield f"I cannot cancel order {order_id}, because it was delivered."
            self.heard = f"{reply} {phrases.ORDER.format(order_id=order_id)}"
            return
        returns_all = phrases.INSTEAD_RETURN in self.heard
        for topic in _NEEDED[kind]:
            while not (_ANSWERS[topic].search(self.heard) or (topic is Topic.ITEM and returns_all)):
                yield from self.ask(_QUESTIONS[topic])
        yield (yield from self.confirm(lambda: self._action(kind)))
        self.heard = yield DONE

    def _action(self, kind: RequestKind) -> Reading:
        """Return the call that fulfils the customer's request, according to the messages so far."""
        order_id = self.order["order_id"]
        if kind is RequestKind.CANCEL:
            wanted = str(self.last(_ANSWERS[Topic.REASON])[0])
            reason = "ordered by mistake" if wanted == "by mistake" else "no longer needed"
            return call_text("cancel_pending_order", {"order_id": order_id, "reason": reason})
        if kind is RequestKind.ADDRESS:
            address1, address2, city, state, zip_code = self.last(phrases.ADDRESS_LINE).groups()
            place = {"address1": address1, "address2": address2 or "", "city": city, "state": state}
            arguments = {"order_id": order_id, **place, "country": "USA", "zip": zip_code}
            return call_text("modify_pending_order_address", arguments)
        method = yield from self._method()
        if kind is RequestKind.PAYMENT:
            arguments = {"order_id": order_id, "payment_method_id": method}
            return call_text("modify_pending_order_payment", arguments)
        items = self._items()
        if kind is RequestKind.RETURN:
            arguments = {"order_id": order_id, "item_ids": [item["item_id"] for item in items]}
            return call_text("return_delivered_order_items", {**arguments, "payment_method_id": method})
        new_item_ids = yield from self._new_items(items)
        tool = "modify_pending_order_items" if kind is RequestKind.ITEMS else "exchange_delivered_order_items"
        item_ids = [item["item_id"] for item in items]
        arguments = {"order_id": order_id, "item_ids": item_ids, "new_item_ids": new_item_ids}
        return call_text(tool, {**arguments, "payment_method_id": method})

    def _find_order(self) -> Steps:
        """Find the order by its number, or by searching the customer's orders for a product."""
        while not _ANSWERS[Topic.ORDER].search(self.heard):
            yield from self.ask(_QUESTIONS[Topic.ORDER])
        named = phrases.ORDER_NUMBER.search(self.heard)
        product = None if named else str(self.last(phrases.FORGOTTEN)[1])
        for order_id in [named[0]] if named else (yield from self._user())["orders"]:
            self.order = yield from self.look("get_order_details", order_id=order_id)
            if product is None or any(item["name"] == product for item in self.order["items"]):
                return
        raise UsageError("the retail expert cannot find the order", got=repr(self.heard))

    def _user(self) -> Reading:
        if not self.user:
            self.user = yield from self.look("get_user_details", user_id=self.user_id)
        return self.user

    def _items(self) -> list[dict[str, Any]]:
        """Return the items of the order that the customer described, or all of them if the customer said so."""
        items: list[dict[str, Any]] = self.order["items"]
        if phrases.INSTEAD_RETURN in self.heard:
            return items
        described = [(name, phrases.read_options(options)) for name, options in phrases.DESCRIBED.findall(self.heard)]
        return [item for item in items if (item["name"], item["options"]) in described]

    def _new_items(self, items: list[dict[str, Any]]) -> Reading:
        """Return the ids of the new items, by the options that the customer asked for."""
        wished, found = phrases.read_options(str(self.last(phrases.WISHED)[1])), []
        for item in items:
            product = yield from self.look("get_product_details", product_id=item["product_id"])
            variants = product["variants"].values()
            found += [variant["item_id"] for variant in variants if variant["options"] == wished]
        return found

    def _method(self) -> Reading:
        source = {"PayPal account": "paypal", "credit card": "credit_card", "gift card": "gift_card"}
        wanted = source[str(self.last(phrases.METHOD)[1])]
        methods = (yield from self._user())["payment_methods"].values()
        return str(next(method["id"] for method in methods if method["source"] == wanted))

    def _product(self, name: str) -> Reading:
        products = yield from self.look("list_all_product_types")
        return (yield from self.look("get_product_details", product_id=products[name]))


class RetailExpert(DeskExpert):
    """Expert of the retail desk for one episode."""

    desk = "retail"
    conversation = _Conversation
