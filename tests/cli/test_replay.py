"""`agentrl replay`: continuations of stored episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import replay
from agentrl.cli.replay import history_text
from agentrl.config import load_config
from agentrl.config.engines import LocalEngineConfig, VLLMEngineConfig
from agentrl.errors import Outcome, UsageError
from agentrl.evaluation.replay import (
    Replay,
    ReplayRequest,
    make_replay_request,
    newest_episodes,
    replay_episode,
)
from agentrl.evaluation.rescoring import environments_played, find_environment
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import TrajectoryStore, read_trajectories
from agentrl.rollout.groups import Group
from agentrl.rollout.task_order import SampledTask
from agentrl.runs.rl import train
from agentrl.runs.start import Run
from agentrl.task import Task
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

Cli = Callable[..., Any]


@pytest.fixture
def longest(trained_run: Path) -> Trajectory:
    """A stored episode with the most turns."""
    found = read_trajectories(RunDirectory(trained_run).trajectories)
    return max((one.trajectory for one in found), key=lambda trajectory: len(trajectory.turns))


def test_without_an_id_the_episodes_are_listed(agentrl: Cli, trained_run: Path, longest: Trajectory) -> None:
    ended = agentrl("replay", str(trained_run))
    assert ended.code == 0, ended.err
    stored = [one.trajectory.id for one in read_trajectories(RunDirectory(trained_run).trajectories)]
    assert [line.split()[0] for line in ended.out.splitlines()[1:]] == stored[::-1]
    assert longest.id in stored
    assert f"{stored[-1]} --turn 1" in ended.err


def test_continuations_repeat_the_first_turns_and_are_stored(
    agentrl: Cli, trained_run: Path, longest: Trajectory
) -> None:
    turns = len(longest.turns) - 1
    assert turns >= 1
    ended = agentrl("replay", str(trained_run), longest.id, "--turn", str(turns), "--n", "4", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["episode"], found["turn"], found["failed"]) == (longest.id, turns, 0)
    assert [one["turns"] > turns for one in found["continuations"]] == [True] * 4
    assert 0 <= found["success"]["low"] <= found["success"]["mean"] <= found["success"]["high"] <= 1
    mean, low, high = (found["reward"][name] for name in ("mean", "low", "high"))
    rewards = {one["reward"] for one in found["continuations"]}
    assert low is high is None if len(rewards) == 1 else low <= mean <= high
    lines = (Path(found["folder"]) / "episodes.jsonl").read_text().splitlines()
    assert len(lines) == 4
    for line in lines:
        record = json.loads(line)["trajectory"]
        assert record["branches_from"] == {"parent": longest.id, "turn": turns}
        (sequence,) = record["sequences"]
        end = longest.sequences[0].turns[turns - 1].end
        assert sequence["token_ids"][:end] == longest.sequences[0].ids_list()[:end]
    viewed = agentrl("view", found["folder"], "--terminal", "--count", "4")
    assert viewed.code == 0, viewed.err


def test_the_table_shows_returns_and_the_first_other_answer(
    agentrl: Cli, trained_run: Path, longest: Trajectory
) -> None:
    name = longest.id.rpartition(".")[0]
    ended = agentrl("replay", str(trained_run), name, "--n", "3", "--temperature", "1.5", "--seed", "3")
    assert ended.code == 0, ended.err
    assert "stored" in ended.out
    assert "success after turn 0:" in ended.out
    assert "95 % interval" in ended.out
    assert "turn 1:" in ended.out
    assert "agentrl view" in ended.err


def test_the_history_is_shown_without_an_engine(agentrl: Cli, trained_run: Path, longest: Trajectory) -> None:
    ended = agentrl("replay", str(trained_run), longest.id, "--turn", "1", "--n", "0")
    assert ended.code == 0, ended.err
    assert f"1 of {len(longest.turns)} turns" in ended.out
    assert "[prompt]" in ended.out
    assert ended.out.count("[sampled · turn 1") == 1
    assert "[sampled · turn 2" not in ended.out


def test_wrong_names_and_turns_are_explained(
    agentrl: Cli, trained_run: Path, longest: Trajectory, tmp_path: Path
) -> None:
    ended = agentrl("replay", str(trained_run), "nosuch/0.0")
    assert ended.code == 2
    assert "no such episode" in ended.err
    ended = agentrl("replay", str(trained_run), longest.id, "--turn", "99")
    assert ended.code == 2
    assert "cannot be continued from turn 99" in ended.err
    ended = agentrl("replay", str(tmp_path), longest.id)
    assert ended.code == 2
    assert "is not a run" in ended.err


def test_every_option_arrives_in_the_request(
    agentrl: Cli, trained_run: Path, longest: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[ReplayRequest] = []

    def note_request(request: ReplayRequest, **_: object) -> None:
        requests.append(request)
        raise UsageError("not played")

    monkeypatch.setattr(replay, "replay_episode", note_request)
    agentrl("replay", str(trained_run), longest.id)
    words = ("--turn", "1", "--n", "3", "--seed", "7", "--temperature", "0", "--engine", "vllm", "--model", "other")
    agentrl("replay", str(trained_run), longest.id, "agent.max_turns=9", "agent.branch={turns: [1]}", *words)
    first, second = requests
    assert (first.episode.id, first.turn, first.samples, first.seed) == (longest.id, 0, 8, 0)
    assert (first.config.model.path, first.config.sampling.temperature) == (str(trained_run), 1.0)
    assert isinstance(first.config.engine, LocalEngineConfig)
    assert (second.turn, second.samples, second.seed) == (1, 3, 7)
    assert (second.config.model.path, second.config.sampling.temperature) == ("other", 0.0)
    assert isinstance(second.config.engine, VLLMEngineConfig)
    assert (second.config.agent.max_turns, second.config.agent.branch) == (9, None)


@pytest.mark.slow
def test_the_seed_decides_what_is_sampled(agentrl: Cli, trained_run: Path, longest: Trajectory) -> None:
    found = []
    for seed in ("3", "3", "4"):
        ended = agentrl("replay", str(trained_run), longest.id, "--n", "2", "--seed", seed, "--json", "--show")
        assert ended.code == 0, ended.err
        found.append([one["answer"] for one in json.loads(ended.out)["continuations"]])
    assert found[0] == found[1] != found[2]


def episode(*answers: int, outcome: Outcome = Outcome.FINISHED, is_one_sequence: bool = True) -> Trajectory:
    """Return an episode with a prompt and an answer of one token in each turn."""
    sequences = [TokenSequence() for _ in (answers[:1] if is_one_sequence else answers)]
    for index, token in enumerate(answers):
        sequence = sequences[-1 if is_one_sequence else index]
        sequence.extend([90 + index], Source.PROMPT)
        sequence.extend_sampled([token], logprobs=[-1.0], versions=[0])
        sequence.turns.append(Turn(index=index, start=len(sequence) - 1, end=len(sequence)))
    error = "lost" if outcome.is_infrastructure else None
    own: dict[str, Any] = {"outcome": outcome, "error": error, "reward": None if error else float(sum(answers))}
    return Trajectory(id="e/0.0", task_id="t", environment="e", seed=0, group_id="e", sequences=sequences, **own)


def result(*continuations: Trajectory) -> Replay:
    def decode(ids: Any) -> str:
        return f"<{ids}>"

    return Replay(episode=episode(1, 2, 3), turn=1, continuations=continuations, folder=Path("x"), decode=decode)


def test_the_first_other_answer_is_counted_from_the_first_new_turn() -> None:
    same, other, shorter, longer = episode(1, 2, 3), episode(1, 2, 4), episode(1, 2), episode(1, 2, 3, 5)
    repeated = episode(8, 2, 3)  # a repeated turn is never another one
    failed = episode(1, 6, outcome=Outcome.ENGINE_ERROR)
    found = result(same, other, shorter, longer, repeated, failed).to_json()
    differences = [(one["first_other_turn"], one["answer"]) for one in found["continuations"]]
    assert differences == [(None, None), (3, "<[4]>"), (3, ""), (4, "<[5]>"), (None, None), (2, "<[6]>")]
    assert (found["failed"], found["stored"]) == (1, {"reward": 6.0, "success": None})
    assert found["reward"]["mean"] == pytest.approx((6 + 7 + 3 + 11 + 13) / 5)


@pytest.mark.parametrize(
    ("outcomes", "code"), [([Outcome.FINISHED, Outcome.ENGINE_ERROR], 0), ([Outcome.ENGINE_ERROR], 1)]
)
def test_the_command_fails_if_no_continuation_could_be_played(
    agentrl: Cli,
    trained_run: Path,
    longest: Trajectory,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[Outcome],
    code: int,
) -> None:
    async def played(request: ReplayRequest, **_: object) -> Replay:
        return result(*(episode(1, 2, outcome=outcome) for outcome in outcomes))

    monkeypatch.setattr(replay, "replay_episode", played)
    ended = agentrl("replay", str(trained_run), longest.id)
    assert ended.code == code
    assert "failed: lost" in ended.out
    assert ("no continuation could be played: lost" in ended.err) is bool(code)


def test_the_history_ends_with_the_prompt_of_the_next_turn() -> None:
    def decode(ids: Any) -> str:
        return f"<{ids}>"

    found = history_text(episode(1, 2, 3, is_one_sequence=False), 1, decode, labelled=True).plain
    assert all(text in found for text in ("[prompt]", "90", "91"))
    assert "[sampled · turn 1" in found
    assert not any(text in found for text in ("[sampled · turn 2", "92"))


def test_only_episodes_with_turns_are_listed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with TrajectoryStore(run.trajectories, step=1) as store:
        for number, answers in enumerate([(1, 2), (), (3,), ()]):
            one = replace(episode(*answers), id=f"e/{number}.0")
            store.start(one)
            store.end(one)
    assert [one.id for one in newest_episodes(run, 5)] == ["e/2.0", "e/0.0"]


async def test_continuations_have_the_seed_of_their_episode(tiny_run: Callable[..., Run], tmp_path: Path) -> None:
    """With the seeds that the task file has now, the environment would wish for other letters."""
    file = tmp_path / "tasks.jsonl"

    def write_tasks(first_seed: int) -> None:
        rows = [{"id": f"task-{number}", "seed": first_seed + number} for number in range(8)]
        file.write_text("\n".join(map(json.dumps, rows)))

    write_tasks(0)
    run = tiny_run(f"environment.tasks={file}", "trainer.steps=1")
    await asyncio.to_thread(train, run)
    write_tasks(100)
    stored = {one.trajectory.task_id: one.trajectory for one in read_trajectories(run.folder.trajectories)}
    assert len(stored) == 2
    for one in stored.values():
        found = await replay_episode(make_replay_request(run.folder, one, turn=1, samples=1), say=print)
        (continuation,) = found.valid_continuations
        assert (continuation.seed, continuation.task_id) == (one.seed, one.task_id)


def test_an_episode_of_a_run_with_several_environments_has_its_own_config() -> None:
    """Without the task's id, the group of the first task could be one of either environment."""
    entries = "{small-train: {name: guess_number}, small: {name: guess_number}, other: {name: maze}}"
    config = load_config(None, [f"environments={entries}"])
    one = episode(1)
    one.environment = "guess_number"
    for task_id, label in (("train-3", "small"), ("3", "small-train")):
        one.task_id, one.group_id = task_id, "7-small-train-3"
        assert find_environment(environments_played(config), one).label == label
    one.environment = "bandit"
    with pytest.raises(UsageError, match="not an environment of the run"):
        find_environment(environments_played(config), one)


def test_an_episode_of_a_later_stage_has_the_options_of_its_stage() -> None:
    """The recorded answers were repeated in the environment of the first stage."""
    stage = "schedules={2: {environment.options.size: 7}}"
    config = load_config(None, ["environment={name: maze, options: {size: 5}}", stage, "trainer.steps=4"])
    one = episode(1)
    one.environment, one.task_id = "maze", "train-3"
    for number, size in ((0, 5), (1, 7)):
        draw = SampledTask(environment="", place=7, task=Task(id="train-3", environment="maze"), stage=number)
        one.group_id = Group(position=7, draw=draw, size=2).id
        assert find_environment(environments_played(config), one).config.sole_environment.options["size"] == size
