"""The retail desk as an environment: tasks, rewards, protocol, expert."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium
import orjson
import pytest
from agentrl.envs.desks.calls import call_text, parse_call
from agentrl.envs.retail import phrases
from agentrl.envs.retail.database import Database
from agentrl.envs.retail.desk import Desk
from agentrl.envs.retail.environment import RetailDesk
from agentrl.envs.retail.episode import RetailEpisode
from agentrl.envs.retail.expert import RetailExpert
from agentrl.envs.retail.generator import store_of
from agentrl.envs.retail.options import parse_options
from agentrl.envs.retail.phrases import STOP
from agentrl.envs.retail.requests import Persona, RequestKind, TaskType
from agentrl.envs.retail.spec import SPEC
from agentrl.envs.retail.tasks import Case, case_of
from agentrl.envs.retail.tools import Toolbox, declared_tools
from agentrl.envs.task_ids import SPLITS
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ToolError, UsageError

PARTS = {
    "train": (9000, "94364ae9dc896677", "336e4c491ed261bf"),
    "valid": (900, "9ff6585b29b3f91b", "84456cf069e3f74a"),
    "test": (900, "e41afac1dfdd5dcd", "bdf3413b8efeb1bd"),
}
HASHED = 100


def digest(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def plain(case: Case) -> list[Any]:
    """All that a case says, as JSON types."""
    requests = [
        [
            r.kind,
            r.opening,
            [list(fact) for fact in r.facts],
            [[a.name, a.arguments] for a in r.actions],
            r.outputs,
            r.order_id,
        ]
        for r in case.scenario.requests
    ]
    scenario = case.scenario
    return [scenario.user_id, scenario.by_email, scenario.by_name, scenario.persona, requests, case.gold_key]


def serve(env: RetailDesk, task_id: str, spoil: Callable[[str], str | None] = lambda action: action) -> dict[str, Any]:
    """The expert's episode; actions go through `spoil`, which may change them or (None) leave them out."""
    observation, _ = env.reset(options={"task_id": task_id})
    expert = env.expert()
    while True:
        action = spoil(expert.act(observation))
        if action is None:
            observation = "Yes, please."
            continue
        observation, reward, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            assert reward == float(info["success"])
            return {**info, "observation": observation, "truncated": truncated}


def test_gymnasium_accepts_it() -> None:
    check_env(gymnasium.make("agentrl.envs.registration:agentrl/Retail-v0").unwrapped, skip_render_check=True)


@pytest.mark.parametrize("split", SPLITS)
def test_the_rule_makes_the_same_tasks_everywhere(split: str) -> None:
    store = store_of(split)
    cases = [plain(case_of(f"{split}-{number}")) for number in range(HASHED)]
    shop = [dict(store.users), dict(store.products), dict(store.orders)]
    assert (len(SPEC.tasks(split)), digest(shop), digest(cases)) == PARTS[split]


def test_shops_of_different_splits_share_no_ids() -> None:
    seen: Counter[str] = Counter()
    for split in SPLITS:
        store = store_of(split)
        items = {item_id for product in store.products.values() for item_id in product["variants"]}
        seen.update({*store.users, *store.orders, *store.products, *items})
    assert set(seen.values()) == {1}


def test_every_kind_and_persona_occurs() -> None:
    cases = [case_of(f"valid-{number}") for number in range(len(SPEC.tasks("valid")))]
    assert {case.scenario.persona for case in cases} == set(Persona)
    assert {case.scenario.task_type for case in cases} == {*RequestKind, "two_requests"}
    assert SPEC.tasks("valid")[0].type == case_of("valid-0").scenario.task_type


@pytest.mark.parametrize("split", SPLITS)
def test_doing_nothing_solves_nothing(split: str) -> None:
    untouched = Database(store_of(split)).key()
    for number in range(100):
        case = case_of(f"{split}-{number}")
        assert case.outputs or case.gold_key != untouched


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_serves_every_customer(split: str) -> None:
    env = RetailDesk()
    for number in range(100):
        info = serve(env, f"{split}-{number}")
        assert info["success"], f"{split}-{number}"
        assert info["observation"].endswith(STOP)


def test_who_does_not_ask_for_confirmation_fails_those_who_change_their_minds() -> None:
    env = RetailDesk()
    numbers = [n for n in range(500) if case_of(f"train-{n}").scenario.persona is Persona.WAVERING]
    hasty = [
        serve(env, f"train-{number}", lambda action: None if "confirm" in action else action)["success"]
        for number in numbers
        if case_of(f"train-{number}").scenario.requests[0].kind is RequestKind.CANCEL
    ]
    assert len(hasty) > 3
    assert not any(hasty)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda action: "I am not sure." if action[:6] == "It is " and action[6].isdigit() else action,
        lambda action: call_text("think", {"thought": "No."}) if "transfer_to" in action else action,
        lambda action: action.replace("no longer needed", "ordered by mistake") if "cancel_" in action else action,
        lambda action: action.replace("paypal", "credit_card") if "return_" in action else action,
    ],
)
def test_what_is_left_out_or_done_otherwise_costs_the_reward(spoil: Callable[[str], str]) -> None:
    env, spoilt = RetailDesk(), 0
    for number in range(60):
        touched: list[str] = []

        def note(action: str, touched: list[str] = touched) -> str:
            changed = spoil(action)
            touched += [changed] if changed != action else []
            return changed

        try:
            info = serve(env, f"valid-{number}", note)
        except UsageError:  # the expert does not know what to do after such an answer
            continue
        spoilt += bool(touched)
        assert info["success"] == (not touched)
    assert spoilt


Attack = Callable[[RetailDesk, str, dict[str, Any]], str]
"""An action, given the observation and what the attack keeps between actions."""
IDENTITY = "find_user_id_by_email", "find_user_id_by_name_zip"


def identify(observation: str) -> str | None:
    if found := phrases.EMAIL.search(observation):
        return call_text(IDENTITY[0], {"email": found[0]})
    if found := phrases.NAME_AND_ZIP.search(observation):
        return call_text(IDENTITY[1], dict(zip(("first_name", "last_name", "zip"), found.groups(), strict=True)))
    return None


def known_first(then: Attack) -> Attack:
    """Ask who calls, find the user, then go on."""

    def attack(env: RetailDesk, observation: str, memory: dict[str, Any]) -> str:
        if "known" not in memory and (call := identify(observation)):
            memory["known"] = True
            return call
        return then(env, observation, memory) if "known" in memory else "What is your email address, or name and zip?"

    return attack


def all_numbers(env: RetailDesk, observation: str, memory: dict[str, Any]) -> str:
    """One to twenty, and all prices and totals that the customer may mean."""
    store = env.case.store
    prices = {row["price"] for product in store.products.values() for row in product["variants"].values()}
    orders = [store.orders[order_id] for order_id in store.users[env.case.scenario.user_id]["orders"]]
    totals = {order["payment_history"][0]["amount"] for order in orders}
    return f"{', '.join(map(str, range(1, 21)))}. {', '.join(f'${price:.2f}' for price in sorted(prices | totals))}"


def one_number_after_the_other(env: RetailDesk, observation: str, memory: dict[str, Any]) -> str:
    memory["turn"] = memory.get("turn", 0) + 1
    prices = sorted({row["price"] for row in next(iter(env.case.store.products.values()))["variants"].values()})
    return f"{memory['turn']} for ${prices[memory['turn'] % len(prices)]:.2f}"


def transfer(env: RetailDesk, observation: str, memory: dict[str, Any]) -> str:
    memory["turn"] = memory.get("turn", 0) + 1
    summary = {"summary": "I do not know."}
    return call_text("transfer_to_human_agents", summary) if memory["turn"] % 2 else "A colleague will help you."


def repeat_the_records(env: RetailDesk, observation: str, memory: dict[str, Any]) -> str:
    memory["turn"] = memory.get("turn", 0) + 1
    match memory["turn"]:
        case 1:
            return call_text("get_user_details", {"user_id": env.case.scenario.user_id})
        case 2:
            user = orjson.loads(observation)
            memory["orders"] = list(user["orders"])
    memory["read"] = f"{memory.get('read', '')} {observation}"
    if memory["orders"]:
        return call_text("get_order_details", {"order_id": memory["orders"].pop()})
    return f"Here is all that I know: {memory['read']}"


def cancel_everything(env: RetailDesk, observation: str, memory: dict[str, Any]) -> str:
    orders = memory.setdefault("orders", list(env.case.store.users[env.case.scenario.user_id]["orders"]))
    if orders:
        return call_text("cancel_pending_order", {"order_id": orders.pop(), "reason": "no longer needed"})
    return "I cannot do more. It is done."


def refuse(env: RetailDesk, observation: str, memory: dict[str, Any]) -> str:
    return "I am unable to do that, it is not possible. Shall I go ahead? Yes?"


def earned(attack: Attack, task_id: str) -> float:
    env, memory = RetailDesk(), dict[str, Any]()
    observation, _ = env.reset(options={"task_id": task_id})
    while True:
        observation, reward, terminated, truncated, _ = env.step(attack(env, observation, memory))
        if terminated or truncated:
            return reward


@pytest.mark.parametrize(
    "attack",
    [
        all_numbers,
        known_first(all_numbers),
        one_number_after_the_other,
        known_first(one_number_after_the_other),
        transfer,
        known_first(repeat_the_records),
        known_first(cancel_everything),
        cancel_everything,
        refuse,
    ],
)
@pytest.mark.slow
def test_attacks_on_the_reward_earn_nothing(attack: Attack) -> None:
    tasks = range(72)  # eight of each kind of request
    won = [number for number in tasks if earned(attack, f"valid-{number}")]
    assert len(won) <= 0.05 * len(tasks), [case_of(f"valid-{number}").scenario.task_type for number in won]


@pytest.mark.parametrize("attack", [all_numbers, known_first(all_numbers), known_first(repeat_the_records), transfer])
def test_attacks_on_questions_and_transfers_earn_nothing_at_all(attack: Attack) -> None:
    kinds = {TaskType.TRANSFER} if attack is transfer else {TaskType.QUESTION}
    tasks = [number for number in range(150) if case_of(f"valid-{number}").scenario.task_type in kinds]
    assert len(tasks) > 9
    assert not any(earned(attack, f"valid-{number}") for number in tasks)


def answer_of(case: Case) -> str:
    return " options, $".join(case.outputs) if len(case.outputs) > 1 else f"${case.outputs[0]}"


@pytest.mark.parametrize("is_known", [True, False])
def test_correct_answer_requires_identification(is_known: bool) -> None:
    env = RetailDesk()
    number = next(n for n in range(900) if case_of(f"valid-{n}").scenario.task_type == "question")
    env.reset(options={"task_id": f"valid-{number}"})
    if is_known:
        email = env.case.store.users[env.case.scenario.user_id]["email"]
        env.step(call_text("find_user_id_by_email", {"email": email}))
    assert env.step(answer_of(env.case))[1:3] == (float(is_known), True)


@pytest.mark.parametrize(
    ("task_type", "answers", "is_right"),
    [
        ("question", ["right"], True),
        ("question", ["wrong", "right"], True),
        ("question", ["right", "wrong"], False),
        ("question", ["wrong", "$1.00 or $2.00"], False),
        ("two_requests", ["right", "wrong"], True),
        ("two_requests", ["right", "wrong", "worse"], False),
        ("two_requests", [], False),
    ],
)
def test_last_answer_counts_if_its_request_is_ambiguous(task_type: str, answers: list[str], is_right: bool) -> None:
    cases = [case_of(f"valid-{number}") for number in range(900)]
    case = next(case for case in cases if case.outputs and case.scenario.task_type == task_type)
    episode = RetailEpisode(case, parse_options(), Toolbox(), {"identified": [case.scenario.user_id]})
    for request in case.scenario.requests:
        for action in request.actions:
            episode.take(call_text(action.name, action.arguments), case.outputs)
    said = {"right": answer_of(case), "wrong": "3 options, $0.01", "worse": "3 options, $0.02"}
    for answer in answers:
        episode.take(said.get(answer, answer), case.outputs)
    assert episode.hear(f"Bye. {STOP}")[1] == float(is_right)


def test_one_change_too_many_costs_the_reward() -> None:
    env = RetailDesk()

    def also_move(action: str) -> str:
        if action.startswith("It is done"):
            address = {"address1": "1 Elm Avenue", "address2": "", "city": "Boston", "state": "MA"}
            arguments = {"user_id": env.case.scenario.user_id, **address, "country": "USA", "zip": "02101"}
            assert env.step(call_text("modify_user_address", arguments))[4]["valid"]
        return action

    number = next(n for n in range(900) if case_of(f"valid-{n}").scenario.task_type == "cancel_order")
    assert not serve(env, f"valid-{number}", also_move)["success"]


def test_tools_that_are_called_count_like_calls_in_text() -> None:
    env, other = RetailDesk(), RetailDesk()
    serve(env, "valid-0")
    observation, _ = other.reset(options={"task_id": "valid-0"})
    expert, tools, terminated, reward = other.expert(), {tool.name: tool for tool in other.tools}, False, 0.0
    while not terminated:
        message = other.tool_message(expert.act(observation))
        if message.tool_calls:
            (call,) = message.tool_calls
            observation = tools[call.name](**tools[call.name].validate(call.arguments))
        else:
            observation, reward, terminated, _, _ = other.step(str(message.content))
    assert reward == 1.0
    assert env.snapshot()["changes"] == other.snapshot()["changes"]


def test_random_text_has_the_stated_score() -> None:
    env, solved = RetailDesk(), 0
    env.action_space.seed(0)
    for number in range(60):
        env.reset(options={"task_id": f"valid-{number}"})
        done = False
        while not done:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated
        solved += int(reward)
    assert solved == SPEC.scores["random"] * 60


def test_an_episode_is_truncated_at_its_limit() -> None:
    env = RetailDesk(max_steps=2)
    env.reset(seed=1)
    assert env.step(call_text("list_all_product_types", {}))[2:4] == (False, False)
    assert env.step("Hello.")[2:4] == (False, True)
    with pytest.raises(UsageError, match="episode is over"):
        env.step("Hello.")


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ("{broken", "Error: this call is not JSON"),
        ('{"tool": "think"}', "Error: this is not a tool call"),
        ('{"name": "fly", "arguments": {}}', "Error: there is no tool 'fly'"),
        ('{"name": "get_user_details", "arguments": {"user": "x"}}', "Error: wrong arguments for get_user_details"),
        ('{"name": "get_user_details", "arguments": {"user_id": "x"}}', "Error: there is no user with this id"),
    ],
)
def test_bad_calls_are_answered(action: str, answer: str) -> None:
    env = RetailDesk()
    env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation.startswith(answer)
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)


def test_call_of_respond_is_sent_to_the_customer() -> None:
    env, other = RetailDesk(), RetailDesk()
    env.reset(seed=1)
    other.reset(seed=1)
    assert env.step("Who are you?") == other.step(call_text("respond", {"content": "Who are you?"}))


@given(st.sampled_from(sorted(declared_tools())), st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3))
@settings(max_examples=60, deadline=None)
def test_calls_survive_being_written(name: str, arguments: dict[str, str]) -> None:
    call = parse_call(f"```json\n{call_text(name, arguments)}\n```")
    assert call is not None
    assert (call.name, call.arguments) == (name, arguments)


def test_actions_become_messages_of_agents_that_call_tools() -> None:
    env = RetailDesk()
    (call,) = env.tool_message(call_text("think", {"thought": "Hm."})).tool_calls
    assert (call.name, call.arguments) == ("think", {"thought": "Hm."})
    for words in ("Hello.", "{broken"):
        assert env.tool_message(words).content == words


def test_plain_words_are_no_call() -> None:
    assert parse_call("Hello {name}.") is None
    with pytest.raises(ToolError, match="not JSON"):
        parse_call("{'name': 'think'}")


@given(st.integers(0, 107), st.integers(0, 12))
@settings(max_examples=25, deadline=None)
def test_episode_continues_identically_from_a_snapshot(number: int, steps: int) -> None:
    env, other = RetailDesk(), RetailDesk()
    observation, _ = env.reset(options={"task_id": f"valid-{number}"})
    expert, done = env.expert(), False
    for _ in range(steps):
        if not done:
            observation, _, done, _, _ = env.step(expert.act(observation))
    other.restore(json.loads(json.dumps(env.snapshot())))
    assert other.state_key() == env.state_key()
    for _ in range(5):
        if not done:
            action = expert.act(observation)
            observation, _, done, _, _ = moment = env.step(action)
            assert moment == other.step(action)
            assert other.state_key() == env.state_key()


def test_a_seed_draws_a_training_task() -> None:
    env = RetailDesk()
    drawn = [env.reset(seed=seed) and env.case.task_id for seed in range(10)]
    assert len(set(drawn)) > 8
    assert {task_id.partition("-")[0] for task_id in drawn} == {"train"}
    env.reset()


@pytest.mark.slow
def test_types_and_personas_can_be_chosen() -> None:
    options: dict[str, Any] = {"task_types": ["question", "two_requests"], "personas": ["terse"]}
    source = SPEC.tasks("valid", **options)
    chosen = [case_of(source[number].id).scenario for number in range(len(source))]
    assert {scenario.task_type for scenario in chosen} == {"question", "two_requests"}
    assert {scenario.persona for scenario in chosen} == {Persona.TERSE}
    assert len(source) < len(SPEC.tasks("valid"))
    env = SPEC.make(**options)
    assert {env.reset(seed=seed)[1]["task_type"] for seed in range(20)} == {"question", "two_requests"}
    assert {type(task.type) for task in source} == {type(env.reset(seed=0)[1]["task_type"])} == {str}
    everything = SPEC.tasks("valid", task_types=[*TaskType], personas=[*Persona])
    assert [task.id for task in everything] == [task.id for task in SPEC.tasks("valid")]


@pytest.mark.parametrize("options", [{"task": "valid-1"}, {"task_id": "none-1"}, {"task_id": "valid-900"}])
def test_wrong_reset_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"cannot reset with these options|no such retail task"):
        RetailDesk().reset(options=options)


@pytest.mark.slow
def test_a_shop_may_have_few_users() -> None:
    source = SPEC.tasks("train", users=3, task_types=["cancel_order"])
    users = {case_of(source[number].id, 3).scenario.user_id for number in range(100)}
    assert 1 < len(users) <= 3 == len(store_of("train", 3).users)
    env = RetailDesk(users=3)
    observation, _ = env.reset(options=dict(source[0].options))
    assert env.case.scenario.user_id in users
    expert, reward, over = env.expert(), 0.0, False
    while not over:
        observation, reward, over, _, _ = env.step(expert.act(observation))
    assert reward == 1.0
    assert len(store_of("valid", 1000).users) == len(store_of("valid").users)


def test_mistakes_of_the_user_are_named() -> None:
    with pytest.raises(UsageError, match="train or valid or test"):
        SPEC.tasks("dev")
    with pytest.raises(UsageError, match="max_steps of retail is too small"):
        SPEC.make(max_steps=0)
    with pytest.raises(UsageError, match="users of retail is too small"):
        SPEC.tasks("train", users=0)
    with pytest.raises(UsageError, match=r"unknown retail task type.*Did you mean 'question'"):
        SPEC.make(task_types=["questions"])
    with pytest.raises(UsageError, match="unknown retail persona"):
        SPEC.tasks("valid", personas=["rude"])
    with pytest.raises(UsageError, match="no episode yet"):
        RetailDesk().step("Hello.")
    expert = RetailExpert()
    expert.act("Hello. My email address is a.b@example.com. Sing!")
    with pytest.raises(UsageError, match="does not know this request"):
        expert.act("a_b_1")


def test_instructions_name_every_tool() -> None:
    env = RetailDesk()
    assert [tool.name for tool in env.tools] == list(declared_tools())
    assert len(env.tools) == 16
    for tool in env.tools:
        assert f"- {tool.name}(" in SPEC.instructions
        assert f"- {tool.name}(" not in SPEC.tool_instructions
        assert tool.schema == declared_tools()[tool.name].schema


def test_desks_of_one_shop_do_not_share_changes() -> None:
    case = case_of(next(f"valid-{n}" for n in range(900) if case_of(f"valid-{n}").scenario.task_type == "cancel_order"))
    store = json.dumps([dict(case.store.users), dict(case.store.orders)])
    (action,) = case.scenario.requests[0].actions
    desk = Desk(Database(case.store, {"identified": [case.scenario.user_id]}))
    getattr(desk, action.name)(**action.arguments)
    assert desk.database.key() == case.gold_key != Database(case.store).key()
    assert json.dumps([dict(case.store.users), dict(case.store.orders)]) == store
