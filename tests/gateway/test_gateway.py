"""OpenAI clients of the gateway: their answers, and the recorded episodes."""

import asyncio
import json

import aiohttp
import openai
import pytest

from agentrl.errors import Outcome
from agentrl.gateway import UntrainedRequestRules
from agentrl.rollout.budget import EpisodeLimits
from agentrl.serving.scripted import Failure, ScriptedAnswer
from agentrl.trajectory import Source

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SYSTEM = {"role": "system", "content": "You are a calculator."}


def user(text):
    return {"role": "user", "content": text}


def client_of(gateway, session, **options):
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0, **options)


async def ask(client, messages, **options):
    return await client.chat.completions.create(model="policy", messages=messages, **options)


async def test_turns_of_one_conversation_are_one_sequence(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            messages = [SYSTEM, user("one")]
            for _ in range(3):
                reply = await ask(client, messages)
                assert reply.choices[0].finish_reason == "stop"
                assert reply.choices[0].message.content == "it is so"
                assert reply.usage.completion_tokens > 0
                messages += [reply.choices[0].message, user("and then?")]

    trajectory, script = await played(play, "it is so")
    (sequence,) = trajectory.sequences
    assert len(sequence.turns) == 3
    script.check(trajectory)


CHANGES = {
    "as the client has it": lambda message: message,
    "the content is a list of parts": lambda m: {**m, "content": [{"type": "text", "text": m["content"] or ""}]},
    "the content is empty text": lambda m: {**m, "content": m["content"] or ""},
    "arguments are written with other spaces": lambda m: _with_calls(
        m, lambda c: {**c, "function": {**c["function"], "arguments": '{ "b":2,"a" : 1}'}}
    ),
    "fields are added": lambda m: {**m, "refusal": None, "annotations": [], "name": None},
    "text is trimmed and padded": lambda m: {**m, "content": m["content"] and f" {m['content']}\n"},
}


def _with_calls(message, change):
    return (
        {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("answer", ["it is so", CALL])
async def test_an_answer_that_comes_back_changed_in_form_is_known(played, change, answer):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            messages = [SYSTEM, user("one")]
            for _ in range(3):
                reply = await ask(client, messages, tools=[ADD])
                message = reply.choices[0].message.model_dump(exclude_none=True)
                message.setdefault("content", None)
                calls = message.get("tool_calls", [])
                results = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls]
                messages += [CHANGES[change](message), *(results or [user("go on")])]

    trajectory, script = await played(play, answer)
    assert len(trajectory.sequences) == 1
    script.check(trajectory)


async def test_a_tool_call_goes_out_as_one_and_its_result_comes_back(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            reply = await ask(client, [user("one")], tools=[ADD])
            choice = reply.choices[0]
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            reply = await ask(client, [user("one"), choice.message, result], tools=[ADD])
            assert reply.choices[0].message.content == "three"

    trajectory, script = await played(play, CALL, "three")
    assert len(trajectory.sequences) == 1
    script.check(trajectory)


async def test_a_malformed_call_comes_out_as_text_and_is_known_again(played):
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1,'

    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            reply = await ask(client, [user("one")], tools=[ADD])
            message = reply.choices[0].message
            assert message.tool_calls is None
            assert broken.split("\n")[1] in message.content
            await ask(client, [user("one"), message, user("again")], tools=[ADD])

    trajectory, script = await played(play, broken, "three")
    assert len(trajectory.sequences) == 1
    script.check(trajectory)


async def test_a_stop_text_is_kept_in_the_ledger_and_not_given_to_the_client(played, renderer):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            reply = await ask(client, [user("one")], stop=["so"])
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("it is ", "stop")
            await ask(client, [user("one"), reply.choices[0].message, user("again")])

    trajectory, script = await played(play, "it is so")
    first, second = trajectory.turns
    (sequence,) = trajectory.sequences
    assert renderer.encoder.decode(sequence.ids_list()[first.start : first.end]).endswith("so")
    assert second.start > first.end
    script.check(trajectory)


async def test_a_rewritten_history_forks_and_shares_what_is_the_same(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            first = (await ask(client, [SYSTEM, user("one")])).choices[0].message
            await ask(client, [SYSTEM, user("one"), first, user("two")])
            await ask(client, [SYSTEM, user("one"), first, user("another two")])
            await ask(client, [SYSTEM, user("a summary of what was said"), user("three")])

    trajectory, script = await played(play, "it is so")
    assert len(trajectory.sequences) == 3
    assert [len(sequence.turns) for sequence in trajectory.sequences] == [2, 1, 1]
    assert trajectory.sequences[1].shared >= trajectory.turns[0].end
    assert trajectory.sequences[2].shared > 0
    script.check(trajectory)
    assert trajectory.sampled_tokens == sum(turn.end - turn.start for turn in trajectory.turns), "each is trained once"


async def test_requests_at_the_same_time_are_branches(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            first = (await ask(client, [user("one")])).choices[0].message
            history = [user("one"), first]
            await asyncio.gather(*(ask(client, [*history, user(f"branch {n}")]) for n in range(4)))

    trajectory, script = await played(play, "it is so")
    assert sorted(turn.index for turn in trajectory.turns) == list(range(5))
    script.check(trajectory)


async def test_several_answers_to_one_request_are_branches_too(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            reply = await ask(client, [user("one")], n=3)
            assert [choice.message.content for choice in reply.choices] == ["first", "second", "third"]

    trajectory, script = await played(play, "first", "second", "third")
    script.check(trajectory)


async def test_a_retry_is_answered_once(played):
    async def play(gateway, session):
        body = {"model": "policy", "messages": [user("one")]}
        async with aiohttp.ClientSession() as http:

            async def post(retry):
                headers = {"Authorization": f"Bearer {session.key}", "x-stainless-retry-count": str(retry)}
                async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as answer:
                    return (await answer.json())["id"]

            first = await post(0)
            assert await post(1) == first
            assert await post(2) == first
            assert await post(0) != first, "without the header it is a new sample"
        assert (session.requests, session.retries) == (2, 2)

    trajectory, script = await played(play, "it is so")
    assert len(trajectory.turns) == 2
    script.check(trajectory)


async def test_a_stream_gives_the_same_answer(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            options = {"include_usage": True}
            stream = await ask(client, [user("one")], stream=True, stream_options=options, tools=[ADD])
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens > 0
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "it is so"
            async with client.chat.completions.stream(model="policy", messages=[user("two")], tools=[ADD]) as events:
                final = await events.get_final_completion()
            (call,) = final.choices[0].message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1, "b": 2}

    trajectory, script = await played(play, "it is so", CALL)
    script.check(trajectory)


async def test_side_calls_are_recorded_and_not_trained(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            await ask(client, [user("one")])
            await client.chat.completions.create(model="small", messages=[user("make a title")])

    trajectory, script = await played(
        play, "it is so", options={"side_calls": UntrainedRequestRules(models=("small",))}
    )
    main, side = trajectory.sequences
    assert main.loss_mask.any()
    assert not side.loss_mask.any()
    assert Source.FORCED in side.sources
    script.check(trajectory)


async def test_a_spent_budget_is_an_answer_that_was_cut_and_then_a_final_error(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            await ask(client, [user("one")])
            reply = await ask(client, [user("two")])
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("", "length")
            with pytest.raises(openai.PermissionDeniedError, match="this episode has ended: truncated_turns"):
                await ask(client, [user("three")])
            assert session.outcome is Outcome.TRUNCATED_TURNS

    trajectory, _ = await played(play, "it is so", limits=EpisodeLimits(max_turns=1))
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 3}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(played, options, field):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, [user("one")], **options)
            assert refused.value.param == field
            await ask(client, [user("one")])

    trajectory, _ = await played(play, "it is so")
    assert len(trajectory.turns) == 1


async def test_sessions_are_kept_apart(played):
    async def play(gateway, session):
        async with aiohttp.ClientSession() as http:

            async def post(path, key, **options):
                body = {"json": {"model": "policy", "messages": [user("one")]}} | options
                async with http.post(gateway.url + path, headers={"Authorization": f"Bearer {key}"}, **body) as answer:
                    return answer.status, await answer.json()

            chat, own = "/v1/chat/completions", f"/s/{session.id}"
            assert (await post(chat, "sk-other"))[0] == 401
            assert (await post(f"/s/unknown{chat}", session.key))[0] == 404
            assert (await post(f"{own}{chat}", "sk-the-users-own"))[0] == 200, "the path is enough"
            assert (await post(chat, session.key))[0] == 200, "and so is the key"
            assert (await post(f"{own}/reward", session.key, json={"reward": 1}))[0] == 401, "which pays nothing"
            assert (await post(f"{own}/reward", session.secret, json={"reward": "x"}))[0] == 400
            assert (await post(f"{own}/reward", session.secret, json={"reward": 0.5, "turn": 7}))[0] == 400
            assert (await post(f"{own}/reward", session.secret, json={"reward": 0.5, "turns": 0}))[0] == 400
            assert (await post(f"{own}/reward", session.secret, json={"reward": 0.5}))[0] == 200
            for body in (b"", b"[]", b"{", b"\xff", b'{"messages": 3}', b'{"model": "m", "messages": [[]]}'):
                status, said = await post(chat, session.key, json=None, data=body)
                assert (status, "message" in said["error"]) == (400, True)
            assert (await post("/v1/embeddings", session.key))[0] == 404
            async with http.get(f"{gateway.url}{own}/reward") as answer:
                message = (await answer.json())["error"]["message"]
                assert answer.status == 405
                assert message.endswith("does not accept GET: expected POST")

    trajectory, script = await played(play, "it is so")
    assert [turn.reward for turn in trajectory.turns] == [0, 0.5]
    assert trajectory.reward == 0.5
    script.check(trajectory)


async def test_an_episode_that_ends_leaves_nothing_behind(played):
    async def play(gateway, session):
        client = client_of(gateway, session)
        waiting = asyncio.create_task(ask(client, [user("one")]))
        async with asyncio.timeout(60):
            while not session.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await session.close()
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            await waiting
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            await ask(client, [user("two")])
        await client.close()

    trajectory, _ = await played(play, ScriptedAnswer(token_ids=[1], failure=Failure.HANG))
    assert trajectory.turns == []


async def test_of_answers_that_say_the_same_the_one_goes_on_whose_ids_come_back(played, renderer):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            reply = await ask(client, [user("one")], tools=[ADD], n=3)
            message = reply.choices[1].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            await ask(client, [user("one"), message, result], tools=[ADD])

    spaces = CALL.replace('"b": 2', '"b":  2')
    trajectory, script = await played(play, CALL, spaces, CALL, "three")
    script.check(trajectory)
    assert spaces in renderer.encoder.decode(script.requests[3].prompt_ids)


@pytest.mark.parametrize(("first", "second"), [("a", " a"), ("a", "a\n")])
async def test_what_users_and_tools_say_is_told_apart_by_its_spaces(played, renderer, first, second):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            answer = (await ask(client, [user(first)])).choices[0].message
            await ask(client, [user(second), answer, user("and?")])

    trajectory, script = await played(play, "it is so")
    script.check(trajectory)
    assert f"{second}<|im_end|>" in renderer.encoder.decode(script.requests[1].prompt_ids)


async def test_whole_numbers_come_back_from_javascript_as_such(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            message = (await ask(client, [user("one")], tools=[ADD])).choices[0].message.model_dump(exclude_none=True)
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"a": 1.0, "b": 2.5}
            call["function"]["arguments"] = '{"a":1,"b":2.5}'
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3.5"}
            await ask(client, [user("one"), message, result], tools=[ADD])

    trajectory, script = await played(play, CALL.replace("1", "1.0").replace("2", "2.5"), "three")
    assert len(trajectory.sequences) == 1
    script.check(trajectory)
