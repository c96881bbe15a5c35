"""A judge that scores episodes: its question, its answers, and what is never a reward of 0."""

import itertools
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.config.judge import JudgeConfig
from agentrl.errors import ConfigError, EngineError, Outcome, UsageError
from agentrl.remote.chat import ChatService, ServiceSettings
from agentrl.rollout.judges.client import JudgeClient
from agentrl.rollout.judges.scorers import make_judge
from agentrl.rollout.judges.transcripts import transcript
from agentrl.task import Task
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

WORDS = ["<|end|>", "Reach", "the", "hill", "go", "north", "you", "are", "there"]
ENGINE = {"url": "http://127.0.0.1:1/v1", "model": "m"}
TASK = Task(id="t-1", environment="w", prompt="Reach the hill.", ground_truth="hill")


def decode(ids):
    return " ".join(WORDS[i] for i in ids if i)


def episode():
    trajectory = Trajectory(id="g/0.0", task_id="t-1", environment="w", seed=0, group_id="g", outcome=Outcome.FINISHED)
    sequence = TokenSequence()
    sequence.extend([1, 2, 3, 0], Source.PROMPT)
    sequence.extend_sampled([4, 5], logprobs=[-1.0, -1.0], versions=[0, 0])
    sequence.turns.append(Turn(index=0, start=4, end=6))
    trajectory.add_reward(sequence.turns[0], "environment/step", 0.25)
    sequence.extend([0, 6, 7, 8], Source.OBSERVATION)
    branch = sequence.fork(6)
    branch.extend([8], Source.OBSERVATION)
    trajectory.sequences += [sequence, branch]
    return trajectory


@asynccontextmanager
async def judge_of(*answers, status=200, **settings):
    """A judge whose service gives the answers in turn, and what the service was sent."""
    seen, told = [], itertools.chain(answers, itertools.repeat(answers[-1]))

    async def answer(request):
        seen.append(await request.json())
        message = {"role": "assistant", "content": next(told)}
        body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}
        return web.Response(status=status, text=json.dumps(body))

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    service = ChatService(
        ServiceSettings(url=url, model="m", api_key_variable="NO_KEY", timeout_s=20.0, retries=1, section="x"),
        first_wait_s=0.001,
    )
    try:
        config = JudgeConfig(engine={**ENGINE, "url": url}, **settings)
        yield make_judge(JudgeClient(service, config), config, decode), seen
    finally:
        await service.close()
        await runner.cleanup()


async def test_a_judge_reads_the_episode_and_its_score_becomes_a_reward():
    async with judge_of("Score: 2 at first, but it got there.\nScore: 7.5", environment_weight=2.0) as (judge, seen):
        score = await judge.score(episode(), TASK)
    assert score.reward == pytest.approx(0.75 + 2 * 0.25)
    assert score.components == {"judge": 0.75, "environment": 0.25}
    assert score.sources == {"judge": 0.75, "environment/step": 0.5}
    (message,) = seen[0]["messages"]
    told = message["content"]
    assert "Task: Reach the hill." in told
    assert "Expected: hill" in told
    (mark,) = {line.split()[-1] for line in told.splitlines() if line.startswith("---")}
    assert f"[world] {mark}\nReach the hill\n\n[agent] {mark}\ngo north\n\n[world] {mark}\nyou are there" in told


def test_what_branches_share_is_read_once():
    text = transcript(episode(), decode)
    assert text.count("go north") == 1
    assert text.endswith("[world]\nyou are there\n\n[world]\nthere")


@pytest.mark.parametrize(
    "unreadable", ["It did well.", "Score: 11", "Score: -3", "", *(f"Score: {'9' * n}" for n in (300, 400))]
)
async def test_an_answer_without_a_score_is_asked_again(unreadable):
    async with judge_of(unreadable, "Score: 5") as (judge, seen):
        assert (await judge.score(episode(), TASK)).reward == 0.5
    said = [message["role"] for message in seen[1]["messages"]]
    # OpenHands#8685: services reject histories with an answer that is empty
    assert said == (["user", "assistant", "user"] if unreadable else ["user"])
    assert "N from 0 to 10" in seen[1]["messages"][-1]["content"]


async def test_a_judge_without_a_score_is_an_infrastructure_failure_without_a_reward():
    async with judge_of("I would rather not.", attempts=2) as (judge, seen):
        with pytest.raises(EngineError, match=r"gave no score for g/0\.0: got 'I would rather not\.'"):
            await judge.score(episode(), TASK)
    assert len(seen) == 2


async def test_a_service_that_is_down_fails_as_machinery():
    async with judge_of("Score: 9", status=503) as (judge, _):
        with pytest.raises(EngineError, match="failed after 2 attempts"):
            await judge.score(episode(), TASK)


async def test_an_episode_in_text_only_cannot_be_judged():
    async with judge_of("Score: 9") as (judge, seen):
        silent = Trajectory(id="g/0.0", task_id="t", environment="w", seed=0, group_id="g")
        silent.sequences.append(TokenSequence())
        with pytest.raises(UsageError, match=r"got an episode with text only.*Remove agent\.judge"):
            await judge.score(silent, TASK)
    assert not seen


async def test_a_prompt_may_read_how_the_episode_ended():
    async with judge_of("Score: 9", prompt="It ended as {{ outcome }} with {{ reward }}.") as (judge, seen):
        await judge.score(episode(), TASK)
    assert seen[0]["messages"][0]["content"] == "It ended as finished with 0.25."


async def test_an_episode_of_which_one_sequence_is_empty_is_judged():
    async with judge_of("Score: 9") as (judge, _):
        judged = episode()
        judged.sequences.append(TokenSequence())
        assert (await judge.score(judged, TASK)).reward == 0.9


async def test_a_prompt_may_read_nothing_but_what_there_is():
    async with judge_of("Score: 9", prompt="{{ tasks }}") as (judge, _):
        with pytest.raises(UsageError, match=r"cannot be filled in: got 'tasks' is undefined"):
            await judge.score(episode(), TASK)
    with pytest.raises(ConfigError, match="not a valid Jinja2 template"):
        make_judge(None, JudgeConfig(engine=ENGINE, prompt="{% if %}"), decode)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 5, "high": 5}, r"agent\.judge\.low \(5\) must be below"),
        ({"pattern": "score"}, "has no group"),
        ({"pattern": "(score"}, "is not a regular expression"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        JudgeConfig(engine=ENGINE, **settings)
