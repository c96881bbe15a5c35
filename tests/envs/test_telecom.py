"""The telephone company's desk: generated problems, the customer and the phone, the expert, and the policy's traps."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from agentrl.envs.desks.calls import call_text
from agentrl.envs.task_ids import SPLITS
from agentrl.envs.telecom.environment import TelecomDesk
from agentrl.envs.telecom.faults import NEEDED, CallerPersona, Fault, ProblemKind, repairs_of
from agentrl.envs.telecom.generator import store_of
from agentrl.envs.telecom.hearing import hear_instructions
from agentrl.envs.telecom.options import parse_options
from agentrl.envs.telecom.phone import Feature, Functions, Network, Phone, PhoneStep, Verb
from agentrl.envs.telecom.records import TABLES, TelecomDatabase
from agentrl.envs.telecom.system import CustomerSystem
from agentrl.envs.telecom.tasks import SIZES, TelecomTasks, case_of

from agentrl.errors import ToolError, UsageError

HOME = Network(active=True, has_data=True, roaming=False, abroad=False)


def played(env: TelecomDesk, task_id: str) -> float:
    """The return of the expert's episode."""
    observation, _ = env.reset(options={"task_id": task_id})
    expert = env.expert()
    while True:
        observation, reward, terminated, truncated, info = env.step(expert.act(observation))
        if terminated or truncated:
            assert info["success"] == (reward == 1)
            return reward


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_repairs_every_fault_for_every_persona(split: str) -> None:
    env, seen = TelecomDesk(), Counter[str]()
    for number in range(108):
        assert played(env, f"{split}-{number}") == 1.0, f"{split}-{number}"
        trouble = case_of(f"{split}-{number}").trouble
        seen.update([trouble.kind, trouble.persona, *trouble.faults])
    assert set(seen) == {*ProblemKind, *CallerPersona, *Fault}


@pytest.mark.slow
def test_the_expert_solves_all_tasks() -> None:
    env = TelecomDesk()
    ids = [f"{split}-{number}" for split, size in SIZES.items() for number in range(size)]
    assert [task_id for task_id in ids if played(env, task_id) != 1.0] == []


def test_splits_share_no_ids() -> None:
    ids = [set().union(*(getattr(store_of(split), table) for table in TABLES)) for split in SPLITS]
    assert not ids[0] & ids[1]
    assert not (ids[0] | ids[1]) & ids[2]
    for split in SPLITS:
        numbers = [line["phone_number"] for line in store_of(split).lines.values()]
        assert len(set(numbers)) == len(numbers)
    assert len(TelecomTasks("valid", parse_options(task_types=["unsolvable"]))) == SIZES["valid"] // 9


ON, OFF, CHECK, RESET = Verb.ON, Verb.OFF, Verb.CHECK, Verb.RESET


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("Please turn off airplane mode, and then run a speed test.", [(OFF, "airplane mode"), (CHECK, "speed test")]),
        ("Could you check if the VPN is on and turn it off if so?", [(CHECK, "VPN"), (OFF, "VPN")]),
        ("Is your mobile data turned on?", [(CHECK, "mobile data")]),
        ("Turn airplane mode on, wait ten seconds, then off again.", [(ON, "airplane mode"), (OFF, "airplane mode")]),
        ("1. **Disable** Wi‑Fi calling\n2. Turn off data saver", [(OFF, "Wi-Fi calling"), (OFF, "data saver")]),
        ("I have sent a payment request. Please accept it.", [(ON, "payment request")]),
        ("I've enabled roaming on your line. Also switch data roaming on.", [(ON, "data roaming")]),
        ("Set the network mode from 3G to 4G/5G.", [(Verb.SET, "network mode", ("5G",))]),
        ("Allow the SMS permission of the messaging app.", [(ON, "permissions of the messaging app", ("SMS",))]),
        ("Take out the SIM card and put it back in.", [(RESET, "SIM card")]),
        ("Reset the APN settings and turn your phone off and on again.", [(RESET, "APN settings"), (RESET, "restart")]),
        ("Do not turn off mobile data. Your data usage is high.", []),
        ("I will check the roaming of your line.", []),
        ("Please hold while I enable roaming for you.", []),
        (
            "I need you to change data roaming to off, and don't forget to restart.",
            [(OFF, "data roaming"), (RESET, "restart")],
        ),
        ("Your speed should be better now.", []),
        ("Please turn the VPN off. " * 300, [(OFF, "VPN")]),
    ],
)
def test_customer_understands_instructions(text: str, steps: list[tuple[Any, ...]]) -> None:
    assert [tuple(step) for step in hear_instructions(text).steps] == [(*step, ())[:3] for step in steps]


def test_a_phone_needs_all_its_settings() -> None:
    phone = Phone()
    assert all(phone.functions(HOME))
    assert not phone.functions(HOME._replace(abroad=True)).data
    phone.carry_out(PhoneStep(ON, Feature.ROAMING), HOME)
    assert all(phone.functions(HOME._replace(abroad=True, roaming=True)))
    assert phone.functions(HOME._replace(has_data=False)) == Functions(True, False, False, False)
    phone.carry_out(PhoneStep(ON, Feature.VPN), HOME)
    assert phone.functions(HOME) == Functions(True, True, False, True)
    phone.carry_out(PhoneStep(ON, Feature.AIRPLANE_MODE), HOME)
    assert phone.functions(HOME) == Functions(False, False, False, False)
    shown = phone.carry_out(PhoneStep(Verb.TOGGLE, Feature.AIRPLANE_MODE), HOME)
    assert shown == "I have turned airplane mode off. The status bar shows a 5G signal, the VPN sign."
    phone.apn = phone.apn_in_use = "custom"
    assert "after a restart" in phone.carry_out(PhoneStep(RESET, Feature.APN), HOME)
    assert not phone.functions(HOME).data
    phone.carry_out(PhoneStep(RESET, Feature.POWER), HOME)
    assert phone.functions(HOME).data


def first_with(fault: Fault, *, alone: bool = True, persona: CallerPersona | None = None) -> str:
    for number in range(SIZES["valid"]):
        trouble = case_of(f"valid-{number}").trouble
        if fault in trouble.faults and persona in (None, trouble.persona) and (not alone or len(trouble.faults) == 1):
            return f"valid-{number}"
    raise AssertionError(fault)


def ended(task_id: str, *actions: str) -> tuple[float, str]:
    """The return of an episode whose customer was found, and the last observation."""
    env = TelecomDesk()
    text, _ = env.reset(options={"task_id": task_id})
    number = case_of(task_id).store.lines[case_of(task_id).trouble.line_id]["phone_number"]
    env.step(call_text("get_customer_by_phone", {"phone_number": number}))
    for action in actions:
        text, reward, terminated, _, _ = env.step(action)
        if terminated:
            return reward, text
    return 0.0, text


def ids_of(task_id: str) -> dict[str, str]:
    trouble = case_of(task_id).trouble
    return {"customer_id": trouble.customer_id, "line_id": trouble.line_id}


def test_stalling_refusing_and_transferring_earn_nothing() -> None:
    transfer = call_text("transfer_to_human_agents", {"summary": "x"})
    for number in range(18):
        for actions in (["Hm."] * 12, ["I am sorry, I cannot help you."] * 12, [transfer, "Please wait."]):
            reward, last = ended(f"valid-{number}", *actions)
            assert (reward, last.endswith("###STOP###")) == (0.0, True)


def test_a_transfer_needs_its_reason() -> None:
    transfer = call_text("transfer_to_human_agents", {"summary": "x"})
    task_id = first_with(Fault.ENDED_CONTRACT)
    look = call_text("get_details_by_id", {"id": ids_of(task_id)["line_id"]})
    assert ended(task_id, look, transfer, "Please wait.")[0] == 1.0
    assert ended(task_id, look, call_text("resume_line", ids_of(task_id)), "Restart your phone.")[0] == 0.0
    assert ended(first_with(Fault.LOCKED_SIM), "Please check the SIM card.", transfer, "Please wait.")[0] == 1.0


def test_unpaid_bills_are_paid_before_the_line_is_resumed() -> None:
    task_id = first_with(Fault.UNPAID_BILLS)
    owner, line = {"customer_id": ids_of(task_id)["customer_id"]}, ids_of(task_id)
    bills = [key for key, row in case_of(task_id).trouble.changes["bills"].items() if row["status"] == "overdue"]
    pay = [
        action
        for key in bills
        for action in (
            call_text("send_payment_request", {**owner, "bill_id": key}),
            "I have sent a payment request. Do you see it?",
            "Yes, please.",
        )
    ]
    resume, suspend = call_text("resume_line", line), call_text("suspend_line", {**line, "reason": "x"})
    assert ended(task_id, *pay, resume, "Please restart your phone.")[0] == 1.0
    assert ended(task_id, resume, "Please restart your phone.")[0] == 0.0, "they were not paid"
    assert ended(task_id, *pay, resume, "Thanks.")[1].startswith("I did not understand"), "the phone was not restarted"
    assert ended(task_id, *pay, resume, suspend, resume, "Please restart your phone.")[0] == 1.0, "the same end state"


@pytest.mark.parametrize(("gb", "reward"), [(0, 1.0), (1, 0.0)])
def test_another_amount_of_data_than_the_customer_wants_costs_the_reward(gb: int, reward: float) -> None:
    task_id = first_with(Fault.DATA_USED_UP)
    gb += case_of(task_id).trouble.gb
    refuel = call_text("refuel_data", {**ids_of(task_id), "gb_amount": gb})
    assert ended(task_id, refuel, "Does it work now?")[0] == reward


def test_an_unnecessary_change_of_the_records_costs_the_reward() -> None:
    task_id = first_with(Fault.AIRPLANE_MODE)
    fix, line = "Please turn off airplane mode.", ids_of(task_id)
    change = "disable_roaming" if case_of(task_id).store.lines[line["line_id"]]["roaming_enabled"] else "enable_roaming"
    reward, last = ended(task_id, fix)
    assert reward == 1.0
    assert last.startswith("I have turned airplane mode off. The status bar shows a 4G signal")
    assert last.endswith("Now it works. Thank you! ###STOP###")
    assert ended(task_id, call_text(change, line), fix)[0] == 0.0


def test_an_unnecessary_change_of_the_phone_costs_the_reward_unless_it_is_undone() -> None:
    task_id, fix = first_with(Fault.AIRPLANE_MODE), "Please turn off airplane mode."
    assert ended(task_id, "Please toggle data roaming.", fix)[0] == 0.0
    assert ended(task_id, "Please set the network mode to 3G.", fix)[0] == 0.0
    assert ended(task_id, *["Please toggle data roaming."] * 2, fix)[0] == 1.0


def test_a_cautious_customer_does_one_thing_at_a_time_and_others_three() -> None:
    text = "Please check the status bar, the SIM card, the APN settings and the network mode."
    task_id = first_with(Fault.VPN, persona=CallerPersona.CAUTIOUS)
    assert ended(task_id, text)[1] == (
        "The status bar shows a 5G signal, the VPN sign. That was a lot at once; I have not done the rest."
        " What comes next?"
    )
    task_id = first_with(Fault.VPN, persona=CallerPersona.TERSE, alone=False)
    shown = ended(task_id, text)[1]
    assert "In the APN settings" in shown
    assert "network mode" not in shown


def test_every_repair_of_a_case_is_needed() -> None:
    """After all repairs the phone works, and without one of them it does not."""
    for number in range(72):
        trouble = case_of(f"test-{number}").trouble
        if trouble.kind is ProblemKind.UNSOLVABLE or Fault.UNPAID_BILLS in trouble.faults:
            continue
        network = HOME._replace(roaming=True, abroad=trouble.abroad)
        repairs = repairs_of(trouble)
        for left_out in (None, *repairs):
            phone = Phone(**trouble.phone)
            for step in repairs:
                if step != left_out:
                    phone.carry_out(step, network)
            works = all(getattr(phone.functions(network), name) for name in NEEDED[trouble.kind])
            assert works == (left_out is None), (trouble.faults, left_out)


def test_an_episode_continues_from_a_snapshot() -> None:
    env, other = TelecomDesk(), TelecomDesk()
    observation, _ = env.reset(seed=5)
    assert TelecomDesk().reset(seed=5)[0] == observation
    expert, total = env.expert(), 0.0
    while True:
        action = expert.act(observation)
        other.restore(json.loads(json.dumps(env.snapshot())))
        assert env.state_key() == other.state_key()
        again = other.step(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        assert again[:2] == (observation, reward)
        assert env.state_key() == other.state_key()
        total += reward
        if terminated or truncated:
            break
    assert total == 1.0


def test_the_tools_check_records() -> None:
    store = store_of("valid")
    customer_id, customer = next(iter(store.customers.items()))
    line_id, other = customer["line_ids"][0], list(store.customers.values())[1]
    system = CustomerSystem(TelecomDatabase(store))
    before = system.database.key()
    for wrong in (lambda: system.resume_line(customer_id, line_id), lambda: system.get_details_by_id(line_id)):
        with pytest.raises(ToolError, match="has not been found yet"):
            wrong()
    assert json.loads(system.get_details_by_id("P501"))["name"] == "Basic"
    system.get_customer_by_name(f" {customer['full_name'].upper()} ", customer["date_of_birth"])
    with pytest.raises(ToolError, match="is not suspended"):
        system.resume_line(customer_id, line_id)
    with pytest.raises(ToolError, match="has no line with this id"):
        system.enable_roaming(customer_id, other["line_ids"][0])
    with pytest.raises(ToolError, match="is paid already"):
        system.send_payment_request(customer_id, customer["bill_ids"][0])
    with pytest.raises(ToolError, match="has no bill with this id"):
        system.send_payment_request(customer_id, other["bill_ids"][0])
    for amount in (0, -1, 1e30, float("nan")):
        with pytest.raises(ToolError, match="cannot be added"):
            system.refuel_data(customer_id, line_id, amount)
    for unknown in ("", "X1", "L", "l5"):
        with pytest.raises(ToolError, match="there is no record with this id"):
            system.get_details_by_id(unknown)
    for unknown in ("", "555", "abc"):
        with pytest.raises(ToolError, match="there is no customer with this phone number"):
            system.get_customer_by_phone(unknown)
    assert system.database.key() == before
    system.send_payment_request(customer_id, customer["bill_ids"][2])
    with pytest.raises(ToolError, match="another bill is awaiting payment"):
        system.send_payment_request(customer_id, customer["bill_ids"][1])
    assert system.database.key() != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps of telecom is too small"),
        ({"task_types": ["fly"]}, "unknown telecom task type"),
        (
            {"task_types": "mms"},
            r"telecom task type is not a list: got 'mms', expected a list of names, such as .mms",
        ),
        ({"task_types": []}, "no telecom task type given"),
        ({"personas": "direct"}, "telecom persona is not a list"),
        ({"max_steps": "x"}, "max_steps of telecom has the wrong type"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(**options)
