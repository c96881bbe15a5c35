"""The agent's tools in the customer system, with the database of one episode.

The tools check records, not the policy: what the policy forbids is up to the agent.
"""

from __future__ import annotations

import re

import orjson

from agentrl.errors import ToolError

from ..desks import arithmetic
from ..desks.records import Row
from .records import ACTIVE, PAID, REQUESTED, SUSPENDED, TODAY, TelecomDatabase

MAX_REFUEL_GB = 100
_TABLE_OF = {"C": "customers", "L": "lines", "P": "plans", "D": "devices", "B": "bills"}
"""Tables by the first letter of their ids."""
_LOOK_UP = "find the customer first, with get_customer_by_phone or get_customer_by_name"


class CustomerSystem:
    """Tools of the agent. Each public method is a tool, and the agent reads its docstring.

    Args:
        database: Database of the episode.
    """

    def __init__(self, database: TelecomDatabase) -> None:
        self.database = database

    def get_customer_by_phone(self, phone_number: str) -> str:
        """Finds a customer by the phone number of one of the customer's lines.

        Args:
            phone_number: Such as "555-123-4567".
        """
        wanted = re.sub(r"\D", "", phone_number)
        for line in self.database.store.lines.values():
            if line["phone_number"].replace("-", "") == wanted:
                return self._found(self._owner(line["line_id"]))
        raise ToolError("there is no customer with this phone number", got=repr(phone_number))

    def get_customer_by_name(self, full_name: str, date_of_birth: str) -> str:
        """Finds a customer by name and date of birth, if the customer does not know the phone number.

        Args:
            full_name: Such as "Ann Lee".
            date_of_birth: Such as "1980-12-31".
        """
        wanted = (" ".join(full_name.lower().split()), date_of_birth.strip())
        for key, row in self.database.store.customers.items():
            if (row["full_name"].lower(), row["date_of_birth"]) == wanted:
                return self._found(key)
        raise ToolError("there is no customer with this name and date of birth", got=", ".join(wanted))

    def get_details_by_id(self, id: str) -> str:
        """Shows a customer, line, plan, device (phone) or bill.

        Args:
            id: Starts with C for a customer, L for a line, P for a plan, D for a device, B for a bill.
        """
        table = _TABLE_OF.get(id[:1])
        row = self.database.get(table, id) if table else None
        if table is None or row is None:
            raise ToolError("there is no record with this id", got=repr(id))
        owner = {"customers": id, "bills": row.get("customer_id")}.get(table) or self._owner_of(table, id)
        if owner is not None and owner not in self.database.seen:
            raise ToolError(f"the customer of {id} has not been found yet", hint=_LOOK_UP)
        self.database.seen.add(id)
        return _to_json(row)

    def get_bills_for_customer(self, customer_id: str) -> str:
        """Lists the bills of a customer, the newest first.

        Args:
            customer_id: Such as "C1001".
        """
        return _to_json(self.database.bills_of(self._customer(customer_id)))

    def send_payment_request(self, customer_id: str, bill_id: str) -> str:
        """Sends the customer a request to pay a bill, which the customer can accept on the phone.

        Args:
            customer_id: Such as "C1001".
            bill_id: Such as "B10011".
        """
        customer = self._customer(customer_id)
        if bill_id not in customer["bill_ids"]:
            raise ToolError(f"customer {customer_id} has no bill with this id", got=repr(bill_id))
        open_requests = [bill["bill_id"] for bill in self.database.bills_of(customer) if bill["status"] == REQUESTED]
        if open_requests:
            raise ToolError("another bill is awaiting payment", got=open_requests[0], hint="it has to be paid first")
        if self._row("bills", bill_id)["status"] == PAID:
            raise ToolError(f"bill {bill_id} is paid already")
        bill = self.database.edit("bills", bill_id)
        bill["status"] = REQUESTED
        return _to_json(bill)

    def suspend_line(self, customer_id: str, line_id: str, reason: str) -> str:
        """Suspends a line, so that it has no service.

        Args:
            customer_id: Such as "C1001".
            line_id: Such as "L10011".
            reason: Why it is suspended.
        """
        if self._line(customer_id, line_id)["status"] != ACTIVE:
            raise ToolError(f"line {line_id} is suspended already")
        line = self.database.edit("lines", line_id)
        line.update(status=SUSPENDED, suspended_since=TODAY)
        return _to_json(line)

    def resume_line(self, customer_id: str, line_id: str) -> str:
        """Lifts the suspension of a line. The phone has to be restarted after that.

        Args:
            customer_id: Such as "C1001".
            line_id: Such as "L10011".
        """
        if self._line(customer_id, line_id)["status"] != SUSPENDED:
            raise ToolError(f"line {line_id} is not suspended")
        line = self.database.edit("lines", line_id)
        line["status"] = ACTIVE
        line.pop("suspended_since", None)
        return _to_json(line)

    def enable_roaming(self, customer_id: str, line_id: str) -> str:
        """Lets a line use mobile data abroad.

        Args:
            customer_id: Such as "C1001".
            line_id: Such as "L10011".
        """
        return self._set_roaming(customer_id, line_id, enabled=True)

    def disable_roaming(self, customer_id: str, line_id: str) -> str:
        """Stops a line from using mobile data abroad.

        Args:
            customer_id: Such as "C1001".
            line_id: Such as "L10011".
        """
        return self._set_roaming(customer_id, line_id, enabled=False)

    def refuel_data(self, customer_id: str, line_id: str, gb_amount: float) -> str:
        """Adds data to a line for this month. Its price goes on the customer's next bill.

        Args:
            customer_id: Such as "C1001".
            line_id: Such as "L10011".
            gb_amount: The data to add, in GB.
        """
        line = self._line(customer_id, line_id)
        if not 0 < gb_amount <= MAX_REFUEL_GB:
            raise ToolError("this amount of data cannot be added", got=gb_amount, expected=f"up to {MAX_REFUEL_GB} GB")
        price = round(gb_amount * self._row("plans", line["plan_id"])["refuel_price_per_gb"], 2)
        line = self.database.edit("lines", line_id)
        line["data_refueled_gb"] = round(float(line["data_refueled_gb"] + gb_amount), 3)
        charge = {"line_id": line_id, "gb": round(float(gb_amount), 3), "dollars": price}
        self.database.edit("customers", customer_id)["charges_on_next_bill"].append(charge)
        return _to_json({"line": line, "charge": charge})

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: Such as "2.5 * 4".
        """
        return arithmetic.calculate(expression)

    def think(self, thought: str) -> str:
        """Writes down a thought, which the customer does not see.

        Args:
            thought: The thought.
        """
        return ""

    def transfer_to_human_agents(self, summary: str) -> str:
        """Transfers the customer to a human agent.

        Args:
            summary: What the customer wants, and what was found out.
        """
        self.database.transfers += 1
        return "The customer was transferred."

    def _found(self, customer_id: str) -> str:
        self.database.seen.add(customer_id)
        return _to_json(self._row("customers", customer_id))

    def _row(self, table: str, key: str) -> Row:
        row = self.database.get(table, key)
        if row is None:
            raise ToolError(f"there is no {table.removesuffix('s')} with this id", got=repr(key))
        return row

    def _owner(self, line_id: str) -> str:
        customers = self.database.store.customers.items()
        return next(key for key, row in customers if line_id in row["line_ids"])

    def _owner_of(self, table: str, key: str) -> str | None:
        """Return the customer of a line or device; ``None`` for a plan, which belongs to nobody."""
        if table == "plans":
            return None
        lines = self.database.store.lines.items()
        return self._owner(next(line for line, row in lines if key in (line, row["device_id"])))

    def _customer(self, customer_id: str) -> Row:
        row = self._row("customers", customer_id)
        if customer_id not in self.database.seen:
            raise ToolError(f"customer {customer_id} has not been found yet", hint=_LOOK_UP)
        return row

    def _line(self, customer_id: str, line_id: str) -> Row:
        if line_id not in self._customer(customer_id)["line_ids"]:
            raise ToolError(f"customer {customer_id} has no line with this id", got=repr(line_id))
        return self._row("lines", line_id)

    def _set_roaming(self, customer_id: str, line_id: str, *, enabled: bool) -> str:
        if self._line(customer_id, line_id)["roaming_enabled"] == enabled:
            raise ToolError(f"roaming of line {line_id} is {'enabled' if enabled else 'disabled'} already")
        line = self.database.edit("lines", line_id)
        line["roaming_enabled"] = enabled
        return _to_json(line)


def _to_json(value: object) -> str:
    return orjson.dumps(value).decode()
