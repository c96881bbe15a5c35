"""The ledger of a conversation is what the engine saw, under any interleaving."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import TOKENIZER_FAMILIES, assemble_tokenizer, build_tokenizer, random_bpe

from agentrl.engine import Generation, StopReason
from agentrl.errors import LedgerError, TemplateError
from agentrl.message import Message, system, user
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.render.chat_template import common_prefix
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.trajectory import NOT_SAMPLED, Source, TokenSequence, Trajectory

texts = st.text(st.sampled_from("aest\n >_é…<|"), max_size=10)


@functools.cache
def random_renderer(family: str, seed: int, words: bool) -> Renderer:
    return Renderer(assemble_tokenizer(family, random_bpe(seed, words=words)))


def new_trajectory() -> Trajectory:
    return Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")


def generation(ids: list[int], version: int = 0) -> Generation:
    return Generation(
        token_ids=ids,
        logprobs=[-0.25 * (i + 1) for i in range(len(ids))],
        versions=[version] * len(ids),
        stop_reason=StopReason.STOP,
    )


@dataclass
class Recorder:
    """An engine's own record of what it was sent and what it sampled, to compare ledgers with."""

    sent: list[tuple[TokenSequence, list[int], list[int]]] = field(default_factory=list)

    def turn(self, conversation: LedgerConversation, answer: list[int], prefill: str) -> None:
        prompt = conversation.prepare(prefill).tolist()
        assert conversation.prepare().tolist() == prompt
        conversation.verify(prompt)
        conversation.accept(generation(answer, version=len(self.sent)))
        conversation.verify(prompt)
        self.sent.append((conversation.sequence, prompt, answer))


def draw_turn(data: st.DataObject, recorder: Recorder, conversation: LedgerConversation, renderer: Renderer) -> None:
    vocabulary = max(renderer.stop_token_ids) + 1
    answer = data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=6))
    if data.draw(st.booleans()):
        answer.append(renderer.boundary.end_id)
    recorder.turn(conversation, answer, data.draw(st.sampled_from(["", "<think>", "so "])))


def draw_history(data: st.DataObject, conversation: LedgerConversation) -> list[Message]:
    """A history that agrees with a conversation's up to some message, then says something else."""
    users = [i for i, message in enumerate(conversation.messages) if message.role == "user"]
    kept = conversation.messages[: data.draw(st.sampled_from(users))]
    return [*kept, user(data.draw(texts))]


@pytest.mark.parametrize("family", sorted(TOKENIZER_FAMILIES))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_ledger_is_what_the_engine_saw(family: str, data: st.DataObject) -> None:
    renderer = random_renderer(family, data.draw(st.integers(0, 4)), data.draw(st.booleans()))
    trajectory, recorder = new_trajectory(), Recorder()
    open_now = [LedgerConversation(renderer, trajectory, [system(data.draw(texts)), user(data.draw(texts))])]
    for _ in range(data.draw(st.integers(1, 8))):
        conversation = data.draw(st.sampled_from(open_now))
        draw_turn(data, recorder, conversation, renderer)
        conversation.add([user(data.draw(texts))])
        if data.draw(st.booleans()):
            open_now.append(conversation.fork(draw_history(data, conversation)))
    check_ledger(trajectory, recorder)


def check_ledger(trajectory: Trajectory, recorder: Recorder) -> None:
    for index, (sequence, prompt, answer) in enumerate(recorder.sent):
        turn = next(t for t in trajectory.turns if t.index == index)
        ids = sequence.token_ids.tolist()
        assert ids[: len(prompt) + len(answer)] == prompt + answer
        assert ids[turn.start : turn.end][len(prompt) - turn.start :] == answer
        sampled = slice(len(prompt), len(prompt) + len(answer))
        assert (sequence.sources[sampled] == Source.SAMPLED).all()
        assert (sequence.versions[sampled] == index).all()
    assert [turn.index for turn in trajectory.turns] == list(range(len(recorder.sent)))
    assert trajectory.sampled_tokens == sum(len(answer) for _, _, answer in recorder.sent)
    for sequence in trajectory.sequences:
        sampled_here = sequence.sources == Source.SAMPLED
        assert (np.isnan(sequence.logprobs) == ~sampled_here).all()
        assert ((sequence.versions == NOT_SAMPLED) == ~sampled_here).all()
        assert (sequence.loss_mask == sampled_here)[sequence.shared :].all()
    check_round_trip(trajectory)


def check_round_trip(trajectory: Trajectory) -> None:
    record = trajectory_record(trajectory)
    restored = trajectory_from_record(json.loads(json.dumps(record)))
    assert trajectory_record(restored) == record
    for mine, theirs in zip(trajectory.sequences, restored.sequences, strict=True):
        for name in ("token_ids", "sources", "logprobs", "versions", "loss_mask"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


@pytest.fixture
def renderer(renderer_of) -> Renderer:
    return renderer_of("qwen2.5")


@pytest.fixture
def conversation(renderer: Renderer) -> LedgerConversation:
    return LedgerConversation(renderer, new_trajectory(), [system("Play."), user("start")])


def answer(renderer: Renderer, text: str) -> Generation:
    return generation(renderer.demonstration(text))


def play(conversation: LedgerConversation, renderer: Renderer, *replies: str) -> None:
    for number, reply in enumerate(replies):
        conversation.prepare()
        conversation.accept(answer(renderer, reply))
        conversation.add([user(f"observation {number}")])


def test_a_history_that_goes_on_stays_one_sequence(renderer: Renderer, conversation: LedgerConversation) -> None:
    play(conversation, renderer, "north", "south")
    child = conversation.fork([*conversation.messages, user("and now?")])
    child.prepare()
    assert child.sequence is conversation.sequence
    conversation.prepare()
    assert conversation.sequence is not child.sequence
    assert conversation.sequence.parent is child.sequence
    assert len(conversation._trajectory.sequences) == 2


def test_a_rewritten_observation_forks_after_the_answer_before_it(
    renderer: Renderer, conversation: LedgerConversation
) -> None:
    play(conversation, renderer, "north", "south")
    conversation.prepare()
    first_answer = conversation.sequence.turns[0]
    child = conversation.fork([*conversation.messages[:3], user("something else")])
    ids = child.prepare().tolist()
    assert child.sequence.shared == first_answer.end
    assert renderer.encoder.decode(ids[first_answer.end :]) == (
        "\n<|im_start|>user\nsomething else<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_rewritten_answer_is_rendered_anew_and_not_trained(
    renderer: Renderer, conversation: LedgerConversation
) -> None:
    play(conversation, renderer, "north", "south")
    history = [*conversation.messages[:2], Message(role="assistant", content="nowhere"), user("summary")]
    child = conversation.fork(history)
    ids = child.prepare().tolist()
    assert ids == renderer.prompt(history).ids
    assert 0 < child.sequence.shared < len(ids)
    assert not child.sequence.loss_mask.any()


def test_histories_with_nothing_in_common_share_nothing(renderer: Renderer, conversation: LedgerConversation) -> None:
    child = conversation.fork([system("Other."), user("x")])
    child.prepare()
    assert (child.sequence.parent, child.sequence.shared) == (None, 0)
    check_round_trip(child._trajectory)


def test_a_prefilled_answer_is_forced_and_then_sampled(renderer: Renderer, conversation: LedgerConversation) -> None:
    prompt = conversation.prepare("<think>").tolist()
    reply = conversation.accept(answer(renderer, "hm</think>north"))
    turn = conversation.sequence.turns[0]
    assert (reply.message.reasoning, reply.text) == ("hm", "north")
    assert conversation.sequence.sources[turn.start] == Source.FORCED
    assert conversation.sequence.sources[len(prompt) :].tolist() == [Source.SAMPLED] * (turn.end - len(prompt))


def test_a_demonstration_is_forced_and_ends_its_turn(renderer: Renderer, conversation: LedgerConversation) -> None:
    reply = conversation.demonstrate("go north")
    turn = conversation.sequence.turns[0]
    assert reply.text == "go north"
    assert set(conversation.sequence.sources[turn.start : turn.end]) == {Source.FORCED}
    assert conversation.sequence.token_ids[-1] == renderer.boundary.end_id
    assert not conversation.sequence.loss_mask.any()


def test_messages_wait_for_the_answer(conversation: LedgerConversation) -> None:
    conversation.prepare()
    with pytest.raises(LedgerError, match="between a prompt and its answer"):
        conversation.add([user("too early")])


def test_an_answer_needs_a_prompt(conversation: LedgerConversation) -> None:
    with pytest.raises(LedgerError, match="without a prompt"):
        conversation.accept(generation([1]))


def test_tools_need_a_family_that_can_call_them(renderer_of) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    with pytest.raises(TemplateError, match=r"no known notation of tool calls.*react_text"):
        LedgerConversation(renderer_of("gemma"), new_trajectory(), [user("x")], tools=[tool])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda ids, renderer: [*ids[:-1]], "the end of the prompt is missing"),
        (lambda ids, renderer: [*ids, 7], "tokens were sent that the ledger does not contain"),
        (lambda ids, renderer: [ids[0], 7, *ids[2:]], "another text"),
        (
            lambda ids, renderer: [t for i in ids for t in spell_out(renderer, i)],
            "the same text in other tokens",
        ),
    ],
)
def test_a_mismatch_shows_token_neighbours_and_cause(
    renderer: Renderer, conversation: LedgerConversation, change, cause: str
) -> None:
    play(conversation, renderer, "north")
    ids = conversation.prepare().tolist()
    with pytest.raises(LedgerError, match=cause) as caught:
        conversation.verify(change(ids, renderer))
    assert "→" in str(caught.value)


def spell_out(renderer: Renderer, token: int) -> list[int]:
    """A token of text as one token per byte, as a careless encoder might write it."""
    if renderer.encoder.is_added(token):
        return [token]
    return [i for character in renderer.encoder.decode([token]) for i in renderer.encoder.encode(character)]


def test_the_message_of_a_mismatch_points_at_the_token(renderer: Renderer, conversation: LedgerConversation) -> None:
    play(conversation, renderer, "north")
    ids = conversation.prepare().tolist()
    at = conversation.sequence.turns[0].start
    wrong = [*ids[:at], renderer.encoder.encode("x")[0], *ids[at + 1 :]]
    with pytest.raises(LedgerError, match=rf"token {at} differs \(sampled, in turn 0\)"):
        conversation.verify(wrong)


def whole_prompt(renderer: Renderer, conversation: LedgerConversation) -> list[int]:
    return renderer.encoder.encode(renderer.template.render(conversation.messages, generation_prompt=True))


def test_a_template_that_drops_thinking_forks_and_shows_what_a_deployed_model_sees() -> None:
    renderer = Renderer(build_tokenizer("qwen3"), enable_thinking=True)
    renderer.rewrites_history = True
    trajectory = new_trajectory()
    conversation = LedgerConversation(renderer, trajectory, [system("Play."), user("start")])
    sampled = 0
    for turn in range(4):
        prompt = conversation.prepare().tolist()
        assert prompt == conversation.prepare().tolist() == whole_prompt(renderer, conversation)
        conversation.verify(prompt)
        answer = renderer.encoder.encode(f"<think>\nthought {turn}\n</think>\n\nmove {turn}")
        sampled += len(answer) + 1
        conversation.accept(generation([*answer, renderer.boundary.end_id]))
        conversation.add([user(f"seen {turn}")])
    assert [len(sequence.turns) for sequence in trajectory.sequences] == [1, 1, 1, 1]
    first, second = trajectory.sequences[:2]
    assert first.ids_list()[: first.turns[0].start - 1] == second.ids_list()[: first.turns[0].start - 1]
    assert sum(int((sequence.sources == Source.SAMPLED).sum()) for sequence in trajectory.sequences) == sampled
    assert "thought 0" not in renderer.encoder.decode(second.ids_list())


def test_where_nothing_is_dropped_a_forking_renderer_goes_on_in_one_sequence() -> None:
    renderer = Renderer(build_tokenizer("qwen3"), enable_thinking=True)
    renderer.rewrites_history = True
    trajectory = new_trajectory()
    conversation = LedgerConversation(renderer, trajectory, [user("start")])
    for turn in range(3):
        conversation.prepare()
        answer = renderer.encoder.encode(f"  move {turn} \n")
        conversation.accept(generation([*answer, renderer.boundary.end_id]))
        conversation.add([user(f"seen {turn}")])
    assert len(trajectory.sequences) == 1


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [([1, 2], [1, 2], 2), ([1, 2], [1], 1), ([1, 2, 3], [1, 9, 3], 1), ([], [1], 0)],
)
def test_the_common_prefix_ends_at_the_first_difference(first: list[int], second: list[int], length: int) -> None:
    assert common_prefix(first, second) == length
