"""The account of a run notices every planted loss, duplicate and wrong label, and finds nothing in an honest run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.observe.files import decode_record, encode_record
from agentrl.observe.trajectory_store import GroupEnd, read_groups, step_files
from agentrl.runs.rl import train
from agentrl.runs.start import start_run
from agentrl.testing.chaos.check import Account, check_run, ledger_episodes
from agentrl.testing.chaos.damage import Damage
from agentrl.testing.chaos.result import CampaignResult
from agentrl.testing.chaos.scenarios import COMMON, GROUP_SIZE, LIMITS, LOCAL_ENGINE, SCRATCH
from agentrl.testing.chaos.world import Words, read_ledger

STALENESS, BATCH, STEPS = 1, 3, 3
Record = dict[str, Any]


def settings(folder: Path, environment: str, steps: int) -> list[str]:
    inline = f"environment={{name: '{environment}', isolation: inline}}"
    fixed = [f"run.directory={folder}", "run.name=run", f"trainer.steps={steps}"]
    return [inline, *LOCAL_ENGINE, *COMMON, *LIMITS, *fixed]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    words = settings(folder, f"{Words.__module__}:{Words.__qualname__}", 1)
    return train(start_run(load_config(None, [*words, *SCRATCH]), kind="test")).folder / "model"


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished asynchronous run, and its ledger."""
    folder = tmp_path_factory.mktemp("finished")
    ledger = folder / "ledger.jsonl"
    spec = folder / "recorded.py"
    spec.write_text(
        "from agentrl.testing.chaos.world import record_environment\n\n"
        f"SPEC = record_environment(None, ledger={str(ledger)!r})\n"
    )
    witness = f"algorithm.shaping={{agentrl.testing.chaos.witness:record_trained: {{ledger: {str(ledger)!r}}}}}"
    words = [*settings(folder, f"{spec}:SPEC", STEPS), f"model={model}", f"rollout.max_staleness={STALENESS}", witness]
    train(start_run(load_config(None, words), kind="test"))
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def check(folder: Path, **options: Any) -> Account:
    most = (STALENESS + 1) * BATCH
    return check_run(folder / "run", folder / "ledger.jsonl", group_size=GROUP_SIZE, max_left_over=most, **options)


def found(account: Account) -> dict[str, list[str]]:
    kinds = {"lost": account.lost, "duplicated": account.duplicated, "mislabelled": account.mislabelled}
    return {kind: findings for kind, findings in kinds.items() if findings}


def change(folder: Path, edit: Callable[[Record], Iterator[Record]]) -> None:
    """Replace each record of the trajectory store by those that `edit` yields, with correct checksums."""
    for file in step_files(folder / "run" / "trajectories"):
        records = [decode_record(line) for line in file.read_bytes().splitlines()]
        step = int(file.stem.partition("-")[2])
        kept = [encode_record(new) for old in records for new in edit({**old, "step": step})]
        file.write_bytes(b"".join(line + b"\n" for line in kept))


def change_ledger(folder: Path, edit: Callable[[Record], Iterator[Record]]) -> None:
    file = folder / "ledger.jsonl"
    lines = [json.dumps(new) for old in read_ledger(file) for new in edit(old)]
    file.write_text("".join(f"{line}\n" for line in lines))


def trained(folder: Path, step: int = 2) -> str:
    """A group that trained in a step."""
    groups = read_groups(folder / "run" / "trajectories").values()
    return next(group.id for group in groups if group.end is GroupEnd.TRAINED and group.step == step)


@pytest.mark.slow
def test_a_run_without_faults_has_no_findings(finished: Path) -> None:
    account = check(finished)
    assert found(account) == {}
    assert account.trained == STEPS * BATCH * GROUP_SIZE
    assert account.named[GroupEnd.TRAINED] == STEPS * BATCH
    assert set(account.named) <= {GroupEnd.TRAINED, GroupEnd.LEFT_OVER}
    left = [group for group in read_groups(finished / "run" / "trajectories").values() if group.end == "left over"]
    assert len(left) == account.named[GroupEnd.LEFT_OVER]


def test_a_group_without_a_record_is_lost(copied: Path) -> None:
    name = trained(copied)
    change(copied, lambda r: iter([] if r["kind"] == "group" and r["id"] == name else [r]))
    findings = found(check(copied))
    assert any("no record states its result" in finding for finding in findings["lost"])


def test_group_voided_by_a_kill_is_lost_unless_recorded(copied: Path) -> None:
    """A killed run played its tasks with newer weights than those of its checkpoint; the resumed run named it only."""
    trajectories, seed = copied / "run" / "trajectories", 10**6
    position = 1 + max(int(group.partition("-")[0]) for group in read_groups(trajectories))
    name = f"{position}-train-{seed}"
    played = [
        {"event": "reset", "episode": "e", "seed": seed, "observation": "Write a."},
        {"event": "step", "episode": "e", "action": "a", "observation": "", "total": 1.0, "terminated": True}
        | {"success": True},
    ]
    with (copied / "ledger.jsonl").open("a") as ledger:
        ledger.writelines(f"{json.dumps(event)}\n" for event in played)
    start = {"kind": "start", "id": f"{name}/0.0", "trajectory": {"seed": seed, "group_id": name}}
    (trajectories / "void").mkdir()
    (trajectories / "void" / "step-000009-1.jsonl").write_bytes(encode_record(start) + b"\n")
    assert found(check(copied)) == {"lost": [f"episode e of seed {seed} was played, but is not stored"]}
    end = {"kind": "group", "id": name, "end": GroupEnd.STALE, "episodes": []}
    with step_files(trajectories)[-1].open("ab") as file:
        file.write(encode_record(end) + b"\n")
    assert found(check(copied)) == {}


def test_a_group_that_left_no_trace_is_lost(copied: Path) -> None:
    name = trained(copied)
    change(copied, lambda r: iter([] if r["id"] == name or r["id"].startswith(f"{name}/") else [r]))
    findings = found(check(copied))["lost"]
    assert any(finding.startswith(f"group {name.partition('-')[0]}: no record of it") for finding in findings)
    assert any("was played, but is not stored" in finding for finding in findings)


def test_a_member_that_neither_trained_nor_failed_is_lost(copied: Path) -> None:
    name = trained(copied)

    def edit(record: Record) -> Iterator[Record]:
        if record["kind"] == "group" and record["id"] == name:
            record["episodes"] = record["episodes"][1:]
        yield record

    change(copied, edit)
    findings = found(check(copied))["lost"]
    assert any("it neither trained nor failed" in finding for finding in findings)
    assert any("no update had" in finding for finding in findings), "the trainer got all members"


def test_a_group_that_claims_to_have_trained_is_lost(copied: Path) -> None:
    """The trainer's updates count, not what the run says of them."""
    change_ledger(copied, lambda event: iter([] if event["event"] == "trained" else [event]))
    findings = found(check(copied))["lost"]
    assert [finding.partition(":")[0] for finding in findings] == [f"step {step}" for step in range(1, STEPS + 1)]


def test_groups_that_are_left_over_without_need_are_lost(copied: Path) -> None:
    left = check(copied).named[GroupEnd.LEFT_OVER]
    for most, is_found in ((left, False), (left - 1, True)):
        account = check_run(copied / "run", copied / "ledger.jsonl", group_size=GROUP_SIZE, max_left_over=most)
        assert bool(account.lost) is is_found
        assert all("groups are left over, expected at most" in finding for finding in account.lost)


def test_a_step_without_metrics_is_lost(copied: Path) -> None:
    file = copied / "run" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"".join(lines[2:]))
    assert found(check(copied)) == {"lost": ["step 2: it has no metrics"]}
    assert found(check(copied, damage=Damage(steps={2}))) == {}


def test_a_group_that_trained_in_two_steps_is_duplicated(copied: Path) -> None:
    name = trained(copied, 1)

    def edit(record: Record) -> Iterator[Record]:
        yield record
        if record["kind"] == "group" and record["id"] == name:
            again.append(record)
        if record["kind"] == "group" and record["step"] == 3 and again:
            yield again.pop()

    again: list[Record] = []
    change(copied, edit)
    assert any("it trained in the steps [1, 3]" in finding for finding in found(check(copied))["duplicated"])


def test_an_episode_that_the_trainer_got_twice_is_duplicated(copied: Path) -> None:
    """A member of step 1 replaces one of step 2, in the update and in all records."""
    updates = [event["returns"] for event in read_ledger(copied / "ledger.jsonl") if event["event"] == "trained"]
    first, second = updates[0][0], updates[1][0]

    def edit_ledger(event: Record) -> Iterator[Record]:
        if event["event"] == "trained" and event["returns"] == updates[1]:
            event["returns"] = [first, *updates[1][1:]]
        yield event

    def edit(record: Record) -> Iterator[Record]:
        if record["kind"] == "end" and record["trajectory"]["reward"] == second:
            record["trajectory"]["reward"] = first
        yield record

    change_ledger(copied, edit_ledger)
    change(copied, edit)
    findings = found(check(copied))
    assert findings["duplicated"] == [f"the episode with return {first!r} trained 2 times"]
    assert any("has the return" in finding for finding in findings["mislabelled"]), "it is stored under another seed"


def test_two_attempts_of_a_member_that_trained_are_duplicated(copied: Path) -> None:
    name = trained(copied)

    def edit(record: Record) -> Iterator[Record]:
        if record["kind"] == "group" and record["id"] == name:
            record["episodes"].append(f"{name}/0.1")
        yield record

    change(copied, edit)
    assert found(check(copied))["duplicated"] == [f"{name}/0: 2 attempts trained"]


@pytest.mark.parametrize(
    ("field", "value", "finding"),
    [
        ("reward", 0.125, "has the return 0.125"),
        ("seed", 99_999_999, "no episode of seed 99999999"),
        ("success", None, "success is None"),
        ("outcome", "truncated_turns", "outcome is 'truncated_turns'"),
    ],
)
def test_a_changed_label_is_noticed(copied: Path, field: str, value: object, finding: str) -> None:
    member = f"{trained(copied)}/0.0"

    def edit(record: Record) -> Iterator[Record]:
        if record["id"] == member and record["kind"] == "end":
            record["trajectory"][field] = value
        yield record

    change(copied, edit)
    findings = found(check(copied))["mislabelled"]
    assert any(member in found and finding in found for found in findings), findings


def test_an_infrastructure_failure_that_trained_is_mislabelled(copied: Path) -> None:
    member = f"{trained(copied)}/0.0"

    def edit(record: Record) -> Iterator[Record]:
        if record["id"] == member and record["kind"] == "end":
            record["trajectory"] |= {"outcome": "environment_error", "reward": None, "error": "the worker died"}
        yield record

    change(copied, edit)
    assert found(check(copied))["mislabelled"] == [f"{member}: it trained in step 2 after environment_error"]


def test_a_failure_has_no_reward_not_even_nothing(copied: Path) -> None:
    member = f"{trained(copied)}/0.0"

    def edit(record: Record) -> Iterator[Record]:
        if record["id"] == member and record["kind"] == "end":
            record["trajectory"] |= {"outcome": "environment_error", "reward": 0.0, "error": "the worker died"}
        yield record

    change(copied, edit)
    assert f"{member}: reward 0.0 after the infrastructure failure environment_error" in check(copied).mislabelled


def test_a_failed_episode_that_claims_success_is_mislabelled(copied: Path) -> None:
    """A failure in the ledger is not an unknown success."""
    failed = next(each for each in ledger_episodes(read_ledger(copied / "ledger.jsonl")).values() if each.ended)

    def edit_ledger(event: Record) -> Iterator[Record]:
        yield event | ({"success": False} if event.get("total") == failed.total else {})

    def edit(record: Record) -> Iterator[Record]:
        if record["kind"] == "end" and record["trajectory"]["reward"] == failed.total:
            record["trajectory"]["success"] = True
        yield record

    change_ledger(copied, edit_ledger)
    change(copied, edit)
    assert any("success is True, the environment recorded False" in each for each in check(copied).mislabelled)


@pytest.mark.parametrize("what", ["conversations", "completions"])
def test_changed_texts_are_noticed(copied: Path, what: str) -> None:
    member = f"{trained(copied)}/0.0"

    def edit(record: Record) -> Iterator[Record]:
        if record["id"] == member and record["kind"] == "end":
            text = json.dumps(record["messages"][what]).replace("More.", "Less.")
            stored = json.loads(text)
            record["messages"][what] = stored if what == "conversations" else ["" for _ in stored]
        yield record

    change(copied, edit)
    findings = found(check(copied))["mislabelled"]
    assert len(findings) == 1
    assert findings[0].startswith(member)


def test_metrics_of_another_step_are_mislabelled(copied: Path) -> None:
    file = copied / "run" / "metrics.jsonl"
    records = [decode_record(line) for line in file.read_bytes().splitlines()]
    records[0]["reward/mean"], records[1]["reward/mean"] = records[1]["reward/mean"], records[0]["reward/mean"]
    file.write_bytes(b"".join(encode_record(record) + b"\n" for record in records))
    assert len(found(check(copied))["mislabelled"]) == 2


def test_records_that_a_fault_destroyed_are_not_missed(copied: Path) -> None:
    name, damage = trained(copied), Damage()
    for file in step_files(copied / "run" / "trajectories"):
        lines, step = file.read_bytes().splitlines(keepends=True), int(file.stem.partition("-")[2])
        for number, line in enumerate(lines):
            record = decode_record(line)
            if record["id"] in (name, f"{name}/1.0") and record["kind"] in ("group", "end"):
                damage.add_line(line, step)
                lines[number] = line.replace(b"{", b"[", 1)
        file.write_bytes(b"".join(lines))
    assert found(check(copied))
    assert found(check(copied, damage=damage)) == {}


def test_restored_episode_includes_events_before_its_snapshot() -> None:
    def step(episode: str, turn: int) -> Record:
        seen = {"action": f"{episode} acts {turn}", "observation": f"{episode} sees {turn}"}
        return {
            "event": "step",
            "episode": episode,
            **seen,
            "total": float(turn),
            "terminated": turn == 3,
            "success": None,
        }

    reset = {"event": "reset", "episode": "one", "seed": 5, "observation": "start"}
    restore = {"event": "restore", "episode": "two", "before": "one", "turns": 2}
    first, second = ledger_episodes(
        [reset, *(step("one", turn) for turn in (1, 2, 3)), restore, step("two", 3)]
    ).values()
    assert (first.seed, first.total, first.ended) == (5, 3.0, True)
    assert second.actions == ("one acts 1", "one acts 2", "two acts 3")
    assert second.observations == ("start", "one sees 1", "one sees 2", "two sees 3")
    assert (second.seed, second.total) == (5, 3.0)


def test_a_campaign_counts_the_findings_and_episodes_of_all_runs() -> None:
    result = CampaignResult(7, hung=["x"])
    for number in (1, 2):
        named = {GroupEnd.TRAINED.value: number}
        own = Account(lost=[f"l{number}"], duplicated=["d"], mislabelled=["m"] * number, trained=10 * number)
        own.named.update(named)
        result.account.add(own)
    found = result.to_json()
    assert found["counts"] == {"lost": 2, "duplicated": 2, "mislabelled": 3, "hung": 1, "unclear": 0}
    assert (found["seed"], found["episodes_trained"], found["groups"]) == (7, 30, {"trained": 3})
    assert found["findings"]["lost"] == ["l1", "l2"]
