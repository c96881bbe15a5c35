"""Faults of a customer's phone and line, which combine to a problem, and how they are repaired."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ..desks.records import Action
from . import phrases
from .phone import (
    APN_WITHOUT_MMS,
    APN_WRONG,
    PERMISSIONS,
    SIM_LOCKED,
    SIM_LOOSE,
    SWITCHES,
    Feature,
    Network,
    Phone,
    PhoneStep,
    Verb,
)
from .records import ACTIVE, OVERDUE, SUSPENDED, TelecomDatabase, TelecomStore, available_gb


class ProblemKind(enum.StrEnum):
    """A kind of problem."""

    NO_SERVICE = "no_service"
    NO_DATA = "no_data"
    SLOW_DATA = "slow_data"
    MMS = "mms"
    UNSOLVABLE = "unsolvable"
    """No service for a reason that only a human agent can remove."""


class CallerPersona(enum.StrEnum):
    """A customer's way of talking."""

    DIRECT = "direct"
    """Tells who and where at once."""
    TERSE = "terse"
    """States only requested facts."""
    CAUTIOUS = "cautious"
    """Does one thing on the phone per message."""
    FORGETFUL = "forgetful"
    """Does not know the phone's number."""


class Fault(enum.StrEnum):
    """A single reason for a problem."""

    AIRPLANE_MODE = "airplane_mode"
    LOOSE_SIM = "loose_sim"
    UNPAID_BILLS = "unpaid_bills"
    DATA_OFF = "data_off"
    PHONE_ROAMING = "phone_roaming"
    LINE_ROAMING = "line_roaming"
    DATA_USED_UP = "data_used_up"
    WRONG_APN = "wrong_apn"
    SLOW_MODE = "slow_mode"
    VPN = "vpn"
    DATA_SAVER = "data_saver"
    WIFI_CALLING = "wifi_calling"
    PERMISSIONS = "permissions"
    INCOMPLETE_APN = "incomplete_apn"
    OLD_MODE = "old_mode"
    LOCKED_SIM = "locked_sim"
    ENDED_CONTRACT = "ended_contract"


_MAIN: Mapping[ProblemKind, Sequence[Fault]] = {
    ProblemKind.NO_SERVICE: (Fault.AIRPLANE_MODE, Fault.LOOSE_SIM, Fault.UNPAID_BILLS),
    ProblemKind.NO_DATA: (
        Fault.DATA_OFF,
        Fault.PHONE_ROAMING,
        Fault.LINE_ROAMING,
        Fault.DATA_USED_UP,
        Fault.WRONG_APN,
    ),
    ProblemKind.SLOW_DATA: (Fault.SLOW_MODE, Fault.VPN, Fault.DATA_SAVER),
    ProblemKind.MMS: (Fault.WIFI_CALLING, Fault.PERMISSIONS, Fault.INCOMPLETE_APN, Fault.OLD_MODE),
    ProblemKind.UNSOLVABLE: (Fault.LOCKED_SIM, Fault.ENDED_CONTRACT),
}
"""Faults that cause a kind of problem; one to three of them occur."""
_ADDED: Mapping[ProblemKind, Sequence[Fault]] = {
    ProblemKind.NO_SERVICE: (),
    ProblemKind.NO_DATA: (Fault.AIRPLANE_MODE, Fault.LOOSE_SIM, Fault.UNPAID_BILLS),
    ProblemKind.SLOW_DATA: (),
    ProblemKind.MMS: (Fault.DATA_OFF, Fault.DATA_USED_UP, Fault.LINE_ROAMING, Fault.AIRPLANE_MODE),
    ProblemKind.UNSOLVABLE: (Fault.AIRPLANE_MODE,),
}
"""Other faults that may occur at the same time; at most one does."""
_OWN: Mapping[ProblemKind, Sequence[Fault]] = {
    ProblemKind.NO_SERVICE: (
        Fault.DATA_OFF,
        Fault.DATA_SAVER,
        Fault.VPN,
        Fault.WIFI_CALLING,
        Fault.PERMISSIONS,
        Fault.SLOW_MODE,
    ),
    ProblemKind.NO_DATA: (Fault.DATA_SAVER, Fault.VPN, Fault.WIFI_CALLING, Fault.PERMISSIONS, Fault.SLOW_MODE),
    ProblemKind.SLOW_DATA: (Fault.WIFI_CALLING, Fault.PERMISSIONS),
    ProblemKind.MMS: (Fault.DATA_SAVER, Fault.VPN),
    ProblemKind.UNSOLVABLE: (Fault.DATA_OFF, Fault.DATA_SAVER, Fault.VPN, Fault.WIFI_CALLING),
}
"""Settings that are irrelevant to a kind of problem: some customers have chosen them and want to keep them."""
_OWN_SHARE = 0.25
NEEDED: Mapping[ProblemKind, Sequence[str]] = {
    ProblemKind.NO_SERVICE: ("service",),
    ProblemKind.NO_DATA: ("service", "data"),
    ProblemKind.SLOW_DATA: ("service", "data", "fast"),
    ProblemKind.MMS: ("service", "data", "picture_messages"),
    ProblemKind.UNSOLVABLE: ("service",),
}
"""Fields of `Functions` that the customer wants to work."""
_ROAMING = (Fault.PHONE_ROAMING, Fault.LINE_ROAMING)
_SWITCHED: Mapping[Fault, tuple[Feature, bool]] = {
    Fault.AIRPLANE_MODE: (Feature.AIRPLANE_MODE, True),
    Fault.DATA_OFF: (Feature.DATA, False),
    Fault.PHONE_ROAMING: (Feature.ROAMING, False),
    Fault.VPN: (Feature.VPN, True),
    Fault.DATA_SAVER: (Feature.DATA_SAVER, True),
    Fault.WIFI_CALLING: (Feature.WIFI_CALLING, True),
}
"""Faults that are a switch in the wrong position."""
_RESTART = PhoneStep(Verb.RESET, Feature.POWER)
_RESET_APN = PhoneStep(Verb.RESET, Feature.APN)
_FASTEST = PhoneStep(Verb.SET, Feature.NETWORK_MODE, ("5G",))
_REPAIRS: Mapping[Fault, Sequence[PhoneStep]] = {
    Fault.LOOSE_SIM: (PhoneStep(Verb.RESET, Feature.SIM),),
    Fault.UNPAID_BILLS: (_RESTART,),
    Fault.WRONG_APN: (_RESET_APN, _RESTART),
    Fault.INCOMPLETE_APN: (_RESET_APN, _RESTART),
    Fault.SLOW_MODE: (_FASTEST,),
    Fault.OLD_MODE: (_FASTEST,),
    Fault.PERMISSIONS: (PhoneStep(Verb.ON, Feature.PERMISSIONS, PERMISSIONS),),
}
"""Repairs on the phone of the other faults."""
_AMOUNTS_GB = (1, 2, 3, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A customer with a problem."""

    customer_id: str
    line_id: str
    persona: CallerPersona
    kind: ProblemKind
    faults: tuple[Fault, ...]
    opening: str
    abroad: bool
    gb: int
    """Data that the customer would buy."""
    phone: Mapping[str, Any]
    """Settings of the phone at the start."""
    changes: Mapping[str, Any]
    """Changes of the store's records at the start."""


def draw_trouble(store: TelecomStore, random: Random, kind: ProblemKind) -> Trouble:
    """Draw a customer with a problem of a kind."""
    customer = store.customers[random.choice(list(store.customers))]
    line_id, persona = random.choice(customer["line_ids"]), random.choice(list(CallerPersona))
    faults, abroad = _draw_faults(random, kind), random.random() < 0.2
    phone, database = Phone(), TelecomDatabase(store)
    abroad = abroad or any(fault in _ROAMING for fault in faults)
    if abroad:
        phone.switches[Feature.ROAMING] = database.edit("lines", line_id)["roaming_enabled"] = True
    else:
        phone.switches[Feature.ROAMING] = random.random() < 0.3
    phone.network_mode = random.choice(("5G", "5G", "4G"))
    for choice in _OWN[kind]:
        if random.random() < _OWN_SHARE:
            _break_phone(choice, phone, random)
    for fault in faults:
        _break_phone(fault, phone, random)
        _break_records(fault, database, customer["bill_ids"], line_id, random)
    phone.registered = network_of(database, line_id, abroad=abroad).active and Fault.AIRPLANE_MODE not in faults
    return Trouble(
        customer_id=customer["customer_id"],
        line_id=line_id,
        persona=persona,
        kind=kind,
        faults=faults,
        opening=random.choice(phrases.OPENINGS[kind]),
        abroad=abroad,
        gb=random.choice(_AMOUNTS_GB),
        phone=phone.to_plain(),
        changes=database.changes(),
    )


def _draw_faults(random: Random, kind: ProblemKind) -> tuple[Fault, ...]:
    main = _MAIN[kind]
    most = 1 if kind is ProblemKind.UNSOLVABLE else min(3, len(main))
    faults = random.sample(main, random.randint(1, most))
    if _ADDED[kind] and random.random() < 0.4:
        faults.append(random.choice(_ADDED[kind]))
    return tuple(fault for fault in Fault if fault in faults)


def _break_phone(fault: Fault, phone: Phone, random: Random) -> None:
    if fault in _SWITCHED:
        feature, wrong = _SWITCHED[fault]
        phone.switches[feature] = wrong
    match fault:
        case Fault.LOOSE_SIM:
            phone.sim = SIM_LOOSE
        case Fault.LOCKED_SIM:
            phone.sim = SIM_LOCKED
        case Fault.WRONG_APN:
            phone.apn = phone.apn_in_use = APN_WRONG
        case Fault.INCOMPLETE_APN:
            phone.apn = phone.apn_in_use = APN_WITHOUT_MMS
        case Fault.SLOW_MODE:
            phone.network_mode = random.choice(("3G", "2G"))
        case Fault.OLD_MODE:
            phone.network_mode = "2G"
        case Fault.PERMISSIONS:
            phone.permissions = random.choice(([], *([one] for one in PERMISSIONS)))


def _break_records(
    fault: Fault, database: TelecomDatabase, bill_ids: Sequence[str], line_id: str, random: Random
) -> None:
    line = database.edit("lines", line_id)
    match fault:
        case Fault.UNPAID_BILLS | Fault.ENDED_CONTRACT:
            past = bill_ids[:2]
            for bill_id in past[random.randint(0, 1) :]:
                database.edit("bills", bill_id)["status"] = OVERDUE
            line.update(status=SUSPENDED, suspended_since="2025-02-20")
            if fault is Fault.ENDED_CONTRACT:
                line["contract_end_date"] = f"2025-02-{random.randint(1, 19):02}"
        case Fault.LINE_ROAMING:
            line["roaming_enabled"] = False
        case Fault.DATA_USED_UP:
            plan = database.store.plans[line["plan_id"]]
            line["data_used_gb"] = round(plan["data_limit_gb"] + random.randint(1, 9) / 10, 1)


def network_of(database: TelecomDatabase, line_id: str, *, abroad: bool) -> Network:
    """Return the state of the network for a line's phone, from the records."""
    line = database.get("lines", line_id) or {}
    has_data = available_gb(line, database.store.plans[line["plan_id"]]) > 0
    return Network(line["status"] == ACTIVE, has_data, line["roaming_enabled"], abroad)


def repairs_of(trouble: Trouble) -> tuple[PhoneStep, ...]:
    """Return the steps that the customer has to take on the phone; a restart comes last."""
    steps: list[PhoneStep] = []
    for fault in trouble.faults:
        if fault in _SWITCHED:
            feature, wrong = _SWITCHED[fault]
            steps.append(PhoneStep(Verb.OFF if wrong else Verb.ON, feature))
        steps += [step for step in _REPAIRS.get(fault, ()) if step not in steps]
    return tuple(sorted(steps, key=lambda step: step is _RESTART))


def keeps_settings(trouble: Trouble, phone: Phone) -> bool:
    """Return True if the settings that did not cause the problem are as at the start."""
    start, repaired = Phone(**trouble.phone), {step.feature for step in repairs_of(trouble)}
    same = {
        Feature.NETWORK_MODE: phone.network_mode == start.network_mode,
        Feature.PERMISSIONS: set(phone.permissions) == set(start.permissions),
        Feature.APN: phone.apn == start.apn,
        **{feature: phone.is_on(feature) == start.is_on(feature) for feature in SWITCHES},
    }
    return all(is_same or feature in repaired for feature, is_same in same.items())


def actions_of(trouble: Trouble, database: TelecomDatabase) -> list[Action]:
    """Return the agent's changes of the records, in order; after each payment request, the customer pays."""
    owner, line = {"customer_id": trouble.customer_id}, {"customer_id": trouble.customer_id, "line_id": trouble.line_id}
    if trouble.kind is ProblemKind.UNSOLVABLE:
        return [Action("transfer_to_human_agents", {"summary": ""})]
    actions: list[Action] = []
    if Fault.UNPAID_BILLS in trouble.faults:
        customer = database.store.customers[trouble.customer_id]
        unpaid = [bill["bill_id"] for bill in database.bills_of(customer) if bill["status"] == OVERDUE]
        actions += [Action("send_payment_request", {**owner, "bill_id": bill_id}) for bill_id in unpaid]
        actions.append(Action("resume_line", line))
    if Fault.LINE_ROAMING in trouble.faults:
        actions.append(Action("enable_roaming", line))
    if Fault.DATA_USED_UP in trouble.faults:
        actions.append(Action("refuel_data", {**line, "gb_amount": trouble.gb}))
    return actions
