"""The retail desk with a customer behind HTTP: what it is told, whole episodes, failures, options."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
from agentrl.envs.retail.briefing import GREETING, brief
from agentrl.envs.retail.customer import Customer
from agentrl.envs.retail.database import Database
from agentrl.envs.retail.environment import LiveRetailDesk, RetailDesk, make_retail
from agentrl.envs.retail.expert import RetailExpert
from agentrl.envs.retail.model_customer import LONGEST_HEARD
from agentrl.envs.retail.phrases import HANDED_OVER, OUT_OF_TIME, STOP
from agentrl.envs.retail.requests import Persona, RequestKind
from agentrl.envs.retail.spec import SPEC
from agentrl.envs.retail.tasks import Case, case_of
from agentrl.envs.retail.tools import call_text, tool_message
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import (
    ChatAnswer,
    ChatPolicy,
    GenerateRequest,
    SamplingParams,
    StopReason,
)
from agentrl.errors import EnvironmentFailure, Outcome, UsageError
from agentrl.message import Message
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import ChatEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner, make_agent_loop
from agentrl.serving.local import LocalEngine
from agentrl.trajectory import Trajectory

Play = Callable[[dict[str, Any]], Any]
"""What a service says to a request's body: words, or a response."""
Serve = Callable[..., Awaitable[dict[str, Any]]]
CASES = [case_of(f"valid-{number}") for number in range(60)]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a chat service; the option ``customer`` that names it."""
    servers: list[TestServer] = []

    async def start(play: Play, **options: Any) -> dict[str, Any]:
        async def answer(request: web.Request) -> web.StreamResponse:
            said = play(await request.json())
            said = await said if asyncio.iscoroutine(said) else said
            return said if isinstance(said, web.StreamResponse) else completion(said)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return {"url": str(servers[-1].make_url("/v1")), "model": "m", **options}

    yield start
    for server in servers:
        await server.close()


def completion(said: str | None, finish: str = "stop") -> web.Response:
    return web.json_response({"choices": [{"message": {"content": said}, "finish_reason": finish}]})


class Believer(Customer):
    """The scripted customer, who cannot look into the database: it believes what it is told."""

    def _is_met(self, heard: Any, text: str, database: Database) -> bool:
        return "It is done" in text or super()._is_met(heard, text, database)


def part_of_a_model(body: dict[str, Any]) -> str:
    """Plays the customer whom a system prompt describes, from the conversation alone."""
    told, greeting, *talk = body["messages"]
    case = next(case for case in CASES if brief(case.scenario) == told["content"])
    assert (told["role"], greeting) == ("system", {"role": "user", "content": GREETING})
    believer = Believer(case.scenario, case.expected)
    said = [believer.open()]
    said += [believer.answer(message["content"], Database(case.store)) for message in talk[1::2]]
    assert [message["role"] for message in talk] == ["assistant", "user"] * (len(talk) // 2)
    assert [message["content"] for message in talk[::2]] == said[:-1]
    return said[-1]


class Agent(ChatPolicy):
    """Answers each conversation with what a policy of its own makes of the latest message."""

    max_context = 100_000

    def __init__(self, make: Callable[[], Callable[[str], str]]) -> None:
        self._make = make
        self._of: dict[str, Callable[[str], str]] = {}

    async def start(self) -> None:
        """Nothing."""

    async def chat(self, messages: Any, tools: Any, params: SamplingParams, request_id: str) -> ChatAnswer:
        policy = self._of.setdefault(request_id.rpartition("-")[0], self._make())
        message = tool_message(policy(messages[-1].text))
        return ChatAnswer(message=message, prompt_tokens=9, answer_tokens=9, stop_reason=StopReason.STOP)

    async def close(self) -> None:
        """Nothing."""


async def play(
    customer: Mapping[str, Any], *task_ids: str, make: Callable[[], Any] = lambda: RetailExpert().act, retries: int = 0
) -> list[Trajectory]:
    """Episodes of tasks of `valid`, all at once."""
    pool = EnvPool(SPEC, options={"customer": customer})
    loop, policy = make_agent_loop("tool_calling", {}), ChatEpisodePolicy(Agent(make), SamplingParams())
    runner = EpisodeRunner(pool=pool, loop=loop, policy=policy, retries=retries)
    tasks = SPEC.tasks("valid")
    chosen = [tasks[int(task_id.rpartition("-")[2])] for task_id in task_ids]
    try:
        return await asyncio.gather(*(runner.run(task, group_id=task.id, member=0, seed=1) for task in chosen))
    finally:
        await pool.close()


def one_of(persona: Persona | None = None, kind: RequestKind | None = None) -> Case:
    scenarios = ((case, case.scenario) for case in CASES)
    return next(c for c, it in scenarios if persona in (None, it.persona) and kind in (None, it.requests[0].kind))


async def test_episodes_at_once_are_played_from_their_own_conversations(serve: Serve) -> None:
    ids = [case.task_id for case in CASES[:27]]
    played = await play(await serve(part_of_a_model), *ids)
    assert [(it.task_id, it.outcome, it.reward, it.success) for it in played] == [
        (task_id, Outcome.FINISHED, 1.0, True) for task_id in ids
    ]
    assert len({case.scenario.persona for case in CASES[:27]}) == len(Persona)


async def test_a_model_in_this_process_plays_the_customer(serve: Serve) -> None:
    tokenizer = build_tokenizer("qwen3")
    model = tiny_model(vocab_size=len(tokenizer), max_context=8192)
    engine = LocalEngine(model, LocalEngineConfig(max_num_seqs=2, cache_tokens=16_384))
    heard: list[str] = []

    async def generate(body: dict[str, Any]) -> str:
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        params = SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"], seed=body["seed"])
        name = f"r{len(heard)}"
        request = GenerateRequest(prompt_ids=list(ids), params=params, session_id=name, request_id=name)
        heard.append(tokenizer.decode((await engine.generate(request)).token_ids, skip_special_tokens=True))
        return heard[-1]

    customer = await serve(generate, max_tokens=9, patience=2)
    await engine.start()
    try:
        trajectories = [(await play(customer, "valid-7", make=lambda: lambda text: "What?"))[0] for _ in range(2)]
    finally:
        await engine.close()
    assert [(it.outcome, it.reward, len(it.turns)) for it in trajectories] == [(Outcome.FINISHED, 0.0, 3)] * 2
    assert heard[: len(heard) // 2] == heard[len(heard) // 2 :]
    assert len(set(heard)) > 1


async def test_the_service_is_asked_in_its_own_format(serve: Serve) -> None:
    bodies: list[dict[str, Any]] = []
    env = make_retail(customer=await serve(lambda body: bodies.append(body) or f"Words {len(bodies)}.", max_tokens=77))
    assert isinstance(env, LiveRetailDesk)
    task = SPEC.tasks("valid")[3]
    assert (await env.reset(seed=task.seed, options=dict(task.options)))[0] == "Words 1."
    await env.step(call_text("list_all_product_types", {}))
    assert (await env.step("Who are you?"))[0] == "Words 2."
    await env.step(call_text("respond", {"content": " "}))
    await env.step("x" * 9999)
    await env.close()
    first = [{"role": "system", "content": brief(CASES[3].scenario)}, {"role": "user", "content": GREETING}]
    talk = [("assistant", "Words 1."), ("user", "Who are you?"), ("assistant", "Words 2."), ("user", "(says nothing)")]
    talk += [("assistant", "Words 3."), ("user", f"{'x' * LONGEST_HEARD} […]")]
    assert bodies[-1].pop("messages") == [*first, *({"role": role, "content": words} for role, words in talk)]
    assert bodies[-1] == {"model": "m", "temperature": 0.0, "top_p": 1.0, "max_tokens": 77, "seed": task.seed}
    assert bodies[0]["messages"] == first


def test_a_briefing_holds_what_the_customer_knows_and_no_more() -> None:
    for case in CASES:
        told, scenario = brief(case.scenario), case.scenario
        assert all(request.opening in told for request in scenario.requests)
        assert all(fact.text in told for request in scenario.requests for fact in request.facts)
        assert (scenario.by_email in told) == (scenario.persona is not Persona.FORGETFUL)
        assert scenario.by_name in told
        assert STOP in told
        assert not any(output in told for output in case.outputs if "." in output)
        secrets = [value for request in scenario.requests for action in request.actions for value in _ids(action)]
        assert not any(value in told for value in [scenario.user_id, *secrets])


def _ids(action: Any) -> list[str]:
    """What the agent has to look up."""
    listed = [*action.arguments.get("item_ids", ()), *action.arguments.get("new_item_ids", ())]
    return [*listed, *([action.arguments["payment_method_id"]] if "payment_method_id" in action.arguments else [])]


def test_only_who_wavers_is_told_to() -> None:
    for persona in Persona:
        case = one_of(persona, RequestKind.EXCHANGE if persona is Persona.WAVERING else None)
        fact = case.scenario.wavers_about(case.scenario.requests[0])
        assert (fact is not None) == (persona is Persona.WAVERING)
        assert (fact is not None) == ("At first: " in brief(case.scenario))
        assert fact is None or f'At first: "{fact.at_first}"' in brief(case.scenario)


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (f"Bye. {STOP} I am a model.", f"Bye. {STOP}"),
        ("<think>Who am I?</think>\n\nYes.", "Yes."),
        (f"I must not say {STOP} yet.</think> Yes.", "Yes."),
        (f"  {STOP}", STOP),
    ],
)
async def test_thoughts_and_what_follows_the_end_are_not_said(serve: Serve, said: str, heard: str) -> None:
    lines = iter(["Hello.", said])
    env = make_retail(customer=await serve(lambda body: next(lines)))
    await env.reset(options={"task_id": "valid-0"})
    text, reward, terminated, _, info = await env.step("What?")
    assert (text, reward, terminated, info["success"]) == (heard, 0.0, heard.endswith(STOP), False)
    await env.close()


async def test_the_customer_leaves_after_a_transfer_and_out_of_patience(serve: Serve) -> None:
    asked: list[Any] = []
    customer = await serve(lambda body: asked.append(body) or "Hm.", patience=3)
    env, case = make_retail(customer=customer), one_of(kind=RequestKind.TRANSFER)
    await env.reset(options={"task_id": case.task_id})
    email = case.store.users[case.scenario.user_id]["email"]
    await env.step(call_text("find_user_id_by_email", {"email": email}))
    assert (await env.step(call_text("transfer_to_human_agents", {"summary": "?"})))[2] is False
    assert (await env.step("Wait."))[:3] == (HANDED_OVER, 1.0, True)
    assert len(asked) == 1
    await env.reset(options={"task_id": case.task_id})
    texts = [(await env.step("Well?"))[0] for _ in range(4)]
    assert texts == ["Hm."] * 3 + [OUT_OF_TIME]
    with pytest.raises(UsageError, match="episode is over"):
        await env.step("Well?")
    await env.close()


async def test_an_episode_goes_on_from_a_snapshot_with_its_conversation(serve: Serve) -> None:
    def play_back(body: dict[str, Any]) -> str:
        return f"{len(body['messages'])} {body['seed']}"

    customer = await serve(play_back)
    env, other = make_retail(customer=customer), make_retail(customer=customer)
    await env.reset(seed=5, options={"task_id": "valid-1"})
    keys = [env.state_key()]
    for _ in range(2):
        await env.step("And?")
        keys.append(env.state_key())
    other.restore(json.loads(json.dumps(env.snapshot())))
    assert other.state_key() == env.state_key()
    assert len(set(keys)) == 3
    moment = await env.step("Then?")
    assert moment == await other.step("Then?")
    assert (moment[0], other.state_key()) == ("8 5", env.state_key())
    await env.reset(seed=6, options={"task_id": "valid-1"})
    assert env.state_key() != keys[0]
    await env.close()
    await other.close()


@pytest.mark.parametrize("nothing", ["", " ", None, "<think>Well, let me see", STOP])
async def test_who_says_nothing_is_asked_once_more(serve: Serve, nothing: str | None) -> None:
    bodies: list[dict[str, Any]] = []
    lines = [completion(nothing), completion("Hello."), completion(nothing), completion(nothing, "length")]

    def say(body: dict[str, Any]) -> web.Response:
        bodies.append(body)
        return lines[len(bodies) - 1]

    env = make_retail(customer=await serve(say))
    assert (await env.reset(seed=4, options={"task_id": "valid-0"}))[0] == "Hello."
    assert [(body["seed"], body["temperature"]) for body in bodies] == [(4, 0.0), (5, 0.7)]
    assert bodies[0]["messages"] == bodies[1]["messages"]
    with pytest.raises(EnvironmentFailure, match=r"valid-0 gave no usable answer.*cut off.*Raise environment.options"):
        await env.reset(seed=4, options={"task_id": "valid-0"})
    with pytest.raises(UsageError, match="no episode yet"):
        await env.step("Hello?")
    await env.close()


async def _hang(body: dict[str, Any]) -> str:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (lambda body: web.Response(status=503, text="loading", headers={"Retry-After": "0"}), "503, 'loading'"),
        (lambda body: web.Response(status=400, text="context length"), "cannot answer: .*400, 'context length'"),
        (lambda body: web.Response(text="<html>"), "not valid JSON"),
        (lambda body: web.json_response({}), "not a chat completion"),
        (_hang, "missed its deadline"),
    ],
)
async def test_a_failing_service_is_the_machinery_s_fault(serve: Serve, said: Play, message: str) -> None:
    env = make_retail(customer=await serve(said, timeout_s=0.05 if said is _hang else 20))
    with pytest.raises(EnvironmentFailure, match=message):
        await env.reset(options={"task_id": "valid-0"})
    await env.close()


async def test_a_failure_in_the_middle_is_no_reward_and_is_tried_again(serve: Serve) -> None:
    broken = {"from": 3, "for": 1}
    asked: list[str] = []

    def sometimes(body: dict[str, Any]) -> Any:
        asked.append("")
        if broken["from"] <= len(asked) < broken["from"] + broken["for"]:
            return web.Response(status=400, text="out of memory")
        return part_of_a_model(body)

    customer = await serve(sometimes)
    task_id = one_of(kind=RequestKind.QUESTION).task_id
    (mended,) = await play(customer, task_id, retries=1)
    assert (mended.attempt, mended.outcome, mended.reward) == (1, Outcome.FINISHED, 1.0)
    asked.clear()
    broken["for"] = 99
    (failed,) = await play(customer, task_id, retries=1)
    assert (failed.attempt, failed.outcome, failed.reward) == (1, Outcome.ENVIRONMENT_ERROR, None)
    assert "out of memory" in str(failed.error)


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "refuses the key.*MY_KEY.*environment.options.customer.api_key_variable"), (404, "options.customer.model")],
)
async def test_what_the_user_must_change_ends_the_run(serve: Serve, status: int, message: str) -> None:
    customer = await serve(lambda body: web.Response(status=status, text="no"), api_key_variable="MY_KEY")
    with pytest.raises(UsageError, match=message):
        await play(customer, "valid-0", retries=3)


async def test_the_key_comes_from_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    app, keys = web.Application(), []

    async def answer(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return completion("Hello.")

    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        customer = {"url": str(server.make_url("/v1")), "model": "m", "api_key_variable": "MY_KEY"}
        env = make_retail(customer=customer)
        await env.reset(seed=1)
        await env.close()
    assert keys == ["Bearer secret"]


GOOD = {"url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("customer", "message"),
    [
        ("gpt", r"customer is not valid: got 'gpt'.*or role"),
        ({"model": "m"}, r"customer\.url is missing"),
        ({"url": GOOD["url"]}, r"customer\.model is missing"),
        ({**GOOD, "url": "127.0.0.1:8000"}, r"customer\.url is not an address"),
        ({**GOOD, "temprature": 1}, "no key 'temprature'.*Did you mean 'temperature'"),
        ({**GOOD, "temperature": -1}, r"customer\.temperature is not valid"),
        ({**GOOD, "temperature": "warm"}, r"customer\.temperature is not valid: got 'warm'"),
        ({**GOOD, "timeout_s": 0}, r"customer\.timeout_s is not valid: got 0, expected a number above 0"),
        ({**GOOD, "patience": 0}, r"customer\.patience is not valid"),
        ({**GOOD, "max_tokens": 1.5}, r"customer\.max_tokens is not valid"),
        ({**GOOD, "api_key_variable": ""}, r"customer\.api_key_variable is missing"),
    ],
)
def test_bad_options_are_named(customer: Any, message: str) -> None:
    for use in (SPEC.make, lambda **options: SPEC.tasks("valid", **options)):
        with pytest.raises(UsageError, match=message):
            use(customer=customer)


def test_the_classes_refuse_the_other_s_options() -> None:
    with pytest.raises(UsageError, match="Use make_retail"):
        RetailDesk(customer=GOOD)
    with pytest.raises(UsageError, match="needs a model for the customer"):
        LiveRetailDesk()
    assert isinstance(make_retail(customer=None), RetailDesk)


async def test_it_asks_for_a_reset_first() -> None:
    env = LiveRetailDesk(customer=GOOD)
    for use in (env.state_key, env.snapshot):
        with pytest.raises(UsageError, match="no episode yet"):
            use()
    assert isinstance(env.tool_message("Hello."), Message)
    await env.close()
