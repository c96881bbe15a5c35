"""Requests in which all values differ, so that a swapped value in a reply is noticed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.gateway_client import post

from agentrl.config import load_config
from agentrl.engine import SamplingParams
from agentrl.evaluation.live_traffic import LiveTraffic
from agentrl.gateway import UntrainedRequestRules
from agentrl.gateway.history import Histories, chain_of, key_of
from agentrl.gateway.pending import cut_at
from agentrl.gateway.session import KEPT_ANSWERS
from agentrl.message import Message, ToolCall
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.serving.scripted import ScriptedEngine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ADD, SUB = (
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("add", "sub")
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def chat(gateway: Any, session: Any, *messages: Any, headers: Any = (), **options: Any) -> dict[str, Any]:
    body = {"model": "policy", "messages": list(messages), **options}
    status, reply = await post(gateway.url + CHAT, session.key, body, headers)
    assert status == 200, reply
    return dict(reply)


def said(text: str, **fields: Any) -> Message:
    return Message(role="assistant", content=text, **fields)


def test_the_name_of_a_system_message_counts() -> None:
    one, other = (Message(role="system", content="Be brief.", name=name) for name in ("ann", "bob"))
    assert key_of(one) != key_of(other)


@pytest.mark.parametrize(
    ("back", "expected"), [(("a", "b"), "first"), (("b", "a"), "first"), (("a", "c"), "latest"), (("x", "y"), "latest")]
)
def test_an_answer_is_echoed_by_the_ids_of_all_its_calls(back: tuple[str, ...], expected: str) -> None:
    """One id that comes back by chance is no echo: the latest answer is as good as any."""

    def calling(ids: tuple[str, ...]) -> list[Message]:
        calls = tuple(ToolCall(name="add", arguments={"n": number}, id=id_) for number, id_ in enumerate(ids))
        return [Message(role="user", content="one"), said("", tool_calls=calls)]

    histories = Histories()
    for name, ids in (("first", ("a", "b")), ("latest", ("x", "y"))):
        messages = calling(ids)
        histories.remember(name, messages, chain_of(messages, []), sent=messages[-1], tools=[])  # type: ignore[arg-type]
    messages = calling(back)
    found, count = histories.find_longest(chain_of(messages, []), messages)
    assert found is not None
    assert (str(found.conversation), count) == (expected, 2)


def test_the_latest_answer_decides_to_whom_a_history_belongs() -> None:
    histories = Histories()
    known = [Message(role="user", content="one"), said("two")]
    histories.remember("c", known, chain_of(known, []), sent=known[-1], tools=[])  # type: ignore[arg-type]
    more = Message(role="user", content="three")
    for history, expected in ((known, True), ([*known, more, said("of another")], False), ([more], False)):
        assert histories.has_answer_of(chain_of(history, []), history) is expected


@pytest.mark.parametrize("stop", [("so", "is"), ("is", "so"), ("o", "s", "is so")])
def test_an_answer_ends_at_the_first_stop_text_whatever_their_order(stop: tuple[str, ...]) -> None:
    text, found = cut_at("it is so", stop)
    assert text == "it is so"[: min("it is so".index(end) for end in stop)]
    assert found in stop


async def test_the_texts_of_side_calls_are_searched_in_system_messages_only(played: Any) -> None:
    async def play(gateway: Any, session: Any) -> None:
        await chat(gateway, session, user("make a title"))
        await chat(gateway, session, {"role": "system", "content": "Please make a title now."}, user("one"))

    rules = UntrainedRequestRules(markers=("nothing like it", "make a title"))
    trajectory, _ = await played(play, "it is so", options={"side_calls": rules})
    assert [bool(sequence.loss_mask.any()) for sequence in trajectory.sequences] == [True, False]


async def test_numbers_of_tokens_are_those_of_the_request(played: Any, renderer: Any) -> None:
    texts = ["it is so", "no, it was otherwise, and for long"]
    sizes = [len(renderer.encoder.encode(text)) + 1 for text in texts]
    told: list[dict[str, int]] = []

    async def play(gateway: Any, session: Any) -> None:
        first = await chat(gateway, session, user("one and two"), n=2)
        history = [user("one and two"), first["choices"][0]["message"], user("and three")]
        told.extend((first["usage"], (await chat(gateway, session, *history))["usage"]))

    trajectory, script = await played(play, *texts)
    sent = [len(script.requests[number].prompt_ids) for number in (0, 2)]
    for usage, prompt, answers in zip(told, sent, (sum(sizes), sizes[0]), strict=True):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, answers)
        assert usage["total_tokens"] == prompt + answers
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in told]
    assert cached[0] == 0
    assert sent[0] < cached[1] < sent[1]
    script.check(trajectory)


async def test_a_reward_goes_to_the_answer_that_it_names(played: Any) -> None:
    async def play(gateway: Any, session: Any) -> None:
        url = gateway.url_of(session)
        ids = [(await chat(gateway, session, user(text)))["id"] for text in ("one", "two", "three")]
        for reply, reward in ((ids[1], 0.25), (ids[0], 0.5), (ids[1], 0.125)):
            assert (await post(f"{url}/reward", session.secret, {"reward": reward, "reply": reply}))[0] == 200
        assert (await post(f"{url}/reward", session.secret, {"reward": 2.0, "turn": 2}))[0] == 200

    trajectory, _ = await played(play, "it is so")
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.125, 2.0]


async def test_the_clients_limit_reaches_the_engine(played: Any) -> None:
    async def play(gateway: Any, session: Any) -> None:
        for limits in ({"max_tokens": 3}, {"max_completion_tokens": 4, "max_tokens": 9}, {}):
            await chat(gateway, session, user("one"), **limits)
        body = {"model": "p", "max_output_tokens": 5, "input": "one", "store": False}
        assert (await post(gateway.url + RESPONSES, session.key, body))[0] == 200
        body = {"model": "p", "max_tokens": 6, "messages": [user("one")]}
        assert (await post(gateway.url + MESSAGES, session.key, body))[0] == 200

    _, script = await played(play, "it is so and so and so and so")
    limits = [request.params.max_tokens for request in script.requests]
    assert [limits[number] for number in (0, 1, 3, 4)] == [3, 4, 5, 6]
    assert limits[2] > 6


async def test_a_result_has_the_name_of_its_call(played: Any) -> None:
    """The client may leave the name out; the prompt shows the one of the call."""
    seen = []

    async def play(gateway: Any, session: Any) -> None:
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for id_, name in (("x", "sub"), ("y", "add"))
        ]
        results = [{"role": "tool", "tool_call_id": id_, "content": id_} for id_ in ("y", "x")]
        opened = session._episode.open

        def keep(messages: Any, **options: Any) -> Any:
            seen.extend(messages)
            return opened(messages, **options)

        session._episode.open = keep
        try:
            history = [user("one"), {"role": "assistant", "content": None, "tool_calls": calls}, *results]
            await chat(gateway, session, *history, tools=[ADD, SUB])
        finally:
            del session._episode.open

    await played(play, "it is so")
    assert [(message.text, message.name) for message in seen if message.role == "tool"] == [("y", "add"), ("x", "sub")]


async def test_an_answer_with_a_call_does_not_name_the_stop_text_after_it(played: Any) -> None:
    async def play(gateway: Any, session: Any) -> None:
        tool = {"name": "add", "input_schema": {"type": "object"}}
        body = {"model": "p", "max_tokens": 99, "messages": [user("one")], "tools": [tool], "stop_sequences": ["."]}
        status, reply = await post(gateway.url + MESSAGES, session.key, body)
        assert status == 200
        assert [block["type"] for block in reply["content"]] == ["text", "tool_use"]
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("tool_use", None)

    await played(play, f"{CALL}\nI added. And more")


async def test_the_newest_answers_are_kept_for_retries(played: Any) -> None:
    async def play(gateway: Any, session: Any) -> None:
        texts = [f"question {number}" for number in range(KEPT_ANSWERS + 3)]
        ids = [(await chat(gateway, session, user(text)))["id"] for text in texts]
        retry = {"x-stainless-retry-count": "1"}
        last = (await chat(gateway, session, user(texts[-1]), headers=retry))["id"]
        first = (await chat(gateway, session, user(texts[0]), headers=retry))["id"]
        assert (last == ids[-1], first == ids[0]) == (True, False)

    await played(play, "it is so")


async def test_a_stored_reply_is_continued_with_its_answer(played: Any, renderer: Any) -> None:
    async def play(gateway: Any, session: Any) -> None:
        body = {"model": "p", "input": "one", "instructions": "Be brief."}
        _, first = await post(gateway.url + RESPONSES, session.key, body)
        body = {"model": "p", "input": "and?", "previous_response_id": first["id"]}
        status, second = await post(gateway.url + RESPONSES, session.key, body)
        assert status == 200, second

    trajectory, script = await played(play, "it is so", "it was so")
    prompt = renderer.encoder.decode(script.requests[1].prompt_ids)
    assert prompt.index("one") < prompt.index("it is so") < prompt.index("and?")
    script.check(trajectory)


async def test_all_tools_of_a_conversation_are_recorded(renderer: Any, tmp_path: Any) -> None:
    engine = ScriptedEngine(
        script=lambda _: [*renderer.encoder.encode("it is so"), renderer.boundary.end_id], vocab_size=400
    )
    policy = EngineEpisodePolicy(engine, renderer, SamplingParams())
    config = load_config(None, ["environment=guess_number"])
    live = LiveTraffic(policy, config, folder=tmp_path, idle_s=60)
    async with live:
        for tools in ([SUB, ADD], [ADD]):
            body = {"model": "p", "messages": [user(f"{len(tools)} tools")], "tools": tools}
            assert (await post(live.gateway.url + CHAT, "", body))[0] == 200
    rows = [json.loads(line) for line in (tmp_path / "conversations.jsonl").read_text().splitlines()]
    found = {row["messages"][0]["content"]: [tool["function"]["name"] for tool in row["tools"]] for row in rows}
    assert found == {"2 tools": ["sub", "add"], "1 tools": ["add"]}
