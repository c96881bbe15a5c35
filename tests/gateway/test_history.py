"""Which recorded conversation a history continues: what counts as the same message, and what does not."""

import openai
import pytest

from agentrl.gateway.chat_completions import ChatCompletions
from agentrl.gateway.history import LONG_TEXT, Histories, chain_of, key_of, tools_key
from agentrl.message import ImagePart, Message, TextPart, ToolCall


def tool(name="add", description="Adds.", **properties):
    parameters = {"type": "object", "properties": properties or {"a": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def user(text="one", **fields):
    return Message(role="user", content=text, **fields)


def answer(text="two", *calls, **fields):
    return Message(role="assistant", content=text, tool_calls=calls, **fields)


def call(name="add", id="c1", **arguments):
    return ToolCall(name=name, arguments=arguments, id=id)


LONG = "x" * LONG_TEXT
SAME = {
    "an answer trimmed": (answer(" two\n"), answer("two")),
    "an answer without its thinking": (answer(reasoning="hm"), answer()),
    "an answer under a name of the client's": (answer(name="bot"), answer()),
    "other ids of calls": (answer("", call(a=1)), answer("", call(id="x", a=1))),
    "whole numbers as JavaScript has them": (answer("", call(a=1.0)), answer("", call(a=1))),
    "arguments in another order": (answer("", call(a=1, b=2)), answer("", call(b=2, a=1))),
    "a long text": (user(LONG), user(LONG)),
}
OTHER = {
    "another role": (user("two"), answer("two")),
    "another text": (user("one"), user("One")),
    "a space of the user's": (user("one"), user("one ")),
    "another speaker": (user(name="ann"), user(name="bob")),
    "another tool": (answer("", call(a=1)), answer("", call("sub", a=1))),
    "another argument": (answer("", call(a=1)), answer("", call(a=2))),
    "no call": (answer("two", call(a=1)), answer("two")),
    "a number and a text": (answer("", call(a=1)), answer("", call(a="1"))),
    "true and 1": (answer("", call(a=True)), answer("", call(a=1))),
    "a long text of another end": (user(LONG + "a"), user(LONG + "b")),
    "a long text and its hash": (user(LONG), user("x")),
    "another image": (user((ImagePart(data=b"a"),)), user((ImagePart(data=b"b"),))),
    "images in another order": (
        user((ImagePart(data=b"a"), TextPart(text="t"))),
        user((TextPart(text="t"), ImagePart(data=b"a"))),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_client_libraries_change_is_the_same(name):
    assert key_of(SAME[name][0]) == key_of(SAME[name][1])


@pytest.mark.parametrize("name", OTHER)
def test_what_means_something_else_is_another(name):
    assert key_of(OTHER[name][0]) != key_of(OTHER[name][1])


@pytest.mark.parametrize(
    "other",
    [[], [tool("sub")], [tool(description="Sums.")], [tool(b={"type": "integer"})], [tool(), tool("sub")]],
    ids=["none", "name", "description", "parameters", "one more"],
)
def test_the_same_messages_with_other_tools_are_another_history(other):
    messages = [user(), answer()]
    assert tools_key([tool()]) == tools_key([tool()])
    assert tools_key([tool()]) == tools_key([dict(reversed(tool().items()))]), "the order of keys says nothing"
    own, others = chain_of(messages, [tool()]), chain_of(messages, other)
    assert all(one != another for one, another in zip(own, others, strict=True))


def test_each_beginning_of_a_history_depends_on_all_before_it():
    first, second = (chain_of([user(text), answer(), user("and?")], []) for text in ("one", "two"))
    assert len(first) == 3
    assert not set(first) & set(second)
    assert chain_of([user("one"), answer()], []) == first[:2]


def test_the_longest_beginning_is_found_with_its_length():
    histories = Histories()
    long, short = ([user("one"), answer("two"), user("three"), answer("four")], [user("one"), answer("two")])
    for name, messages in (("short", short), ("long", long)):
        histories.remember(name, messages, chain_of(messages, []), sent=messages[-1], tools=[])

    def found(*messages):
        known, count = histories.find_longest(chain_of(messages, []), messages)
        return (None if known is None else known.conversation), count

    assert found(*long, user("five")) == ("long", 4)
    assert found(*long[:3], answer("other")) == ("long", 3)
    assert found(*short, user("another")) == ("short", 2)
    assert found(user("one"), answer("other")) == ("short", 1)
    assert found(user("other")) == (None, 0)
    assert [known.conversation for known in histories.ends()] == ["long"]


@pytest.mark.parametrize(
    ("back", "expected"),
    [
        (answer("two", call(id="first", a=1)), "first"),
        (answer("two", call(id="second", a=1)), "second"),
        (answer("two", call(id="unknown", a=1)), "second"),
    ],
)
def test_of_equal_answers_the_one_goes_on_whose_ids_come_back(back, expected):
    histories = Histories()
    for name in ("first", "second"):
        messages = [user(), answer("two", call(id=name, a=1))]
        histories.remember(name, messages, chain_of(messages, []), sent=messages[-1], tools=[])
    messages = [user(), back]
    assert histories.find_longest(chain_of(messages, []), messages)[0].conversation == expected


@pytest.mark.parametrize(("thought", "expected"), [("first", "first"), ("second", "second"), (None, "second")])
def test_of_equal_answers_the_one_goes_on_whose_thinking_comes_back(thought, expected):
    histories = Histories()
    for name in ("first", "second"):
        messages = [user(), answer(reasoning=name)]
        histories.remember(name, messages, chain_of(messages, []), sent=messages[-1], tools=[])
    messages = [user(), answer(reasoning=thought)]
    assert histories.find_longest(chain_of(messages, []), messages)[0].conversation == expected


async def test_a_history_goes_on_with_other_tools_in_a_prompt_that_shows_them(played, renderer):
    async def play(gateway, session):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0) as client:
            question = {"role": "user", "content": "one"}
            first = await client.chat.completions.create(model="m", messages=[question], tools=[tool("add")])
            history = [question, first.choices[0].message, {"role": "user", "content": "and?"}]
            for name in ("add", "sub"):
                await client.chat.completions.create(model="m", messages=history, tools=[tool(name)])

    trajectory, script = await played(play, "it is so")
    script.check(trajectory)
    prompts = [renderer.encoder.decode(request.prompt_ids) for request in script.requests]
    assert [("add" in prompt, "sub" in prompt) for prompt in prompts] == [(True, False), (True, False), (False, True)]
    assert [len(sequence.turns) for sequence in trajectory.sequences] == [2, 1]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (499, "invalid_request_error"), (500, "server_error")],
)
def test_the_type_of_an_error_follows_from_its_status(status, kind):
    """Clients of OpenAI's API decide by it whether to try again."""
    assert ChatCompletions().error(status, "no")["error"]["type"] == kind
