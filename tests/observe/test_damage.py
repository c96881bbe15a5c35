"""Damaged files of a run are reported and never read as data."""

import logging

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import AgentRLError, Outcome
from agentrl.evaluation.panel import EpisodeStore, EvaluatedEpisode, read_episodes
from agentrl.message import ImagePart
from agentrl.message.image import PlacedImage
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import MetricsFile, read_metrics
from agentrl.observe.run_folder import logging_to
from agentrl.observe.trajectory_record import trajectory_record
from agentrl.observe.trajectory_store import TrajectoryStore, read_trajectories
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn


def episode(number, turns=2):
    """An episode with an image and a branch."""
    trajectory = Trajectory(id=f"t{number}", task_id="task", environment="maze", seed=number, group_id="g")
    sequence = TokenSequence()
    trajectory.sequences.append(sequence)
    sequence.extend([1, 2, 3], Source.PROMPT)
    sequence.place(PlacedImage(start=1, rows=1, columns=1, image=ImagePart(data=b"png", media_type="image/png")))
    for index in range(turns):
        if index == 1:
            sequence = sequence.fork(4)
            trajectory.sequences.append(sequence)
        start = len(sequence)
        sequence.extend_sampled([10 + index, 2], logprobs=[-1 / 3, -0.1], versions=[1, 1])
        sequence.turns.append(Turn(index=index, start=start, end=len(sequence)))
        sequence.extend([5], Source.OBSERVATION)
    trajectory.outcome, trajectory.reward, trajectory.success = Outcome.FINISHED, 0.1 * number, True
    return trajectory


def write_trajectories(folder):
    with TrajectoryStore(folder, step=1) as store:
        for number in range(4):
            played = episode(number)
            store.start(played)
            store.turn(played, played.turns[0])
            if number == 2:
                store.rotate(2)
            store.end(played)


def write_metrics(folder):
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(4):
        metrics.append_step(step, {"reward/mean": step / 3, "n": 7})
    metrics.close()


def write_episodes(folder):
    store = EpisodeStore(folder / "episodes.jsonl")
    for number in range(3):
        store.add(EvaluatedEpisode(task_id=f"task {number}", sample=0, trajectory=episode(number)))
    store.close()


def read_all_episodes(folder):
    return {found.slot: found.to_record() for found in read_episodes(folder / "episodes.jsonl")}


KINDS = {
    "trajectories": (
        write_trajectories,
        lambda folder: {s.trajectory.id: trajectory_record(s.trajectory) for s in read_trajectories(folder)},
    ),
    "metrics": (write_metrics, lambda folder: {line["step"]: line for line in read_metrics(folder / "metrics.jsonl")}),
    "evaluation": (write_episodes, read_all_episodes),
}


@st.composite
def damages(draw):
    """What becomes of some bytes: a bit flips, a stretch is zeroed, removed or doubled, or the end is lost."""
    place, length = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 60))
    bit, kind = draw(st.integers(0, 7)), draw(st.sampled_from(["flip", "zero", "remove", "double", "cut"]))

    def damage(data):
        at = int(place * len(data))
        match kind:
            case "flip":
                return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            case "zero":
                return data[:at] + bytes(min(length, len(data) - at)) + data[at + length :]
            case "remove":
                return data[:at] + data[at + length :]
            case "double":
                return data[: at + length] + data[at:]
        return data[:at]

    return damage


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_is_read_as_data(tmp_path, caplog, kind):
    write, read = KINDS[kind]
    write(tmp_path)
    whole, kept = read(tmp_path), {file: file.read_bytes() for file in sorted(tmp_path.iterdir())}
    assert whole

    @given(damages(), st.sampled_from(list(kept)))
    def check(damage, file):
        damaged = damage(kept[file])
        caplog.clear()
        file.write_bytes(damaged)
        try:
            found = read(tmp_path)
        finally:
            file.write_bytes(kept[file])
        assert all(whole[name] == record for name, record in found.items()), "what is read is what was written"
        lost = kept[file].removeprefix(damaged)
        is_cut_between_lines = kept[file].startswith(damaged) and (damaged[-1:] in (b"\n", b"") or lost[:1] == b"\n")
        has_only_whole_lines = kind == "metrics" and set(damaged.splitlines()) <= set(kept[file].splitlines())
        assert found == whole or is_cut_between_lines or has_only_whole_lines or "skipped" in caplog.text

    check()


def says_the_same(data, whole):
    """Whether two files have the same bytes, or JSON that differs in white space only."""
    try:
        return data == whole or orjson.loads(data) == orjson.loads(whole)
    except orjson.JSONDecodeError:
        return False


@pytest.mark.parametrize("name", ["state", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_on_the_screen(tmp_path, name):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        checkpoints.save(step, lambda inside: (inside / "state").write_bytes(bytes(40)))
    file = checkpoints.folder / "step-000002" / name
    whole = file.read_bytes()

    @given(damages())
    def check(damage):
        said = []
        file.write_bytes(damage(whole))
        with logging_to(tmp_path / "log", said.append):
            newest = checkpoints.newest()
        if says_the_same(file.read_bytes(), whole):
            assert (newest.step, said) == (2, [])
        else:
            assert newest.step == 1
            assert [text.partition(":")[0] for text in said] == [f"skipped checkpoint {file.parent}"]

    check()


@pytest.mark.parametrize("line", [b"{}", b"[]", b'{"step": "x"}', b'{"id": 3, "kind": "start"}', b"\xff", b"[" * 9999])
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_something_else_is_left_out(tmp_path, kind, line, caplog):
    write, read = KINDS[kind]
    write(tmp_path)
    whole = read(tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(line + b"\n" + file.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == whole
    assert "skipped 1 damaged record (line 1)" in caplog.text


def test_records_without_checksums_are_read(tmp_path):
    """Those that another program has written, or an earlier version."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2.5}\n')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 2.5}]


def test_a_record_that_lost_its_checksum_is_left_out(tmp_path, caplog):
    write_metrics(tmp_path)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].partition(b"3333,")[0] + b"}\n"
    file.write_bytes(b"".join(lines))
    assert [line["step"] for line in read_metrics(file)] == [0, 2, 3]
    assert "skipped 1 damaged record (line 2)" in caplog.text


def test_a_metrics_file_that_is_too_short_is_not_filled_up(tmp_path, caplog):
    write_metrics(tmp_path)
    file = tmp_path / "metrics.jsonl"
    position, whole = file.stat().st_size, read_metrics(file)
    file.write_bytes(file.read_bytes()[:-70])
    metrics = MetricsFile(file)
    metrics.truncate(position)
    metrics.append_step(4, {})
    metrics.close()
    assert b"\0" not in file.read_bytes()
    assert [line["step"] for line in read_metrics(file)] == [0, 1, 4]
    assert read_metrics(file)[:2] == whole[:2]
    assert "is truncated" in caplog.text


@pytest.mark.parametrize("writer", ["metrics", "trajectories"])
@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_is_moved_while_it_is_written_is_noticed(tmp_path, writer, again):
    folder = tmp_path / "run"
    metrics, store = MetricsFile(folder / "metrics.jsonl"), TrajectoryStore(folder / "trajectories", step=1)
    metrics.append_step(1, {})
    folder.rename(tmp_path / "moved")
    if again:
        write_metrics_like = MetricsFile(folder / "metrics.jsonl")
        write_metrics_like.close()
    with pytest.raises(AgentRLError, match="was moved or removed during"):
        metrics.append_step(2, {}) if writer == "metrics" else store.start(episode(0))
    with pytest.raises(AgentRLError, match="was moved or removed during"):
        metrics.sync() if writer == "metrics" else store.rotate(2)
    metrics.close()
    assert not (folder / "trajectories").exists()


def test_a_file_that_is_reached_by_another_way_is_still_there(tmp_path):
    """As after a move that leaves a link behind."""
    metrics = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").symlink_to(tmp_path / "moved")
    metrics.append_step(1, {})
    metrics.close()
    assert len(read_metrics(tmp_path / "moved" / "metrics.jsonl")) == 1


def test_a_failed_rotation_tells_its_own_cause(tmp_path):
    (tmp_path / "step-000002.jsonl").mkdir()
    expected = pytest.raises(AgentRLError, match=r"cannot write .*step-000002.jsonl: got Is a directory")
    with expected, TrajectoryStore(tmp_path, step=1) as store:
        store.rotate(2)
