"""Both sides of a published task in one episode: the company's records and the customer's phone, kept in step."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ToolError, UsageError

from .company import ACTIVE, AWAITING, PAID, CompanyTools, Records, bills_of, customer_by_phone, find_row, line_by_phone
from .handset import Handset
from .phone_tools import PhoneTools
from .schema import Assertion, FunctionCall, Requestor
from .starts import CompanyFunctions, PhoneFunctions, public_methods

COMPANY_TOOLS = tuple(public_methods(CompanyTools))
PHONE_TOOLS = tuple(public_methods(PhoneTools))


def hash_json(value: Any) -> str:
    """Return a hash of JSON values, which may have numbers of any size."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFiles:
    """The state before a task's start, in JSON types."""

    company: Mapping[str, Any]
    customer: Mapping[str, Any]


class PublishedWorld:
    """State of an episode, and the functions that change it.

    Args:
        records: The company's tables, changed in place.
        phone: The customer's phone, changed in place.
    """

    def __init__(self, records: Records, phone: Handset) -> None:
        self.records, self.phone = records, phone
        self.company_tools, self.phone_tools = CompanyTools(records), PhoneTools(phone)
        self._functions: dict[str, Any] = {"assistant": CompanyFunctions(records), "user": PhoneFunctions(phone)}

    @classmethod
    def from_files(cls, start: StartFiles) -> PublishedWorld:
        """Return the state before a task's start."""
        customer = copy.deepcopy(dict(start.customer))
        world = cls(copy.deepcopy(dict(start.company)), Handset(customer["device"], customer["surroundings"]))
        world.sync()
        return world

    def sync(self) -> None:
        """Let the phone know what the company allows, and the company what the customer has paid.

        Raises:
            ToolError: the customer's line or its plan does not exist.
        """
        around = self.phone.surroundings
        if (number := around["phone_number"]) is None:
            return
        line = line_by_phone(self.records, number)
        around["line_active"] = line["status"] == ACTIVE
        around["roaming_allowed"] = bool(line["roaming_enabled"])
        plan = find_row(self.records, "plan", line["plan_id"])
        allowed = plan["data_limit_gb"] + line["data_refueling_gb"]
        around["mobile_data_usage_exceeded"] = line["data_used_gb"] >= allowed
        request = around["payment_request"]
        if request is not None and request["paid"]:
            find_row(self.records, "bill", request["bill_id"])["status"] = PAID
            around["payment_request"] = None
        if around["payment_request"] is None:
            waiting = bills_of(self.records, customer_by_phone(self.records, number), AWAITING)
            if waiting:
                asked = {"bill_id": waiting[0]["bill_id"], "amount_due": waiting[0]["total_due"], "paid": False}
                around["payment_request"] = asked

    def call(self, requestor: Requestor, name: str, arguments: Mapping[str, Any], *, synced: bool = True) -> str:
        """Call a tool of one side, and return its result as text.

        Args:
            requestor: The side.
            name: Name of the tool.
            arguments: Checked arguments.
            synced: False to leave the other side behind, as tau2-bench does for the published actions.

        Raises:
            ToolError: the tool does not exist, or refuses.
        """
        names = COMPANY_TOOLS if requestor == "assistant" else PHONE_TOOLS
        if name not in names:
            raise ToolError(f"Tool '{name}' not found.")
        tools = self.company_tools if requestor == "assistant" else self.phone_tools
        try:
            result = getattr(tools, name)(**arguments)
        except OverflowError as error:
            raise ToolError(str(error)) from error
        if synced:
            self.sync()
        return result if isinstance(result, str) else json.dumps(result)

    def run(self, step: FunctionCall) -> bool | None:
        """Carry out a step of a task's start, or an assertion, and return its result.

        Raises:
            UsageError: the function does not exist, or cannot be carried out.
        """
        functions = self._functions[step.env_type]
        names = COMPANY_TOOLS if step.env_type == "assistant" else PHONE_TOOLS
        known = (*public_methods(type(functions)), *names)
        if step.func_name not in known:
            raise UsageError(
                f"the published telecom tasks use an unknown function of the {step.env_type}",
                got=step.func_name,
                expected=", ".join(known),
            )
        try:
            if step.func_name in names:
                self.call(step.env_type, step.func_name, step.arguments)
                return None
            result: bool | None = getattr(functions, step.func_name)(**step.arguments)
            self.sync()
            return result
        except (ToolError, TypeError, AttributeError) as error:
            raise UsageError(
                f"the function {step.func_name} of a published telecom task cannot be carried out",
                got=f"{step.arguments}: {error}",
                expected="records and arguments that fit the task",
                hint="use the files of one version of tau2-bench together",
            ) from error

    def holds(self, assertion: Assertion) -> bool:
        """Return True if an assertion has its expected value.

        Raises:
            UsageError: it is not an assertion, or cannot be checked.
        """
        value = self.run(assertion)
        if value is None:
            raise UsageError("this function of a published telecom task is not an assertion", got=assertion.func_name)
        return value == assertion.assert_value

    def keys(self) -> tuple[str, str]:
        """Return hashes of the company's records and of the customer's side."""
        return hash_json(self.records), hash_json(self.phone.to_plain())

    def to_plain(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return copy.deepcopy({"records": self.records, "phone": self.phone.to_plain(), "vpn": self.phone.vpn})

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PublishedWorld:
        """Continue from `to_plain`."""
        kept = copy.deepcopy(dict(plain))
        phone = kept["phone"]
        return cls(kept["records"], Handset(phone["device"], phone["surroundings"], kept["vpn"]))
