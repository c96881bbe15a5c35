"""A run whose servers are killed during steps: no episode is lost or trained twice, and the run continues."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from agentrl.config.engines import SGLangEngineConfig
from agentrl.errors import EngineError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.serving.launch.guard import descendants
from agentrl.serving.sglang import SGLangServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

WORLDS = Path(__file__).parent.parent / "worlds"
WAIT_S = 900
EPISODES = 16
PROBES = 4
"""Requests at once that are no episode's."""
RUN = (
    "environment={name: letters:Letters, isolation: inline}",
    "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 100, max_tokens: 500}",
    "model.scratch={layers: 1, hidden_size: 64, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 512}",
    "model.scratch.initializer_range=0.2",
    "algorithm.group_size=4",
    "trainer={steps: 1000, tasks_per_step: 4, learning_rate: 1e-3}",
    "engine={type: sglang, max_num_seqs: 16, replicas: 2, health_timeout_s: 20, timeout_s: 1800}",
    "run.name=run",
)


class TrainingRun:
    """`agentrl train` in a process of its own, and its servers."""

    def __init__(self, process, folder, launched_by):
        self._process, self._folder, self._launched_by = process, folder, launched_by

    @property
    def steps(self) -> int:
        """Steps that are complete."""
        file = self._folder / "metrics.jsonl"
        return len(read_metrics(file)) if file.exists() else 0

    def servers(self):
        """The first processes of the servers by address."""
        return self._launched_by(self._process.pid)

    async def until(self, condition, what):
        """Ask again and again, until something is so."""
        end = time.monotonic() + WAIT_S
        while True:
            if await condition():
                return
            assert self._process.poll() is None, f"the run ended while it was waited for {what}"
            assert time.monotonic() < end, f"waited in vain for {what}"
            await asyncio.sleep(0.02)

    async def in_a_step(self):
        """Wait until both servers sample for episodes; their first processes."""
        leaders = []

        async def both_sample():
            leaders[:] = self.servers().values()
            return len(leaders) == 2 and all([await _running(url) > PROBES for url in self.servers()])

        await self.until(both_sample, "two servers that sample for episodes")
        return leaders

    async def completes(self, more=1):
        """Wait for the end of some steps, from now on."""
        wanted = self.steps + more

        async def are_done():
            return self.steps >= wanted

        await self.until(are_done, "the end of a step")


async def _running(url: str) -> int:
    client = SGLangServer(url, SGLangEngineConfig(health_timeout_s=5))
    try:
        return (await client.load()).running
    except EngineError:
        return 0
    finally:
        await client.close()


@pytest.fixture
def run(launched_by, all_gone, sglang_python, tmp_path):
    words = [*RUN, f"run.directory={tmp_path}", f"engine.python={sglang_python}"]
    environment = {**os.environ, "PYTHONPATH": str(WORLDS)}
    program = Path(sys.executable).with_name("agentrl")
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen([program, "train", *words], env=environment, stdout=said, stderr=said)
    try:
        yield TrainingRun(process, tmp_path / "run", launched_by)
    finally:
        started = descendants(process.pid)
        process.kill()
        process.wait(PATIENCE_S)
        print((tmp_path / "said").read_text()[-4000:])
    assert len(started) >= 8, "the guards and processes of two servers"
    assert all_gone(started)


async def test_a_run_outlives_its_servers(run, tmp_path):
    os.kill((await run.in_a_step())[0], signal.SIGKILL)
    await run.completes()
    for leader in await run.in_a_step():
        os.kill(leader, signal.SIGKILL)
    await run.completes()
    os.killpg((await run.in_a_step())[1], signal.SIGSTOP)
    await run.completes()
    await run.in_a_step()
    await run.completes()

    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["version"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        assert line["episodes"] == EPISODES
        assert line["mismatch/prob_abs_mean"] < 1e-4
        assert line["staleness/max"] == 0
    assert sum(line.get("episode/resubmissions", 0.0) for line in lines) > 0
    stored = [found for found in read_trajectories(tmp_path / "run" / "trajectories") if found.step <= len(lines)]
    assert Counter(found.step for found in stored) == dict.fromkeys(range(1, len(lines) + 1), EPISODES)
    assert len({found.trajectory.id for found in stored}) == len(stored)
    for found in stored:
        assert found.trajectory.outcome.is_trainable
        for sequence in found.trajectory.sequences:
            assert set(sequence.versions[sequence.loss_mask]) == {found.step - 1}
