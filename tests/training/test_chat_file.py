"""Conversations in a file: the assistant's tokens are learnt, others are read, and mistakes are named by their line."""

import json
import re

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.tokenizers import OTHER_TEMPLATES, build_tokenizer, build_with_other_template

from agentrl.errors import TemplateError, UsageError
from agentrl.evaluation.live_traffic import _append
from agentrl.message.data_file import read_rows
from agentrl.render.content_guard import unbroken
from agentrl.render.renderer import Renderer
from agentrl.training.chat_file import build_sft_dataset, check_chats, read_chats
from agentrl.training.sft import _examples
from agentrl.trajectory import Source

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}}}}  # fmt: skip
PLAIN = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
        {"role": "assistant", "content": "A door."},
        {"role": "user", "content": "Open."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Never answered."},
    ]
}
CALLING = {
    "messages": [
        {"role": "user", "content": "Look at the door."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "It is shut."},
        {"role": "assistant", "content": "It is shut."},
    ],
    "tools": [TOOL],
}


def write(folder, *rows):
    file = folder / "chats.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return file


@pytest.fixture(scope="module")
def renderer():
    return Renderer(build_tokenizer("qwen2.5"))


def learnt(trajectory, renderer):
    """The texts that are learnt."""
    (sequence,) = trajectory.sequences
    ids, sources, found = sequence.ids_list(), list(sequence.sources), []
    for turn in trajectory.turns:
        assert set(sources[turn.start : turn.end]) == {Source.FORCED}
        found.append(renderer.encoder.decode(ids[turn.start : turn.end]))
    assert sources.count(Source.FORCED) == sum(turn.end - turn.start for turn in trajectory.turns)
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Who are you?", "completion": "A door."},
        {"prompt": [{"role": "user", "content": "Who are you?"}], "completion": "A door."},
        {"prompt": "Who are you?", "completion": [{"role": "assistant", "content": "A door."}]},
        {
            "prompt": [{"role": "user", "content": "Who are you?"}],
            "completion": [{"role": "assistant", "content": "A door."}],
        },
    ],
)
def test_a_prompt_and_its_completion_are_a_conversation(tmp_path, renderer, row):
    whole = {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A door."}]}
    first, second = build_sft_dataset(read_chats(write(tmp_path, whole, row)), renderer, max_tokens=1000).trajectories
    assert list(first.sequences[0].token_ids) == list(second.sequences[0].token_ids)
    assert list(first.sequences[0].sources) == list(second.sequences[0].sources)


def test_an_answer_may_equal_its_prompt(tmp_path):
    (chat,) = read_chats(write(tmp_path, {"prompt": "Echo.", "completion": "Echo."}))
    assert [message.role for message in chat.messages] == ["user", "assistant"]


def test_answers_within_a_prompt_are_context(tmp_path):
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {"system": "Be brief.", "prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}
    (chat,) = read_chats(write(tmp_path, row))
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.context_only == {2}


def test_assistant_messages_are_trained_with_their_end_of_turn(tmp_path, renderer):
    found = build_sft_dataset(read_chats(write(tmp_path, PLAIN)), renderer, max_tokens=1000)
    (trajectory,) = found.trajectories
    assert learnt(trajectory, renderer) == ["A door.<|im_end|>", "No.<|im_end|>"]
    text = renderer.encoder.decode(trajectory.sequences[0].ids_list())
    assert "Be brief." in text
    assert "Never answered" not in text
    (chat,) = read_chats(tmp_path / "chats.jsonl")
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    place = f"{tmp_path / 'chats.jsonl'} line 1"
    assert (trajectory.id, trajectory.group_id, trajectory.seed) == (place, place, 0)


def test_tool_calls_are_learnt_as_the_template_writes_them(tmp_path, renderer):
    (trajectory,) = build_sft_dataset(read_chats(write(tmp_path, CALLING)), renderer, max_tokens=2000).trajectories
    call, answer = learnt(trajectory, renderer)
    assert '{"name": "look", "arguments": {"at": "door"}}' in call
    assert answer == "It is shut.<|im_end|>"
    text = renderer.encoder.decode(trajectory.sequences[0].ids_list())
    assert text.index("Look.") < text.index("Look at the door.")
    whole = renderer.template.render(read_chats(tmp_path / "chats.jsonl")[0].messages, tools=[TOOL])
    assert text.rstrip() == whole.rstrip()


HERMES = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role in ("system", "user") or (message.role == "assistant" and message.tool_calls is not defined) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>' + message.role }}
{%- for tool_call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == "tool" %}
{{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Hermes 2 Pro: the text beside a call is left out."""


def renderer_of(name):
    if name in OTHER_TEMPLATES:
        return Renderer(build_with_other_template(name))
    tokenizer = build_tokenizer("qwen2.5" if name == "hermes" else name)
    if name == "hermes":
        tokenizer.chat_template = HERMES
    return Renderer(tokenizer)


PLAIN_CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""It leaves out calls."""


def test_calls_that_nothing_follows_are_checked_too(tmp_path):
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = PLAIN_CHATML
    chats = read_chats(write(tmp_path, PLAIN, {"messages": CALLING["messages"][:2]}))
    check_chats(chats[:1], Renderer(tokenizer))
    with pytest.raises(TemplateError, match="calls"):
        check_chats(chats, Renderer(tokenizer))


def with_text(text):
    rows = [dict(row) for row in CALLING["messages"]]
    rows[1]["content"] = text
    return {**CALLING, "messages": rows}


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral_v7"])
def test_text_next_to_a_call_that_the_template_omits_is_an_error_with_count_and_location(tmp_path, name):
    renderer = renderer_of(name)
    fine = [CALLING, with_text(""), with_text(" \n")]
    assert len(build_sft_dataset(read_chats(write(tmp_path, *fine)), renderer, max_tokens=4000).trajectories) == 3
    file = write(tmp_path, CALLING, with_text("I look first."), CALLING, with_text("I look again."))
    told = (
        r"leaves out the text of an answer next to tool calls, so the model would not learn it: got 2 of 2 answers "
        rf"with .*the first in {file} line 2, message 2: .*look.*, expected an answer with the text 'I look first.'.*"
        r"Set model.chat_template=(chatml|llama3|FILE, .*); or remove what"
    )
    with pytest.raises(TemplateError, match=told):
        check_chats(read_chats(file), renderer)
    with pytest.raises(TemplateError, match="leaves out the text"):
        build_sft_dataset(read_chats(file), renderer, max_tokens=4000)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "mistral", "kimi_k2", "deepseek_v3.1", "glm", "minimax_m2"])
def test_text_next_to_a_call_is_trained_if_the_template_shows_it(tmp_path, name):
    renderer = renderer_of(name)
    file = write(tmp_path, with_text("I look <|im_end|> first.\n\n  Then again."))
    (trajectory,) = build_sft_dataset(read_chats(file), renderer, max_tokens=4000).trajectories
    said = learnt(trajectory, renderer)[0]
    assert "".join(unbroken(said).split()).count("Ilook<|im_end|>first.Thenagain.") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen2.5", {"content": "It is shut.", "reasoning_content": "I see."}),
        ("llama3", {"content": "It is shut.", "reasoning_content": "I see."}),
        ("deepseek_r1", {"content": "I see.</think>It is shut."}),
    ],
)
def test_thinking_that_the_template_leaves_out_is_refused(tmp_path, name, message):
    rows = [CALLING["messages"][0], {"role": "assistant", **message}]
    with pytest.raises(TemplateError, match=r"leaves out the t.* of an answer, so .*got 1 of 1 answers.*message 2"):
        check_chats(read_chats(write(tmp_path, {"messages": rows})), renderer_of(name))


def test_calls_are_numbered_over_the_conversation_where_the_family_numbers_them(tmp_path):
    again = [{**CALLING["messages"][1], "tool_calls": [{**CALL, "id": "c2"}]}, {"role": "tool", "tool_call_id": "c2"}]
    rows = [*CALLING["messages"][:3], *again, CALLING["messages"][3]]
    renderer = Renderer(build_tokenizer("kimi_k2"))
    found = build_sft_dataset(read_chats(write(tmp_path, {**CALLING, "messages": rows})), renderer, max_tokens=2000)
    first, second, _ = learnt(found.trajectories[0], renderer)
    assert "functions.look:0" in first
    assert "functions.look:1" in second
    text = renderer.encoder.decode(found.trajectories[0].sequences[0].ids_list())
    assert [text.count(f"## Return of functions.look:{number}") for number in (0, 1)] == [1, 1]


@pytest.mark.parametrize("ids", [("c1", "c2"), ("c2", "c1"), (None, None)])
def test_results_have_the_ids_with_which_their_calls_are_shown(tmp_path, ids):
    calls = [{**CALL, "id": given} for given in (("c1", "c2") if ids[0] else ids)]
    results = [{"role": "tool", "content": f"for {given}", "tool_call_id": given} for given in ids]
    rows = [CALLING["messages"][0], {**CALLING["messages"][1], "tool_calls": calls}, *results, CALLING["messages"][3]]
    renderer = renderer_of("mistral_v7")
    found = build_sft_dataset(read_chats(write(tmp_path, {**CALLING, "messages": rows})), renderer, max_tokens=2000)
    text = renderer.encoder.decode(found.trajectories[0].sequences[0].ids_list())
    shown = {"c1": "call00001", "c2": "call00002"}
    order = [shown[given] for given in ids] if ids[0] else [*shown.values()]
    assert re.findall(r'"call_id": "(\w+)"', text) == order


def test_control_tokens_spelled_in_a_file_are_text_and_thinking_is_kept(tmp_path):
    renderer = Renderer(build_tokenizer("qwen3"), enable_thinking=True)
    spelled = "It ends with <|im_end|>\n<|im_start|>user\nand goes on."
    rows = [
        {"role": "user", "content": spelled},
        {"role": "assistant", "content": f"<think>\nOf {spelled}\n</think>\n\n{spelled}"},
    ]
    (trajectory,) = build_sft_dataset(
        read_chats(write(tmp_path, {"messages": rows})), renderer, max_tokens=1000
    ).trajectories
    (turn,), ids = trajectory.turns, trajectory.sequences[0].ids_list()
    count = lambda token: ids[turn.start :].count(renderer.encoder.added_id(token))  # noqa: E731
    assert [count(token) for token in ("<|im_end|>", "<|im_start|>", "<think>", "</think>")] == [1, 0, 1, 1]
    assert ids.count(renderer.boundary.end_id) == 2
    assert renderer.encoder.decode(ids).count(spelled) == 3


def test_what_is_too_long_is_left_out_and_counted(tmp_path, renderer):
    chats = read_chats(write(tmp_path, PLAIN, CALLING))
    lengths = [len(t.sequences[0]) for t in build_sft_dataset(chats, renderer, max_tokens=2000).trajectories]
    found = build_sft_dataset(chats, renderer, max_tokens=min(lengths))
    assert (len(found.trajectories), found.too_long) == (1, 1)
    with pytest.raises(UsageError, match=r"all conversations are longer than agent.max_tokens: got 2 conversations"):
        build_sft_dataset(chats, renderer, max_tokens=3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "is not valid JSON"),
        ({"text": "x"}, "is not a conversation: got the columns text"),
        ({"prompt": "x", "completion": "y", "label": False}, "is not a conversation: got the columns prompt"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "no known role.* expected system, user, assistant, tool"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]}, "an empty answer"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "an answer follows no message"),
        ({"messages": [*PLAIN["messages"][:3], {"role": "assistant", "content": "x"}]}, "an answer follows no message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *PLAIN["messages"][2:]]}, "is not text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]},
         "call cannot be read"),
        ({**PLAIN, "tools": ["look"]}, "not a list of schemas"),
        ({**PLAIN, "tools": [{"function": "look"}]}, "not a list of schemas"),
        ({**PLAIN, "tools": "[{"}, "not a list of schemas"),
        ({**PLAIN, "tools": 3}, "not a list of schemas"),
        ({**PLAIN, "tools": {"function": {"name": "look"}}}, "not a list of schemas"),
        ({**PLAIN, "images": ["a.png"]}, "has a column images: got images, which the model would not see"),
        ({**PLAIN, "image": "a.png"}, "has a column image"),
        ({**PLAIN, "functions": [{"name": "look"}]}, "has a column functions"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "x"}}]}, "has a function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": {"function": {}}}]}, "tool_calls are not a list"),
        ({"messages": [{"role": "tool", "tool_call_id": ["c"]}]}, "tool_call_id of a message is not text"),
        ({"messages": [{"role": ["user"]}]}, "no known role"),
        ({"messages": [{"role": "user", "content": 3}]}, "is not text"),
        ({"messages": [{"role": "assistant", "reasoning": 3}]}, "reasoning of a message is not text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]}, "call cannot be read"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "x", "arguments": "[" * 100_000}}]}]}, "call cannot be read"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "x", "arguments": '{"a": ' + "9" * 5000 + "}"}}]}]}, "call cannot be read"),
    ],
)  # fmt: skip
def test_lines_that_cannot_be_used_are_named(tmp_path, row, message):
    with pytest.raises(UsageError, match=rf"chats\.jsonl line 2.*{message}"):
        read_chats(write(tmp_path, PLAIN, row))


def test_an_answer_of_weight_0_is_read_and_not_learnt(tmp_path, renderer):
    rows = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "bad answer", "weight": 0},
        {"role": "user", "content": "again", "weight": None},
        {"role": "assistant", "content": "good", "weight": 1},
    ]
    (trajectory,) = build_sft_dataset(
        read_chats(write(tmp_path, {"messages": rows})), renderer, max_tokens=500
    ).trajectories
    (sequence,), ids = trajectory.sequences, trajectory.sequences[0].ids_list()
    texts = {
        source: renderer.encoder.decode([i for i, s in zip(ids, sequence.sources, strict=True) if s == source])
        for source in (Source.MISTAKE, Source.FORCED)
    }
    assert texts == {Source.MISTAKE: "bad answer<|im_end|>", Source.FORCED: "good<|im_end|>"}
    for everything in (False, True):  # neither as an answer, nor as an observation with a weight of its own
        (lesson,) = _examples([trajectory], everything=everything)
        learned = lesson.scored.targets.tolist()
        assert "bad answer" not in renderer.encoder.decode(learned)
        assert "good<|im_end|>" in renderer.encoder.decode(learned)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([None, 0.5], "weight of a message cannot be used: got assistant: 0.5, expected 0 .context only. or 1"),
        ([None, "1"], "weight of a message cannot be used"),
        ([1, 1], "weight of a message cannot be used: got user: 1"),
        ([None, 0], "nothing to learn: got weight: 0"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(tmp_path, weights, message):
    rows = [
        {"role": role, "content": "x", "weight": weight}
        for role, weight in zip(("user", "assistant"), weights, strict=True)
    ]
    with pytest.raises(UsageError, match=rf"chats\.jsonl line 2.*{message}"):
        read_chats(write(tmp_path, PLAIN, {"messages": rows}))


@pytest.mark.parametrize("name", ["weight", "train", "training", "trainable", "loss"])
def test_an_answer_that_its_row_does_not_train_on_is_context(tmp_path, name):
    rows = [
        {"role": "user", "content": "q", name: False},
        {"role": "assistant", "content": "bad", name: False},
        {"role": "user", "content": "again", name: None},
        {"role": "assistant", "content": "good", name: True},
    ]
    (chat,) = read_chats(write(tmp_path, {"messages": rows}))
    assert chat.context_only == {1}


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([{}, {"train": "no"}], "the train of a message cannot be used: got assistant: 'no'"),
        ([{}, {"train": [True]}], "the train of a message cannot be used"),
        ([{}, {"loss": 0.5}], "the loss of a message cannot be used: got assistant: 0.5"),
        ([{"training": True}, {}], "the training of a message cannot be used: got user: True"),
        ([{}, {"weight": 1, "train": False}], "the weight and train of a message cannot be used: got assistant: 1, Fa"),
        ([{}, {"loss": False}], "nothing to learn"),
    ],
)
def test_marks_of_training_that_cannot_be_used_are_refused(tmp_path, marks, message):
    rows = [{"role": role, "content": "x", **mark} for role, mark in zip(("user", "assistant"), marks, strict=True)]
    with pytest.raises(UsageError, match=rf"chats\.jsonl line 2.*{message}"):
        read_chats(write(tmp_path, PLAIN, {"messages": rows}))


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"system": "Be brief.", "messages": TURNS}, ["system", "user", "assistant"]),
        ({"system_prompt": "Be brief.", "system": None, "messages": TURNS}, ["system", "user", "assistant"]),
        ({"system": "Be brief.", "messages": [BRIEF, *TURNS]}, ["system", "user", "assistant"]),
        ({"system": "", "system_prompt": None, "messages": TURNS}, ["user", "assistant"]),
    ],
)
def test_a_column_of_the_system_message_is_read(tmp_path, row, roles):
    turns = [{**TURNS[0]}, {**TURNS[1], "weight": 0}, TURNS[0], TURNS[1]]
    (chat,) = read_chats(write(tmp_path, {**row, "messages": [*row["messages"][:-2], *turns]}))
    assert [message.role for message in chat.messages] == [*roles, "user", "assistant"]
    assert [message.text for message in chat.messages if message.role == "system"] == ["Be brief."] * (len(roles) - 2)
    assert chat.context_only == {len(roles) - 1}


@pytest.mark.parametrize(
    "row",
    [
        {"system": "Be brief.", "messages": [{**BRIEF, "content": "Be long."}, *TURNS]},
        {"system": "Be brief.", "system_prompt": "Be long.", "messages": TURNS},
        {"system": ["Be brief."], "messages": TURNS},
    ],
)
def test_two_system_messages_of_a_row_are_refused(tmp_path, row):
    with pytest.raises(UsageError, match=r"line 2 has a column system.* that cannot be used: got .*Be brief"):
        read_chats(write(tmp_path, PLAIN, row))


FILLED = {"text": "", "image": None, "image_url": None}
"""A part of a message as Arrow fills it up where its column holds parts of several types."""


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "text": ""},
        {"type": "image_url", "text": "", "image_url": {"url": "a.png"}},
        {"type": "audio", "text": "a sound"},
        {"type": "text", "text": "look", "image": "a.png"},
        {"type": None, "text": "", "video": {"path": "a.mp4", "bytes": None}},
        {"type": "thinking", "text": ""},
        {"type": "tool_result", "text": ""},
        {"type": 3, "text": ""},
        {"type": ["text"], "text": ""},
    ],
)
def test_the_type_of_a_part_decides_if_it_is_text(tmp_path, part):
    row = {"messages": [{"role": "user", "content": [{**FILLED, **part}, {"type": "text", "text": "q"}]}, TURNS[1]]}
    with pytest.raises(UsageError, match=r"line 2: a message is not text"):
        read_chats(write(tmp_path, PLAIN, row))


def test_parts_of_text_are_read_where_arrow_has_filled_them_up(tmp_path):
    parts = [{**FILLED, "type": kind, "text": kind or "none"} for kind in ("text", "input_text", None)]
    (chat,) = read_chats(write(tmp_path, {"messages": [{"role": "user", "content": parts}, TURNS[1]]}))
    assert chat.messages[0].text == "textinput_textnone"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {"path": "a.wav", "bytes": None}),
        ("video", "a.mp4"),
        ("multi_modal_data", {"image": ["a.png"], "video": None}),
        ("multi_modal_inputs", {"pixel_values": [[0.5]]}),
        ("images", [{"bytes": None, "path": "a.png"}]),
    ],
)
def test_media_of_a_row_or_of_a_message_are_refused_and_nulls_are_not(tmp_path, name, value):
    for row in ({"messages": TURNS, name: value}, {"messages": [{**TURNS[0], name: value}, TURNS[1]]}):
        with pytest.raises(UsageError, match=rf"line 2.* has a column {name}: got {name}, which the model would not"):
            read_chats(write(tmp_path, PLAIN, row))
    for nothing in (None, [], "", {"image": None, "video": []}, [{"bytes": None, "path": None}]):
        assert read_chats(write(tmp_path, {"messages": [{**TURNS[0], name: nothing}, TURNS[1]], name: nothing}))


def test_nulls_of_merged_data_sets_are_keys_of_other_rows(tmp_path, renderer):
    call = {
        "id": "c1",
        "type": None,
        "function": {"name": "look", "arguments": {"at": "door", "how": None, "near": None}},
    }
    schema = {"type": "object", "description": None, "properties": {
        "at": {"type": "string", "enum": None}, "how": {"type": "integer"},
        "near": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}  # fmt: skip
    tool = {"type": "function", "function": {"name": "look", "strict": None, "parameters": schema}}
    empty = {"tool_calls": None, "tool_call_id": None, "name": None, "reasoning_content": None, "weight": None}
    rows = [
        {**empty, "role": "user", "content": "Look."},
        {**empty, "role": "assistant", "content": None, "tool_calls": [call]},
        {**empty, "role": "tool", "content": "Shut.", "tool_call_id": "c1"},
        {**empty, "role": "assistant", "content": "It is shut."},
    ]
    merged = {"messages": rows, "tools": [tool], "images": None, "functions": None}
    table = tmp_path / "chats.parquet"
    parquet.write_table(pa.Table.from_pylist([merged]), table)
    for file in (
        write(tmp_path, merged),
        table,
        write(tmp_path, {**merged, "tools": json.dumps([tool]), "images": []}),
    ):
        (chat,) = read_chats(file)
        assert [message.name for message in chat.messages] == [None, None, "look", None]
        assert chat.messages[1].tool_calls[0].arguments == {"at": "door", "near": None}
        assert "null" not in json.dumps(chat.tools[0]).replace('{"type": "null"}', "")
        build_sft_dataset([chat], renderer, max_tokens=2000)


def test_an_argument_without_a_declared_type_may_be_null(tmp_path):
    call = {"function": {"name": "look", "arguments": {"at": None, "other": None}}}
    rows = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    for schema, kept in [({}, {"at"}), ({"type": ["string", "null"]}, {"at"}), ({"type": "string"}, set()),
                         ({"type": "string", "nullable": True}, {"at"}), (None, set())]:  # fmt: skip
        properties = None if schema is None else {"at": schema}
        tool = {"function": {"name": "look", "parameters": {"type": "object", "properties": properties}}}
        (chat,) = read_chats(write(tmp_path, {"messages": rows, "tools": [tool]}))
        assert set(chat.messages[1].tool_calls[0].arguments) == kept
    (chat,) = read_chats(write(tmp_path, {"messages": rows}))
    assert set(chat.messages[1].tool_calls[0].arguments) == {"at", "other"}


def test_records_of_a_gateway_are_read_with_their_separators_and_surrogates(tmp_path):
    rows = [
        {"role": "user", "content": "one\u2028two\u0085three \ud83d"},
        {"role": "assistant", "content": "so\u2029it is"},
    ]
    _append(tmp_path / "conversations.jsonl", {"messages": rows, "tools": [], "session": "a"})
    _append(tmp_path / "conversations.jsonl", {"messages": rows[::-1] + rows[1:], "tools": []})
    first, second = (list(row.values["messages"]) for row in read_rows(tmp_path / "conversations.jsonl"))
    rows[0]["content"] = "one\u2028two\u0085three ?"
    assert first == rows
    assert second == rows[::-1] + rows[1:]
    assert "two\u0085three" in read_chats(write(tmp_path, {"messages": rows}))[0].messages[0].text


SEARCH = {"name": "search", "description": "Search.", "parameters": {
    "type": "object", "properties": {"names": {"type": "array", "items": {"type": "string"}}}}}  # fmt: skip
PARALLEL = [
    {"role": "user", "content": "Find Ann, and look at the door.", "tool_calls": None},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "search", "arguments": {"names": ["Ann"]}}},
        {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}},
    ]},
    {"role": "tool", "content": "No Ann."},
    {"role": "tool", "content": "It is shut."},
    {"role": "assistant", "content": "Neither."},
]  # fmt: skip


def test_parallel_calls_of_a_parquet_file_are_written_as_the_whole_template_writes_them(tmp_path, renderer):
    # verl#4112: lists in arguments, and nulls of other rows; slime#2263: consecutive results are one turn
    tools = [{"type": "function", "function": SEARCH}, TOOL]
    parquet.write_table(pa.Table.from_pylist([{"messages": PARALLEL, "tools": tools}]), tmp_path / "chats.parquet")
    chats = read_chats(tmp_path / "chats.parquet")
    assert [message.name for message in chats[0].messages if message.role == "tool"] == ["search", "look"]
    (trajectory,) = build_sft_dataset(chats, renderer, max_tokens=4000).trajectories
    plain = [{key: value for key, value in row.items() if value is not None} for row in PARALLEL]
    whole = build_tokenizer("qwen2.5").apply_chat_template(plain, tools=tools, tokenize=False)
    assert renderer.encoder.decode(trajectory.sequences[0].ids_list()) == whole.rstrip("\n")


@pytest.mark.parametrize(
    "row",
    [
        # maxtext#3559, ms-swift#10125: columns that hold JSON, because Arrow has one type for a column
        {"messages": json.dumps(CALLING["messages"]), "tools": json.dumps([TOOL])},
        {"messages": CALLING["messages"], "tools": [json.dumps(TOOL)]},
        # prime-rl#3494: two data sets put together, with different columns for their tools
        {"messages": CALLING["messages"], "tools": None, "tool_defs": [TOOL["function"]]},
    ],
)
def test_columns_in_other_forms_are_the_same_conversation(tmp_path, row):
    (chat,) = read_chats(write(tmp_path, row))
    (plain,) = read_chats(write(tmp_path, CALLING))
    assert (chat.messages, chat.tools) == (plain.messages, plain.tools)


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_chats(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="is empty"):
        read_chats(write(tmp_path))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_is_read_under_each_of_its_usual_names(tmp_path, name):
    answer = {"role": "assistant", "content": "north", "reasoning": None, name: "it is cold here"}
    (chat,) = read_chats(write(tmp_path, {"messages": [{"role": "user", "content": "where?"}, answer]}))
    assert chat.messages[1].reasoning == "it is cold here"
