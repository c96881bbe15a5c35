"""Rendering a turn at a time gives the tokens of the whole conversation, whatever the tokenizer."""

from __future__ import annotations

import functools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.tokenizers import TOKENIZER_FAMILIES, assemble_tokenizer, build_tokenizer, random_bpe

from agentrl.engine import Generation, StopReason
from agentrl.errors import TemplateError
from agentrl.message import Message, Role, TextPart, ToolCall, system, user
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.trajectory import Trajectory

ROLES: dict[str, tuple[Role, ...]] = {
    "qwen2.5": ("user", "tool"),
    "qwen2.5-vl": ("user", "tool"),
    "qwen3": ("user", "tool"),
    "qwen3_coder": ("user", "tool"),
    "llama3": ("user", "tool"),
    "gemma": ("user",),
    "gemma4": ("user", "tool"),
    "mistral": ("user", "tool"),
    "mistral_v3": ("user", "tool"),
    "glm": ("user", "tool"),
    "deepseek_v3": ("user", "tool"),
    "deepseek_v3.1": ("user", "tool"),
    "deepseek_v3.2": ("user", "tool"),
    "kimi_k2": ("user", "tool"),
    "kimi_k2_thinking": ("user", "tool"),
    "gpt_oss": ("user", "tool"),
    "llama4": ("user", "tool"),
    "lfm2": ("user", "tool"),
    "seed_oss": ("user", "tool"),
    "apertus": ("user",),
}
ANSWERS_AS_HISTORY = sorted(set(TOKENIZER_FAMILIES) - {"minimax_m2"})
"""Families whose answers begin in a history as they are asked for; MiniMax M2 asks for thinking."""
SYSTEM_MOVES = {"mistral_v3"}
"""Families whose system prompt stands before the last user message, so that a conversation with one is rewritten."""
contents = st.text(st.sampled_from("aest\n >_é…<|"), max_size=12)
answers = st.text(st.sampled_from("aest >_é"), min_size=1, max_size=12).map(str.strip).filter(bool)


@functools.cache
def random_renderer(family: str, seed: int, words: bool) -> Renderer:
    thinks = not family.startswith("deepseek")
    return Renderer(assemble_tokenizer(family, random_bpe(seed, words=words)), enable_thinking=thinks)


def generation(ids: list[int]) -> Generation:
    return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), stop_reason=StopReason.STOP)


def new_trajectory() -> Trajectory:
    return Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")


def template_answer(renderer: Renderer, prompt: list[int], whole: list[int]) -> list[int]:
    """The tokens of the answer in a whole rendering, with the end of its turn."""
    assume(whole[: len(prompt)] == prompt)
    end = next(i for i in range(len(prompt), len(whole)) if whole[i] in renderer.boundary.end_ids)
    return whole[len(prompt) : end + 1]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("family", ANSWERS_AS_HISTORY)
def test_incremental_rendering_equals_the_whole_where_the_model_writes_what_the_template_would(
    family: str, data: st.DataObject
) -> None:
    renderer = random_renderer(family, data.draw(st.integers(0, 5)), data.draw(st.booleans()))
    encode, template = renderer.encoder.encode, renderer.template
    messages = [] if family in SYSTEM_MOVES else [system(data.draw(contents))]
    messages.append(user(data.draw(contents)))
    conversation = LedgerConversation(renderer, new_trajectory(), messages)
    for _ in range(data.draw(st.integers(1, 4))):
        prompt = conversation.prepare().tolist()
        role = data.draw(st.sampled_from(ROLES[family]))
        call = ToolCall(name="look", arguments={"at": data.draw(answers)}, id=renderer.call_id("look", 0))
        observation = Message(role=role, content=data.draw(contents), tool_call_id=call.id, name="look")
        if role == "tool":
            messages += [Message(role="assistant", tool_calls=(call,)), observation]
        else:
            messages += [Message(role="assistant", content=data.draw(answers)), observation]
        whole = encode(template.render(messages, generation_prompt=True))
        answer = template_answer(renderer, prompt, whole)
        cut_by_length = data.draw(st.booleans())
        conversation.accept(generation(answer[:-1] if cut_by_length else answer))
        conversation.add([observation])
        assert conversation.prepare().tolist() == whole
        conversation.verify(whole)


@pytest.mark.parametrize("family", sorted(TOKENIZER_FAMILIES))
@settings(max_examples=25, deadline=None, derandomize=True)
@given(text=st.text(max_size=60), seed=st.integers(0, 3), words=st.booleans())
def test_cached_pieces_encode_like_the_whole(family: str, text: str, seed: int, words: bool) -> None:
    encoder = random_renderer(family, seed, words).encoder
    added = TOKENIZER_FAMILIES[family].special[0]
    for probe in (text, f"{text}{added}{text}", f"{added}{added} {text}"):
        whole = encoder._backend_for(probe).encode(probe, add_special_tokens=False)
        ranges = [(0, len(text)), (len(probe) - len(text) // 2, len(probe))] if len(probe) > len(text) else [(1, 3)]
        expected = [tokens_of(whole, start, min(end, len(probe))) for start, end in ranges]
        assert encoder.encode(probe) == whole.ids
        assert encoder.encode_with_ranges(probe, ranges) == (whole.ids, expected)


def tokens_of(encoding, start: int, end: int) -> tuple[int, int]:
    found = [token for at in range(start, end) if (token := encoding.char_to_token(at)) is not None]
    return (found[0], found[-1] + 1) if found else (0, 0)


def test_text_parts_are_rendered_as_their_text(renderer_of) -> None:
    renderer = renderer_of("qwen2.5")
    parts = user((TextPart(text="go "), TextPart(text="north")))
    assert renderer.prompt([parts]).ids == renderer.prompt([user("go north")]).ids


def test_a_refused_message_names_the_roles(renderer_of) -> None:
    with pytest.raises(TemplateError, match=r"user, user.*must alternate"):
        renderer_of("gemma").prompt([user("a"), user("b")])


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        Renderer(tokenizer)


OWN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template of no known family, which ends turns with a token of Qwen's."""


def test_an_unknown_template_gives_its_own_boundary() -> None:
    tokenizer = build_tokenizer("gemma")
    tokenizer.chat_template = (
        "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    renderer = Renderer(tokenizer)
    assert renderer.family.name == "unknown"
    assert renderer.encoder.decode([renderer.boundary.end_id]) == "<eos>"
    suffix = renderer.suffix([user("hi")], last_id=renderer.boundary.end_id)
    assert renderer.encoder.decode(suffix.ids) == "<bos>user: hi<eos><bos>assistant: "


@pytest.mark.parametrize("template", [None, OWN_TEMPLATE], ids=["known", "own"])
def test_an_eos_that_is_not_the_end_of_turn_stops_sampling_and_ends_no_turn(template: str | None) -> None:
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.add_special_tokens({"eos_token": "<|document_end|>"})
    renderer, eos = Renderer(tokenizer), tokenizer.eos_token_id
    end = renderer.encoder.added_id("<|im_end|>")
    assert (renderer.boundary.end_id, renderer.family.name == "unknown") == (end, template is not None)
    assert {eos, end} <= renderer.stop_token_ids
    assert renderer.demonstration("north")[-1] == end
    after_eos, after_end = (renderer.suffix([user("on")], last_id=last).ids for last in (eos, end))
    assert after_eos == [end, *after_end]
    tokenizer.eos_token = None
    assert Renderer(tokenizer).stop_token_ids == renderer.stop_token_ids - {eos}


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    tokenizer = build_tokenizer("gemma")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(TemplateError, match="does not mark the end of an answer"):
        Renderer(tokenizer)


def test_a_template_that_hides_answers_is_refused() -> None:
    tokenizer = build_tokenizer("gemma")
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}<bos>{{ m.content }}<eos>{% endfor %}"
    with pytest.raises(TemplateError, match="omits the assistant's content"):
        Renderer(tokenizer)


@pytest.mark.parametrize("family", TOKENIZER_FAMILIES)
def test_a_suffix_that_comes_again_is_the_same_whatever_was_done_with_the_first(family: str, renderer_of) -> None:
    renderer = renderer_of(family)
    for text in ("go on", "go on " * 200):
        for last_id in (None, renderer.boundary.end_id):
            first = renderer.suffix([user(text)], last_id=last_id)
            expected = list(first.ids), first.sources
            first.ids.clear()
            again = renderer.suffix([user(text)], last_id=last_id)
            assert (again.ids, again.sources) == expected
        whole, rest = (renderer.suffix([user(text)], last_id=i).ids for i in (None, renderer.boundary.end_id))
        assert whole[1:] == rest


def test_long_messages_are_not_kept(renderer_of) -> None:
    renderer = renderer_of("qwen2.5")
    before = renderer._known_suffix.cache_info().currsize
    renderer.suffix([user("new " * 200)], last_id=None)
    assert renderer._known_suffix.cache_info().currsize == before
    renderer.suffix([user("new and short")], last_id=None)
    assert renderer._known_suffix.cache_info().currsize == before + 1
