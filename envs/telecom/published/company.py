"""The agent's tools in the company's system, with the names, arguments and results of tau2-bench.

Records are plain JSON values; `PublishedWorld` keeps them together with the customer's phone.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

from agentrl.errors import ToolError

from ...desks.records import Row

Records: TypeAlias = dict[str, list[Row]]
"""Tables of the company: plans, customers, lines, bills and devices."""
TODAY = "2025-02-25"
"""Date of all published tasks, on which the other dates depend."""
_CYCLE_END = "2025-02-28"
LAST_MONTH = ("2025-01-01", "2025-01-31")
_LAST_DUE = "2025-01-15"
_NEXT_MONTH, _NEXT_DUE = ("2025-03-01", "2025-03-31"), "2025-03-15"
ACTIVE, SUSPENDED = "Active", "Suspended"
PAID, OVERDUE, DRAFT, AWAITING = "Paid", "Overdue", "Draft", "Awaiting Payment"
_KINDS = {"C": "customer", "L": "line", "D": "device", "B": "bill", "P": "plan"}
"""Kinds of rows by the first letter of their ids."""


def find_row(records: Records, kind: str, key: str) -> Row:
    """Return a row of a kind: ``customer``, ``line``, ``device``, ``bill`` or ``plan``.

    Raises:
        ToolError: it does not exist.
    """
    for row in records[f"{kind}s"]:
        if row[f"{kind}_id"] == key:
            return row
    raise ToolError(f"{kind.capitalize()} with ID {key} not found")


def line_by_phone(records: Records, phone_number: str) -> Row:
    """Return the line with a phone number.

    Raises:
        ToolError: there is no such line.
    """
    for row in records["lines"]:
        if row["phone_number"] == phone_number:
            return row
    raise ToolError(f"Line with phone number {phone_number} not found")


def line_of(records: Records, customer_id: str, line_id: str) -> Row:
    """Return a line of a customer.

    Raises:
        ToolError: the customer does not exist, or does not have the line.
    """
    if line_id not in find_row(records, "customer", customer_id)["line_ids"]:
        raise ToolError(f"Line {line_id} not found for customer {customer_id}")
    return find_row(records, "line", line_id)


def bills_of(records: Records, customer: Row, status: str | None = None) -> list[Row]:
    """Return the bills of a customer, of all states or one."""
    bills = [find_row(records, "bill", bill_id) for bill_id in customer["bill_ids"]]
    return [bill for bill in bills if status in (None, bill["status"])]


def customer_by_phone(records: Records, phone_number: str) -> Row:
    """Return the customer whose contact number or line has a phone number.

    Raises:
        ToolError: there is no such customer.
    """
    for row in records["customers"]:
        if row["phone_number"] == phone_number:
            return row
        if any(find_row(records, "line", key)["phone_number"] == phone_number for key in row["line_ids"]):
            return row
    raise ToolError(f"Customer with phone number {phone_number} not found")


def _new_bill(key: str, customer_id: str, period: tuple[str, str], due: str, status: str) -> Row:
    return {
        "bill_id": key,
        "customer_id": customer_id,
        "period_start": period[0],
        "period_end": period[1],
        "issue_date": period[0],
        "total_due": 0.0,
        "due_date": due,
        "line_items": [],
        "status": status,
    }


def _charge(bill: Row, amount: float, description: str) -> None:
    kind = "Credit" if amount < 0 else "Charge"
    item = {"description": description, "amount": float(amount), "date": TODAY, "item_type": kind}
    bill["line_items"].append(item)
    bill["total_due"] += amount


def add_overdue_bill(records: Records, customer: Row, bill_id: str, amount: float, description: str) -> None:
    """Add an unpaid bill of the last month."""
    bill = _new_bill(bill_id, customer["customer_id"], LAST_MONTH, _LAST_DUE, OVERDUE)
    _charge(bill, amount, description)
    records["bills"].append(bill)
    customer["bill_ids"].append(bill_id)


class CompanyTools:
    """Tools of the agent. Each public method is a tool, and the agent reads its docstring.

    Args:
        records: The company's tables, changed in place.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def get_customer_by_phone(self, phone_number: str) -> Any:
        """Finds a customer by the contact number or by the number of a line.

        Args:
            phone_number: The number, such as "555-123-2002".
        """
        return customer_by_phone(self._records, phone_number)

    def get_customer_by_id(self, customer_id: str) -> Any:
        """Shows a customer's profile.

        Args:
            customer_id: Id of the customer.
        """
        return find_row(self._records, "customer", customer_id)

    def get_customer_by_name(self, full_name: str, dob: str) -> Any:
        """Finds customers by their name and date of birth.

        Args:
            full_name: First and last name.
            dob: Date of birth, as YYYY-MM-DD.
        """
        wanted = (full_name.lower(), dob)
        return [row for row in self._records["customers"] if (row["full_name"].lower(), row["date_of_birth"]) == wanted]

    def get_details_by_id(self, id: str) -> Any:
        """Shows a customer, line, device, bill or plan.

        Args:
            id: Its id, whose first letter is C, L, D, B or P.
        """
        if id[:1] not in _KINDS:
            raise ToolError(f"Unknown ID format or type: {id}")
        return find_row(self._records, _KINDS[id[0]], id)

    def suspend_line(self, customer_id: str, line_id: str, reason: str) -> Any:
        """Suspends an active line, for six months at most.

        Args:
            customer_id: Id of the customer who has the line.
            line_id: Id of the line.
            reason: Why it is suspended.
        """
        line = line_of(self._records, customer_id, line_id)
        if line["status"] != ACTIVE:
            raise ToolError("Line must be active to suspend")
        line.update(status=SUSPENDED, suspension_start_date=TODAY)
        return {"message": "Line suspended successfully. $5/month holding fee will apply.", "line": dict(line)}

    def resume_line(self, customer_id: str, line_id: str) -> Any:
        """Makes a suspended or not yet activated line active.

        Args:
            customer_id: Id of the customer who has the line.
            line_id: Id of the line.
        """
        line = line_of(self._records, customer_id, line_id)
        if line["status"] not in (SUSPENDED, "Pending Activation"):
            raise ToolError("Line must be suspended to resume")
        line.update(status=ACTIVE, suspension_start_date=None)
        return {"message": "Line resumed successfully", "line": dict(line)}

    def get_bills_for_customer(self, customer_id: str, limit: int = 12) -> Any:
        """Lists the bills of a customer, the newest first.

        Args:
            customer_id: Id of the customer.
            limit: Maximum number of bills.
        """
        bills = bills_of(self._records, find_row(self._records, "customer", customer_id))
        return sorted(bills, key=lambda bill: str(bill["issue_date"]), reverse=True)[:limit]

    def send_payment_request(self, customer_id: str, bill_id: str) -> Any:
        """Asks a customer to pay a bill. One bill at a time can await payment; the bill's state is not checked.

        Args:
            customer_id: Id of the customer who has the bill.
            bill_id: Id of the bill.
        """
        customer = find_row(self._records, "customer", customer_id)
        if bills_of(self._records, customer, AWAITING):
            raise ToolError("A bill is already awaiting payment for this customer")
        if bill_id not in customer["bill_ids"]:
            raise ToolError(f"Bill {bill_id} not found for customer {customer_id}")
        find_row(self._records, "bill", bill_id)["status"] = AWAITING
        return f"Payment request sent to the customer for bill {bill_id}"

    def get_data_usage(self, customer_id: str, line_id: str) -> Any:
        """Shows how much data a line has used and refueled, its plan's limit, and when the month ends.

        Args:
            customer_id: Id of the customer who has the line.
            line_id: Id of the line.
        """
        line = line_of(self._records, customer_id, line_id)
        plan = find_row(self._records, "plan", line["plan_id"])
        return {
            "line_id": line_id,
            "data_used_gb": str(line["data_used_gb"]),
            "data_limit_gb": str(plan["data_limit_gb"]),
            "data_refueling_gb": str(line["data_refueling_gb"]),
            "cycle_end_date": _CYCLE_END,
        }

    def enable_roaming(self, customer_id: str, line_id: str) -> Any:
        """Lets a line be used abroad.

        Args:
            customer_id: Id of the customer who has the line.
            line_id: Id of the line.
        """
        return self._set_roaming(customer_id, line_id, True)

    def disable_roaming(self, customer_id: str, line_id: str) -> Any:
        """Stops a line from being used abroad.

        Args:
            customer_id: Id of the customer who has the line.
            line_id: Id of the line.
        """
        return self._set_roaming(customer_id, line_id, False)

    def _set_roaming(self, customer_id: str, line_id: str, on: bool) -> str:
        line = line_of(self._records, customer_id, line_id)
        word = "enabled" if on else "disabled"
        if line["roaming_enabled"] == on:
            return f"Roaming was already {word}"
        line["roaming_enabled"] = on
        return f"Roaming {word} successfully"

    def transfer_to_human_agents(self, summary: str) -> Any:
        """Hands the customer over to a human agent: only if the customer asks for one, or the policy and the tools do
        not allow a solution.

        Args:
            summary: What the customer's problem is.
        """
        return "Transfer successful"

    def refuel_data(self, customer_id: str, line_id: str, gb_amount: int | float) -> Any:
        """Adds data to a line, and its price to the customer's next bill.

        Args:
            customer_id: Id of the customer who has the line.
            line_id: Id of the line.
            gb_amount: Gigabytes to add.
        """
        line = line_of(self._records, customer_id, line_id)
        if gb_amount <= 0:
            raise ToolError("Refuel amount must be positive")
        price = find_row(self._records, "plan", line["plan_id"])["data_refueling_price_per_gb"]
        charge = gb_amount * price
        line["data_refueling_gb"] += gb_amount
        _charge(self._next_bill(customer_id), charge, f"Data refueling: {gb_amount} GB at ${price}/GB")
        return {
            "message": f"Successfully added {gb_amount} GB of data for line {line_id} for ${charge:.2f}",
            "new_data_refueling_gb": str(line["data_refueling_gb"]),
            "charge": str(charge),
        }

    def _next_bill(self, customer_id: str) -> Row:
        """Return the customer's draft; if there is none, a new one with an id that depends only on the records."""
        customer = find_row(self._records, "customer", customer_id)
        for key in customer["bill_ids"]:
            bill = find_row(self._records, "bill", key)
            if bill["status"] == DRAFT:
                return bill
        seed = f"{customer_id} {len(self._records['bills'])}".encode()
        bill = _new_bill(
            f"B{hashlib.blake2b(seed, digest_size=4).hexdigest()}", customer_id, _NEXT_MONTH, _NEXT_DUE, DRAFT
        )
        self._records["bills"].append(bill)
        customer["bill_ids"].append(bill["bill_id"])
        return bill
