"""Forms of answers: JSON schemas, forced calls and log-probabilities in each vendor's notation."""

import json

import aiohttp
import anthropic
import openai
import pydantic
import pytest
from agentrl.agent_loops.external import External
from support.gateway_client import DIALECTS

from agentrl.errors import Outcome
from agentrl.render.answer_tokens import content_logprobs
from agentrl.serving.scripted import ScriptedAnswer

QUESTION = [{"role": "user", "content": "Who?"}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
PERSON = '{"name": "Ann"}'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": PARAMETERS}}
    for name in ("add", "sub")
]
FLAT = [{"type": "function", **tool["function"]} for tool in FUNCTIONS]
CUSTOM = [{"name": name, "input_schema": PARAMETERS} for name in ("add", "sub")]
NAMED = {"name": "person", "schema": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TAG = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "add", "arguments": ',
    "content": {"type": "json_schema", "json_schema": PARAMETERS},
    "end": "}\n</tool_call>",
}


class Person(pydantic.BaseModel):
    name: str


async def chat(gateway, session, **fields):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0) as client:
        reply = await client.chat.completions.create(model="policy", messages=QUESTION, **fields)
        return [chunk async for chunk in reply] if fields.get("stream") else reply


async def respond(gateway, session, **fields):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0) as client:
        return await client.responses.create(model="policy", input=QUESTION, **fields)


async def message(gateway, session, **fields):
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key, max_retries=0) as client:
        return await client.messages.create(model="policy", max_tokens=99, messages=QUESTION, **fields)


@pytest.fixture
def held(played):
    """Play an episode that is not trained, with an engine that takes structures."""

    async def run(play, *answers, **fields):
        return await played(play, *answers, structures=True, trains=False, **fields)

    return run


SCHEMAS = {
    "chat": (chat, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
    "responses": (respond, {"text": {"format": {**FORMAT, "name": "person"}}}),
    "anthropic": (message, {"output_config": {"format": FORMAT}}),
}
CALLS = {
    "chat, any": (chat, {"tools": FUNCTIONS, "tool_choice": "required"}),
    "chat, one": (chat, {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "add"}}}),
    "responses, any": (respond, {"tools": FLAT, "tool_choice": "required"}),
    "responses, one": (respond, {"tools": FLAT, "tool_choice": {"type": "function", "name": "add"}}),
    "anthropic, any": (message, {"tools": CUSTOM, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    "anthropic, one": (message, {"tools": CUSTOM, "tool_choice": {"type": "tool", "name": "add"}}),
}


@pytest.mark.parametrize("name", SCHEMAS)
async def test_an_engine_is_given_the_schema(held, name):
    ask, fields = SCHEMAS[name]

    async def play(gateway, session):
        assert PERSON in (await ask(gateway, session, **fields)).model_dump_json().replace('\\"', '"')

    _, script = await held(play, PERSON)
    structure = json.loads(script.requests[0].params.structure)
    assert structure == {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}


async def test_what_the_clients_parse_is_of_their_own_types(held):
    async def play(gateway, session):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key) as client:
            chatted = await client.chat.completions.parse(model="p", messages=QUESTION, response_format=Person)
            responded = await client.responses.parse(model="p", input=QUESTION, text_format=Person)
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key) as client:
            told = await client.messages.parse(model="p", max_tokens=99, messages=QUESTION, output_format=Person)
        assert chatted.choices[0].message.parsed == responded.output_parsed == told.parsed_output == Person(name="Ann")

    await held(play, PERSON)


@pytest.mark.parametrize("name", CALLS)
async def test_an_engine_is_given_the_calls(held, name):
    ask, fields = CALLS[name]

    async def play(gateway, session):
        assert '"add"' in (await ask(gateway, session, **fields)).model_dump_json()

    _, script = await held(play, CALL)
    form = json.loads(script.requests[0].params.structure)["format"]
    if "one" in name:
        assert form == TAG
    else:
        assert form["type"] == "or"
        assert form["elements"][0] == TAG
        assert '"sub"' in form["elements"][1]["begin"]


@pytest.mark.parametrize("name", [*SCHEMAS, *CALLS])
async def test_an_answer_that_is_trained_is_held_to_nothing(played, name):
    ask, fields = {**SCHEMAS, **CALLS}[name]
    field = "tool_choice" if "tools" in fields else next(iter(fields))

    async def play(gateway, session):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=field) as refused:
            await ask(gateway, session, **fields)
        assert "agent.options.forms=free" in str(refused.value)
        await chat(gateway, session)

    trajectory, script = await played(play, "Ann", structures=True)
    assert len(trajectory.turns) == 1
    assert script.requests[0].params.structure is None


@pytest.mark.parametrize("name", [*SCHEMAS, *CALLS])
async def test_a_policy_that_is_free_answers_as_it_likes(played, name):
    ask, fields = {**SCHEMAS, **CALLS}[name]

    async def play(gateway, session):
        assert "just Ann" in (await ask(gateway, session, **fields)).model_dump_json()

    trajectory, script = await played(play, "just Ann", options={"holds_forms": False})
    assert script.requests[0].params.structure is None
    assert trajectory.sampled_tokens > 0


TOO_YOUNG = '{"name": 3}'
WRONG = {"chat": "Sure: " + PERSON, "responses": TOO_YOUNG, "anthropic": f"```json\n{PERSON}\n```"}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_an_engine_without_grammars_is_asked_until_the_schema_is_met(played, name, streams):
    ask, fields = SCHEMAS[name]

    async def play(gateway, session):
        if streams:
            pieces = [piece async for piece in await ask_streamed(gateway, session, name, fields)]
            text = "".join(pieces)
        else:
            text = (await ask(gateway, session, **fields)).model_dump_json().replace('\\"', '"')
        assert PERSON in text
        assert not any(wrong in text for wrong in (WRONG[name], TOO_YOUNG))

    trajectory, script = await played(play, WRONG[name], TOO_YOUNG, PERSON, trains=False)
    assert len(script.requests) == 3
    assert len({request.params.seed for request in script.requests}) == 3
    assert len(trajectory.turns) == 1, "only the answer that was given is recorded, and counts"
    assert script.requests[0].params.structure is None


async def ask_streamed(gateway, session, name, fields):
    route, write, _, _ = DIALECTS[name]
    body = write([{"role": "user", "text": "Who?"}], False) | fields | {"stream": True}

    async def pieces():
        headers = {"Authorization": f"Bearer {session.key}"}
        async with aiohttp.ClientSession() as http, http.post(gateway.url + route, json=body, headers=headers) as got:
            assert got.status == 200, await got.text()
            yield (await got.text()).replace('\\"', '"')

    return pieces()


@pytest.mark.parametrize("name", CALLS)
async def test_an_engine_without_grammars_is_asked_until_a_tool_is_called(played, name):
    ask, fields = CALLS[name]

    async def play(gateway, session):
        told = str((await ask(gateway, session, **fields)).model_dump(exclude={"tools", "tool_choice"}))
        assert [told.count(f"'name': '{tool}'") for tool in ("add", "sub", "mul")] == [1, 0, 0]

    other = CALL.replace("add", "sub" if "one" in name else "mul")
    trajectory, script = await played(play, "I would add them.", other, CALL, trains=False)
    assert (len(script.requests), len(trajectory.turns)) == (3, 1)


async def test_a_policy_that_misses_the_form_is_told_apart_from_a_gateway_that_cannot(played):
    async def play(gateway, session):
        with pytest.raises(openai.BadRequestError, match="no answer of the model has the requested format") as refused:
            await chat(gateway, session, response_format={"type": "json_object"})
        assert (refused.value.param, refused.value.code) == ("response_format", "form_missed")
        assert session.refusal is None
        broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}
        with pytest.raises(openai.BadRequestError, match="schema is not valid"):
            await chat(gateway, session, response_format=broken)
        assert "schema is not valid" in session.refusal

    trajectory, script = await played(play, "Ann", trains=False)
    assert (len(script.requests), trajectory.turns) == (8, [])


@pytest.mark.parametrize("answer", [CALL, PERSON])
async def test_with_tools_an_answer_is_a_call_or_json_of_the_schema(held, answer):
    async def play(gateway, session):
        told = (await chat(gateway, session, tools=FUNCTIONS, **SCHEMAS["chat"][1])).choices[0]
        assert told.message.content == (None if answer == CALL else PERSON)
        assert told.finish_reason == ("tool_calls" if answer == CALL else "stop")

    trajectory, script = await held(play, "Sure, Ann.", TOO_YOUNG, answer)
    assert [request.params.structure for request in script.requests] == [None] * 3
    assert len(trajectory.turns) == 1


async def test_tools_that_may_not_be_called_leave_the_schema_alone(held):
    async def play(gateway, session):
        await chat(gateway, session, tools=FUNCTIONS, tool_choice="none", **SCHEMAS["chat"][1])

    _, script = await held(play, PERSON)
    assert "json_schema" in script.requests[0].params.structure


def allowed(mode, *names):
    """Allow only some tools, in both of OpenAI's notations."""
    nested = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}
    flat = {"mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    return {
        "chat": (chat, {"tools": FUNCTIONS, "tool_choice": {"type": "allowed_tools", "allowed_tools": nested}}),
        "responses": (respond, {"tools": FLAT, "tool_choice": {"type": "allowed_tools", **flat}}),
    }


SUB = CALL.replace("add", "sub")
OPENAI = ("chat", "responses")


@pytest.mark.parametrize("dialect", OPENAI)
async def test_all_tools_stay_in_the_prompt_of_an_answer_that_must_call_some_of_them(held, dialect):
    async def play(gateway, session):
        for mode, names in (("required", ["add"]), ("required", ["sub", "add"]), ("auto", ["sub", "add"])):
            ask, fields = allowed(mode, *names)[dialect]
            await ask(gateway, session, **fields)
        await ask(gateway, session, tools=fields["tools"])

    _, script = await held(play, CALL)
    prompts = [list(request.prompt_ids) for request in script.requests]
    assert prompts == [prompts[-1]] * 4
    one, both, *free = [
        request.params.structure and json.loads(request.params.structure) for request in script.requests
    ]
    assert (one["format"], both["format"]["type"], free) == (TAG, "or", [None, None])


@pytest.mark.parametrize("answer", [CALL, "I would add them."])
@pytest.mark.parametrize("dialect", OPENAI)
async def test_an_answer_is_text_or_a_call_of_an_allowed_tool(held, dialect, answer):
    async def play(gateway, session):
        ask, fields = allowed("auto", "add")[dialect]
        told = str((await ask(gateway, session, **fields)).model_dump(exclude={"tools", "tool_choice"}))
        assert [told.count("'add'"), told.count("I would")] == ([1, 0] if answer == CALL else [0, 1])

    trajectory, script = await held(play, SUB, f"{CALL}\n{SUB}", answer)
    assert [request.params.structure for request in script.requests] == [None] * 3
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("dialect", OPENAI)
async def test_a_trained_answer_is_not_restricted_to_some_tools(played, dialect):
    async def play(gateway, session):
        for mode in ("auto", "required"):
            ask, fields = allowed(mode, "add")[dialect]
            with pytest.raises(openai.BadRequestError, match=r"tool_choice: .*agent\.options\.forms=free"):
                await ask(gateway, session, **fields)
        ask, fields = allowed("auto", "sub", "add")[dialect]
        await ask(gateway, session, **fields)

    trajectory, _ = await played(play, SUB)
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("dialect", OPENAI)
async def test_a_policy_that_is_free_may_call_every_tool(played, dialect):
    async def play(gateway, session):
        ask, fields = allowed("auto", "add")[dialect]
        assert "'sub'" in str((await ask(gateway, session, **fields)).model_dump(exclude={"tools"}))

    await played(play, SUB, options={"holds_forms": False})


@pytest.mark.parametrize("dialect", OPENAI)
@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"mode": "any", "tools": []}, "mode"),
        ({"tools": []}, "mode"),
        ({"mode": "auto", "tools": []}, "tools"),
        ({"mode": "auto"}, "tools"),
        ({"mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type"),
        ({"mode": "auto", "tools": ["add"]}, "tools.0.type"),
        ({"mode": "auto", "tools": [{"type": "function", "name": "mul", "function": {"name": "mul"}}]}, "tools.0"),
    ],
)
async def test_a_choice_of_tools_that_cannot_be_followed_is_refused_by_its_field(played, dialect, choice, field):
    ask, fields = allowed("auto")[dialect]
    nested = {"type": "allowed_tools", "allowed_tools": choice} if dialect == "chat" else {"type": "allowed_tools"}
    where = "tool_choice.allowed_tools" if dialect == "chat" else "tool_choice"

    async def play(gateway, session):
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(gateway, session, **(fields | {"tool_choice": {**choice, **nested}}))
        assert refused.value.param == f"{where}.{field}"
        await chat(gateway, session)

    await played(play, "Ann")


@pytest.mark.parametrize("dialect", OPENAI)
async def test_a_schema_and_a_choice_of_some_tools_exclude_each_other(held, dialect):
    async def play(gateway, session):
        ask, fields = allowed("auto", "add")[dialect]
        with pytest.raises(openai.BadRequestError, match="together with allowed_tools of mode auto") as refused:
            await ask(gateway, session, **fields, **SCHEMAS[dialect][1])
        assert refused.value.param == ("response_format" if dialect == "chat" else "text.format")
        ask, fields = allowed("required", "add")[dialect]
        assert '"add"' in (await ask(gateway, session, **fields, **SCHEMAS[dialect][1])).model_dump_json()

    await held(play, CALL)


ONE_CALL = {
    "chat": (chat, {"tools": FUNCTIONS, "parallel_tool_calls": False}),
    "responses": (respond, {"tools": FLAT, "parallel_tool_calls": False}),
    "anthropic": (message, {"tools": CUSTOM, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
}


@pytest.mark.parametrize("name", ONE_CALL)
async def test_a_client_that_takes_one_call_at_a_time_gets_the_first(played, name):
    ask, fields = ONE_CALL[name]
    several = f"{CALL}\n{CALL.replace('add', 'sub')}"

    async def play(gateway, session):
        told = str((await ask(gateway, session, **fields)).model_dump(exclude={"tools"}))
        assert (told.count("'add'"), told.count("'sub'")) == (1, 0)
        both = str((await ask(gateway, session, tools=fields["tools"])).model_dump(exclude={"tools"}))
        assert (both.count("'add'"), both.count("'sub'")) == (1, 1)

    trajectory, script = await played(play, several)
    script.check(trajectory)


async def test_a_history_with_the_first_of_several_calls_goes_on_with_the_recorded_tokens(played):
    async def play(gateway, session):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0) as client:
            fields = {"model": "p", "tools": FUNCTIONS, "parallel_tool_calls": False}
            answer = (await client.chat.completions.create(messages=QUESTION, **fields)).choices[0].message
            result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "3"}
            await client.chat.completions.create(messages=[*QUESTION, answer, result], **fields)

    trajectory, script = await played(play, f"{CALL}\n{CALL.replace('add', 'sub')}", "It is 3.")
    script.check(trajectory)
    assert len(trajectory.sequences) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_log_probabilities_are_those_that_were_recorded(played, renderer, streams):
    ids = [*renderer.encoder.encode("it is so"), renderer.boundary.end_id]
    values = [-(index + 1) / 8 for index in range(len(ids))]

    async def play(gateway, session):
        told = await chat(gateway, session, logprobs=True, stream=streams)
        if streams:
            (rows,) = [c.choices[0].logprobs.content for c in told if c.choices[0].logprobs]
        else:
            rows = told.choices[0].logprobs.content
        assert "".join(row.token for row in rows) == "it is so"
        assert [row.logprob for row in rows] == values[:-1]
        responded = await respond(gateway, session, include=["message.output_text.logprobs"])
        assert [row.logprob for row in responded.output[0].content[0].logprobs] == values[:-1]
        cut = await chat(gateway, session, logprobs=True, stop=" so")
        assert "".join(row.token for row in cut.choices[0].logprobs.content).startswith("it is")
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(gateway, session, logprobs=True, top_logprobs=2)
        assert refused.value.param == "top_logprobs"

    trajectory, _ = await played(play, ScriptedAnswer(token_ids=ids, logprobs=values))
    assert trajectory.sampled_tokens > 0


@pytest.mark.parametrize("streams", [False, True])
async def test_log_probabilities_without_alternatives_may_be_asked_for_by_number(played, streams):
    async def play(gateway, session):
        told = await chat(gateway, session, logprobs=True, top_logprobs=0, stream=streams)
        choices = [choice for chunk in told for choice in chunk.choices] if streams else told.choices
        (rows,) = [choice.logprobs.content for choice in choices if choice.logprobs]
        assert [row.top_logprobs for row in rows] == [[] for _ in rows]

    await played(play, "it is so")


@pytest.mark.parametrize("streams", [False, True])
async def test_each_of_several_answers_has_its_own_log_probabilities(played, renderer, streams):
    texts = ["it is so", "no, it was otherwise"]
    scripts = []
    for number, text in enumerate(texts):
        ids = [*renderer.encoder.encode(text), renderer.boundary.end_id]
        scripts.append(ScriptedAnswer(token_ids=ids, logprobs=[-(number + index / 16) for index in range(len(ids))]))

    async def play(gateway, session):
        told = await chat(gateway, session, logprobs=True, n=2, stream=streams)
        if streams:
            chosen = [choice for chunk in told for choice in chunk.choices if choice.logprobs]
            found = {choice.index: choice.logprobs.content for choice in chosen}
            assert len(chosen) == len(found) == 2
        else:
            found = {choice.index: choice.logprobs.content for choice in told.choices}
        for number, text in enumerate(texts):
            assert "".join(row.token for row in found[number]) == text
            assert [row.logprob for row in found[number]] == scripts[number].logprobs[:-1]

    await played(play, *scripts)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stop", [" so", "so", "s so", "o"])
async def test_log_probabilities_end_where_the_text_does(played, renderer, streams, stop):
    ids = [*renderer.encoder.encode("it is so and so"), renderer.boundary.end_id]
    values = [-(index + 1) / 8 for index in range(len(ids))]

    async def play(gateway, session):
        told = await chat(gateway, session, logprobs=True, stop=stop, stream=streams)
        choices = [choice for chunk in told for choice in chunk.choices] if streams else told.choices
        text = "".join((choice.delta if streams else choice.message).content or "" for choice in choices)
        (rows,) = [choice.logprobs.content for choice in choices if choice.logprobs]
        assert text == "it is so and so".partition(stop)[0]
        covered = "".join(row.token for row in rows)
        assert covered.startswith(text)
        assert not "".join(row.token for row in rows[:-1]).startswith(text), "the last token still belongs to the text"
        assert [row.logprob for row in rows] == values[: len(rows)]

    await played(play, ScriptedAnswer(token_ids=ids, logprobs=values))


def test_characters_of_several_tokens_count_with_their_last(renderer):
    encoder = renderer.encoder
    ids = [*encoder.encode("<think>\nHm\n</think>\n\nä 中 ok"), renderer.boundary.end_id]
    tokens = content_logprobs(ids, [0.0] * len(ids), "ä 中 ok", encoder.decode)
    assert "".join(token.text for token in tokens) == "ä 中 ok"
    assert len(tokens) >= len(encoder.encode("ä 中 ok"))
    assert content_logprobs(ids, [0.0] * len(ids), "", encoder.decode) == ()
    # ollama#13497: an answer that is cut within a character has all of its tokens, and their texts are its text
    for end in range(1, len(ids) + 1):
        content = encoder.decode(ids[:end])
        tokens = content_logprobs(ids[:end], [0.0] * end, content, encoder.decode)
        assert ("".join(token.text for token in tokens), len(tokens)) == (content, end)


async def test_what_is_not_followed_is_said_once(played, caplog):
    async def play(gateway, session):
        await chat(gateway, session, temperature=0.2, reasoning_effort="high")
        await chat(gateway, session, temperature=0.2, seed=3)
        await message(gateway, session, thinking={"type": "enabled", "budget_tokens": 1024})

    await played(play, "Ann")
    said = [record.message for record in caplog.records if "ignored, because" in record.message]
    assert ["temperature=0.2, reasoning_effort=high" in said[0], "seed=3" in said[1], "thinking" in said[2]] == [
        True
    ] * 3
    assert len(said) == 3
    assert "temperature" not in said[1]


async def test_a_refused_form_is_no_error_of_the_policy(run_loop, program):
    lines = """
        import urllib.error
        try:
            ask("hm")
            request = urllib.request.Request(
                os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                json.dumps({"model": "p", "messages": [{"role": "user", "content": "x"}],
                            "response_format": {"type": "json_object"}}).encode(),
                {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
            )
            print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            sys.exit("no form")
    """
    trajectory, _ = await run_loop(External(command=program(lines)), "Ann")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "forms=free" in trajectory.error
    trajectory, _ = await run_loop(External(command=program(lines), forms="free"), "42")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
