"""The shop's records: a shared constant store, and the changes of one episode."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..desks.records import EditedTable, Row, hash_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Users, products and orders by their ids, in JSON types."""

    users: Mapping[str, Row]
    products: Mapping[str, Row]
    orders: Mapping[str, Row]


class Database:
    """View of a store in one episode; rows are copied before they are changed.

    Args:
        store: The records at the start.
        changes: Changes from the method `changes`.
    """

    def __init__(self, store: Store, changes: Mapping[str, Any] | None = None) -> None:
        self.store = store
        kept = dict(changes or {})
        self._users = EditedTable(store.users, kept.get("users"))
        self._orders = EditedTable(store.orders, kept.get("orders"))
        self.transfers: int = kept.get("transfers", 0)
        """Number of transfers of the customer to a human agent."""
        self.identified: set[str] = set(kept.get("identified", ()))
        """Users that the agent has identified by data that only the customer could tell."""

    def user(self, user_id: str) -> Row | None:
        """Return a user for reading."""
        return self._users.get(user_id)

    def order(self, order_id: str) -> Row | None:
        """Return an order for reading."""
        return self._orders.get(order_id)

    def edit_user(self, user_id: str) -> Row:
        """Return a user for changing."""
        return self._users.edit(user_id)

    def edit_order(self, order_id: str) -> Row:
        """Return an order for changing."""
        return self._orders.edit(order_id)

    def changes(self) -> dict[str, Any]:
        """Return the differences from the store and the identified users as JSON types; undone changes are omitted."""
        return {**copy.deepcopy(self._differences()), "identified": sorted(self.identified)}

    def key(self) -> str:
        """Return a hash of the records, equal for two databases over one store if and only if their records are."""
        return hash_records(self._differences())

    def _differences(self) -> dict[str, Any]:
        rows = {"users": self._users.differences(), "orders": self._orders.differences()}
        return {**rows, "transfers": self.transfers}
