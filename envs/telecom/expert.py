"""A scripted agent that helps every scripted customer from the texts only, and follows the policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ..desks.calls import call_text
from ..desks.expert import COLLEAGUE, Conversation, DeskExpert, Reading, Steps
from . import phrases
from .phone import PERMISSIONS
from .records import OVERDUE, SUSPENDED, TODAY, available_gb

_STATUS = "Please check the status bar."
_RESTART = "Please restart your phone."


class _Conversation(Conversation):
    def __init__(self, opening: str) -> None:
        super().__init__(opening)
        self.customer: dict[str, Any] = {}
        self.line: dict[str, Any] = {}
        self.kind = next(kind for kind, texts in phrases.OPENINGS.items() if any(text in opening for text in texts))

    def steps(self) -> Steps:
        """Find the line, then repair the records, then the phone."""
        yield from self._find_line()
        if self.line["status"] == SUSPENDED:
            if self.line["contract_end_date"] < TODAY:
                yield from self._transfer("The contract of the suspended line has ended.")
                return
            yield from self._collect_payments()
        yield from self._repair_service()
        yield from self._repair_data()
        if self.kind == "slow_data":
            yield from self._repair_speed()
        if self.kind == "mms":
            yield from self._repair_messages()

    def _ids(self) -> dict[str, Any]:
        return {"customer_id": self.customer["customer_id"], "line_id": self.line["line_id"]}

    def _find_line(self) -> Steps:
        if not phrases.PHONE_NUMBER.search(self.heard):
            yield from self.ask("What is your phone number?")
        if number := phrases.PHONE_NUMBER.search(self.heard):
            self.customer = yield from self.look("get_customer_by_phone", phone_number=number[1])
        else:
            while not (named := phrases.NAME_AND_BIRTH.search(self.heard)):
                yield from self.ask("What are your full name and your date of birth?")
            self.customer = yield from self.look("get_customer_by_name", full_name=named[1], date_of_birth=named[2])
            yield from self.ask("Which model is your phone?")
        model = phrases.PHONE_MODEL.search(self.heard)
        for line_id in self.customer["line_ids"]:
            self.line = yield from self.look("get_details_by_id", id=line_id)
            if number and self.line["phone_number"] == number[1]:
                return
            if model:
                device = yield from self.look("get_details_by_id", id=self.line["device_id"])
                if device["model"] == model[1]:
                    return

    def _collect_payments(self) -> Steps:
        owner = self.customer["customer_id"]
        bills = yield from self.look("get_bills_for_customer", customer_id=owner)
        for bill in bills:
            if bill["status"] == OVERDUE:
                yield call_text("send_payment_request", {"customer_id": owner, "bill_id": bill["bill_id"]})
                yield f"Bill {bill['bill_id']} of {bill['total_due']:.2f} dollars is overdue. Please pay it."
        yield call_text("resume_line", self._ids())
        yield _RESTART

    def _is_abroad(self) -> Reading:
        if not (phrases.ABROAD in self.heard or phrases.AT_HOME in self.heard):
            yield from self.ask("Are you abroad?")
        return phrases.ABROAD in self.heard

    def _refuel(self) -> Steps:
        plan = yield from self.look("get_details_by_id", id=self.line["plan_id"])
        if available_gb(self.line, plan) > 0:
            return
        price = plan["refuel_price_per_gb"]
        yield from self.ask(f"Your data is used up. How many GB would you like to add, for {price:.2f} dollars each?")
        yield call_text("refuel_data", {**self._ids(), "gb_amount": int(self.last(phrases.AMOUNT_GB)[1])})

    def _repair_service(self) -> Steps:
        shown = yield _STATUS
        if "airplane mode" in shown:
            shown = yield "Please turn off airplane mode."
        if "no SIM card" in shown:
            shown = yield "Please take the SIM card out and put it back in."
        if "locked SIM card" in shown:
            yield from self._transfer("The SIM card is locked with a PIN.")

    def _repair_data(self) -> Steps:
        is_abroad = yield from self._is_abroad()
        if is_abroad and not self.line["roaming_enabled"]:
            yield call_text("enable_roaming", self._ids())
        yield from self._refuel()
        yield "Please turn on mobile data."
        if is_abroad:
            yield "Please turn on data roaming."
        apn = yield "Please check the APN settings."
        if "carrier defaults" not in apn:
            yield "Please reset the APN settings."
            yield _RESTART

    def _repair_speed(self) -> Steps:
        yield "Please turn off the VPN."
        yield "Please turn off the data saver."
        yield from self._set_mode(slow=("3G", "2G"))

    def _set_mode(self, slow: Sequence[str]) -> Steps:
        mode = yield "Which network mode is set?"
        if any(one in mode for one in slow):
            yield "Please set the network mode to 5G."

    def _repair_messages(self) -> Steps:
        yield from self._set_mode(slow=("2G",))
        yield "Please turn off Wi-Fi calling."
        allowed = yield "Please check the permissions of the messaging app."
        for one in PERMISSIONS:
            if f"{one} is not allowed" in allowed:
                yield f"Please allow the {one} permission."

    def _transfer(self, summary: str) -> Steps:
        yield call_text("transfer_to_human_agents", {"summary": summary})
        yield COLLEAGUE


class TelecomExpert(DeskExpert):
    """Expert of the telephone company's desk for one episode."""

    desk = "telecom"
    conversation = _Conversation

    def mistake(self, rng: random.Random) -> str:
        """Return a call that finds nothing: with a phone number, or with an id, that nobody has."""
        number = f"{rng.randrange(10_000):04}"
        if rng.random() < 0.5:
            return call_text("get_customer_by_phone", {"phone_number": f"555-000-{number}"})
        return call_text("get_details_by_id", {"id": f"L0{number}"})
