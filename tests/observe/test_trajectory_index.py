"""The index of a store shows what reading the whole store shows, whatever has happened to the store or to the index."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from agentrl.errors import Outcome, UsageError
from agentrl.evaluation.panel import EpisodeStore, EvaluatedEpisode
from agentrl.message import ImagePart, Message, TextPart, user
from agentrl.message.image import PlacedImage
from agentrl.observe import index_scan
from agentrl.observe.metrics import successes
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.observe.trajectory_record import trajectory_record
from agentrl.observe.trajectory_store import TrajectoryStore, read_trajectories, step_file, step_files, void_after
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

INDEX = ".index.sqlite"
PICTURE = ImagePart(data=b"picture", alternative="a picture")


def new_trajectory(number: int, attempt: int = 0) -> Trajectory:
    group = f"{number // 2}-train-{number % 5}"
    return Trajectory(
        id=f"{group}/{number % 2}.{attempt}",
        task_id=f"train-{number % 5}",
        environment="household" if number % 3 else "sokoban",
        seed=7,
        group_id=group,
        attempt=attempt,
    )


def play(store: TrajectoryStore, trajectory: Trajectory, turns: int, *, branch: bool = False) -> None:
    sequence = TokenSequence()
    trajectory.sequences.append(sequence)
    store.start(trajectory)
    sequence.extend([1, 2, 3, 4], Source.PROMPT)
    sequence.place(PlacedImage(image=PICTURE, start=1, rows=1, columns=2))
    for index in range(turns):
        if branch and index == 1:
            sequence = sequence.fork(5)
            trajectory.sequences.append(sequence)
        start = len(sequence)
        sequence.extend_sampled([10 + index, 2], logprobs=[-1 / 3, -0.1], versions=[index, index])
        sequence.turns.append(Turn(index=index, start=start, end=len(sequence), valid=index != 2))
        sequence.extend([5, 6], Source.OBSERVATION)
        store.turn(trajectory, sequence.turns[-1])


def finish(store: TrajectoryStore, trajectory: Trajectory, reward: float = 1.0, text: str = "") -> None:
    answer = Message(role="assistant", content=text or "done")
    trajectory.conversations = [[user((TextPart(text="Find the Key."), PICTURE)), answer]]
    trajectory.answers, trajectory.completions = [answer], [answer.text]
    trajectory.outcome = Outcome.FINISHED if reward >= 0 else Outcome.CANCELLED
    trajectory.reward = reward
    trajectory.success = reward > 0.5
    store.end(trajectory)


def records(trajectories: list[Trajectory]) -> list[object]:
    return [(trajectory_record(trajectory), trajectory.conversations) for trajectory in trajectories]


def check(store: Path, index: TrajectoryIndex | None = None) -> None:
    """Compare the index with the store, and with an index that is built from nothing."""
    expected = list(read_trajectories(store, messages=True, unfinished=True))
    complete = [stored for stored in expected if stored.complete]
    running = {stored.trajectory.id: stored.trajectory for stored in expected if not stored.complete}
    opened = index or TrajectoryIndex(store)
    opened.update()
    rows = opened.select()
    found = [opened.read(row, messages=True) for row in rows]
    assert [(stored.step, stored.trajectory.id) for stored in found] == [
        (stored.step, stored.trajectory.id) for stored in complete
    ]
    assert records([s.trajectory for s in found]) == records([s.trajectory for s in complete])
    for row, stored in zip(rows, complete, strict=True):
        trajectory = stored.trajectory
        assert (row.task_id, row.outcome, row.reward) == (trajectory.task_id, trajectory.outcome, trajectory.reward)
        assert (row.turns, row.sampled_tokens) == (len(trajectory.turns), trajectory.sampled_tokens)
        assert (row.sequences, row.oldest_version) == (len(trajectory.sequences), trajectory.oldest_version)
        assert row.tokens == sum(len(s) - s.shared for s in trajectory.sequences)
        assert row.longest == max(len(s) for s in trajectory.sequences)
        assert (row.missing_logprobs, row.success) == (0, trajectory.success)
    unfinished = []
    for row in opened.select(EpisodeFilter(complete=False)):
        with suppress(UsageError):  # its image is damaged
            unfinished.append(opened.read(row).trajectory)
    assert {t.id: trajectory_record(t) for t in unfinished} == {i: trajectory_record(t) for i, t in running.items()}
    if index is None:
        opened.close()


def write(folder: Path, episodes: int = 6, step: int = 1) -> None:
    with TrajectoryStore(folder, step=step) as store:
        for number in range(episodes):
            trajectory = new_trajectory(number)
            play(store, trajectory, 1 + number % 4, branch=number % 2 == 1)
            finish(store, trajectory, reward=number / 4, text=f"I opened Drawer {number}")


@pytest.mark.parametrize("seed", range(8))
def test_an_index_follows_a_store_that_grows_stops_and_resumes(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each change, an index that was open all the time and one that is opened then show the same episodes."""
    chance = random.Random(seed)
    monkeypatch.setattr(index_scan, "CHUNK", chance.choice([700, 5000, 2**20]))
    step, number, running = 1, 0, list[Trajectory]()
    store = TrajectoryStore(tmp_path, step=step)
    positions = {step: 0}
    index = TrajectoryIndex(tmp_path)

    def start() -> None:
        nonlocal number
        number += chance.random() < 0.7  # else another attempt voids an earlier one
        running.append(trajectory := new_trajectory(number))
        play(store, trajectory, chance.randint(0, 3), branch=chance.random() < 0.3)

    def end() -> None:
        if running:
            trajectory = running.pop(chance.randrange(len(running)))
            if trajectory.id not in {other.id for other in running}:
                finish(store, trajectory, reward=chance.choice([-1, 0, 1]))

    def rotate() -> None:
        nonlocal step
        step += 1
        store.rotate(step)
        positions[step] = 0

    def note_checkpoint() -> None:
        positions[step] = store.position

    def kill_and_resume() -> None:
        nonlocal step, store
        store.close()
        with step_file(tmp_path, step).open("ab") as file:
            file.write(b'{"kind": "turn", "id"'[: chance.randint(0, 21)])
        check(tmp_path, index)
        step = chance.randint(max(1, step - 1), step)
        void_after(tmp_path, step, positions[step])
        for later in [later for later in positions if later > step]:
            del positions[later]
        running.clear()
        store = TrajectoryStore(tmp_path, step=step)

    def damage() -> None:
        file = chance.choice(step_files(tmp_path))
        data = bytearray(file.read_bytes())
        if data:
            data[chance.randrange(len(data))] ^= 1
            with file.open("r+b") as opened:
                opened.write(data)
            check(tmp_path, index)

    actions: list[Callable[[], None]] = [start, start, start, end, end, rotate, note_checkpoint, kill_and_resume]
    for _ in range(60):
        chance.choice([*actions, damage] if seed % 2 else actions)()
        if chance.random() < 0.4:
            check(tmp_path, index)
        if chance.random() < 0.1:
            check(tmp_path)
    check(tmp_path, index)
    (tmp_path / INDEX).unlink()
    check(tmp_path)
    store.close()
    index.close()


def test_only_what_is_new_is_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    TrajectoryIndex(tmp_path).close()
    scanned = []
    add = index_scan.StoreScan.add

    def counted(self: index_scan.StoreScan, line: index_scan.Line) -> None:
        scanned.append(line.piece.length)
        add(self, line)

    monkeypatch.setattr(index_scan.StoreScan, "add", counted)
    TrajectoryIndex(tmp_path).close()
    assert scanned == []
    size = step_file(tmp_path, 1).stat().st_size
    with TrajectoryStore(tmp_path, step=1) as store:
        play(store, trajectory := new_trajectory(9), 1)
        finish(store, trajectory)
    TrajectoryIndex(tmp_path).close()
    assert sum(scanned) == step_file(tmp_path, 1).stat().st_size - size


def test_a_store_that_was_cut_edited_replaced_or_removed_is_scanned_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step=step)
    index = TrajectoryIndex(tmp_path)
    second = step_file(tmp_path, 2)
    data = second.read_bytes()
    second.write_bytes(data[: len(data) // 2])
    check(tmp_path, index)
    second.write_bytes(data.replace(b"Drawer 3", b"Drawer 8"))
    times = second.stat().st_atime_ns, second.stat().st_mtime_ns
    check(tmp_path, index)
    second.write_bytes(data)
    os.utime(second, ns=times)  # the same size and the same time of change
    check(tmp_path, index)
    os.replace(step_file(tmp_path, 3), second)
    check(tmp_path, index)
    second.unlink()
    check(tmp_path, index)
    write(tmp_path, episodes=2, step=2)
    write(tmp_path, episodes=1, step=9)
    write(tmp_path, episodes=1, step=4)
    check(tmp_path, index)
    index.close()


@pytest.mark.parametrize("data", [b"", b"no database", b"SQLite format 3\x00" + b"\x01" * 5000])
def test_a_damaged_index_is_built_again(tmp_path: Path, data: bytes) -> None:
    write(tmp_path)
    (tmp_path / INDEX).write_bytes(data)
    check(tmp_path)
    content = bytearray((tmp_path / INDEX).read_bytes())
    content[4096:12000] = bytes(7904)
    (tmp_path / INDEX).write_bytes(content)
    write(tmp_path, step=2)
    check(tmp_path)


def test_an_index_of_another_version_is_built_again(tmp_path: Path) -> None:
    write(tmp_path)
    TrajectoryIndex(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / INDEX)) as database, database:
        database.execute("PRAGMA user_version = 99")
        database.execute("DELETE FROM episodes")
    database.close()
    check(tmp_path)


def test_an_index_that_was_deleted_is_built_again(tmp_path: Path) -> None:
    write(tmp_path)
    index = TrajectoryIndex(tmp_path)
    (tmp_path / INDEX).unlink()
    write(tmp_path, step=2)
    check(tmp_path, index)
    check(tmp_path)
    index.close()


def test_an_index_of_a_folder_that_cannot_be_written_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("AGENTRL_CACHE", str(cache))
    store = tmp_path / "trajectories"
    write(store)
    (store / INDEX).mkdir()  # also for a superuser, who can write everywhere
    check(store)
    assert len(list((cache / "indexes").iterdir())) == 1
    shutil.rmtree(cache)
    cache.write_text("a file")
    check(store)


def test_a_copied_index_is_not_trusted(tmp_path: Path) -> None:
    write(tmp_path / "a")
    TrajectoryIndex(tmp_path / "a").close()
    write(tmp_path / "b", episodes=3)
    shutil.copy(tmp_path / "a" / INDEX, tmp_path / "b" / INDEX)
    check(tmp_path / "b")


def test_rows_are_filtered_sorted_and_paged(tmp_path: Path) -> None:
    write(tmp_path, 6, step=1)
    write(tmp_path, 0, step=2)
    with TrajectoryStore(tmp_path, step=3) as store:
        for number in range(6, 12):
            play(store, trajectory := new_trajectory(number), 3)
            trajectory.sequences[0].turns[0].role = "planner"
            if number == 7:
                trajectory.sequences[0].turns[0].stop_reason = "length"
            finish(store, trajectory, reward=-1 if number == 11 else number / 4, text=f"Nothing in Drawer {number}")
    with TrajectoryIndex(tmp_path, splits={"household": "train", "sokoban": "test"}) as index:

        def numbers(where: EpisodeFilter = EpisodeFilter(), **options: object) -> list[int]:  # noqa: B008
            rows = index.select(where, **options)  # type: ignore[arg-type]
            assert options or index.count(where) == len(rows)
            return [2 * int(row.group_id.partition("-")[0]) + (row.member or 0) for row in rows]

        everything = list(range(12))
        assert numbers() == everything
        assert numbers(descending=True, limit=3) == [11, 10, 9]
        assert numbers(order="reward", limit=2, offset=1) == [0, 1]
        assert numbers(order="turns", descending=True, limit=2) == [3, 11]
        assert index.steps() == [1, 3]
        assert numbers(EpisodeFilter(first_step=2)) == everything[6:]
        assert numbers(EpisodeFilter(last_step=2)) == everything[:6]
        assert numbers(EpisodeFilter(environment="sokoban")) == numbers(EpisodeFilter(split="test")) == [0, 3, 6, 9]
        assert numbers(EpisodeFilter(split="valid")) == []
        assert numbers(EpisodeFilter(task_id="train-1")) == [1, 6, 11]
        assert numbers(EpisodeFilter(group_id="2-train-4")) == [4]
        assert numbers(EpisodeFilter(outcomes=[Outcome.CANCELLED])) == numbers(EpisodeFilter(is_infrastructure=True))
        assert numbers(EpisodeFilter(is_trainable=False)) == [11]
        assert numbers(EpisodeFilter(success=False)) == [0, 1, 2, 11]
        assert numbers(EpisodeFilter(least_reward=0.25, most_reward=0.75)) == [1, 2, 3]
        assert numbers(EpisodeFilter(least_turns=4)) == [3]
        assert numbers(EpisodeFilter(most_tokens=8)) == [0, 4]
        assert numbers(EpisodeFilter(role="planner", last_step=3)) == everything[6:]
        assert numbers(EpisodeFilter(invalid=True, last_step=1)) == [2, 3]
        assert numbers(EpisodeFilter(truncated=True)) == [7]
        assert numbers(EpisodeFilter(has_sequences=False)) == []
        assert numbers(EpisodeFilter(text="drawer 1")) == [1, 10, 11]
        assert numbers(EpisodeFilter(text="opened DRAWER 3")) == [3]
        assert numbers(EpisodeFilter(text="find the key")) == everything
        assert numbers(EpisodeFilter(text="g")) == everything[6:]
        assert numbers(EpisodeFilter(text="drawer 99")) == []
        assert numbers(EpisodeFilter(text="drawer"), order="reward", descending=True, limit=2, offset=1) == [9, 8]
        assert index.steps(EpisodeFilter(text="nothing in")) == [3]
        with pytest.raises(UsageError, match="cannot be sorted"):
            index.select(order="id")  # type: ignore[arg-type]


def test_unknown_success_and_missing_rewards_are_distinguished_from_failures(tmp_path: Path) -> None:
    known: list[tuple[bool | None, float | None, str | None]] = [
        (True, 1.0, "hard"),
        (False, 0.0, None),
        (None, 0.5, "easy"),
        (None, None, "hard"),
    ]
    with TrajectoryStore(tmp_path, step=1) as store:
        for number, (success, reward, task_type) in enumerate(known):
            trajectory = new_trajectory(number)
            trajectory.task_type = task_type
            play(store, trajectory, 2)
            trajectory.outcome, trajectory.success, trajectory.reward = Outcome.FINISHED, success, reward
            store.end(trajectory)
    with TrajectoryIndex(tmp_path) as index:

        def found(where: EpisodeFilter) -> list[int]:
            return [row.number - 1 for row in index.select(where)]

        rows = index.select()
        assert [(row.success, row.reward, row.task_type) for row in rows] == known
        assert found(EpisodeFilter(success=True)) == [0]
        assert found(EpisodeFilter(success=False)) == [1, 2, 3], "unknown success is no success"
        assert found(EpisodeFilter(is_trainable=True)) == [0, 1, 2]
        assert found(EpisodeFilter(is_trainable=False)) == [3]
        assert found(EpisodeFilter(task_type="hard")) == [0, 3]
        assert found(EpisodeFilter(most_reward=0.5)) == [1, 2]


def test_episodes_without_success_have_failed_where_others_report_it(tmp_path: Path) -> None:
    """The rule of the metrics (`agentrl.observe.metrics.successes`)."""
    ends: list[tuple[str, bool | None, Outcome]] = [
        ("maze", True, Outcome.FINISHED),
        ("maze", None, Outcome.TRUNCATED_TOKENS),
        ("maze", None, Outcome.ENGINE_ERROR),
        ("silent", None, Outcome.FINISHED),
    ]
    trajectories = []
    with TrajectoryStore(tmp_path, step=1) as store:
        for number, (environment, success, outcome) in enumerate(ends):
            trajectory = replace(new_trajectory(number), environment=environment)
            play(store, trajectory, 1)
            trajectory.outcome, trajectory.success, trajectory.reward = outcome, success, 0.0
            store.end(trajectory)
            trajectories.append(trajectory)
        play(store, replace(new_trajectory(9), environment="maze"), 1)
    with TrajectoryIndex(tmp_path) as index:
        found = {row.values[0]: (row.solved, row.judged) for row in index.summarize(["environment"])}
        assert found == {"maze": (1, 2), "silent": (0, 0)}
        cut = EpisodeFilter(outcomes=(Outcome.TRUNCATED_TOKENS,))
        assert [(row.solved, row.judged) for row in index.summarize(["environment"], cut)] == [(0, 1)]
    measured = successes(one for one in trajectories if one.is_trainable)
    assert (sum(measured), len(measured)) == found["maze"]


def test_texts_of_episodes_without_messages_are_decoded(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, step=1) as store:
        play(store, trajectory := new_trajectory(1), 2)
        trajectory.outcome = Outcome.FINISHED
        store.end(trajectory)
    with TrajectoryIndex(tmp_path) as index:
        assert index.select(EpisodeFilter(text="11 2 5")) == []
    with TrajectoryIndex(tmp_path, decode=lambda ids: " ".join(map(str, ids))) as index:
        assert len(index.select(EpisodeFilter(text="11 2 5"))) == 1
        assert index.select(EpisodeFilter(text="11 5 2")) == []


def test_episodes_that_have_not_ended_are_found(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, step=1) as store:
        play(store, running := new_trajectory(1), 2)
        with TrajectoryIndex(tmp_path) as index:
            assert index.select() == []
            (row,) = index.select(EpisodeFilter(complete=False))
            assert (row.turns, row.sampled_tokens, row.outcome, row.complete) == (2, 4, None, False)
            assert row.started_at is not None
            assert index.read(row).trajectory.sampled_tokens == 4
            finish(store, running)
            index.update()
            assert index.select(EpisodeFilter(complete=False)) == []
            (row,) = index.select()
            assert (row.turns, row.outcome) == (2, Outcome.FINISHED)
            assert row.ended_at is not None


def test_a_store_that_changes_after_the_update_is_not_misread(tmp_path: Path) -> None:
    write(tmp_path)
    with TrajectoryIndex(tmp_path) as index:
        row = index.select()[3]
        file = step_file(tmp_path, 1)
        file.write_bytes(file.read_bytes()[5:])
        with pytest.raises(UsageError, match="cannot be read"):
            index.read(row)
        index.update()
        with pytest.raises(UsageError, match="cannot be read"):
            index.read(replace(row, number=77))


def test_an_edit_that_an_update_has_missed_is_found_when_the_episode_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    with TrajectoryIndex(tmp_path) as index:
        file = step_file(tmp_path, 1)
        data = file.read_bytes()
        with file.open("r+b") as opened:  # the same file, which then grows
            opened.write(data.replace(b"Drawer 2", b"Drawer 7"))
        write(tmp_path, 1)
        index.update()
        row = next(row for row in index.select() if row.group_id.startswith("1-") and row.member == 0)
        with pytest.raises(UsageError, match="try again"):
            index.read(row)
        check(tmp_path, index)


def test_damaged_records_are_counted(tmp_path: Path) -> None:
    write(tmp_path)
    file = step_file(tmp_path, 1)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:4], b"{}\n", lines[4][:-5] + b"\n", *lines[5:]]))
    with TrajectoryIndex(tmp_path) as index:
        assert index.damaged >= 2
        assert len(index.select()) == 5
    check(tmp_path)


def test_damaged_records_are_counted_wherever_an_update_has_found_them(tmp_path: Path) -> None:
    """In a file with checksums, a record without one is damaged, in a part that is scanned later, too."""
    write(tmp_path)
    file = step_file(tmp_path, 1)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:4], b"{}\n", *lines[4:]]))
    with TrajectoryIndex(tmp_path) as index:
        assert index.damaged == 1
        size = file.stat().st_size
        with TrajectoryStore(tmp_path, step=1) as store:
            play(store, trajectory := new_trajectory(9), 2)
            finish(store, trajectory)
        data = file.read_bytes()
        first, *others = data[size:].splitlines(keepends=True)
        record = orjson.loads(first)
        del record["checksum"]
        file.write_bytes(b"".join([data[:size], orjson.dumps(record), b"\n", *others]))
        index.update()
        assert index.damaged == 2
        check(tmp_path, index)


def test_a_file_that_appears_late_is_in_the_order_of_its_step(tmp_path: Path) -> None:
    def write_step(step: int, *numbers: int) -> None:
        with TrajectoryStore(tmp_path, step=step) as store:
            for number in numbers:
                play(store, trajectory := new_trajectory(number), 2)
                finish(store, trajectory, reward=step)

    write_step(1, 1)
    write_step(5, 5)
    with TrajectoryIndex(tmp_path) as index:
        assert index.steps() == [1, 5]
        write_step(3, 3, 5)  # the attempt of step 5 is the later one
        check(tmp_path, index)
        assert [(row.step, row.reward) for row in index.select()] == [(1, 1), (3, 3), (5, 5)]


def test_the_episodes_of_an_evaluation_are_indexed(tmp_path: Path) -> None:
    write(tmp_path / "store")
    file = tmp_path / "episodes.jsonl"
    store = EpisodeStore(file)
    played = [stored.trajectory for stored in read_trajectories(tmp_path / "store")]
    for number, trajectory in enumerate(played):
        store.add(
            EvaluatedEpisode(task_id=trajectory.task_id, sample=number, trajectory=trajectory, task="d", played_at=5.0)
        )
    store.close()
    with TrajectoryIndex(file) as index:
        rows = index.select()
        assert [(row.step, row.member, row.task_digest, row.ended_at) for row in rows] == [
            (0, number, "d", 5.0) for number in range(6)
        ]
        found = [index.read(row).trajectory for row in index.select(EpisodeFilter(success=True), descending=True)]
        assert [trajectory_record(t) for t in found] == [trajectory_record(t) for t in reversed(played) if t.success]
        outlines = [index.outline(row) for row in rows]
    assert [len(outline.turns) for outline in outlines] == [len(trajectory.turns) for trajectory in played]
    assert not any(hasattr(sequence, "_none") for outline in outlines for sequence in outline.sequences)
    assert [trajectory_record(outline) for outline in outlines] == [trajectory_record(one) for one in played]
    assert [len(copy.copy(one.sequences[-1])) for one in outlines] == [len(one.sequences[-1]) for one in played]
    again = EpisodeStore(file)
    again.close()
    with TrajectoryIndex(file) as index:
        late = index.outline(index.select()[0])
    file.write_bytes(file.read_bytes()[7:])
    with pytest.raises(UsageError, match="cannot be read from"):
        late.sequences[0].ids_list()
    assert late.reward == played[0].reward
    assert (tmp_path / ".episodes.index.sqlite").exists()


def test_a_store_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trajectories found in"):
        TrajectoryIndex(tmp_path / "none")
    with TrajectoryIndex(tmp_path) as index:
        assert index.select() == []


@pytest.mark.parametrize("text", ["", "ab", "short text", "Straße " * 400, "x" * 100_000])
def test_a_signature_never_leaves_out_a_text_that_contains_the_pattern(text: str) -> None:
    signatures = [(7, index_scan.sign_text(text)), (8, index_scan.sign_text("another text")), (9, None)]
    for start in range(0, len(text), max(1, len(text) // 20)):
        found = index_scan.may_contain(signatures, text[start : start + 12])
        assert {7, 9} <= set(found)


def test_a_signature_leaves_out_most_other_texts() -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=chance.randint(100, 9000))) for _ in range(200)]
    signatures = [(number, index_scan.sign_text(text)) for number, text in enumerate(texts)]
    assert len(index_scan.may_contain(signatures, "the red bottle")) < 10


def test_numbers_beyond_those_of_sqlite_are_compared(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, step=1) as store:
        play(store, new_trajectory(0), 2)
    with TrajectoryIndex(tmp_path) as index:
        assert index.select(EpisodeFilter(first_step=10**30)) == []
        assert len(index.select(EpisodeFilter(complete=None, last_step=10**30), limit=10**30)) == 1
