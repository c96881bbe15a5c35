"""The families with notations of their own: their conversations source by source, thinking apart, calls both ways."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from support.tokenizers import OTHER_TEMPLATES, TOKENIZER_FAMILIES, build_tokenizer, build_with_other_template

from agentrl.engine import Generation, StopReason
from agentrl.errors import TemplateError
from agentrl.message import Message, ToolCall, system, tool_result, user
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import OmittedText, Renderer
from agentrl.render.template_check import check_template
from agentrl.trajectory import Source, Trajectory

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"direction": {"type": "string"}}},
    },
}
FAMILIES = {
    "mistral": "mistral",
    "mistral_v3": "mistral",
    "gemma4": "gemma4",
    "glm": "glm",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3.1": "deepseek_v3.1",
    "deepseek_v3.2": "deepseek_v3.2",
    "kimi_k2": "kimi_k2",
    "kimi_k2_thinking": "kimi_k2",
    "gpt_oss": "gpt_oss",
    "minimax_m2": "minimax_m2",
    "llama4": "llama4",
    "lfm2": "lfm2",
    "seed_oss": "seed_oss",
    "apertus": "apertus",
}
LOOK = ToolCall(name="look", arguments={"direction": "north"}, id="call_1")
DSML = "｜DSML｜"


def conversation_of(renderer: Renderer) -> LedgerConversation:
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")
    return LedgerConversation(renderer, trajectory, [user("start")], tools=[TOOL])


def sampled(renderer: Renderer, text: str) -> Generation:
    ids = renderer.encoder.encode(text)
    return Generation(token_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids), stop_reason=StopReason.STOP)


def runs(conversation: LedgerConversation, renderer: Renderer) -> list[tuple[str, str]]:
    pairs = zip(conversation.sequence.sources.tolist(), conversation.sequence.token_ids.tolist(), strict=True)
    return [
        (Source(source).name, renderer.encoder.decode([token for _, token in group]))
        for source, group in itertools.groupby(pairs, key=lambda pair: pair[0])
    ]


CALLS = {
    "mistral": (
        '[TOOL_CALLS]look[ARGS]{"direction": "north"}</s>',
        [("TEMPLATE", "[TOOL_RESULTS]"), ("OBSERVATION", "dark"), ("TEMPLATE", "[/TOOL_RESULTS]")],
    ),
    "mistral_v3": (
        '[TOOL_CALLS] [{"name": "look", "arguments": {"direction": "north"}}]</s>',
        [
            ("TEMPLATE", '[TOOL_RESULTS] {"content": '),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", ', "call_id": "call00001"}[/TOOL_RESULTS]'),
        ],
    ),
    "gemma4": (
        '<|tool_call>call:look{direction:<|"|>north<|"|>}<tool_call|><|tool_response>',
        [
            ("TEMPLATE", 'response:look{value:<|"|>'),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", '<|"|>}<tool_response|>'),
        ],
    ),
    "glm": (
        "\n<tool_call>look\n<arg_key>direction</arg_key>\n<arg_value>north</arg_value>\n</tool_call><|observation|>",
        [
            ("TEMPLATE", "\n<tool_response>\n"),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", "\n</tool_response><|assistant|>\n<think></think>"),
        ],
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"direction": "north"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        [
            ("TEMPLATE", "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>"),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"),
        ],
    ),
    "deepseek_v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"direction": "north"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        [("TEMPLATE", "<｜tool▁output▁begin｜>"), ("OBSERVATION", "dark"), ("TEMPLATE", "<｜tool▁output▁end｜>")],
    ),
    "deepseek_v3.2": (
        f'\n\n<{DSML}function_calls>\n<{DSML}invoke name="look">\n'
        f'<{DSML}parameter name="direction" string="true">north</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls><｜end▁of▁sentence｜>",
        [
            ("TEMPLATE", "\n\n<function_results>\n<result>"),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", "</result>\n</function_results>\n\n</think>"),
        ],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"direction": "north"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        [
            ("TEMPLATE", "<|im_system|>look<|im_middle|>## Return of functions.look:0\n"),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", "<|im_end|><|im_assistant|>assistant<|im_middle|>"),
        ],
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"direction": "north"}<|call|>',
        [
            ("TEMPLATE", '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"'),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", '"<|end|><|start|>assistant'),
        ],
    ),
    "minimax_m2": (
        'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="direction">north</parameter>\n'
        "</invoke>\n</minimax:tool_call>[e~[",
        [
            ("TEMPLATE", "\n]~b]tool\n<response>"),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", "</response>[e~[\n]~b]ai\n<think>\n"),
        ],
    ),
    "llama4": (
        "[look(direction='north')]<|eot|>",
        [
            ("TEMPLATE", '<|header_start|>ipython<|header_end|>\n\n"'),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", '"<|eot|><|header_start|>assistant<|header_end|>\n\n'),
        ],
    ),
    "seed_oss": (
        "\n<seed:tool_call>\n<function=look>\n<parameter=direction>north</parameter>\n</function>\n</seed:tool_call>"
        "<seed:eos>",
        [
            ("TEMPLATE", "<seed:bos>tool\n"),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", "<seed:eos><seed:bos>assistant\n"),
        ],
    ),
    "apertus": (
        '<|tools_prefix|>[{"look": {"direction": "north"}}]<|tools_suffix|>',
        [("TEMPLATE", "["), ("OBSERVATION", "dark"), ("TEMPLATE", "]<|assistant_start|>")],
    ),
    "lfm2": (
        "<|tool_call_start|>[look(direction='north')]<|tool_call_end|><|im_end|>",
        [
            ("TEMPLATE", "\n<|im_start|>tool\n"),
            ("OBSERVATION", "dark"),
            ("TEMPLATE", "<|im_end|>\n<|im_start|>assistant\n"),
        ],
    ),
}


@pytest.mark.parametrize("family", CALLS)
def test_a_call_and_its_result_by_source(renderer_of, family: str) -> None:
    renderer = renderer_of(family)
    conversation = conversation_of(renderer)
    conversation.prepare()
    text, expected = CALLS[family]
    answer = conversation.accept(sampled(renderer, text))
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look", {"direction": "north"})]
    assert (answer.text, answer.problems, answer.repairs) == ("", (), ())
    conversation.add([tool_result(answer.tool_calls[0], "dark")])
    ids = conversation.prepare().tolist()
    conversation.verify(ids)
    assert runs(conversation, renderer)[1:] == [("SAMPLED", text), *expected]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_known_by_its_template(renderer_of, family: str) -> None:
    assert renderer_of(family).family.name == FAMILIES[family]


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"mistral_v3", "apertus"}))
def test_tool_results_can_be_appended(renderer_of, family: str) -> None:
    check_template(renderer_of(family), roles=("tool",), tools=[TOOL])


@pytest.mark.parametrize(
    "family", ["gemma4", "glm", "deepseek_v3.2", "kimi_k2_thinking", "gpt_oss", "minimax_m2", "lfm2"]
)
def test_thinking_is_kept_between_tool_results_and_dropped_once_a_user_speaks(renderer_of, family: str) -> None:
    renderer = renderer_of(family, enable_thinking=True)
    check_template(renderer, roles=("tool",), tools=[TOOL])
    with pytest.raises(TemplateError, match=r"it changes answers with thinking"):
        check_template(renderer, roles=("user",))


@pytest.mark.parametrize("family", ["gpt_oss", "kimi_k2_thinking", "minimax_m2"])
def test_families_that_always_think_are_refused_where_their_thinking_is_dropped(renderer_of, family: str) -> None:
    with pytest.raises(TemplateError, match="rewrites history") as caught:
        check_template(renderer_of(family), roles=("user",))
    assert "enable_thinking" not in str(caught.value)
    assert "step_independent" in str(caught.value)


@pytest.mark.parametrize(
    "family", ["mistral", "gemma4", "glm", "deepseek_v3", "deepseek_v3.1", "deepseek_v3.2", "kimi_k2", "lfm2"]
)
def test_plain_conversations_can_be_appended(renderer_of, family: str) -> None:
    check_template(renderer_of(family))


def test_a_header_that_only_an_answer_after_results_has_is_refused(renderer_of) -> None:
    with pytest.raises(TemplateError, match=r"rewrites history.*assistant_start"):
        check_template(renderer_of("apertus"), roles=("tool",), tools=[TOOL])


def test_a_system_prompt_that_moves_is_refused(renderer_of) -> None:
    with pytest.raises(TemplateError, match=r"rewrites history.*You play"):
        check_template(renderer_of("mistral_v3"))


@pytest.mark.parametrize(
    ("family", "thinks", "text", "reasoning", "content"),
    [
        ("glm", True, "\n<think>Hm.</think>\ngo", "Hm.", "go"),
        ("gemma4", True, "<|channel>thought\nHm.\n<channel|>go", "Hm.", "go"),
        ("deepseek_v3.1", True, "Hm.</think>go", "Hm.", "go"),
        ("deepseek_v3.2", True, "Hm.</think>go", "Hm.", "go"),
        ("kimi_k2_thinking", True, "<think>Hm.</think>go", "Hm.", "go"),
        ("minimax_m2", True, "Hm.\n</think>\n\ngo", "Hm.", "go"),
        ("lfm2", True, "<think>Hm.</think>go", "Hm.", "go"),
        ("seed_oss", True, "<seed:think>Hm.</seed:think>\ngo", "Hm.", "go"),
        ("apertus", True, "<|inner_prefix|>Hm.<|inner_suffix|>go", "Hm.", "go"),
        ("apertus", False, "go", None, "go"),
        ("mistral", True, "[THINK]Hm.[/THINK]go", "Hm.", "go"),
        (
            "gpt_oss",
            True,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>go<|return|>",
            "Hm.",
            "go",
        ),
        ("gpt_oss", True, "<|channel|>final<|message|>go", None, "go"),
        ("deepseek_v3.1", False, "go", None, "go"),
    ],
)
def test_thinking_is_kept_apart(
    renderer_of, family: str, thinks: bool, text: str, reasoning: str | None, content: str
) -> None:
    renderer = renderer_of(family, enable_thinking=thinks)
    answer = renderer.read(renderer.encoder.encode(text))
    assert (answer.message.reasoning, answer.text, answer.problems) == (reasoning, content, ())


@pytest.mark.parametrize(
    ("family", "text", "problem"),
    [
        ("gpt_oss", "<|channel|>analysis<|message|>Hm", "The thinking was not closed with <|end|>."),
        ("mistral", "[THINK]Hm", "The thinking was not closed with [/THINK]."),
        ("gpt_oss", "go", "A part of the answer has no channel. Write <|channel|>final<|message|> before an answer."),
        ("gpt_oss", "<|channel|>fin", "A message ends before its <|message|>."),
        ("gpt_oss", "<|channel|>secret<|message|>go<|end|>", "A part of the answer is on the channel 'secret'."),
    ],
)
def test_unfinished_answers_are_problems(renderer_of, family: str, text: str, problem: str) -> None:
    renderer = renderer_of(family, enable_thinking=True)
    (found,) = renderer.read(renderer.encoder.encode(text), stop_reason=StopReason.LENGTH).problems
    assert problem in found


@pytest.mark.parametrize(
    ("family", "stops", "call_end", "plain_end"),
    [
        ("glm", {"<|user|>", "<|observation|>", "<|endoftext|>"}, "<|observation|>", "<|user|>"),
        ("gemma4", {"<turn|>", "<|tool_response>", "<eos>"}, "<|tool_response>", "<turn|>"),
        ("gpt_oss", {"<|return|>", "<|call|>", "<|endoftext|>"}, "<|call|>", "<|return|>"),
        ("apertus", {"<|assistant_end|>", "<|tools_suffix|>", "</s>"}, "<|tools_suffix|>", "<|assistant_end|>"),
        ("seed_oss", {"<seed:eos>"}, "<seed:eos>", "<seed:eos>"),
        ("kimi_k2", {"<|im_end|>", "[EOS]"}, "<|im_end|>", "<|im_end|>"),
        ("minimax_m2", {"[e~["}, "[e~[", "[e~["),
        ("llama4", {"<|eot|>", "<|eom|>", "<|end_of_text|>"}, "<|eot|>", "<|eot|>"),
    ],
)
def test_where_answers_stop_and_how_demonstrated_ones_end(
    renderer_of, family: str, stops: set[str], call_end: str, plain_end: str
) -> None:
    renderer = renderer_of(family)
    assert {renderer.encoder.decode([i]) for i in renderer.stop_token_ids} == stops
    reasoning = "Hm." if family == "minimax_m2" else None
    called = renderer.answer_text(Message(role="assistant", tool_calls=(LOOK,), reasoning=reasoning))
    ends = [
        renderer.encoder.decode(renderer.demonstration(text)[-1:]) for text in (called, renderer.plain_answer("go"))
    ]
    assert ends == [call_end, plain_end]
    answer = renderer.read(renderer.demonstration(called), tools=[TOOL])
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look", {"direction": "north"})]
    assert answer.problems == ()


def test_a_head_that_another_message_follows_is_kept(renderer_of) -> None:
    renderer = renderer_of("glm")
    head = renderer.encoder.added_id("<|user|>")
    said = renderer.suffix([user("on")], last_id=head)
    told = renderer.suffix([tool_result(LOOK, "dark")], last_id=head)
    assert renderer.encoder.decode(said.ids).startswith("\non")
    assert renderer.encoder.decode(told.ids).startswith("<|observation|>\n<tool_response>")


def test_ids_of_demonstrated_calls_count_through_a_conversation(renderer_of) -> None:
    message = Message(role="assistant", tool_calls=(LOOK, LOOK))
    text = renderer_of("kimi_k2").answer_text(message, earlier_calls=3)
    assert "functions.look:3<" in text
    assert "functions.look:4<" in text


def test_the_prompt_does_not_depend_on_the_day(renderer_of) -> None:
    assert "Current date: 2024-07-26\n" in renderer_of("gpt_oss").header


def test_a_family_that_marks_answers_marks_demonstrated_ones(renderer_of) -> None:
    assert renderer_of("gpt_oss").plain_answer("go") == "<|channel|>final<|message|>go"
    conversation = LedgerConversation(
        renderer_of("gpt_oss"),
        Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g"),
        [system("Play."), user("x")],
    )
    assert conversation.demonstrate(renderer_of("gpt_oss").plain_answer("go")).text == "go"


def test_special_tokens_besides_the_markup_are_left_out_of_an_answers_text() -> None:
    renderer = Renderer(build_tokenizer("mistral"))
    answer = renderer.read(
        renderer.encoder.encode('a</s>[INST][TOOL_CALLS]look[ARGS]{"direction": ""}</s>'), tools=[TOOL]
    )
    assert answer.raw_text == 'a[TOOL_CALLS]look[ARGS]{"direction": ""}'
    assert answer.text == "a"


OLMO = """{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message['content'] }}
{{- '<|im_end|>\\n' if not loop.last else eos_token }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- if loop.last and add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
{%- endfor %}"""
"""OLMo 3: the last answer ends with the end of text, and others with the end of a message."""


def test_a_template_that_ends_the_last_answer_with_the_end_of_text() -> None:
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", OLMO
    renderer = Renderer(tokenizer)
    assert {renderer.encoder.decode([end]) for end in renderer.stop_token_ids} == {"<|im_end|>", "<|endoftext|>"}
    check_template(renderer)
    assert renderer.answer_text(Message(role="assistant", content="Yes.")) == "Yes."
    ids = renderer.demonstration("Yes.")
    assert renderer.encoder.decode(ids) == "Yes.<|im_end|>"
    after = renderer.suffix([user("And you?")], last_id=ids[-1])
    assert renderer.encoder.decode(after.ids) == "\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n"


APERTUS = """{%- set ns = namespace(open=false) %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- ('' if ns.open else '<|im_start|>assistant\\n') + message['content'] }}{% set ns.open = true %}
{%- else %}
{{- '<|im_end|>' if ns.open else '' }}{% set ns.open = false %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""
"""Apertus: an answer ends only before the next message."""


def test_a_template_that_ends_answers_only_before_a_message() -> None:
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = APERTUS
    renderer = Renderer(tokenizer)
    assert renderer.encoder.decode([renderer.boundary.end_id]) == "<|im_end|>"
    ids = renderer.demonstration("Yes.")
    after = renderer.suffix([user("And you?")], last_id=ids[-1])
    whole = renderer.template.render([user("Sure?"), Message(role="assistant", content="Yes."), user("And you?")])
    assert (
        renderer.encoder.decode([*renderer.prompt([user("Sure?")]).ids, *ids, *after.ids])
        == whole + renderer.header[-len("<|im_start|>assistant\n") :]
    )


@pytest.mark.parametrize("name", [*TOKENIZER_FAMILIES, *OTHER_TEMPLATES])
def test_a_thought_is_written_as_the_template_shows_it(name: str) -> None:
    tokenizer = build_with_other_template(name) if name in OTHER_TEMPLATES else build_tokenizer(name)
    renderer = Renderer(tokenizer, enable_thinking=True)
    if not renderer.thinks or renderer.family.marks_answers:
        return
    with contextlib.suppress(OmittedText):
        answer = Message(role="assistant", content="go", reasoning="Hm.")
        assert renderer.plain_answer("go", thought="Hm.") == renderer.answer_text(answer)
    if renderer.opens_thinking:
        assert renderer.thinking.open not in renderer.plain_answer("go", thought="Hm.")


CLOSED_THOUGHT = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' and not message['content'] %}{{- EMPTY }}{% endif %}
{{- message['content'] }}
{%- for call in message['tool_calls'] or () %}
{{- '<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' + HEADER if add_generation_prompt else '' }}"""


@pytest.mark.parametrize(
    ("header", "empty", "written"),
    [
        ("<think>\\n</think>", "", "<tool_call>"),  # QwQ
        ("<think>\\n", "<think></think>\\n", "</think>\n<tool_call>"),  # Nemotron 3
        ("<think>", "</think>", "</think><tool_call>"),
        ("<think></think>", "</think>\\n", "\n<tool_call>"),
    ],
)
def test_a_call_after_a_header_with_thinking_that_past_answers_lack(header: str, empty: str, written: str) -> None:
    tokenizer = build_tokenizer("qwen3")
    tokenizer.chat_template = CLOSED_THOUGHT.replace("HEADER", f"'{header}'").replace("EMPTY", f"'{empty}'")
    renderer = Renderer(tokenizer)
    text = renderer.answer_text(Message(role="assistant", tool_calls=(LOOK,)))
    assert text.startswith(written)
    assert (renderer.header + text).count("</think>") == 1


def test_a_template_whose_calls_end_with_the_head_of_the_next_message() -> None:
    renderer = Renderer(build_with_other_template("glm45_training"))
    check_template(renderer, roles=("tool",), tools=[TOOL])
    ids = renderer.demonstration(renderer.answer_text(Message(role="assistant", tool_calls=(LOOK,))))
    assert renderer.encoder.decode(ids).endswith("</tool_call><|observation|>")
    assert renderer.encoder.decode(ids).count("<|observation|>") == 1
