"""Corpus of a new model's tokenizer: equal however many episodes are played at once."""

import asyncio

import pytest
from support.waiting import PATIENCE_S

from agentrl.builders import scratch
from agentrl.builders.scratch import scratch_corpus
from agentrl.rollout import text_corpus
from agentrl.rollout.waits import WaitKind, WaitTracker


@pytest.fixture
def waiting(tiny_run, monkeypatch):
    """Config of a run whose steps wait, later episodes less than earlier ones; counts the episodes at once."""
    import letters

    plain = letters.Letters.step
    running, most = set(), []

    def step(self, action):
        async def wait():
            running.add(self)
            most.append(len(running))
            await asyncio.sleep(0.02 / len(most))
            running.discard(self)
            return plain(self, action)

        return wait()

    monkeypatch.setattr(letters.Letters, "step", step)
    return tiny_run().config, most


async def test_slow_episodes_are_played_at_once_and_give_the_same_corpus(waiting, monkeypatch):
    config, most = waiting
    monkeypatch.setattr(text_corpus, "ALONE_S", 3600.0)
    one_at_a_time = await scratch_corpus(config)
    assert max(most) == 1
    most.clear()
    monkeypatch.setattr(text_corpus, "ALONE_S", 0.0)
    assert await scratch_corpus(config) == one_at_a_time
    assert 8 < max(most) <= text_corpus.AT_ONCE


async def test_slow_episodes_report_their_progress(waiting, monkeypatch):
    config, _ = waiting
    monkeypatch.setattr(text_corpus, "ALONE_S", 0.0)
    monkeypatch.setattr(text_corpus, "REPORT_S", 0.01)
    said = []
    await scratch_corpus(config, say=said.append)
    assert said[0].startswith("episodes for the new model's vocabulary: ")
    assert said[0].endswith(f" of {scratch.EPISODES} played")


async def test_the_waits_of_its_episodes_are_those_of_the_run(waiting):
    config, most = waiting
    waits = WaitTracker()
    corpus = asyncio.create_task(scratch_corpus(config, waits=waits))
    async with asyncio.timeout(PATIENCE_S):
        while not any(wait.kind is WaitKind.ENVIRONMENT for wait in waits.list_waits()):
            assert not corpus.done()
            await asyncio.sleep(0.001)
    corpus.cancel()
    await asyncio.wait({corpus})
    assert most
