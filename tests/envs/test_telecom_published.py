"""Published tasks of tau2-bench's telecom desk: equal to recorded calls of the original, rewards, both modes, errors.

The records and tasks in `telecom_published` are our own, in the published shape; `recorded.json` has what tau2-bench's
own code returned for them: the results of random calls, and the first characters of a hash of the state after each.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.desks.calls import call_text
from agentrl.envs.telecom.options import parse_options
from agentrl.envs.telecom.published.customer import MAX_CALLS, NOT_YET, TALK
from agentrl.envs.telecom.published.desk import MAX_ERRORS, PublishedDesk
from agentrl.envs.telecom.published.reading import read_folder
from agentrl.envs.telecom.published.schema import FunctionCall
from agentrl.envs.telecom.published.task_source import PublishedTasks
from agentrl.envs.telecom.published.world import COMPANY_TOOLS, PHONE_TOOLS, PublishedWorld
from agentrl.envs.telecom.spec import SPEC
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentRole
from agentrl.config.derived import make_agent_loop
from agentrl.engine import ChatAnswer, ChatPolicy, SamplingParams, StopReason
from agentrl.env import EnvironmentSpec
from agentrl.errors import EnvironmentFailure, Outcome, ToolError, UsageError
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.settings import evaluation_config
from agentrl.message import Message
from agentrl.remote.wire import write_served
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.roles.role_policies import RolePolicy
from agentrl.rollout.roles.run_roles import RoleSetup
from agentrl.rollout.runner import EpisodeRunner
from agentrl.serving.scripted import ScriptedEngine
from agentrl.testing import check_env
from agentrl.testing.report import CheckStatus
from agentrl.tool import ToolResult

FILES = Path(__file__).parent / "telecom_published"
RECORDED = json.loads((FILES / "recorded.json").read_text(encoding="utf-8"))
POLICIES = ("main_policy", "main_policy_solo", "tech_support_manual", "tech_support_workflow")
LINE = {"customer_id": "C1", "line_id": "L1"}
DONE = call_text("done", {})


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A folder with our records and tasks, and policies of a line each."""
    for name in ("db.toml", "user_db.toml", "tasks.json"):
        shutil.copy(FILES / name, tmp_path)
    for name in (*POLICIES, "tech_support_workflow_solo"):
        (tmp_path / f"{name}.md").write_text(f"Text of {name}.", encoding="utf-8")
    read_folder.cache_clear()
    return str(tmp_path)


def key(world: PublishedWorld) -> str:
    """Hash as in `recorded.json`."""
    state = {"records": world.records, "phone": world.phone.to_plain()}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:8]


def called(world: PublishedWorld, side: Any, name: str, arguments: dict[str, Any]) -> str:
    try:
        return world.call(side, name, arguments)
    except ToolError as error:
        return f"Error: {error}"
    finally:
        world.sync()


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda row: row["task"])
def test_calls_have_the_results_and_the_effects_of_the_original(recorded: dict[str, Any]) -> None:
    task = next(task for task in read_folder(str(FILES)).tasks if task.row.id == recorded["task"])
    world = task.begin()
    assert key(world) == recorded["start"]
    for side, name, arguments, text, after in recorded["calls"]:
        assert called(world, side, name, arguments) == text, name
        assert key(world) == after, name
    criteria = task.row.evaluation_criteria
    assert criteria is not None
    assert [world.holds(assertion) for assertion in criteria.env_assertions or ()] == recorded["holds"]


def test_every_tool_is_recorded() -> None:
    assert {call[1] for row in RECORDED for call in row["calls"]} == {*COMPANY_TOOLS, *PHONE_TOOLS}


def played(env: PublishedDesk, task_id: str) -> tuple[float, dict[str, Any]]:
    observation, info = env.reset(options={"task_id": task_id})
    expert = env.expert()
    while True:
        observation, reward, terminated, truncated, info = env.step(expert.act(observation))
        if terminated or truncated:
            return reward, info


@pytest.mark.parametrize(
    ("env", "overrides", "split"),
    [
        ("telecom", [], "test"),
        ("telecom/valid", [], "valid"),
        ("telecom", ["environment.split=valid"], "valid"),
        ("household", ["environment=telecom"], "test"),
    ],
)
def test_an_evaluation_plays_a_split_that_the_data_have_unless_one_is_named(
    data: str, env: str, overrides: list[str], split: str
) -> None:
    options = [*overrides, f"environment.options={{data: {data}}}"]
    config = evaluation_config(env=env, policy=PolicyKind.EXPERT, overrides=options)
    assert (config.sole_environment.name, config.sole_environment.split) == ("telecom", split)


@pytest.mark.parametrize("options", [{}, {"customer": "role"}])
def test_the_expert_solves_every_task_with_the_published_actions(data: str, options: dict[str, Any]) -> None:
    env = PublishedDesk(data=data, **options)
    tasks = PublishedTasks("test", env.options)
    assert len(tasks) == len(RECORDED)
    for number in range(len(tasks)):
        reward, info = played(env, tasks[number].id)
        assert (reward, info["success"]) == (1.0, True), info["published_id"]
        assert tasks[number].type == info["task_type"]


def test_without_a_customer_the_agent_has_both_sides_and_ends_the_episode(data: str) -> None:
    env = PublishedDesk(data=data)
    ticket, info = env.reset(options={"task_id": "test-0"})
    assert (ticket, info["task_type"]) == ("Ann Lee, 555-200-1001: no service.", "service_issue")
    assert {tool.name for tool in env.tools} == {*COMPANY_TOOLS, *PHONE_TOOLS, "done"}
    assert env.step("Hello?")[0].startswith("Error: there is no customer to talk to")
    assert env.step(call_text("toggle_airplane_mode", {}))[0].startswith("Airplane Mode is now OFF.\nStatus Bar: 📵 No")
    assert env.step(call_text("reseat_sim_card", {}))[0].endswith("📶⁴ Excellent | 5G | 📱 Data Enabled | 🔋 64%")
    text, reward, terminated, truncated, info = env.step(DONE)
    assert (text, reward, terminated, truncated, info["success"]) == ("The ticket is closed.", 1.0, True, False, True)
    with pytest.raises(UsageError, match="is over"):
        env.step(DONE)
    env.reset(options={"task_id": "test-0"})
    assert env.step(DONE)[1:4] == (0.0, True, False)


def test_native_tools_act_as_texts_do(data: str) -> None:
    env = PublishedDesk(data=data, max_steps=3)
    tools = {tool.name: tool for tool in env.tools}
    env.reset(options={"task_id": "test-0"})
    text = tools["toggle_airplane_mode"]()
    assert isinstance(text, ToolResult)
    assert (text.stop, text.success) == (False, None)
    tools["reseat_sim_card"]()
    assert tools["done"]().reward == 1.0
    env.reset(options={"task_id": "test-0"})
    with pytest.raises(ToolError, match="Line L7 not found for customer C1"):
        tools["resume_line"](customer_id="C1", line_id="L7")
    env.step(call_text("check_status_bar", {}))
    last = tools["check_status_bar"]()
    assert (last.stop, last.truncated, last.success) == (True, True, False)


def test_numbers_are_shown_as_they_were_written_and_may_be_large(data: str) -> None:
    env = PublishedDesk(data=data)
    tools = {tool.name: tool for tool in env.tools}
    env.reset(options={"task_id": "test-0"})
    refuel = tools["refuel_data"]
    for amount in (2, 2.0):
        message = f"Successfully added {amount} GB of data for line L1 for $5.00"
        assert message in env.step(call_text("refuel_data", {**LINE, "gb_amount": amount}))[0]
        assert message in refuel(**refuel.validate({**LINE, "gb_amount": amount})).text
    with pytest.raises(ToolError, match="int too large"):
        refuel(**LINE, gb_amount=10**400)
    tools["set_apn_settings"](apn_settings={"mms_port": 10**30})
    before = env.state_key()
    env.restore(env.snapshot())
    assert env.state_key() == before


def test_ten_failed_calls_end_the_episode_unsolved(data: str) -> None:
    env = PublishedDesk(data=data)
    env.reset(options={"task_id": "test-0"})
    for number in range(MAX_ERRORS):
        _, reward, terminated, _, info = env.step(call_text("resume_line", LINE))
        assert (reward, terminated, info["valid"]) == (0.0, number == MAX_ERRORS - 1, False)


def test_all_parts_of_the_reward_count(data: str) -> None:
    """The task of an ended contract requires a transfer, besides a phone that still has no service."""
    env = PublishedDesk(data=data)
    env.reset(options={"task_id": "test-3"})
    assert env.step(DONE)[1] == 0.0
    env.reset(options={"task_id": "test-3"})
    assert (
        env.step(call_text("transfer_to_human_agents", {"summary": "An ended contract."}))[0] == "Transfer successful"
    )
    assert env.step(DONE)[1] == 1.0
    change_tasks(data, lambda rows: rows[0]["evaluation_criteria"].update(reward_basis=["DB"]))
    assert played(PublishedDesk(data=data), "test-0")[0] == 1.0
    env = PublishedDesk(data=data)
    env.reset(options={"task_id": "test-0"})
    for name in ("toggle_airplane_mode", "reseat_sim_card", "toggle_wifi_calling"):
        env.step(call_text(name, {}))
    assert env.step(DONE)[1] == 0.0


def test_what_has_to_be_said_counts_in_any_message_of_the_agent(data: str) -> None:
    needed = {"communicate_info": ["1000 Dollars"], "reward_basis": ["COMMUNICATE"]}
    change_tasks(data, lambda rows: rows[0].update(evaluation_criteria=needed))
    for said, expected in (("It is 1,000 dollars.", 1.0), ("It is 100 dollars.", 0.0)):
        env = PublishedDesk(data=data, customer="role")
        env.reset(options={"task_id": "test-0"})
        for action in ("Hello.", said, "Thanks. ###STOP###"):
            _, reward, terminated, *_ = env.step(action)
        assert (reward, terminated) == (expected, True)


def test_a_customer_has_the_phone_and_only_its_words_reach_the_agent(data: str) -> None:
    env = PublishedDesk(data=data, customer="role")
    greeting, info = env.reset(options={"task_id": "test-2"})
    told = info["instructions"]["user"]
    assert all(part in told for part in ("You are shy.", "555-200-1001", "- make_payment():", "###TRANSFER###"))
    assert "refuel_data" not in told
    assert (greeting != "", info["player"], info["players"]) == (True, "user", ["agent", "user"])
    assert {tool.name for tool in env.tools} == set(COMPANY_TOOLS)
    assert env.step("Bye. ###STOP###")[0] == NOT_YET
    shown, *_, info = env.step(f"<think>Hm.</think>{call_text('check_status_bar', {})}")
    assert (shown.startswith("Status Bar: "), info["player"]) == (True, "user")
    assert env.step("I have no service.")[4]["player"] == "agent"
    wrong, *_, info = env.step(call_text("toggle_airplane_mode", {}))
    assert (wrong.startswith("Error: there is no tool 'toggle_airplane_mode'"), info["player"]) == (True, "agent")
    env.step(call_text("send_payment_request", {"customer_id": "C1", "bill_id": "B9"}))
    heard, *_, info = env.step("Please pay. ###TRANSFER###")
    assert (heard, info["player"]) == ("Please pay. […]", "user")
    assert env.step(call_text("resume_line", LINE))[0].startswith("Error: there is no tool 'resume_line'")
    paid = "Payment of 30.0 USD has been made for bill B9."
    assert env.step(call_text("make_payment", {}))[0] == paid
    assert env.step("Paid.")[0] == "Paid."
    env.step(call_text("resume_line", LINE))
    env.step("Restart it.")
    env.step(call_text("reboot_device", {}))
    text, reward, terminated, *_ = env.step("It works. ###STOP###")
    assert (text, reward, terminated) == ("It works. ###STOP###", 1.0, True)


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "toggle_data", "arguments": {}}\n</tool_call>',
        'I will look.\n{"name": "toggle_data", "arguments": {}}',
        'One moment.\n```json\n{"name": "toggle_data", "arguments": {}}\n```',
        '```json\n{"name": "toggle_data"}\n```',
    ],
)
def test_a_customers_call_is_read_in_the_notations_of_chat_models(data: str, answer: str) -> None:
    env = PublishedDesk(data=data, customer="role")
    env.reset(options={"task_id": "test-0"})
    shown, *_, info = env.step(answer)
    assert (shown.startswith("Mobile Data is now OFF."), info["player"]) == (True, "user")


def test_a_task_can_limit_the_customers_tools(data: str) -> None:
    env = PublishedDesk(data=data, customer="role")
    _, info = env.reset(options={"task_id": "test-1"})
    assert "- toggle_data" not in info["instructions"]["user"]
    assert env.step(call_text("toggle_data", {}))[0].startswith("Error: there is no tool 'toggle_data'")
    assert env.step(call_text("reboot_device", {}))[0].startswith("Restarting network services...")


def test_a_customer_that_only_calls_tools_is_asked_to_talk_and_then_fails(data: str) -> None:
    env = PublishedDesk(data=data, customer="role")
    env.reset(options={"task_id": "test-0"})
    call = call_text("check_status_bar", {})
    for _ in range(MAX_CALLS):
        assert env.step(call)[0].startswith("Status Bar: ")
    assert env.step(call)[0] == TALK
    assert env.step("")[0].startswith("(That could not be understood.")
    with pytest.raises(EnvironmentFailure, match=r"gave no usable answer.*agent\.roles\.user"):
        env.step('{"name": ')


@pytest.mark.parametrize("options", [{}, {"customer": "role"}])
def test_an_episode_continues_from_a_snapshot(data: str, options: dict[str, Any]) -> None:
    first, second = PublishedDesk(data=data, **options), PublishedDesk(data=data, **options)
    first.reset(options={"task_id": "test-5"})
    expert = first.expert()
    done = False
    while not done:
        second.restore(json.loads(json.dumps(first.snapshot())))
        assert second.state_key() == first.state_key()
        action = expert.act("")
        step = first.step(action)
        assert second.step(action) == step
        assert second.state_key() == first.state_key()
        done = step[2]
    assert step[1] == 1.0


def test_a_broken_vpn_stays_slow_when_it_is_connected_again(data: str) -> None:
    world = read_folder(data).tasks[5].begin()
    assert "<PerformanceLevel.POOR: 'poor'>" in world.call("user", "check_vpn_status", {})
    world = PublishedWorld.from_plain(world.to_plain())
    world.call("user", "disconnect_vpn", {})
    world.call("user", "connect_vpn", {})
    assert "<PerformanceLevel.POOR: 'poor'>" in world.call("user", "check_vpn_status", {})


def test_the_instructions_are_the_published_policy(data: str) -> None:
    def told(**options: Any) -> EnvironmentSpec:
        return SPEC.with_instructions_under({"data": data, **options})

    solo, role = told(policy="workflow"), told(customer="role")
    assert solo.instructions.startswith("<main_policy>\nText of main_policy_solo.\n</main_policy>\n")
    assert "Text of tech_support_workflow_solo." in solo.instructions
    assert all(f"- {name}(" in solo.instructions for name in (*COMPANY_TOOLS, *PHONE_TOOLS, "done"))
    assert "Text of main_policy." in role.tool_instructions
    assert "Text of tech_support_manual." in role.tool_instructions
    assert "- toggle_data" not in role.instructions
    assert SPEC.with_instructions_under({}) is SPEC
    assert (SPEC.roles_under({"data": data}), SPEC.roles_under({"customer": "role"})) == ((), ("user",))
    assert isinstance(SPEC.make(data=data), PublishedDesk)


async def test_agents_and_servers_get_the_instructions_of_the_options(data: str) -> None:
    pool = EnvPool(SPEC, options={"data": data})
    assert pool.spec.instructions == SPEC.with_instructions_under({"data": data}).instructions
    await pool.close()
    served = write_served(SPEC, {"data": data}, frozenset(), "")
    assert served["spec"]["tool_instructions"].startswith("<main_policy>")


def test_the_environment_check_knows_which_splits_the_files_have(data: str) -> None:
    rules = ("has tasks", "keeps splits apart")
    alone, apart = check_env("telecom", options={"data": data}, only=rules).rows
    assert (alone.status, apart.status, apart.detail) == (CheckStatus.PASSED, CheckStatus.SKIPPED, "only one split")
    ids = [task["id"] for task in json.loads(Path(data, "tasks.json").read_text(encoding="utf-8"))]
    Path(data, "split_tasks.json").write_text(json.dumps({"train": ids[:2], "test": ids[2:4]}), encoding="utf-8")
    read_folder.cache_clear()
    rows = check_env("telecom", options={"data": data}, only=rules).rows
    assert [(row.status, row.detail) for row in rows] == [
        (CheckStatus.PASSED, "train 2, test 2"),
        (CheckStatus.PASSED, "all tasks compared, 4 openings"),
    ]


def test_the_split_file_names_the_splits(data: str) -> None:
    ids = [row["id"] for row in json.loads((FILES / "tasks.json").read_text(encoding="utf-8"))]
    sets = {"train": ids[:3], "test": [ids[5], ids[4], "gone"], "base": ids[:6]}
    Path(data, "split_tasks.json").write_text(json.dumps(sets), encoding="utf-8")

    def listed(split: str, **options: Any) -> list[str]:
        tasks = SPEC.tasks(split, data=data, **options)
        return [tasks[number].id for number in range(len(tasks))]

    assert listed("train") == ["train-0", "train-1", "train-2"]
    assert listed("test") == ["test-4", "test-5"]
    assert len(listed("test", task_set="base")) == 6
    assert PublishedDesk(data=data).reset(seed=1)[1]["published_id"] in sets["train"]
    with pytest.raises(UsageError, match="do not have this split: got valid, expected train or test"):
        listed("valid")
    with pytest.raises(UsageError, match="do not have this split: got train, expected test"):
        listed("train", task_set="base")
    with pytest.raises(UsageError, match="unknown set of published telecom tasks: got 'all', expected train or test"):
        listed("test", task_set="all")
    with pytest.raises(UsageError, match="no such telecom task in the split test"):
        PublishedDesk(data=data).reset(options={"task_id": "test-0"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"customer": "role"}, "do not apply to generated telecom tasks: got customer"),
        ({"policy": "manual", "task_set": "base"}, "generated telecom tasks: got policy, task_set"),
        ({"data": "x", "task_types": ["mms"]}, "do not apply to published telecom tasks: got task_types"),
        ({"data": "x", "customer": "script"}, "the option customer of telecom is not valid"),
        ({"data": "x", "policy": "solo"}, "unknown policy of telecom: got 'solo', expected manual or workflow"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(**options)


def change_tasks(data: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
    file = Path(data, "tasks.json")
    rows = json.loads(file.read_text(encoding="utf-8"))
    change(rows)
    file.write_text(json.dumps(rows), encoding="utf-8")
    read_folder.cache_clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.clear(), "has no tasks"),
        (lambda rows: rows[1].pop("user_scenario"), r"task 1 of .*tasks.json cannot be read: got user_scenario: Field"),
        (lambda rows: rows[0]["initial_state"].update(message_history=[{}]), "starts within a conversation"),
        (lambda rows: rows[0]["initial_state"].update(initialization_data={"a": 1}), "got initialization_data"),
        (lambda rows: rows[0]["evaluation_criteria"].update(reward_basis=["NL_ASSERTION"]), "needs a judge"),
    ],
)
def test_damaged_tasks_are_named(data: str, change: Callable[[Any], object], message: str) -> None:
    change_tasks(data, change)
    with pytest.raises(UsageError, match=message):
        SPEC.tasks("test", data=data)


def test_missing_files_and_unknown_functions_are_named(data: str) -> None:
    world = read_folder(data).tasks[0].begin()
    with pytest.raises(UsageError, match=r"unknown function of the user: got fly, expected .*turn_data_off"):
        world.run(FunctionCall(env_type="user", func_name="fly", arguments={}))
    with pytest.raises(UsageError, match=r"set_data_usage of a published telecom task cannot be carried out"):
        world.run(FunctionCall(env_type="assistant", func_name="set_data_usage", arguments={"line_id": "L1"}))
    change_tasks(data, lambda rows: rows[0].pop("ticket"))
    with pytest.raises(UsageError, match="has no ticket"):
        PublishedDesk(data=data).reset(options={"task_id": "test-0"})
    Path(data, "main_policy_solo.md").unlink()
    with pytest.raises(UsageError, match=r"main_policy_solo.md cannot be read.*Copy the folder"):
        SPEC.with_instructions_under({"data": data})
    Path(data, "tasks.json").unlink()
    read_folder.cache_clear()
    with pytest.raises(UsageError, match=r"has no telecom tasks, expected tasks\.json or tasks_small\.json"):
        SPEC.tasks("test", data=data)
    Path(data, "db.toml").write_text('plans = [{plan_id = "P1"}]', encoding="utf-8")
    with pytest.raises(UsageError, match=r"db.toml cannot be read: got plans.0.name: Field required"):
        SPEC.tasks("test", data=data)
    with pytest.raises(UsageError, match="need a folder"):
        PublishedDesk()


class Guest(ChatPolicy):
    """A service that plays a customer: it says one text after the other."""

    max_context = 100_000

    def __init__(self, *says: str) -> None:
        self.says, self.read = list(says), [""]

    async def start(self) -> None:
        return

    async def chat(self, messages: Any, tools: Any, params: SamplingParams, request_id: str) -> ChatAnswer:
        self.read.append(messages[-1].text)
        message = Message(role="assistant", content=self.says.pop(0))
        return ChatAnswer(message=message, stop_reason=StopReason.STOP, prompt_tokens=1, answer_tokens=1)

    async def close(self) -> None:
        return


async def test_the_runtime_passes_results_to_the_customer_and_words_to_the_agent(data: str) -> None:
    renderer = Renderer(build_tokenizer("qwen2.5"))
    reseat, toggle = call_text("reseat_sim_card", {}), call_text("toggle_airplane_mode", {})
    guest = Guest("No service!", toggle, reseat, "I have a signal now.", "Thank you. ###STOP###")
    says = ["Turn airplane mode off, and reseat the card.", "Is that all?"]

    def script(request: Any) -> list[int]:
        return [*renderer.encoder.encode(says.pop(0)), renderer.boundary.end_id]

    options = {"data": data, "customer": "role"}
    pool = EnvPool(SPEC, options=options)
    role = RoleSetup(role=AgentRole(name="user", trained=False), policy=RolePolicy(guest, SamplingParams()))
    runner = EpisodeRunner(
        pool=pool,
        loop=make_agent_loop("react_text", {"format": "free"}),
        policy=EngineEpisodePolicy(
            ScriptedEngine(script=script, vocab_size=400, max_context=100_000), renderer, SamplingParams()
        ),
        limits=EpisodeLimits(max_tokens=50_000),
        roles=[role],
    )
    trajectory = await runner.run(SPEC.tasks("test", **options)[0], group_id="g", member=0, seed=1)
    await pool.close()
    assert (trajectory.outcome, trajectory.success) == (Outcome.FINISHED, True)
    assert trajectory.environment_reward == 1.0
    assert [turn.role for turn in trajectory.turns] == [
        "user",
        "assistant",
        "user",
        "user",
        "user",
        "assistant",
        "user",
    ]
    assert guest.read[3].startswith("Airplane Mode is now OFF.")
    assert guest.read[4].startswith("SIM card re-seated successfully.")
    own = next(sequence for sequence in trajectory.sequences if len(sequence))
    shown = renderer.encoder.decode(own.ids_list())
    assert ("I have a signal now." in shown, "re-seated successfully" in shown) == (True, False)
