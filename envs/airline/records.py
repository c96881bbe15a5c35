"""The airline's records, in the shape of tau-bench's data: a shared constant store, and the changes of one episode."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

Row: TypeAlias = dict[str, Any]

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
        kept = copy.deepcopy(dict(changes or {}))
        self._users: dict[str, Row] = kept.get("users", {})
        self._reservations: dict[str, Row] = kept.get("reservations", {})
        self.transfers: int = kept.get("transfers", 0)
        """Number of transfers of the customer to a human agent."""
        self.seen: set[str] = set(kept.get("seen", ()))
        """Users and reservations that the agent has looked up."""

    def user(self, user_id: str) -> Row | None:
        """Return a user for reading."""
        return self._users.get(user_id) or self.store.users.get(user_id)

    def reservation(self, reservation_id: str) -> Row | None:
        """Return a reservation for reading."""
        return self._reservations.get(reservation_id) or self.store.reservations.get(reservation_id)

    def edit_user(self, user_id: str) -> Row:
        """Return a user for changing."""
        if user_id not in self._users:
            self._users[user_id] = copy.deepcopy(self.store.users[user_id])
        return self._users[user_id]

    def edit_reservation(self, reservation_id: str) -> Row:
        """Return a reservation for changing."""
        if reservation_id not in self._reservations:
            self._reservations[reservation_id] = copy.deepcopy(self.store.reservations[reservation_id])
        return self._reservations[reservation_id]

    def add_reservation(self, row: Row) -> None:
        """Add a new reservation, also to those of its user."""
        self._reservations[row["reservation_id"]] = row
        self.edit_user(row["user_id"])["reservations"].append(row["reservation_id"])

    def key(self, *, with_transfers: bool = True) -> str:
        """Return a hash of the changed rows; equal databases have equal keys."""
        users = {key: row for key, row in self._users.items() if row != self.store.users.get(key)}
        reservations = {key: row for key, row in self._reservations.items() if row != self.store.reservations.get(key)}
        rows = [users, reservations, self.transfers if with_transfers else 0]
        return hashlib.blake2b(orjson.dumps(rows, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()

    def changes(self) -> dict[str, Any]:
        """Return the changes of the episode as JSON types."""
        rows = {"users": self._users, "reservations": self._reservations}
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
