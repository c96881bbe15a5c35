"""Conversations in a file: the assistant's tokens are learnt, others are read, and mistakes are named by their line."""

import json

import pytest
from support.tokenizers import build_tokenizer

from agentrl.builders.chat_file import lessons, read_chats
from agentrl.errors import UsageError
from agentrl.render.renderer import Renderer
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


def test_what_the_assistant_says_is_learnt_with_the_end_of_its_turn(tmp_path, renderer):
    found = lessons(read_chats(write(tmp_path, PLAIN)), renderer, max_tokens=1000)
    (trajectory,) = found.trajectories
    assert learnt(trajectory, renderer) == ["A door.<|im_end|>", "No.<|im_end|>"]
    text = renderer.encoder.decode(trajectory.sequences[0].ids_list())
    assert "Be brief." in text
    assert "Never answered" not in text


def test_tool_calls_are_learnt_as_the_template_writes_them(tmp_path, renderer):
    (trajectory,) = lessons(read_chats(write(tmp_path, CALLING)), renderer, max_tokens=2000).trajectories
    call, answer = learnt(trajectory, renderer)
    assert '{"name": "look", "arguments": {"at": "door"}}' in call
    assert answer == "It is shut.<|im_end|>"
    text = renderer.encoder.decode(trajectory.sequences[0].ids_list())
    assert text.index("Look.") < text.index("Look at the door.")
    whole = renderer.template.render(read_chats(tmp_path / "chats.jsonl")[0].messages, tools=[TOOL])
    assert text.rstrip() == whole.rstrip()


def test_what_is_spelled_in_a_file_ends_no_message_and_thinking_stays_thinking(tmp_path):
    renderer = Renderer(build_tokenizer("qwen3"), enable_thinking=True)
    spelled = "It ends with <|im_end|>\n<|im_start|>user\nand goes on."
    rows = [
        {"role": "user", "content": spelled},
        {"role": "assistant", "content": f"<think>\nOf {spelled}\n</think>\n\n{spelled}"},
    ]
    (trajectory,) = lessons(read_chats(write(tmp_path, {"messages": rows})), renderer, max_tokens=1000).trajectories
    (turn,), ids = trajectory.turns, trajectory.sequences[0].ids_list()
    count = lambda token: ids[turn.start :].count(renderer.encoder.added_id(token))  # noqa: E731
    assert [count(token) for token in ("<|im_end|>", "<|im_start|>", "<think>", "</think>")] == [1, 0, 1, 1]
    assert ids.count(renderer.boundary.end_id) == 2
    assert renderer.encoder.decode(ids).count(spelled) == 3


def test_what_is_too_long_is_left_out_and_counted(tmp_path, renderer):
    chats = read_chats(write(tmp_path, PLAIN, CALLING))
    lengths = [len(t.sequences[0]) for t in lessons(chats, renderer, max_tokens=2000).trajectories]
    found = lessons(chats, renderer, max_tokens=min(lengths))
    assert (len(found.trajectories), found.too_long) == (1, 1)
    with pytest.raises(UsageError, match=r"no conversation fits agent.max_tokens: got 2 conversations"):
        lessons(chats, renderer, max_tokens=3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "is not JSON"),
        ({"text": "x"}, "is no conversation"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "no known role"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]}, "an empty answer"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "an answer answers nothing"),
        ({"messages": [*PLAIN["messages"][:3], {"role": "assistant", "content": "x"}]}, "an answer answers nothing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *PLAIN["messages"][2:]]}, "is no text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]},
         "call cannot be read"),
        ({**PLAIN, "tools": ["look"]}, "no list of schemas"),
    ],
)  # fmt: skip
def test_lines_that_cannot_be_used_are_named(tmp_path, row, message):
    with pytest.raises(UsageError, match=rf"chats\.jsonl line 2.*{message}"):
        read_chats(write(tmp_path, PLAIN, row))


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_chats(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="is empty"):
        read_chats(write(tmp_path))
