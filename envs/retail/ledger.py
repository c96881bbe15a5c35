"""Rules of orders and money that the tools enforce."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import ToolError

from ..desks.records import Row
from .database import Database
from .generator import GIFT_CARD

PENDING, DELIVERED, PROCESSED = "pending", "delivered", "processed"
MODIFIED = "pending (items modified)"
REASONS = ("no longer needed", "ordered by mistake")


class Swap:
    """Items of an order and their replacements.

    Args:
        database: The database, which is only read.
        order: The order.
        item_ids: The items to replace.
        new_item_ids: The replacements, in the same order.

    Raises:
        ToolError: a replacement is not another, available variant of the same product.
    """

    def __init__(self, database: Database, order: Row, item_ids: Sequence[str], new_item_ids: Sequence[str]) -> None:
        if len(item_ids) != len(new_item_ids):
            got = f"{len(item_ids)} and {len(new_item_ids)}"
            raise ToolError("item_ids and new_item_ids differ in length", got=got, expected="a new item for each")
        self.pairs = [
            (item, _replacement(database, item, new_item_id))
            for item, new_item_id in zip(items_of(order, item_ids), new_item_ids, strict=True)
        ]
        self.difference = round(sum(new["price"] - old["price"] for old, new in self.pairs), 2)
        """Difference in price, in dollars; positive if the new items cost more."""


def _replacement(database: Database, item: Row, new_item_id: str) -> Row:
    variants = database.store.products[item["product_id"]]["variants"]
    variant: Row | None = variants.get(new_item_id)
    if variant is None:
        raise ToolError(f"item {new_item_id} is not a {item['name']}", expected="another option of the same product")
    if new_item_id == item["item_id"]:
        raise ToolError(f"item {new_item_id} is already in the order", expected="another option")
    if not variant["available"]:
        raise ToolError(f"item {new_item_id} is not available", expected="an available option")
    return variant


def items_of(order: Row, item_ids: Sequence[str]) -> list[Row]:
    """Return the items of an order with these ids.

    Raises:
        ToolError: there are no ids, one occurs twice, or one is not in the order.
    """
    held = {item["item_id"]: item for item in order["items"]}
    missing = [item_id for item_id in item_ids if item_id not in held]
    if not item_ids or missing or len(set(item_ids)) != len(item_ids):
        raise ToolError(
            f"these are not items of order {order['order_id']}", got=", ".join(item_ids), expected=", ".join(held)
        )
    return [held[item_id] for item_id in item_ids]


def require_status(order: Row, status: str) -> None:
    """Check the status of an order.

    Raises:
        ToolError: the order has a different status.
    """
    if order["status"] != status:
        raise ToolError(f"order {order['order_id']} is not {status}", got=order["status"])


def method_of(user: Row, payment_method_id: str) -> Row:
    """Return a payment method of a user.

    Raises:
        ToolError: the user does not have this method.
    """
    method: Row | None = user["payment_methods"].get(payment_method_id)
    if method is None:
        known = ", ".join(user["payment_methods"])
        raise ToolError(f"{user['user_id']} has no payment method {payment_method_id!r}", expected=known)
    return method


def total_of(order: Row) -> float:
    """Return the first payment of an order, in dollars."""
    amount: float = order["payment_history"][0]["amount"]
    return amount


def settle(database: Database, order: Row, payment_method_id: str, amount: float) -> None:
    """Charge a positive amount to a payment method or refund a negative one, and record it in an order.

    Raises:
        ToolError: a gift card does not have enough money, or the user does not have this method.
    """
    method = method_of(database.edit_user(order["user_id"]), payment_method_id)
    if method["source"] == GIFT_CARD:
        if method["balance"] < amount:
            raise ToolError("the gift card does not have enough money", got=method["balance"], expected=amount)
        method["balance"] = round(method["balance"] - amount, 2)
    if amount:
        kind = "payment" if amount > 0 else "refund"
        note = {"transaction_type": kind, "amount": abs(amount), "payment_method_id": payment_method_id}
        order["payment_history"].append(note)
