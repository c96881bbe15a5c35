"""Published templates with tools: what they show, the form in which they read calls, what is refused at the start."""

from __future__ import annotations

import json

import pytest
from support.tokenizers import OTHER_TEMPLATES, TOKENIZER_FAMILIES, build_tokenizer, build_with_other_template

from agentrl.engine import Generation, StopReason
from agentrl.errors import TemplateError
from agentrl.message import Message, ToolCall, tool_result, user
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.render.template_check import (
    check_calls_shown,
    check_template,
    check_tools_shown,
    find_omitted_text,
    template_faults,
)
from agentrl.trajectory import Trajectory

SEARCH = {
    "type": "function",
    "function": {
        "name": "search_rooms",
        "description": "Search the rooms.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}
OPEN = {
    "type": "function",
    "function": {
        "name": "open_box",
        "description": "Open a box.",
        "parameters": {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]},
    },
}
WITHOUT_TOOLS = {"gemma", "gemma3", "qwen2.5-vl", "llama3_first", "deepseek_r1", "deepseek_v3_joined"} | {
    "deepseek_v3.1_joined"
}
WITHOUT_CALLS = (WITHOUT_TOOLS - {"deepseek_v3.1_joined"}) | {"kimi_k2_first", "lfm2_first"}
TEMPLATES = [*TOKENIZER_FAMILIES, *OTHER_TEMPLATES]


def renderer_with(name: str) -> Renderer:
    return Renderer(build_with_other_template(name) if name in OTHER_TEMPLATES else build_tokenizer(name))


def sampled(renderer: Renderer, text: str) -> Generation:
    ids = renderer.demonstration(text)
    return Generation(token_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids), stop_reason=StopReason.STOP)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_tools_or_is_refused(name: str) -> None:
    renderer = renderer_with(name)
    if name in WITHOUT_TOOLS:
        with pytest.raises(
            TemplateError, match=r"does not show tools.*search_rooms.*model\.chat_template=.*react_text"
        ):
            check_tools_shown(renderer, [SEARCH, OPEN])
    else:
        check_tools_shown(renderer, [SEARCH, OPEN])


def test_all_faults_of_a_template_are_listed_and_history_is_compared_only_where_it_shows_everything() -> None:
    missing = [str(fault) for fault in template_faults(renderer_with("gemma"), roles=("tool",), tools=[SEARCH])]
    tools, calls = missing
    assert "does not show tools" in tools
    assert "does not show the call" in calls
    assert [*template_faults(renderer_with("gemma"), roles=("user",))] == []
    assert [*template_faults(renderer_with("qwen2.5"), roles=("tool", "user"), tools=[SEARCH])] == []


def test_conversations_with_calls_need_a_template_that_shows_them_though_nothing_follows() -> None:
    check_template(renderer_with("gemma"), roles=())
    with pytest.raises(TemplateError, match="does not show the call"):
        check_template(renderer_with("gemma"), roles=(), has_calls=True)
    with pytest.raises(TemplateError, match="does not show tools"):
        check_template(renderer_with("gemma"), roles=(), tools=[SEARCH])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_calls_or_is_refused(name: str) -> None:
    renderer = renderer_with(name)
    if name in WITHOUT_CALLS:
        with pytest.raises(TemplateError, match=r"(does not show the call|ends the turn).*model\.chat_template="):
            check_calls_shown(renderer)
    else:
        check_calls_shown(renderer)


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - WITHOUT_TOOLS - WITHOUT_CALLS))
def test_an_episode_with_two_calls_goes_on_also_where_its_history_is_rendered_again(name: str) -> None:
    renderer = renderer_with(name)
    conversation = LedgerConversation(
        renderer,
        Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g"),
        [user("start")],
        tools=[SEARCH],
    )
    renderer.rewrites_history = True
    conversation.prepare()
    for place in ("cellar", "attic"):
        call = ToolCall(name="search_rooms", arguments={"where": place})
        reasoning = "hm" if renderer.thinks else None
        text = renderer.answer_text(Message(role="assistant", tool_calls=(call,), reasoning=reasoning))
        answer = conversation.accept(sampled(renderer, text))
        assert [(one.name, one.arguments) for one in answer.tool_calls] == [("search_rooms", {"where": place})]
        conversation.add([tool_result(answer.tool_calls[0], f"dust in the {place}")])
        shown = renderer.encoder.decode(conversation.prepare())
        assert shown.count(f"dust in the {place}") == 1
    assert "dust in the cellar" in shown
    assert "attic" in shown.partition("dust in the cellar")[2].partition("dust in the attic")[0]


@pytest.mark.parametrize(("name", "omits"), [("llama3", True), ("mistral_v7", True), ("qwen2.5", False)])
def test_a_conversation_forks_after_text_that_the_template_leaves_out_and_only_then(name: str, omits: bool) -> None:
    renderer = renderer_with(name)
    assert (find_omitted_text(renderer) is not None) == omits
    renderer.omits_text_beside_calls = omits
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")
    conversation = LedgerConversation(renderer, trajectory, [user("start")], tools=[SEARCH], repairs_calls=True)
    call = renderer.answer_text(
        Message(role="assistant", tool_calls=(ToolCall(name="search_rooms", arguments={"where": "attic"}),))
    )
    counts = []
    conversation.prepare()
    for text in ("", "I search. ", ""):
        answer = conversation.accept(sampled(renderer, text + call))
        assert (answer.message.text.strip(), len(answer.tool_calls)) == (text.strip(), 1)
        conversation.add([tool_result(answer.tool_calls[0], "dust")])
        conversation.render_ahead()
        shown = renderer.encoder.decode(conversation.prepare())
        counts.append((len(trajectory.sequences), shown.count("I search."), shown.count("dust")))
    assert counts == ([(1, 0, 1), (2, 0, 2), (2, 0, 3)] if omits else [(1, 0, 1), (1, 1, 2), (1, 1, 3)])


@pytest.mark.parametrize(
    ("name", "as_json"),
    [("deepseek_v3.1_joined", True), ("deepseek_v3_joined", True), ("qwen3", False), ("qwen2.5", False)]
    + [(name, False) for name in ("minimax_m2", "glm", "qwen3_coder", "mistral", "deepseek_v3.1", "gpt_oss")],
)
def test_arguments_are_passed_in_the_form_that_the_template_reads(name: str, as_json: bool) -> None:
    renderer = renderer_with(name)
    assert renderer.template.json_arguments is as_json
    call = ToolCall(name="search_rooms", arguments={"where": 'ça "là"'}, id=renderer.call_id("search_rooms", 0))
    text = renderer.template.render([user("x"), Message(role="assistant", tool_calls=(call,))])
    assert '"là"' in text.replace("\\", "")
    assert "{'where'" not in text


@pytest.mark.parametrize(
    ("name", "follow"),
    [
        *((name, True) for name in ("minimax_m2", "gpt_oss", "deepseek_v3.2")),
        *((name, False) for name in ("mistral", "glm", "qwen2.5", "llama3", "deepseek_v3")),
    ],
)
def test_results_follow_calls_where_the_template_says_so(name: str, follow: bool) -> None:
    assert renderer_with(name).results_follow_calls is follow


def test_that_results_must_follow_calls_is_found_in_a_template_of_no_known_family() -> None:
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
        "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer = Renderer(tokenizer)
    result = Message(role="tool", content="dark", tool_call_id="call_1", name="look")
    assert renderer.family.name == "unknown"
    assert renderer.after_answer([result]) == "<|im_end|>tool: dark<|im_end|>assistant: "


def test_a_system_prompt_that_moves_to_the_last_user_message_is_refused_for_tools_too() -> None:
    with pytest.raises(TemplateError, match="rewrites history"):
        check_template(renderer_with("mistral_v3"), roles=("tool",), tools=[SEARCH])


@pytest.mark.parametrize("name", sorted(WITHOUT_TOOLS))
def test_a_conversation_with_tools_is_refused_where_they_would_not_be_seen(name: str) -> None:
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")
    with pytest.raises(TemplateError, match=r"does not show tools|no known notation of tool calls"):
        LedgerConversation(renderer_with(name), trajectory, [user("start")], tools=[SEARCH])


def test_a_demonstrated_call_that_the_template_leaves_out_is_an_error() -> None:
    call = ToolCall(name="open_box", arguments={"colour": "red"})
    with pytest.raises(TemplateError, match=r"does not show the call of open_box.*\{'colour': 'red'\}"):
        renderer_with("llama3_first").answer_text(Message(role="assistant", tool_calls=(call,)))


PYTHON_NOTATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("arguments", "as_json", "refused"),
    [
        ("{{ c.function.arguments }}", True, ""),  # a mapping would be written as Python writes it
        ("{{ c.function.arguments | tojson }}", False, ""),
        ("{{ c.function.arguments | string | tojson }}", False, "does not show the call"),
        ("{}", False, "does not show the call"),
    ],
)
def test_arguments_in_another_notation_than_json_are_found(arguments: str, as_json: bool, refused: str) -> None:
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = PYTHON_NOTATION.replace("ARGUMENTS", arguments)
    renderer = Renderer(tokenizer)
    assert renderer.template.json_arguments is as_json
    if refused:
        with pytest.raises(TemplateError, match=refused):
            check_calls_shown(renderer)
    else:
        check_calls_shown(renderer)


def test_a_parser_that_does_not_read_the_template_s_notation_is_refused() -> None:
    renderer = Renderer(build_tokenizer("qwen2.5"), tool_parser="mistral")
    with pytest.raises(
        TemplateError, match=r"parser mistral does not read calls as the chat template writes.*tool_parser"
    ):
        check_calls_shown(renderer)


def test_a_history_that_the_template_refuses_stays_as_it_was_kept() -> None:
    renderer = renderer_with("llama3")  # one call per answer
    conversation = LedgerConversation(
        renderer,
        Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g"),
        [user("start")],
        tools=[SEARCH],
    )
    renderer.rewrites_history = True
    conversation.prepare()
    places = ("cellar", "attic")
    calls = "; ".join(json.dumps({"name": "search_rooms", "parameters": {"where": place}}) for place in places)
    answer = conversation.accept(sampled(renderer, calls))
    conversation.add([tool_result(call, f"dust in the {call.arguments['where']}") for call in answer.tool_calls])
    shown = renderer.encoder.decode(conversation.prepare())
    assert calls in shown
    assert shown.index("dust in the cellar") < shown.index("dust in the attic")
