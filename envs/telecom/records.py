"""The telephone company's records: a shared constant store, and the changes of one episode."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..desks.records import EditedTable, Row, hash_records

TODAY = "2025-03-10"
"""Date of every conversation."""
ACTIVE, SUSPENDED = "active", "suspended"
"""States of a line."""
PAID, ISSUED, OVERDUE, REQUESTED = "paid", "issued", "overdue", "awaiting payment"
"""States of a bill."""
TABLES = ("customers", "lines", "plans", "devices", "bills")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelecomStore:
    """Customers, lines, plans, devices and bills by their ids, in JSON types."""

    customers: Mapping[str, Row]
    lines: Mapping[str, Row]
    plans: Mapping[str, Row]
    devices: Mapping[str, Row]
    bills: Mapping[str, Row]


class TelecomDatabase:
    """View of a store in one episode; rows are copied before they are changed.

    Args:
        store: The records of the split.
        changes: Changes from the method `changes`.
    """

    def __init__(self, store: TelecomStore, changes: Mapping[str, Any] | None = None) -> None:
        self.store = store
        kept = dict(changes or {})
        self._tables = {name: EditedTable(getattr(store, name), kept.get(name)) for name in TABLES}
        self.transfers: int = kept.get("transfers", 0)
        """Number of transfers of the customer to a human agent."""
        self.seen: set[str] = set(kept.get("seen", ()))
        """Records that the agent has looked up."""

    def get(self, table: str, key: str) -> Row | None:
        """Return a row for reading."""
        return self._tables[table].get(key)

    def edit(self, table: str, key: str) -> Row:
        """Return a row of the store for changing."""
        return self._tables[table].edit(key)

    def bills_of(self, customer: Row) -> list[Row]:
        """Return the bills of a customer, the newest first."""
        bills = [bill for key in customer["bill_ids"] if (bill := self.get("bills", key)) is not None]
        return sorted(bills, key=lambda bill: str(bill["due_date"]), reverse=True)

    def requested(self, customer: Row) -> Row | None:
        """Return the bill of a customer's payment request; ``None`` without a request."""
        return next((bill for bill in self.bills_of(customer) if bill["status"] == REQUESTED), None)

    def pay(self, customer: Row) -> Row | None:
        """Pay the bill of a customer's payment request, if there is one, and return it."""
        found = self.requested(customer)
        if found is not None:
            self.edit("bills", found["bill_id"])["status"] = PAID
        return found

    def key(self) -> str:
        """Return a hash of the changed rows; equal databases have equal keys."""
        return hash_records([*(table.differences() for table in self._tables.values()), self.transfers])

    def changes(self) -> dict[str, Any]:
        """Return the changes of the episode as JSON types."""
        rows = {name: table.rows for name, table in self._tables.items()}
        return copy.deepcopy({**rows, "transfers": self.transfers, "seen": sorted(self.seen)})


def available_gb(line: Row, plan: Row) -> float:
    """Return the data that a line has left in this month, in GB."""
    return float(plan["data_limit_gb"] + line["data_refueled_gb"] - line["data_used_gb"])
