"""Images in message content, in spaces, and at their places in sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentrl.envs.content_space import ContentSpace
from gymnasium.spaces import Text
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import LedgerError
from agentrl.message import ImagePart, TextPart, text_of
from agentrl.message.image import PlacedImage, common_tokens, rope_positions
from agentrl.observe.trajectory_record import trajectory_record
from agentrl.observe.trajectory_store import TrajectoryStore, read_trajectories
from agentrl.training.batch import turn_states
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

A, B = ImagePart(data=b"a", alternative="an a"), ImagePart(data=b"b")


def placed(start: int, rows: int, columns: int, image: ImagePart = A) -> PlacedImage:
    return PlacedImage(start=start, rows=rows, columns=columns, image=image)


def shown(image: ImagePart) -> TokenSequence:
    """Two tokens, four of an image, one; then a turn of two sampled ones."""
    sequence = TokenSequence()
    sequence.extend([1, 2, 0, 0, 0, 0, 3], Source.PROMPT)
    sequence.place(placed(2, 2, 2, image))
    sequence.extend_sampled([4, 5], logprobs=[-1.0, -1.0], versions=[0, 0])
    sequence.turns.append(Turn(index=0, start=7, end=9))
    return sequence


def trajectory_of(*sequences: TokenSequence, name: str = "t") -> Trajectory:
    return Trajectory(id=name, task_id="t", environment="e", seed=0, group_id="g", sequences=list(sequences))


def test_images_are_distinguished_by_bytes_and_described_by_alternatives() -> None:
    assert ImagePart(data=b"a") == A != B
    assert A.checksum != B.checksum
    assert text_of((TextPart(text="See "), A, B)) == "See an a"
    assert text_of("text") == "text"


def test_a_content_space_holds_parts() -> None:
    space = ContentSpace(5)
    space.seed(0)
    assert space.contains(space.sample())
    assert space.contains((TextPart(text="né"), A, TextPart(text="abc")))
    assert not space.contains((TextPart(text="abcdef"),))
    assert not space.contains("text")
    assert not space.contains((A, "text"))
    assert (space, space.is_np_flattenable) == (ContentSpace(5), False)
    assert space != ContentSpace(6)
    assert space != Text(5)


@pytest.mark.parametrize(
    ("second", "length", "common"),
    [
        ([], 9, 2),
        ([placed(2, 2, 2)], 9, 9),
        ([placed(2, 2, 2, B)], 9, 2),
        ([placed(2, 1, 4)], 9, 2),
        ([placed(2, 2, 2)], 4, 2),
        ([placed(2, 2, 2, B)], 2, 2),
        ([placed(2, 2, 2), placed(7, 1, 1)], 9, 7),
        ([placed(2, 2, 2), placed(7, 1, 1)], 7, 7),
    ],
)
def test_sequences_share_tokens_up_to_the_first_image_that_differs(
    second: list[PlacedImage], length: int, common: int
) -> None:
    assert common_tokens(length, [placed(2, 2, 2)], second) == common
    assert common_tokens(length, second, [placed(2, 2, 2)]) == common


@given(data=st.data())
def test_positions_of_a_part_are_part_of_the_positions(data: st.DataObject) -> None:
    images, at = [], 0
    for _ in range(data.draw(st.integers(0, 3))):
        image = placed(at + data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
        images.append(image)
        at = image.end
    length = at + data.draw(st.integers(0, 5))
    start = data.draw(st.integers(0, length))
    end = data.draw(st.integers(start, length))
    whole = rope_positions(images, 0, length)
    assert rope_positions(images, start, end).tolist() == whole[:, start:end].tolist()
    if not images:
        assert whole.tolist() == [list(range(length))] * 3


def test_images_must_cover_unsampled_tokens() -> None:
    sequence = shown(A)
    for wrong in (placed(4, 1, 1), placed(7, 1, 2), placed(8, 2, 2), placed(6, 0, 3)):
        with pytest.raises(LedgerError, match="has no tokens"):
            sequence.place(wrong)
    assert sequence.images == (placed(2, 2, 2),)


def test_images_do_not_overlap_the_latest_of_several() -> None:
    sequence = shown(A)
    sequence.extend([0, 0, 0], Source.OBSERVATION)
    sequence.place(placed(9, 1, 2, B))
    with pytest.raises(LedgerError, match="some between 11 and 12"):
        sequence.place(placed(10, 1, 1))
    sequence.place(placed(11, 1, 1))
    assert [image.start for image in sequence.images] == [2, 9, 11]


def test_a_fork_shares_whole_images() -> None:
    sequence = shown(A)
    assert sequence.fork(6).images == sequence.images
    assert sequence.fork(2).images == ()
    with pytest.raises(LedgerError, match="fork inside an image"):
        sequence.fork(4)
    child = sequence.fork(9)
    child.extend([0], Source.OBSERVATION)
    child.place(placed(9, 1, 1, B))
    assert child.images == (placed(2, 2, 2), placed(9, 1, 1, B))
    assert child.fork(5 + 4).images == sequence.images


def test_a_store_keeps_an_image_once_in_a_file(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path, step=1)
    first, second, third = (trajectory_of(name=name) for name in "abc")
    for trajectory, image in ((first, A), (second, A), (third, B)):
        store.start(trajectory)
        trajectory.sequences.append(shown(image))
        store.turn(trajectory, trajectory.turns[0])
    store.end(first)
    store.rotate(2)
    fork = second.sequences[0].fork(9)
    fork.extend([0], Source.OBSERVATION)
    fork.place(placed(9, 1, 1, A))
    second.sequences.append(fork)
    store.end(second)
    store.close()
    lines = [(tmp_path / f"step-00000{step}.jsonl").read_text().count('"kind":"image"') for step in (1, 2)]
    assert lines == [2, 1]
    read = {s.trajectory.id: s.trajectory for s in read_trajectories(tmp_path, unfinished=True)}
    for trajectory in (first, second):
        assert trajectory_record(read[trajectory.id]) == trajectory_record(trajectory)
    assert read["c"].sequences[0].images == shown(B).images


def test_states_with_equal_tokens_differ_by_their_images() -> None:
    same, other = trajectory_of(shown(A), name="a"), trajectory_of(shown(B), name="b")
    assert turn_states([same, other, trajectory_of(shown(A), name="c")]).tolist() == [0, 1, 0]
