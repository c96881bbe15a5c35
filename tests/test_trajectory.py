"""The token ledger's arrays against plain lists."""

from __future__ import annotations

import json
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import LedgerError, Outcome, UsageError
from agentrl.message import ImagePart, Message, ToolCall
from agentrl.message.image import PlacedImage
from agentrl.models.routed_experts import RoutedExperts
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.trajectory import NOT_SAMPLED, Source, TokenSequence, Trajectory, Turn, TurnTimings, id_array

NOT_BY_POLICY = [source for source in Source if source is not Source.SAMPLED]
RED, BLUE = ImagePart(data=b"red"), ImagePart(data=b"blue")
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
logprobs = st.floats(-100, 0, width=32)

Row = tuple[int, int, float | None, int, bool]
"""Id, source, log-probability, version, and whether this sequence trains it."""


def grow(data: st.DataObject, sequence: TokenSequence, rows: list[Row]) -> None:
    """Append something drawn to a sequence and to its model."""
    tokens = data.draw(ids)
    kind = data.draw(st.sampled_from(["same", "each", "sampled"]))
    if kind == "sampled":
        values = data.draw(st.lists(logprobs, min_size=len(tokens), max_size=len(tokens)))
        versions = sorted(data.draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens))))
        sequence.extend_sampled(tokens, logprobs=values, versions=versions)
        rows += [(t, Source.SAMPLED, v, n, True) for t, v, n in zip(tokens, values, versions, strict=True)]
        return
    sources = [data.draw(st.sampled_from(NOT_BY_POLICY)) for _ in tokens or [0]]
    if kind == "same":
        sequence.extend(tokens, sources[0])
        rows += [(t, sources[0], None, NOT_SAMPLED, False) for t in tokens]
    else:
        sequence.extend(tokens, bytes(sources[: len(tokens)]))
        rows += [(t, s, None, NOT_SAMPLED, False) for t, s in zip(tokens, sources, strict=False)]


def check(sequence: TokenSequence, rows: list[Row]) -> None:
    assert len(sequence) == len(rows)
    assert sequence.ids_list() == [row[0] for row in rows] == sequence.token_ids.tolist()
    assert all(sequence.ids_array(i).tolist() == sequence.ids_list()[i:] for i in range(len(rows) + 1))
    assert sequence.sources.tolist() == [row[1] for row in rows]
    assert [None if np.isnan(v) else v for v in sequence.logprobs.tolist()] == [row[2] for row in rows]
    assert sequence.versions.tolist() == [row[3] for row in rows]
    assert sequence.loss_mask.tolist() == [row[4] for row in rows]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.slow
def test_sequences_behave_like_lists_under_any_interleaving(data: st.DataObject) -> None:
    trajectory = Trajectory(id="t", task_id="17", environment="e", seed=1, group_id="g")
    models: list[list[Row]] = []
    for _ in range(data.draw(st.integers(1, 10))):
        if not models or data.draw(st.booleans()):
            trajectory.sequences.append(TokenSequence())
            models.append([])
        elif data.draw(st.booleans()):
            parent = data.draw(st.integers(0, len(models) - 1))
            shared = data.draw(st.integers(0, len(models[parent])))
            trajectory.sequences.append(trajectory.sequences[parent].fork(shared))
            models.append([(*row[:4], False) for row in models[parent][:shared]])
        index = data.draw(st.integers(0, len(models) - 1))
        grow(data, trajectory.sequences[index], models[index])
    restored = trajectory_from_record(json.loads(json.dumps(trajectory_record(trajectory))))
    for sequence, copy, rows in zip(trajectory.sequences, restored.sequences, models, strict=True):
        check(sequence, rows)
        check(copy, rows)
    own = [row for rows in models for row in rows if row[4]]
    assert trajectory.sampled_tokens == restored.sampled_tokens == len(own)
    assert trajectory.oldest_version == min((row[3] for row in own), default=None)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_images_and_routes_follow_their_tokens_through_forks_and_storage(data: st.DataObject) -> None:
    """Sequences grow by turns, fork and are stored turn by turn; token t of any branch was routed to experts (t, t)."""
    trajectory = Trajectory(id="t", task_id="17", environment="e", seed=1, group_id="g", sequences=[TokenSequence()])
    stored, pictures = [TokenSequence()], [list[PlacedImage]()]
    told: dict[int, int] = {}

    def routed(index: int) -> int:
        """How many tokens have routed_experts: those told in this branch, else those that its parent knows by now."""
        sequence = trajectory.sequences[index]
        if index in told or sequence.parent is None:
            return told.get(index, 0)
        return min(routed(trajectory.sequences.index(sequence.parent)), sequence.shared)

    for _ in range(data.draw(st.integers(1, 8))):
        index = data.draw(st.integers(0, len(stored) - 1))
        sequence = trajectory.sequences[index]
        if data.draw(st.booleans()):
            shared = data.draw(st.integers(0, len(sequence)))
            if any(image.start < shared < image.end for image in pictures[index]):
                with pytest.raises(LedgerError, match="fork inside an image"):
                    sequence.fork(shared)
                continue
            fork = sequence.fork(shared)
            trajectory.sequences.append(fork)
            pictures.append([image for image in pictures[index] if image.end <= shared])
            parent = None if fork.parent is None else stored[trajectory.sequences.index(fork.parent)]
            stored.append(TokenSequence(parent=parent, shared=fork.shared))
            index, sequence = len(stored) - 1, fork
        written = len(sequence) - sequence.shared
        known = len(pictures[index])
        for _ in range(data.draw(st.integers(0, 3))):
            pictures[index] += show(data, sequence)
            sequence.extend_sampled([7] * 2, logprobs=[-1.0] * 2, versions=[0] * 2)
        if len(sequence) - sequence.shared > written and data.draw(st.booleans()):
            sequence.routes.append(expert_pairs(routed(index), len(sequence) - 1), computed=len(sequence) - 1)
            told[index] = len(sequence) - 1
        assert sequence.own_images(written) == [image.image for image in pictures[index][known:]]
        arrays = json.loads(json.dumps(sequence.own_arrays(written)))
        stored[index].load_arrays(arrays, {image.checksum: image for image in (RED, BLUE)})
    restored = trajectory_from_record(json.loads(json.dumps(trajectory_record(trajectory))))
    for number, sequences in enumerate(zip(trajectory.sequences, restored.sequences, stored, strict=True)):
        for sequence in sequences:
            assert list(sequence.images) == pictures[number]
            assert sequence.token_ids.tolist() == trajectory.sequences[number].token_ids.tolist()
            assert len(sequence.routes) == routed(number)
            found = [] if sequence.routes.experts is None else sequence.routes.experts.tolist()
            assert found == expert_pairs(0, routed(number)).tolist()


def show(data: st.DataObject, sequence: TokenSequence) -> list[PlacedImage]:
    """Append text and perhaps an image, which is returned."""
    sequence.extend([1] * data.draw(st.integers(0, 2)), Source.PROMPT)
    rows = data.draw(st.integers(0, 2))
    start = len(sequence)
    sequence.extend([0] * rows * 2, Source.OBSERVATION)
    image = PlacedImage(start=start, rows=rows, columns=2, image=data.draw(st.sampled_from([RED, BLUE])))
    if not rows:
        with pytest.raises(LedgerError, match=f"expected some between .* and {start} that were not sampled"):
            sequence.place(image)
        return []
    sequence.place(image)
    return [image]


def expert_pairs(start: int, end: int) -> RoutedExperts:
    return np.repeat(np.arange(start, end, dtype=np.uint8)[:, None], 2, axis=1)


def test_routes_that_lack_those_before_them_are_not_read() -> None:
    sequence = TokenSequence()
    sequence.extend([1] * 9, Source.PROMPT)
    sequence.routes.append(expert_pairs(0, 2), computed=len(sequence) - 1)
    sequence.routes.append(expert_pairs(2, 4), computed=len(sequence) - 1)
    arrays = sequence.own_arrays()
    del arrays["routes"][0]
    copy = TokenSequence()
    copy.load_arrays(arrays)
    assert (len(copy.routes), copy.routes.experts) == (0, None)


@pytest.mark.parametrize("routed_experts", [expert_pairs(0, 3)[:, 0], expert_pairs(0, 3), expert_pairs(0, 4)])
def test_routed_experts_of_tokens_that_were_not_computed_are_refused(routed_experts: RoutedExperts) -> None:
    sequence = TokenSequence()
    sequence.extend([1] * 3, Source.PROMPT)
    with pytest.raises(LedgerError, match="from token 0 on, expected at most 2 tokens"):
        sequence.routes.append(routed_experts, computed=len(sequence) - 1)
    sequence.routes.append(expert_pairs(0, 0), computed=len(sequence) - 1)
    assert sequence.routes.experts is None
    sequence.routes.append(expert_pairs(0, 2), computed=len(sequence) - 1)
    assert len(sequence.routes) == 2


def test_a_fork_of_a_fork_hangs_on_the_sequence_that_stores_the_tokens() -> None:
    root = TokenSequence()
    root.extend([1, 2, 3], Source.PROMPT)
    sequence = root
    for _ in range(2000):
        sequence = sequence.fork(3)
    assert sequence.parent is root
    assert sequence.ids_list() == [1, 2, 3]


def test_a_sequence_grows_while_frames_that_read_it_are_held() -> None:
    """As by a profiler, or by the report of a stall."""
    sequence = TokenSequence()
    frames = []
    for version in range(3):
        sequence.extend([1, 2], Source.PROMPT)
        sequence.extend_sampled([3], logprobs=[-1.0], versions=[version])
        sys.setprofile(lambda frame, event, argument: frames.append(frame))
        try:
            sequence.own_arrays()
            assert sequence.versions.tolist() == [n for v in range(version + 1) for n in (NOT_SAMPLED, NOT_SAMPLED, v)]
            assert len(sequence.token_ids) == len(sequence.sources) == len(sequence.logprobs) == len(sequence.loss_mask)
        finally:
            sys.setprofile(None)
    assert frames


def test_only_arrays_of_32_bits_are_taken_without_a_copy() -> None:
    own, wide = array("i", [1, 2]), array("q", [1, 2])
    assert id_array(own) is own
    assert id_array(wide).tobytes() == id_array([1, 2]).tobytes() == id_array((1, 2)).tobytes() == own.tobytes()


@pytest.mark.parametrize("length", [-1, 4])
def test_a_fork_outside_the_sequence_is_refused(length: int) -> None:
    sequence = TokenSequence()
    sequence.extend([1, 2, 3], Source.PROMPT)
    with pytest.raises(LedgerError, match=f"fork outside the sequence: got {length}, expected 0 to 3"):
        sequence.fork(length)


@pytest.mark.parametrize("source", [Source.SAMPLED, bytes([Source.PROMPT, Source.SAMPLED])])
def test_sampled_tokens_cannot_come_without_logprobs(source: Source | bytes) -> None:
    with pytest.raises(LedgerError, match="Use extend_sampled"):
        TokenSequence().extend([1, 2], source)


def test_lengths_must_agree() -> None:
    sequence = TokenSequence()
    with pytest.raises(LedgerError, match="differ in number"):
        sequence.extend([1, 2], bytes([Source.PROMPT]))
    with pytest.raises(LedgerError, match=r"got \(2, 1, 2\)"):
        sequence.extend_sampled([1, 2], logprobs=[-1.0], versions=[0, 0])
    assert len(sequence) == 0


def test_a_trajectory_comes_back_from_its_record_exactly() -> None:
    sequence = TokenSequence()
    sequence.extend([5, 6], Source.PROMPT)
    sequence.extend_sampled([7], logprobs=[-0.1], versions=[3])
    timings = TurnTimings(queue=0.1, prefill=0.2, decode=0.3, tool=0.4, env=0.5, scoring=0.6, started=0.7)
    sequence.turns.append(
        Turn(index=0, start=2, end=3, role="judge", reward=0.5, valid=False, state_key="k", timings=timings)
    )
    sequence.turns.append(Turn(index=1, start=3, end=3, adapter="a", own_reward=0.25, repaired_calls=2))
    trajectory = Trajectory(
        id="17/0/1",
        task_id="17",
        environment="household",
        seed=9,
        group_id="17",
        attempt=1,
        sequences=[sequence],
        outcome=Outcome.TRUNCATED_TURNS,
        error="no",
        reward=0.25,
        reward_components={"goal": 0.25},
        reward_sources={"exact": 0.25},
        environment_sources={"environment/step": 1.0},
        success=False,
        metrics={"tool_calls": 2.0},
        task_type="clean",
    )
    restored = trajectory_from_record(json.loads(json.dumps(trajectory_record(trajectory))))
    assert trajectory_record(restored) == trajectory_record(trajectory)
    assert restored.turns == trajectory.turns
    assert (restored.reward_sources, restored.environment_sources) == ({"exact": 0.25}, {"environment/step": 1.0})
    assert restored.outcome is Outcome.TRUNCATED_TURNS
    assert restored.sequences[0].logprobs[2] == np.float32(-0.1)
    assert (restored.reward, restored.success, restored.oldest_version) == (0.25, False, 3)


def test_turns_are_ordered_over_all_sequences() -> None:
    first, second = TokenSequence(), TokenSequence()
    first.turns += [Turn(index=0, start=0, end=0), Turn(index=2, start=0, end=0)]
    second.turns += [Turn(index=1, start=0, end=0)]
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g", sequences=[first, second])
    assert [turn.index for turn in trajectory.turns] == [0, 1, 2]


def test_what_was_said_can_be_read_until_it_is_forgotten() -> None:
    calls = [ToolCall(name=name, arguments={}, id=name) for name in ("look", "take", "go")]
    first, second = TokenSequence(), TokenSequence()
    first.turns.append(Turn(index=0, start=0, end=0, reward=0.5))
    first.turns.append(Turn(index=1, start=0, end=0, reward=-0.25))
    trajectory = Trajectory(
        id="t7", task_id="t", environment="e", seed=0, group_id="g", sequences=[second, first], completions=["a", "b"]
    )
    trajectory.conversations = [
        [Message(role="user", content="old")],
        [Message(role="user", content="new"), Message(role="assistant", content="b")],
    ]
    trajectory.answers = [
        Message(role="assistant", content="a", tool_calls=tuple(calls[:2])),
        Message(role="assistant", content="", tool_calls=tuple(calls[2:])),
        Message(role="assistant", content="b"),
    ]
    assert [message.content for message in trajectory.messages] == ["new", "b"]
    assert (trajectory.final_text, trajectory.tool_calls) == ("b", tuple(calls))
    assert trajectory.environment_reward == 0.25
    trajectory.forget_messages()
    for name in ("messages", "final_text", "tool_calls"):
        with pytest.raises(UsageError, match="the messages of episode t7 are not available"):
            getattr(trajectory, name)
    assert trajectory.completions == []
    # three answers in two turns: none can be told to be of a turn
    assert [[(one.role, one.text, one.turn) for one in said] for said in trajectory.transcript] == [
        [("user", "old", None)],
        [("user", "new", None), ("assistant", "b", None)],
    ]


def test_the_text_of_an_episode_without_tokens_is_kept_and_stored() -> None:
    sequence = TokenSequence()
    sequence.turns.append(Turn(index=0, start=0, end=0))
    look = ToolCall(name="look", arguments={"at": "a"}, id="1")
    answer = Message(role="assistant", content="Well.", tool_calls=(look,), reasoning="hm")
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g", sequences=[sequence])
    trajectory.conversations, trajectory.answers = [[Message(role="user", content=(RED,)), answer]], [answer]
    with_tokens = trajectory_from_record(trajectory_record(trajectory))
    with_tokens.sequences[0].extend([1], Source.PROMPT)
    for one in (trajectory, with_tokens):
        one.forget_messages()
    restored = trajectory_from_record(json.loads(json.dumps(trajectory_record(trajectory))))
    asked, said = restored.transcript[0]
    assert (asked.role, asked.turn) == ("user", None)
    assert (said.turn, said.text) == (0, '<think>hm</think>\nWell.\n{"name": "look", "arguments": {"at": "a"}}')
    assert "transcript" not in trajectory_record(with_tokens)


def test_a_mere_call_is_no_final_text() -> None:
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")
    act = ToolCall(name="act", arguments={"action": "go north", "times": 2}, id="1")
    trajectory.answers = [Message(role="assistant", tool_calls=(ToolCall(name="look", arguments={"at": "a"}), act))]
    assert trajectory.final_text == ""
    trajectory.answers = [Message(role="assistant", content="I go.", tool_calls=(act,))]
    assert trajectory.final_text == "I go."


def test_an_episode_that_never_answered_said_nothing() -> None:
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g", sequences=[TokenSequence()])
    assert (trajectory.messages, trajectory.final_text, trajectory.tool_calls) == ((), "", ())
    assert trajectory.environment_reward == 0
