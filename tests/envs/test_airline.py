"""The airline's desk: generated tasks, their expert, the policy's traps, and published tasks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.airline.desk import Desk
from agentrl.envs.airline.environment import AirlineDesk
from agentrl.envs.airline.generator import store_of
from agentrl.envs.airline.published import read_published
from agentrl.envs.airline.records import Database, paid_bags
from agentrl.envs.airline.requests import Persona, RequestKind
from agentrl.envs.airline.tasks import SIZES, AirlineTasks, case_of, parse_options
from agentrl.envs.desks.calls import call_text
from agentrl.envs.task_ids import SPLITS

from agentrl.errors import ToolError, UsageError


def played(env: AirlineDesk, task_id: str) -> tuple[float, int]:
    """The return and the length of the expert's episode."""
    observation, _ = env.reset(options={"task_id": task_id})
    expert, steps = env.expert(), 0
    while True:
        observation, reward, terminated, truncated, info = env.step(expert.act(observation))
        steps += 1
        if terminated or truncated:
            assert info["success"] == (reward == 1)
            return reward, steps


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_solves_every_kind_for_every_persona(split: str) -> None:
    env, seen = AirlineDesk(), Counter[tuple[str, str]]()
    for number in range(66):
        assert played(env, f"{split}-{number}")[0] == 1.0, f"{split}-{number}"
        scenario = case_of(f"{split}-{number}").scenario
        seen[scenario.kind, scenario.persona] += 1
    assert {kind for kind, _ in seen} == set(RequestKind)
    assert {persona for _, persona in seen} == set(Persona)


@pytest.mark.slow
def test_the_expert_solves_all_tasks() -> None:
    env = AirlineDesk()
    failed = [
        task_id
        for split, size in SIZES.items()
        for task_id in (f"{split}-{number}" for number in range(size))
        if played(env, task_id)[0] != 1.0
    ]
    assert failed == []


def test_splits_share_no_ids() -> None:
    ids = [set().union(*(vars_ for vars_ in (s.users, s.flights, s.reservations))) for s in map(store_of, SPLITS)]
    assert not ids[0] & ids[1]
    assert not ids[0] & ids[2]
    assert not ids[1] & ids[2]
    assert len(AirlineTasks("valid", parse_options(task_types=["book"]))) == SIZES["valid"] // len(RequestKind)


def first_of(kind: RequestKind) -> str:
    return next(f"valid-{n}" for n in range(SIZES["valid"]) if case_of(f"valid-{n}").scenario.kind is kind)


def ended(task_id: str, *actions: str) -> tuple[float, bool]:
    """The return of an episode whose customer has told everything, and true if it ended."""
    env = AirlineDesk()
    env.reset(options={"task_id": task_id})
    scenario = case_of(task_id).scenario
    env.step(call_text("get_user_details", {"user_id": scenario.user_id}))
    for action in actions:
        _, reward, terminated, _, _ = env.step(action)
        if terminated:
            return reward, True
    return 0.0, False


def test_what_the_policy_forbids_is_possible_and_costs_the_reward() -> None:
    task_id = first_of(RequestKind.REFUSED_CANCEL)
    number = str(case_of(task_id).scenario.reservation_id)
    cancel = call_text("cancel_reservation", {"reservation_id": number})
    look, refusal = call_text("get_reservation_details", {"reservation_id": number}), "I cannot cancel it."
    assert ended(task_id, look, refusal) == (1.0, True)
    assert ended(task_id, cancel, look, refusal) == (0.0, True)
    assert ended(task_id, *[refusal] * 5) == (0.0, False), "the agent has not looked at the reservation"


def test_an_unnecessary_transfer_and_a_wrong_amount_cost_the_reward() -> None:
    transfer = call_text("transfer_to_human_agents", {"summary": "x"})
    assert ended(first_of(RequestKind.BOOK), transfer, "Please wait.") == (0.0, True)
    assert ended(first_of(RequestKind.TRANSFER), transfer, "Please wait.") == (1.0, True)
    task_id = first_of(RequestKind.QUESTION)
    (right,) = case_of(task_id).scenario.outputs
    assert ended(task_id, f"It is {right} dollars.") == (1.0, True)
    assert ended(task_id, "It is 1.00 dollars.", f"It is {right} dollars.") == (0.0, True)


def test_an_episode_continues_from_a_snapshot() -> None:
    env, other = AirlineDesk(), AirlineDesk()
    observation, _ = env.reset(seed=5)
    expert, rewards = env.expert(), []
    while True:
        action = expert.act(observation)
        other.restore(json.loads(json.dumps(env.snapshot())))
        assert env.state_key() == other.state_key()
        again = other.step(action)
        observation, reward, terminated, truncated, _ = env.step(action)
        assert again[:2] == (observation, reward)
        rewards.append(reward)
        if terminated or truncated:
            break
    assert sum(rewards) == 1.0


def test_the_tools_check_records_and_payments() -> None:
    store = store_of("valid")
    user_id, user = next(iter(store.users.items()))
    desk, number = Desk(Database(store)), user["reservations"][0]
    with pytest.raises(ToolError, match="has not been read"):
        desk.cancel_reservation(number)
    desk.get_user_details(user_id)
    with pytest.raises(ToolError, match="no payment method 'x'"):
        desk.update_reservation_baggages(number, 3, 3, "x")
    with pytest.raises(ToolError, match="the number of passengers cannot change"):
        desk.update_reservation_passengers(number, [])
    before = desk.database.key()
    assert before == Database(store).key()
    assert json.loads(desk.cancel_reservation(number))["status"] == "cancelled"
    assert desk.database.key() != before
    with pytest.raises(ToolError, match="is cancelled already"):
        desk.cancel_reservation(number)
    assert paid_bags("gold", "economy", 1, 4) == 1


RESERVATION = {
    "reservation_id": "ABC123",
    "user_id": "ann_lee_1",
    "origin": "SFO",
    "destination": "JFK",
    "flight_type": "one_way",
    "cabin": "economy",
    "flights": [{"origin": "SFO", "destination": "JFK", "flight_number": "F1", "date": "2024-05-20", "price": 100}],
    "passengers": [{"first_name": "Ann", "last_name": "Lee", "dob": "1990-01-01"}],
    "payment_history": [{"payment_id": "credit_card_1", "amount": 100}],
    "created_at": "2024-05-15T10:00:00",
    "total_baggages": 0,
    "nonfree_baggages": 0,
    "insurance": "no",
}
USER = {"payment_methods": {}, "membership": "gold", "reservations": ["ABC123"]}
PYTHON = """
from tau_bench.types import Action, Task
raise RuntimeError("not run")
TASKS = [Task(annotator="0", user_id="ann_lee_1", instruction="Cancel ABC123.",
    actions=[Action(name="cancel_reservation", kwargs={"reservation_id": "ABC123"})], outputs=["1,000"])]
"""


@pytest.fixture(params=["python", "tau2"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Published data in the shape of tau-bench or tau2-bench."""
    tables = {"users": {"ann_lee_1": USER}, "flights": {"F1": {"dates": {}}}, "reservations": {"ABC123": RESERVATION}}
    if request.param == "python":
        for name, rows in tables.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        (tmp_path / "tasks_test.py").write_text(PYTHON)
    else:
        (tmp_path / "db.json").write_text(json.dumps(tables))
        action = {"name": "cancel_reservation", "arguments": {"reservation_id": "ABC123"}}
        scenario = {"reason_for_call": "Cancel ABC123.", "known_info": "You are Ann.", "unknown_info": None}
        criteria = {"actions": [action], "communicate_info": ["1000"]}
        row = {"id": "0", "user_scenario": {"instructions": scenario}, "evaluation_criteria": criteria}
        (tmp_path / "tasks.json").write_text(json.dumps([row]))
    read_published.cache_clear()
    return str(tmp_path)


def test_a_published_task_is_played_with_a_role(data: str) -> None:
    env = AirlineDesk(data=data, customer="role")
    opening, info = env.reset(options={"task_id": "test-0"})
    assert "Cancel ABC123." in info["instructions"]["user"]
    assert (info["player"], info["players"]) == ("user", ["agent", "user"])
    said, *_, info = env.step("Please cancel ABC123.")
    assert (said, info["player"]) == ("Please cancel ABC123.", "agent")
    env.step(call_text("get_user_details", {"user_id": "ann_lee_1"}))
    env.step(call_text("cancel_reservation", {"reservation_id": "ABC123"}))
    env.step("It is done; you get 1,000 dollars.")
    _, reward, terminated, _, _ = env.step("Thank you. ###STOP###")
    assert (reward, terminated) == (1.0, True)
    env.reset(options={"task_id": "test-0"})
    for action in ("Cancel it.", "No. 1000 dollars.", "Bye. ###STOP###"):
        _, reward, terminated, _, _ = env.step(action)
    assert (reward, terminated) == (0.0, True)
    with pytest.raises(UsageError, match="have no expert"):
        env.expert()
    assert opening


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "x"}, "played by a model"),
        ({"customer": "role"}, "played by a model"),
        ({"max_steps": 0}, "max_steps of airline is too small"),
        ({"task_types": ["fly"]}, "unknown airline task type"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(**options)


def test_missing_and_damaged_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"users.json cannot be read"):
        read_published(str(tmp_path))
    for name in ("users", "flights", "reservations"):
        (tmp_path / f"{name}.json").write_text('{"a": {}}')
    with pytest.raises(UsageError, match="has no airline tasks"):
        read_published(str(tmp_path))
    (tmp_path / "tasks.json").write_text('[{"user_scenario": {}}]')
    with pytest.raises(UsageError, match=r"task 0 of .*tasks.json cannot be read: got KeyError"):
        read_published(str(tmp_path))
