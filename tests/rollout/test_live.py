"""Live traffic: who may open and reward sessions, what becomes of them, and what survives a kill."""

import asyncio
import json

import openai
import pytest
from support.gateway_client import post
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentLoop
from agentrl.builders.checks import check_training
from agentrl.config import load_config
from agentrl.engine import SamplingParams
from agentrl.errors import ConfigError, UsageError
from agentrl.observe.trajectory_store import GroupEnd, TrajectoryStore, read_groups
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.finished_episodes import read_recoverable
from agentrl.rollout.live import LIVE, LiveScheduler, LiveSessions, first_step_to_read
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.task_order import TaskSampler
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import SeedTasks

CHAT = "/v1/chat/completions"
ASK = {"model": "any", "messages": [{"role": "user", "content": "one"}]}
GOOD = {"reward": 1.0, "success": True}


class Stored(RolloutObserver):
    """Stores episodes as a run does."""

    def __init__(self, store):
        self._store = store

    def on_start(self, trajectory):
        self._store.start(trajectory)

    def on_turn(self, trajectory, turn):
        self._store.turn(trajectory, turn)

    def on_end(self, trajectory):
        self._store.end(trajectory)

    def on_group_end(self, group_id, end, episodes):
        self._store.group(group_id, end, [episode.id for episode in episodes])


@pytest.fixture(scope="module")
def renderer():
    return Renderer(build_tokenizer("qwen2.5"))


@pytest.fixture
async def serve(renderer, tmp_path):
    """Start live traffic in a folder; what is started is closed."""
    started = []

    async def start(*, batch=2, max_staleness=1, most=64, version=0, state=None, **options):
        answer = [*renderer.encoder.encode("it is so"), renderer.boundary.end_id]
        engine = ScriptedEngine(script=lambda request: answer, vocab_size=400, max_context=200, version=version)
        sessions = LiveSessions(**options)
        store = TrajectoryStore(tmp_path / "trajectories", step=version + 1)
        runner = EpisodeRunner(
            pool=EnvPool(LIVE),
            loop=sessions,
            policy=EngineEpisodePolicy(engine, renderer, SamplingParams()),
            limits=EpisodeLimits(max_answer_tokens=32),
            observer=Stored(store),
        )
        scheduler = LiveScheduler(
            {"": runner},
            TaskSampler({"": SeedTasks("live")}, seed=0),
            sessions=sessions,
            folder=tmp_path,
            group_size=1,
            batch=batch,
            max_staleness=max_staleness,
            batch_order="greedy",
            max_concurrent=most,
            version=version,
        )
        first = first_step_to_read(tmp_path, version, max_staleness)
        found = read_recoverable(tmp_path / "trajectories", first_step=first, are_stored=True)
        if state is not None:
            scheduler.load_state_dict(json.loads(json.dumps(state)))
        scheduler.kept = scheduler.recover(found)
        await scheduler.start()
        scheduler.engine, scheduler.store = engine, store
        started.append((scheduler, runner, store))
        return scheduler

    yield start
    for scheduler, runner, store in started:
        await scheduler.close()
        await runner.close()
        store.__exit__(None, None, None)


async def refused(address, body, key=""):
    """Send a request that is refused; return its status and error code."""
    status, answer = await post(address, key, body)
    return status, answer["error"]["code"]


def url(scheduler, name):
    return f"{scheduler.live.url}/s/{name}"


async def chat(scheduler, name):
    status, reply = await post(url(scheduler, name) + CHAT, "", ASK)
    assert status == 200, reply


async def reward(scheduler, name, body=GOOD):
    return await post(url(scheduler, name) + "/feedback", "", body)


async def test_a_rewarded_session_is_trained_with_what_its_client_said(serve, tmp_path):
    scheduler = await serve(batch=2)

    def talk():
        for name, value in (("a", 1.0), ("b", -2.5)):
            with openai.OpenAI(base_url=url(scheduler, name) + "/v1", api_key="any") as client:
                messages = ASK["messages"]
                reply = client.chat.completions.create(model="policy", messages=messages)
                said = [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "two"}]
                client.chat.completions.create(model="policy", messages=[*messages, *said])
                accepted = client.post("/feedback", body={"reward": value}, cast_to=object)
                assert accepted == {"session": name, "status": "accepted"}

    await asyncio.to_thread(talk)
    groups = await scheduler.next_batch()
    found = [(g.task.id, [(len(t.turns), t.reward, t.sampled_tokens > 0) for t in g.trajectories]) for g in groups]
    assert found == [("a", [(2, 1.0, True)]), ("b", [(2, -2.5, True)])]
    lines = [json.loads(line) for line in (tmp_path / "sessions.jsonl").read_text().splitlines()]
    assert [(line["session"], line["end"], line["reward"]) for line in lines] == [
        ("a", "rewarded", 1.0),
        ("b", "rewarded", -2.5),
    ]
    metrics = scheduler.metrics()
    assert {name: value for name, value in metrics.items() if value} == {
        "live/opened": 2,
        "live/answers": 4,
        "live/rewarded": 2,
    }
    assert not any(scheduler.metrics().values()), "counts are those of a step"


async def test_feedback_that_is_refused_is_counted_and_changes_nothing(serve):
    scheduler = await serve()
    feedback = url(scheduler, "a") + "/feedback"
    assert await refused(feedback, GOOD) == (404, "unknown_session")
    await chat(scheduler, "a")
    for body in (
        {},
        {"reward": "good"},
        {"reward": True},
        {"reward": 1e300},
        {"reward": 1, "success": 1},
        {"rewards": 1},
    ):
        assert (await refused(feedback, body))[0] == 400
    assert await refused(url(scheduler, "a%2Fb") + "/feedback", GOOD) == (400, "invalid_session")
    assert (await reward(scheduler, "a"))[0] == 200
    assert await refused(feedback, {"reward": 0.0}) == (409, "duplicate_feedback")
    retried = await post(feedback, "", GOOD, {"x-stainless-retry-count": "1"})
    assert retried == (200, {"session": "a", "status": "accepted"}), "the answer to the first attempt may be lost"
    assert await refused(url(scheduler, "a") + CHAT, ASK) == (403, "session_ended")
    counts = scheduler.live.counts
    assert (counts["feedback_unknown"], counts["feedback_duplicate"], counts["feedback_refused"]) == (1, 1, 7)
    assert (counts["rewarded"], scheduler.live.waiting, scheduler.live.open) == (1, 1, 0)


async def test_a_request_needs_a_session(serve):
    scheduler = await serve()
    assert await refused(scheduler.live.url + CHAT, ASK) == (404, "no_session")
    assert await refused(url(scheduler, "x" * 129) + CHAT, ASK) == (400, "invalid_session")


@pytest.mark.parametrize("body", [{}, {"messages": "one"}, {**ASK, "n": 0}])
async def test_a_malformed_request_opens_no_session(serve, body):
    scheduler = await serve()
    assert (await refused(url(scheduler, "a") + CHAT, body))[0] == 400
    assert (await post(url(scheduler, "a") + "/v1/messages/count_tokens", "", body))[0] == 400
    assert (scheduler.live.counts["opened"], scheduler.live.open) == (0, 0)
    assert await refused(url(scheduler, "a") + "/feedback", GOOD) == (404, "unknown_session")
    await chat(scheduler, "a")


async def test_feedback_waits_for_the_end_of_an_answer(serve, renderer):
    asked, blocked = asyncio.Event(), asyncio.Event()
    scheduler = await serve()
    generate = scheduler.engine.generate

    async def slowly(request):
        asked.set()
        await blocked.wait()
        return await generate(request)

    scheduler.engine.generate = slowly
    asking = asyncio.create_task(chat(scheduler, "a"))
    await asked.wait()
    assert await refused(url(scheduler, "a") + "/feedback", GOOD) == (409, "busy")
    blocked.set()
    await asking
    assert (await reward(scheduler, "a"))[0] == 200


async def test_sessions_without_feedback_expire(serve, tmp_path):
    scheduler = await serve(expires_s=0.2)
    await chat(scheduler, "a")
    async with asyncio.timeout(20):
        while scheduler.live.open:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await refused(url(scheduler, "a") + "/feedback", GOOD) == (410, "expired")
    counts = scheduler.live.counts
    assert (counts["expired"], counts["feedback_late"], scheduler.live.waiting) == (1, 1, 0)
    (group,) = read_groups(tmp_path / "trajectories").values()
    assert group.end is GroupEnd.EXPIRED


async def test_stale_feedback_is_rejected_with_the_reason_and_never_ends_the_run(serve):
    scheduler = await serve(max_staleness=1, batch=1)
    for number in range(25):  # more than the stale batches in a row that end a run on its own tasks
        await chat(scheduler, f"s{number}")
    for number in range(25):
        scheduler.set_version(2)
        assert await refused(url(scheduler, f"s{number}") + "/feedback", GOOD) == (410, "stale")
    assert (scheduler.live.counts["stale"], scheduler.live.waiting) == (25, 0)
    waiting = asyncio.create_task(scheduler.next_batch())
    await asyncio.sleep(0.01)
    assert not waiting.done(), "the run waits for feedback that is not too late"
    waiting.cancel()


async def test_rewarded_sessions_that_wait_too_long_are_dropped_and_counted(serve):
    scheduler = await serve(max_staleness=1, batch=1)
    for name in ("a", "b"):
        await chat(scheduler, name)
        await reward(scheduler, name)
    (first,) = await scheduler.next_batch()
    assert first.task.id == "a"
    scheduler.set_version(2)
    waiting = asyncio.create_task(scheduler.next_batch())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert scheduler.live.counts["dropped"] == 1
    waiting.cancel()


async def test_a_new_session_replaces_the_one_idle_for_longest(serve, monkeypatch):
    monkeypatch.setattr("agentrl.rollout.live.sessions.MIN_IDLE_S", 0.01)
    scheduler = await serve(most=2)
    for name in ("a", "b", "c"):
        await chat(scheduler, name)
        await asyncio.sleep(0.02)
    assert await refused(url(scheduler, "a") + "/feedback", GOOD) == (410, "expired")
    assert [(await reward(scheduler, name))[0] for name in ("b", "c")] == [200, 200]


async def test_a_burst_of_new_sessions_ends_none_whose_request_has_just_arrived(serve, monkeypatch):
    """Their clients got an error that no package retries, 403; now those that came too late retry after a 503."""
    monkeypatch.setattr("agentrl.rollout.live.sessions.MIN_IDLE_S", 60.0)
    scheduler = await serve(most=4)

    async def ask(number):
        await asyncio.sleep(0.004 * number)
        return (await post(url(scheduler, f"s{number}") + CHAT, "", ASK))[0]

    asked = await asyncio.gather(*map(ask, range(60)))
    assert set(asked) == {200, 503}
    assert (asked.count(200), scheduler.live.counts["expired"]) == (4, 0)


async def test_feedback_can_need_a_key_of_its_own(serve, monkeypatch):
    monkeypatch.setenv("CLIENTS", "their-key")
    monkeypatch.setenv("JUDGES", "another-key")
    scheduler = await serve(key_variable="CLIENTS", feedback_key_variable="JUDGES")
    assert await refused(url(scheduler, "a") + CHAT, ASK, "wrong") == (401, "invalid_api_key")
    assert (await post(url(scheduler, "a") + CHAT, "their-key", ASK))[0] == 200
    assert await refused(url(scheduler, "a") + "/feedback", GOOD, "their-key") == (401, "invalid_api_key")
    assert (await post(url(scheduler, "a") + "/feedback", "another-key", GOOD))[0] == 200


async def test_a_killed_run_keeps_every_rewarded_session(serve, tmp_path):
    scheduler = await serve(batch=3)
    for name in ("trained", "open", "in-the-checkpoint", "after"):
        await chat(scheduler, name)
    await reward(scheduler, "trained")
    scheduler.batch = 1
    await scheduler.next_batch()
    scheduler.set_version(1)
    await reward(scheduler, "in-the-checkpoint")
    state = json.loads(json.dumps(scheduler.state_dict()))
    await reward(scheduler, "after")
    await chat(scheduler, "later")
    await reward(scheduler, "later")
    # what a killed process leaves: its files, and the checkpoint
    again = await serve(batch=3, version=1, state=state)
    assert again.kept == 2
    groups = await again.next_batch()
    assert sorted(group.task.id for group in groups) == ["after", "in-the-checkpoint", "later"]
    assert len({group.position for group in groups}) == 3
    for name in ("trained", "in-the-checkpoint", "after", "later"):
        assert await refused(url(again, name) + "/feedback", GOOD) == (409, "duplicate_feedback")
    assert await refused(url(again, "open") + "/feedback", GOOD) == (404, "unknown_session")
    await chat(again, "open")
    assert (await reward(again, "open"))[0] == 200


async def test_sessions_of_lost_weights_are_trained_as_those_of_the_checkpoint(serve):
    scheduler = await serve(version=5, max_staleness=3)
    await chat(scheduler, "a")
    await reward(scheduler, "a")
    again = await serve(version=4, max_staleness=3, batch=1)
    (group,) = await again.next_batch()
    assert (group.task.id, group.staleness(4, {})) == ("a", 0)


async def test_a_killed_run_does_not_train_on_what_it_refused(serve):
    scheduler = await serve(version=2, max_staleness=1, side_models=["titles"])
    assert (await post(url(scheduler, "untrained") + CHAT, "", {**ASK, "model": "titles"}))[0] == 200
    assert await refused(url(scheduler, "untrained") + "/feedback", GOOD) == (409, "nothing_to_train")
    await chat(scheduler, "late")
    scheduler.set_version(4)
    assert await refused(url(scheduler, "late") + "/feedback", GOOD) == (410, "stale")
    again = await serve(version=2, max_staleness=1)  # for whose weights it is not too late
    assert (again.kept, again.live.waiting) == (0, 0)
    assert await refused(url(again, "late") + "/feedback", GOOD) == (410, "stale")
    assert await refused(url(again, "untrained") + "/feedback", GOOD) == (409, "nothing_to_train")


async def test_a_killed_run_keeps_a_session_that_was_opened_long_before_its_first_answer(serve):
    scheduler = await serve(version=0, max_staleness=1, batch=1)
    assert (await post(url(scheduler, "a") + "/v1/messages/count_tokens", "", ASK))[0] == 200
    await scheduler.engine.update_weights({}, 7)
    scheduler.set_version(7)
    scheduler.store.rotate(8)
    await chat(scheduler, "a")
    assert (await reward(scheduler, "a"))[0] == 200
    again = await serve(version=8, max_staleness=1, batch=1)
    assert again.kept == 1
    (group,) = await again.next_batch()
    assert (group.task.id, group.staleness(8, {})) == ("a", 1)


async def test_a_list_of_models_opens_no_session(serve):
    scheduler = await serve()
    async with openai.AsyncOpenAI(base_url=url(scheduler, "a") + "/v1", api_key="any") as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
    assert (scheduler.live.open, scheduler.live.counts["opened"]) == (0, 0)


async def test_a_port_that_is_taken_is_named_by_its_option(serve):
    scheduler = await serve()
    with pytest.raises(UsageError, match=r"cannot listen.*agent\.options\.port"):
        await serve(port=int(scheduler.live.url.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.name=guess_number", "bring their own tasks"),
        ("environment.tasks=tasks.jsonl", "bring their own tasks"),
        ("agent.tools=[python]", "run their own tools"),
        ("agent.system_prompt=Be brief.", "send their own messages"),
        ("curriculum.pools={by: task}", "bring their own tasks"),
        ("agent.options.side_models=titles", "not a list of texts"),
        ("agent.options.port=true", "not a port"),
        ("algorithm={advantage: grpo, group_size: 8}", "rae uses a running baseline"),
        ("algorithm={advantage: grpo, group_size: 1}", "compares the members of a group"),
        ("algorithm.advantage=spo", "needs to play a task again"),
        ("algorithm.advantage=remax", "needs to play a task again"),
        ("rollout={max_staleness: 0, batch_order: windowed}", "serves clients while it trains"),
        ("rollout.batch_order=windowed", "may never be rewarded"),
        ("evaluation.every=10", "agentrl eval"),
        ("agent.options.host=0.0.0.0", "without a key"),
        ("agent.options.key_variable=NOT_SET_ANYWHERE", "is not set"),
        ("agent.options.expires_s=0", "more than 0"),
        ("agent.options.port=70000", "not a port"),
        ("environment.max_concurrent=10", "at least rollout.max_concurrent"),
        ("algorithm.advantage_options={decays: 0.9}", "rae does not take this option"),
    ],
)
def test_settings_that_do_not_fit_are_errors(override, message):
    with pytest.raises((ConfigError, UsageError), match=message):
        check_training(load_config("live", [override]))


def test_the_shipped_config_fits():
    check_training(load_config("live", ["algorithm.advantage=reinforce++"]))
    check_training(load_config("live"))


def test_the_loop_is_registered():
    assert issubclass(LiveSessions, AgentLoop)
    assert load_config("live").agent.loop == "live"
