"""Refused requests: the vendors' error format, with the reason, and no endless retries."""

import asyncio
import sys

import anthropic
import openai
import pytest
from agentrl.agent_loops.external import External

from agentrl.errors import Outcome
from agentrl.gateway.dialect import BadRequest
from agentrl.gateway.fields import read_feedback
from agentrl.rollout.budget import EpisodeLimits

SMALL = EpisodeLimits(max_tokens=100)
LONG = "word " * 500


@pytest.fixture
def played_by(run_loop, monkeypatch):
    """Play one episode with a function of an external task."""

    async def run(function, *answers, limits=SMALL, **options):
        monkeypatch.setattr(sys.modules[__name__], "now_plays", function, raising=False)
        loop = External(function=f"{__name__}:now_plays", **options)
        trajectory, _ = await run_loop(loop, *answers, limits=limits)
        return trajectory

    return run


async def ask_openai(task, text):
    message = {"role": "user", "content": text}
    async with openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key) as client:
        return (await client.chat.completions.create(model="m", messages=[message])).choices[0].message.content


async def ask_anthropic(task, text):
    message = {"role": "user", "content": text}
    async with anthropic.AsyncAnthropic(base_url=task.base_url, api_key=task.api_key) as client:
        return (await client.messages.create(model="m", max_tokens=50, messages=[message])).content[0].text


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("words", [130, 40_000])
async def test_a_first_request_that_does_not_fit_ends_its_episode_and_no_other(played_by, words, goes_on):
    refused = []

    async def play(task):
        try:
            return await ask_openai(task, "word " * words)
        except openai.BadRequestError as error:
            refused.append(error)
            if not goes_on:
                raise
        return "42"

    trajectory = await played_by(play, "42")
    assert (trajectory.outcome, trajectory.reward, trajectory.turns) == (Outcome.TRUNCATED_TOKENS, 0.0, [])
    assert (refused[0].code, refused[0].param) == ("context_length_exceeded", "messages")
    assert "agent.max_tokens of 100" in str(refused[0])
    assert (await played_by(lambda task: asyncio.run(ask_openai(task, "6 times 7?")), "42")).reward == 1.0


async def test_anthropics_clients_read_that_the_prompt_is_too_long(played_by):
    async def play(task):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await ask_anthropic(task, LONG)

    assert (await played_by(play, "42")).outcome is Outcome.TRUNCATED_TOKENS


async def test_a_later_request_that_does_not_fit_is_an_answer_that_was_cut(played_by):
    async def play(task):
        first = await ask_openai(task, "6 times 7?")
        assert await ask_openai(task, LONG) == ""
        return first

    trajectory = await played_by(play, "42")
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.TRUNCATED_TOKENS, 1.0, 1)


def test_a_misspelt_field_is_named_with_the_nearest_one():
    with pytest.raises(BadRequest, match=r"^rewrd is not supported here: got 1; did you mean 'reward'\?$"):
        read_feedback({"rewrd": 1}, 10.0)
    with pytest.raises(BadRequest, match=r"^zzz is not supported here: got 1$"):
        read_feedback({"zzz": 1}, 10.0)
