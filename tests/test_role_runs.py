"""Whole runs of several agents on one policy."""

import asyncio
from statistics import fmean

import pytest
from support.runs import numbers
from support.token_tables import check_token_tables

from agentrl.cli.token_text import episode_text
from agentrl.errors import ConfigError
from agentrl.evaluation.rescoring import (
    RescoringRequest,
    RescoringSummary,
    environments_played,
    find_scorers,
    find_tasks,
    rescore,
)
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import resume_run
from agentrl.training.episode_export import sft_rows

LOOP = ("agent={loop: 'two_agents:Telling', options: {}}", "agent.max_answer_tokens=6", "agent.max_tokens=256")


@pytest.mark.slow
def test_two_roles_train_on_one_policy_and_go_on_bit_for_bit(tiny_run):
    whole = tiny_run(*LOOP, "observe.tokens=all", name="whole")
    train(whole)
    check_token_tables(whole.folder.path)
    lines = numbers(whole.folder.path)
    for line in lines:
        assert (line["role/teller/members"], line["role/writer/members"]) == (6, 6)
        assert (line["role/teller/turns/mean"], line["role/writer/turns/mean"]) == (3, 3)
        assert line["groups/trained"] == 4
        told = line["role/teller/return/mean"] - line["role/writer/return/mean"]
        assert told == pytest.approx(line["episode/reward_of/teller"])
        assert line["train/updates"] == 2
    cut = tiny_run(*LOOP, "trainer.steps=2", name="cut")
    train(cut)
    train(resume_run(cut.folder.path, ["trainer.steps=4"]))
    assert numbers(cut.folder.path) == lines


async def rescore_run(run):
    parts = environments_played(run.config)
    request, summary = RescoringRequest(run=run.folder, parts=parts), RescoringSummary()
    tasks = find_tasks(parts, request.tasks_by_environment())
    return [one async for one in rescore(request, tasks, find_scorers(parts), summary)], summary


def test_rescored_episodes_keep_the_rewards_of_single_roles(tiny_run):
    opposites = LOOP[0].replace("Telling", "Opposites")
    run = tiny_run(opposites, *LOOP[1:], "trainer.steps=1", name="rescored")
    train(run)
    found, summary = asyncio.run(rescore_run(run))
    assert any(one.trajectory.own_rewards for one in found)
    for one in found:
        assert one.score.reward == pytest.approx(one.trajectory.reward)
        assert sum(one.score.sources.values()) == pytest.approx(one.score.reward)
    assert summary.to_json()["changed"] == 0


def test_a_role_can_be_left_out_of_training(tiny_run):
    run = tiny_run(*LOOP, "agent.roles={teller: {trained: false}}", "trainer.steps=1", name="writer_only")
    train(run)
    (line,) = numbers(run.folder.path)
    assert "role/teller/members" not in line
    assert "role/teller/return/mean" not in line
    assert line["role/writer/members"] == 6
    assert line["reward/mean"] == pytest.approx(line["role/writer/return/mean"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("agent.roles={teler: {}}", r"agent\.roles\.teler.*expected teller, writer"),
        ("agent.roles={teller: {tools: [calculator]}}", r"agent\.roles\.teller\.tools is ignored"),
        ("agent.roles={teller: {policy: random, trained: true}}", "cannot be trained"),
        ("agent.few_shot_turns=2", r"agent\.few_shot_turns is ignored by the agent loop two_agents:Telling"),
        ("agent.roles={teller: {temperature: 0.5}}", "is ignored without engine"),
        ("algorithm.role_weights={telller: 2}", r"role_weights\.telller.*teller"),
        ("algorithm={expert: {members: 1}, loss: luffy}", "an expert plays only one"),
    ],
)
def test_what_does_not_fit_is_refused(tiny_run, setting, message):
    with pytest.raises(ConfigError, match=message):
        train(tiny_run(*LOOP, setting, name="refused"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("agent.loop=react_text", r"agent\.roles\.scout\.as_tool: the agent loop react_text does not offer tools"),
        ("agent.roles={scout: {as_tool: {description: ''}}}", "at least 1 character"),
        ("agent.roles={scout: {as_tool: {description: x}, policy: random}}", "can only take actions"),
        ("agent.roles={scout: {as_tool: {description: x}, tools: [scout]}}", "the role scout can call itself"),
        ("agent.roles={'my scout': {as_tool: {description: x}}}", "valid tool name"),
        ("agent.roles={assistant: {as_tool: {description: x}}}", "cannot be called by others"),
        ("agent.roles={scout: {as_tool: {description: x, arguments: {'a b': y}}}}", "is not a name for an argument"),
        ("agent.few_shot_turns=2", r"agent\.few_shot_turns is ignored"),
    ],
)
def test_roles_that_cannot_be_called_are_refused(tiny_run, setting, message):
    described = "agent={loop: tool_calling, options: {}, roles: {scout: {as_tool: {description: Looks.}}}}"
    with pytest.raises(ConfigError, match=message):
        train(tiny_run(described, setting, name="refused"))


def test_debaters_and_their_judge_train_on_one_policy(tiny_run):
    options = "agent={loop: debate, options: {format: plain, explain: false, rounds: 1}}"
    run = tiny_run(options, "trainer.steps=2", "agent.max_answer_tokens=4", "agent.max_tokens=256", name="debate")
    train(run)
    lines = numbers(run.folder.path)
    for line in lines:
        assert [line[f"role/{role}/members"] for role in ("debater_1", "debater_2", "judge")] == [6, 6, 6]
        tokens = sum(line[f"role/{role}/tokens"] for role in ("debater_1", "debater_2", "judge"))
        assert tokens == line["train/tokens"] > 0


GUESTS = ("environment={name: 'guests:SPEC', isolation: inline}", "agent.max_answer_tokens=6", "agent.max_tokens=200")


@pytest.mark.slow
def test_an_environment_s_user_speaks_in_runs_which_go_on_bit_for_bit(tiny_run):
    whole = tiny_run(*GUESTS, name="whole")
    train(whole)
    lines = numbers(whole.folder.path)
    for line in lines:
        assert line["groups/trained"] == 2
        assert "role/user/members" not in line
        assert "role/user/return/mean" not in line
        assert line["reward/mean"] == pytest.approx(line["role/assistant/return/mean"])
    played = [found.trajectory for found in read_trajectories(whole.folder.trajectories)]
    for role in ("user", "assistant"):
        said = [sum(turn.role == role for turn in trajectory.turns) for trajectory in played]
        assert fmean(line[f"role/{role}/turns/mean"] for line in lines) == pytest.approx(fmean(said))
    cut = tiny_run(*GUESTS, "trainer.steps=2", name="cut")
    train(cut)
    train(resume_run(cut.folder.path, ["trainer.steps=4"]))
    assert numbers(cut.folder.path) == lines


def test_the_agent_trains_an_adapter_beside_a_user_without_one(tiny_run):
    roles = "agent.roles={assistant: {adapter: a}, user: {adapter: base}}"
    run = tiny_run(*GUESTS, roles, "adapters={a: {}}", "model.lora={rank: 2}", "trainer.steps=1", name="adapter")
    train(run)
    (line,) = numbers(run.folder.path)
    assert line["adapter/a/tokens"] == line["train/tokens"] > 0
    trajectory = next(read_trajectories(run.folder.trajectories)).trajectory
    assert {(turn.role, turn.adapter) for turn in trajectory.turns} == {("assistant", "a"), ("user", None)}


def test_the_terminal_shows_who_spoke(tiny_run):
    run = tiny_run(*GUESTS, "agent.roles={user: {policy: expert}}", "trainer.steps=1", name="shown")
    train(run)
    trajectory = next(read_trajectories(run.folder.trajectories)).trajectory
    shown = episode_text(trajectory, str).plain.splitlines()
    assert "user: in text, without tokens" in shown
    assert "assistant" in shown


def test_unusable_answers_of_an_agent_with_a_user_are_not_exported(tiny_run):
    """No answer was found to be unusable, because the answers of the user's turns are not stored."""
    react = "agent.options={format: react}"
    run = tiny_run(*GUESTS, react, "trainer.steps=1", name="exported")
    train(run)
    stored = list(read_trajectories(run.folder.trajectories, messages=True))
    answers = [turn for one in stored for turn in one.trajectory.turns if turn.role == "assistant"]
    assert not any(turn.valid for turn in answers)
    exported = sft_rows(stored, {})
    assert (exported.rows, exported.left_out["without a usable answer"]) == ([], len(stored))


def test_demonstrations_hold_nothing_of_the_user(tiny_run):
    run = tiny_run(*GUESTS, "sft={episodes: 4, epochs: 1}", name="taught")
    warm_start(run)
    assert read_metrics(run.folder.metrics_file)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "agent.roles={usr: {}}",
            r"agent\.roles\.usr: .*no such role.*expected user.*Did you mean .user",
        ),
        ("agent.roles={user: {trained: true}}", "is a role of the environment and cannot be trained"),
        ("agent.roles={user: {as_tool: {description: x}}}", "it cannot be called as a tool"),
        ("agent.roles={user: {tools: [calculator]}}", r"no agent\.roles\.user\.tools"),
        ("algorithm={expert: {members: 1}, loss: luffy}", "does not work with environment roles"),
        ("agent={loop: self_play, options: {roles: [user, b]}}", "both the environment and the agent loop self_play"),
        ("adapters={a: {}}", "agent.roles.assistant does not name an adapter"),
    ],
)
def test_what_an_environment_s_user_cannot_be_is_refused(tiny_run, setting, message):
    with pytest.raises(ConfigError, match=message):
        train(tiny_run(*GUESTS, setting, name="refused"))
