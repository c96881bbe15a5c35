"""Two tokenizations of one text: hand-computed groups, and what holds for any text and any pair of tokenizers."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import (
    OTHER_TEMPLATES,
    TOKENIZER_FAMILIES,
    assemble_tokenizer,
    build_tokenizer,
    build_with_other_template,
    random_bpe,
    train_unigram,
    train_words,
)

from agentrl.engine import Generation, StopReason
from agentrl.errors import UsageError
from agentrl.message import Message, system, user
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.render.translation import NO_GROUP, UNALIGNED, Translation, Translator, align
from agentrl.trajectory import Trajectory

MAKERS = {
    "bytes": lambda: assemble_tokenizer("llama3", random_bpe(3, merges=80)),
    "unigram": lambda: assemble_tokenizer("gemma", train_unigram()),
    "words": lambda: assemble_tokenizer("mistral", train_words()),
    "random-1": lambda: assemble_tokenizer("llama3", random_bpe(1, merges=120)),
    "random-2": lambda: assemble_tokenizer("llama3", random_bpe(2, merges=120)),
}
PAIRS = (("qwen3", "bytes"), ("bytes", "unigram"), ("unigram", "qwen3"))
"""Byte-level BPE of words, byte-level BPE over spaces, and unigrams with bytes for rare characters."""
ODD = "aeo t\n\u2581\u00e9\ud55c\U0001f469\u200d\u0301\u01c4"
"""Letters, spaces, sentencepiece's space, and characters of several bytes or code points."""
TEXTS = st.text(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=40)
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@functools.cache
def renderer(name):
    made = Renderer(MAKERS[name]() if name in MAKERS else build_tokenizer(name))
    made.keeps_contexts = True
    return made


def generation(ids, logprobs):
    return Generation(token_ids=list(ids), logprobs=logprobs, versions=[0] * len(ids), stop_reason=StopReason.STOP)


ASKED, TOLD = (user("Where to?"),), (user("Go on."),)


def sampled(policy, *answers, messages=ASKED, between=TOLD, tools=(), prefill=""):
    """The episode of a policy that samples these answers: texts, or token ids."""
    own, trajectory = renderer(policy), Trajectory(id="t", task_id="", environment="", seed=0, group_id="")
    conversation = LedgerConversation(own, trajectory, messages, tools=tools)
    for answer in answers:
        conversation.prepare(prefill)
        ids = [*own.encoder.encode(answer), own.boundary.end_id] if isinstance(answer, str) else answer
        logprobs = [-0.5 - 0.1 * number for number in range(len(ids))]
        conversation.accept(generation(ids, logprobs))
        conversation.add(between)
    return trajectory


def translate(trajectory, policy, reader):
    masks = [sequence.loss_mask for sequence in trajectory.sequences]
    return Translator(renderer(policy), renderer(reader)).translate(trajectory, masks)


def pieces(sequence, found, policy, reader):
    """The text of each group on both sides, in order, and the number of tokens."""
    ids, groups, mine, yours = sequence.token_ids, found.groups, renderer(policy).encoder, renderer(reader).encoder
    other = np.concatenate([own[own_g >= 0] for own, own_g in zip(found.ids, found.other_groups, strict=True)])
    numbers = dict.fromkeys(groups[groups >= 0].tolist())
    both = [(ids[groups == number].tolist(), other[found.scored_groups == number].tolist()) for number in numbers]
    return [(mine.decode(own), yours.decode(theirs), len(own), len(theirs)) for own, theirs in both]


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ([3, 6], [(2, 2), (5, 5), (6, 6)], ([0, 0], [0, 0, 0])),
        ([1, 2, 3], [(1, 1), (2, 2), (3, 3)], ([0, 1, 2], [0, 1, 2])),
        ([None, None, 1, 2], [None, (1, 1), (2, 2)], ([0, 0, 0, 1], [0, 0, 1])),
        ([1, None], [(1, 1)], ([0, NO_GROUP], [0])),
        ([0, 1, 1], [(1, 1)], ([0, 0, 0], [0])),
        ([1], [(0, 0), (1, 1), (1, 1)], ([0], [0, 0, 0])),
        ([5, 6, 11], [(5, 6), (11, 11)], ([0, 1, 1], [0, 1])),
        ([6, 11, 12], [(5, 6), (11, 12)], ([0, 1, NO_GROUP], [0, 1])),
        ([], [(1, 1)], ([], [NO_GROUP])),
        ([None], [], ([NO_GROUP], [])),
    ],
)
def test_groups_by_hand(own, other, expected):
    assert align(own, other) == expected


def test_two_tokens_against_one_by_hand():
    """log p of the group is -2, and its tokens were sampled with -1 and -0.5: -1.25 and -0.75 are 0.25 below each."""
    found = Translation(
        ids=(np.array([7, 8, 9], np.int32),),
        other_groups=(np.array([NO_GROUP, 0, 1], np.int32),),
        groups=np.array([NO_GROUP, 0, 0, 1, UNALIGNED], np.int32),
    )
    values = found.distribute(np.array([-2.0, -3.0], np.float32), np.array([np.nan, -1, -0.5, -4, -1], np.float32))
    assert values.tolist() == pytest.approx([np.nan, -1.25, -0.75, -3.0, np.nan], nan_ok=True)
    assert found.counts == (4, 1, 1)


def test_an_expert_sampled_nothing_so_that_its_tokens_get_equal_parts():
    groups = np.array([NO_GROUP, 0, 0], np.int32)
    found = Translation(ids=(np.array([1, 2]),), other_groups=(np.array([NO_GROUP, 0], np.int32),), groups=groups)
    assert found.distribute(np.array([-3.0], np.float32), np.full(3, np.nan, np.float32))[1:].tolist() == [-1.5, -1.5]


def check_sums(trajectory, found, seed):
    """The values of the tokens add up to those of the other model, group by group, and so over the whole text."""
    (sequence,), generator = trajectory.sequences, np.random.default_rng(seed)
    told = -generator.exponential(2.0, found.scored_groups.size).astype(np.float32)
    values = found.distribute(told, sequence.logprobs).astype(np.float64)
    assert np.isnan(values).tolist() == (found.groups < 0).tolist()
    assert np.nansum(values) == pytest.approx(told.sum(dtype=np.float64), abs=1e-3)
    for number in {*found.scored_groups.tolist()}:
        assert values[found.groups == number].sum() == pytest.approx(
            told[found.scored_groups == number].sum(), abs=1e-4
        )


@pytest.mark.parametrize(("policy", "reader"), PAIRS)
@given(text=TEXTS, seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_the_groups_of_any_text_add_up_to_the_whole_text(policy, reader, text, seed):
    trajectory = sampled(policy, text)
    (found,) = translate(trajectory, policy, reader)
    check_sums(trajectory, found, seed)
    *parts, end = pieces(trajectory.sequences[0], found, policy, reader)
    assert end[2:] == (1, 1)
    assert all(own == other for own, other, *_ in parts)
    assert found.counts[2] == 0
    assert sum(length for *_, length in parts) + 1 == found.scored_groups.size
    (ids,), (groups,) = found.ids, found.other_groups
    assert renderer(reader).encoder.decode(ids[groups >= 0][:-1].tolist()) == text


@pytest.mark.parametrize(("policy", "reader"), PAIRS)
@given(choices=st.lists(st.integers(0, 2**16), max_size=30), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_bytes_that_are_no_character_and_control_tokens_are_read_as_text(policy, reader, choices, seed):
    encoder, own = renderer(policy).encoder, renderer(policy)
    choices = [token for token in (choice % 400 for choice in choices) if encoder.decode([token])]
    trajectory = sampled(policy, [*choices, own.boundary.end_id])
    (found,) = translate(trajectory, policy, reader)
    check_sums(trajectory, found, seed)
    assert found.counts[2] == 0
    (ids,), (groups,) = found.ids, found.other_groups
    read = renderer(reader).encoder.decode(ids[groups >= 0][:-1].tolist())
    if "\N{REPLACEMENT CHARACTER}" not in encoder.decode(choices):
        assert read == encoder.decode(choices)


def test_groups_of_the_authors_of_dpca():
    """Computed by their code for random texts; `large_chunk_threshold`, which drops long groups, was off."""
    own, other = (renderer(f"random-{seed}") for seed in (1, 2))
    cases = json.loads((Path(__file__).parent / "authors_chunks.json").read_text())["cases"]
    for case in cases:
        ids = own.encoder.encode(case["text"])
        turn = Translator(own, other)._align([*ids, own.boundary.end_id], np.ones(len(ids) + 1, np.bool_))
        assert turn.own[:-1].tolist() == case["chunks"]
        sums = np.bincount(turn.other[:-1], case["teacher_logp"])
        sizes = np.bincount(turn.own[:-1])
        assert (sums / sizes)[turn.own[:-1]].tolist() == pytest.approx(case["mean_logp"], abs=2e-4)
    assert sum(len(case["chunks"]) - case["chunks"][-1] for case in cases) > len(cases), "some have several tokens"


def test_the_same_tokenizer_has_every_token_one_to_one():
    trajectory = sampled("qwen3", "na\u00efve \U0001f469 > go to cabinet 1", "", "x")
    (found,) = translate(trajectory, "qwen3", "qwen3")
    sequence = trajectory.sequences[0]
    assert found.counts == (int(sequence.loss_mask.sum()),) * 2 + (0,)
    (ids,), (groups,) = found.ids, found.other_groups
    assert ids.tolist() == sequence.ids_list()[: len(ids)]
    assert (groups >= 0).tolist() == sequence.loss_mask[: len(ids)].tolist()
    told = np.linspace(-9, -1, found.scored_groups.size, dtype=np.float32)
    assert found.distribute(told, sequence.logprobs)[sequence.loss_mask].tolist() == told.tolist()


@pytest.mark.parametrize(("policy", "reader"), PAIRS)
def test_cut_and_empty_answers(policy, reader):
    """A cut answer has no end, and a character whose last bytes are missing has no counterpart."""
    own = renderer(policy)
    cut = own.encoder.encode("go \U0001f469")[:-1]
    trajectory = sampled(policy, cut, "", "look")
    (found,) = translate(trajectory, policy, reader)
    sequence = trajectory.sequences[0]
    first, second, _ = sequence.turns
    unaligned = found.groups[first.start : first.end] == UNALIGNED
    assert 1 <= unaligned.sum() == found.counts[2] <= 3
    assert own.encoder.decode(np.array(cut)[~unaligned].tolist()) == "go "
    assert found.groups[second.start : second.end].tolist() == [found.groups[first.start : first.end].max() + 1]
    assert [part[0] for part in pieces(sequence, found, policy, reader)][-2:-1] == ["k"] or found.counts[0] > 3


def test_a_word_list_that_normalises_drops_spaces_and_has_unknown_words():
    trajectory = sampled("qwen3", "You  See \u2603 a Drawer \n")
    (found,) = translate(trajectory, "qwen3", "words")
    texts = {other: own for own, other, *_ in pieces(trajectory.sequences[0], found, "qwen3", "words")}
    assert {"you", "see", "a", "drawer"} <= {*texts}
    assert "<unk>" not in texts, "the probability of an unknown word is not that of this word"
    assert 0 < found.counts[2] < found.counts[0] / 2
    check_sums(trajectory, found, 0)


def test_a_prefill_is_context_and_a_token_across_its_end_is_left_out():
    trajectory = sampled("qwen3", "t to cabinet", prefill="Thought: ge")
    (found,) = translate(trajectory, "qwen3", "bytes")
    sequence = trajectory.sequences[0]
    assert (found.groups[~sequence.loss_mask] == NO_GROUP).all()
    assert "get" not in [own for own, *_ in pieces(sequence, found, "qwen3", "bytes")]
    check_sums(trajectory, found, 0)


def test_control_tokens_in_an_answer_are_text_for_the_reader():
    """The policy writes the reader's control token as text; the reader reads that text, and its turn goes on."""
    text = "a <|eot_id|> b"
    trajectory = sampled("qwen3", text)
    (found,) = translate(trajectory, "qwen3", "bytes")
    assert found.counts[2] == 0
    (other,) = translate(sampled("qwen3", "a b"), "qwen3", "bytes")
    end = renderer("bytes").boundary.end_id
    assert (found.ids[0] == end).sum() == (other.ids[0] == end).sum()
    assert "".join(other for _, other, *_ in pieces(trajectory.sequences[0], found, "qwen3", "bytes")[:-1]) == text


@pytest.mark.parametrize("reader", ["bytes", "unigram", *TOKENIZER_FAMILIES, *OTHER_TEMPLATES])
def test_every_published_template_reads_a_conversation(reader):
    """A system message, two answers and an observation; the reader's own tokens around them."""
    opening = [system("Be brief."), user("Where to?")]
    trajectory = sampled("qwen3", "go to cabinet 1", "look", messages=opening)
    own, other = renderer("qwen3"), other_renderer(reader)
    masks = [sequence.loss_mask for sequence in trajectory.sequences]
    (found,) = Translator(own, other).translate(trajectory, masks)
    trained, _, unaligned = found.counts
    assert (trained, unaligned) == (masks[0].sum(), 0)
    text = other.encoder.decode(found.ids[-1].tolist())
    assert text.index("Be brief.") < text.index("go to cabinet 1") < text.index("Go on.") < text.index("look")
    assert "<|im_start|>user" not in text or "im_start" in other.header
    plain = other.template.render([*opening, Message(role="assistant", content="go to cabinet 1"), user("Go on.")])
    assert without_space(plain)[-12:] in without_space(text) or other.rewrites_history
    check_sums(trajectory, found, 1)


def without_space(text):
    return "".join(text.split())


@functools.cache
def other_renderer(name):
    return Renderer(build_with_other_template(name)) if name in OTHER_TEMPLATES else renderer(name)


def test_calls_and_results_are_shown_in_the_readers_form():
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    result = Message(role="tool", content="A cabinet.", tool_call_id="call_0", name="look")
    trajectory = sampled("qwen3", call, "go", between=(result,), tools=(LOOK,))
    for reader in ("mistral_v3", "llama3", "kimi_k2", "qwen2.5"):
        (found,) = translate(trajectory, "qwen3", reader)
        text = renderer(reader).encoder.decode(found.ids[-1].tolist())
        assert text.index(call) < text.index("A cabinet.") < text.rindex("go")
        assert "look" in text[: text.index(call)], "the tool is offered"
        assert found.counts[2] == 0


def test_a_fork_is_translated_with_what_it_shares_and_a_rewritten_history_without():
    own, trajectory = renderer("qwen3"), Trajectory(id="t", task_id="", environment="", seed=0, group_id="")
    conversation = LedgerConversation(own, trajectory, [user("Where to?")])

    def answer(conversation, text):
        conversation.prepare()
        ids = [*own.encoder.encode(text), own.boundary.end_id]
        conversation.accept(generation(ids, [-1.0] * len(ids)))

    answer(conversation, "north")
    conversation.add([user("A wall.")])
    answer(conversation, "south")
    branch = conversation.fork([*conversation.messages[:2], user("A door.")])
    answer(branch, "open")
    other = conversation.fork([user("Where now?"), Message(role="assistant", content="north"), user("A pit.")])
    answer(other, "jump")
    first, second, third = translate(trajectory, "qwen3", "bytes")
    decode = renderer("bytes").encoder.decode
    assert first.counts[2] == second.counts[2] == third.counts[2] == 0
    assert second.counts[0] == len(own.encoder.encode("open")) + 1, "shared tokens are trained once"
    assert decode(second.ids[0].tolist()).count("north") == 1
    assert "Where now?" in decode(third.ids[0].tolist())
    assert "Where to?" not in decode(third.ids[0].tolist())


@pytest.mark.parametrize(
    ("policy", "reader", "begins"),
    [
        ("deepseek_r1", "bytes", "<think>\nhm</think>north"),
        ("deepseek_r1", "deepseek_r1", "hm</think>north"),
        ("gpt_oss", "bytes", "hm</think>north"),
        ("bytes", "gpt_oss", "<|channel|>final<|message|>hm</think>north"),
    ],
)
def test_headers_that_open_thinking_or_a_channel(policy, reader, begins):
    """The mark that only one of the two headers writes is context, and the answer's tokens are compared."""
    own, other = other_renderer(policy), other_renderer(reader)
    own.keeps_contexts, trajectory = True, Trajectory(id="t", task_id="", environment="", seed=0, group_id="")
    conversation = LedgerConversation(own, trajectory, ASKED)
    conversation.prepare()
    ids = [*own.encoder.encode("hm</think>north"), own.boundary.end_id]
    conversation.accept(generation(ids, [-1.0] * len(ids)))
    masks = [sequence.loss_mask for sequence in trajectory.sequences]
    (found,) = Translator(own, other).translate(trajectory, masks)
    text = other.encoder.decode(found.ids[0].tolist())
    assert text.removeprefix(other.encoder.decode(other.prompt(ASKED).ids)).startswith(begins)
    assert found.counts[2] <= 1
    check_sums(trajectory, found, 0)


def test_an_episode_whose_messages_were_not_kept_is_an_error():
    trajectory = sampled("qwen3", "go")
    trajectory.contexts.clear()
    with pytest.raises(UsageError, match="needs the messages of an episode"):
        translate(trajectory, "qwen3", "bytes")


def test_the_share_of_equal_tokens():
    assert Translator(renderer("qwen3"), renderer("qwen3")).equal_share() == 1.0
    assert 0.1 < Translator(renderer("qwen3"), renderer("bytes")).equal_share() < 1.0
