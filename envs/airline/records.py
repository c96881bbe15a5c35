"""The airline's records, in the shape of tau-bench's data: a shared constant store, and the changes of one episode."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..desks.records import EditedTable, Row, hash_records

NOW = "2024-05-15T15:00:00"
"""Time of every conversation; published data has the same."""
TODAY = NOW[:10]
BASIC, ECONOMY, BUSINESS = CABINS = ("basic_economy", "economy", "business")
REGULAR, SILVER, GOLD = MEMBERSHIPS = ("regular", "silver", "gold")
AVAILABLE, CANCELLED = "available", "cancelled"
GIFT_CARD, CERTIFICATE, CREDIT_CARD = "gift_card", "certificate", "credit_card"
BAG_PRICE, INSURANCE_PRICE = 50, 30
"""Prices in dollars: of a bag that is not free, and of the insurance of a passenger."""
FREE_BAGS: Mapping[str, Mapping[str, int]] = {
    REGULAR: {BASIC: 0, ECONOMY: 1, BUSINESS: 2},
    SILVER: {BASIC: 1, ECONOMY: 2, BUSINESS: 3},
    GOLD: {BASIC: 2, ECONOMY: 3, BUSINESS: 3},
}
"""Free checked bags of each passenger, by the customer's membership and the cabin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Users, flights and reservations by their ids, in JSON types."""

    users: Mapping[str, Row]
    flights: Mapping[str, Row]
    reservations: Mapping[str, Row]


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
        self._reservations = EditedTable(store.reservations, kept.get("reservations"))
        self.transfers: int = kept.get("transfers", 0)
        """Number of transfers of the customer to a human agent."""
        self.seen: set[str] = set(kept.get("seen", ()))
        """Users and reservations that the agent has looked up."""

    def user(self, user_id: str) -> Row | None:
        """Return a user for reading."""
        return self._users.get(user_id)

    def reservation(self, reservation_id: str) -> Row | None:
        """Return a reservation for reading."""
        return self._reservations.get(reservation_id)

    def edit_user(self, user_id: str) -> Row:
        """Return a user for changing."""
        return self._users.edit(user_id)

    def edit_reservation(self, reservation_id: str) -> Row:
        """Return a reservation for changing."""
        return self._reservations.edit(reservation_id)

    def add_reservation(self, row: Row) -> None:
        """Add a new reservation, also to those of its user."""
        self._reservations.add(row["reservation_id"], row)
        self.edit_user(row["user_id"])["reservations"].append(row["reservation_id"])

    def key(self, *, with_transfers: bool = True) -> str:
        """Return a hash of the changed rows; equal databases have equal keys."""
        rows = [self._users.differences(), self._reservations.differences()]
        return hash_records([*rows, self.transfers if with_transfers else 0])

    def changes(self) -> dict[str, Any]:
        """Return the changes of the episode as JSON types."""
        rows = {"users": self._users.rows, "reservations": self._reservations.rows}
        return copy.deepcopy({**rows, "transfers": self.transfers, "seen": sorted(self.seen)})


def passengers_of(reservation: Mapping[str, Any]) -> int:
    """Return the number of passengers of a reservation."""
    return len(reservation["passengers"])


def paid_bags(membership: str, cabin: str, passengers: int, bags: int) -> int:
    """Return the number of bags that are not free.

    >>> paid_bags("silver", "economy", 2, 5)
    1
    """
    return max(0, bags - FREE_BAGS[membership][cabin] * passengers)
