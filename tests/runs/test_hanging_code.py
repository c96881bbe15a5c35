"""Nothing hangs: whatever foreign code does, one Ctrl-C ends a run with a checkpoint, and two end it within seconds."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support import SLACK
from support.named_waits import wait_until_named
from support.programs import start_program
from support.waiting import join

WORLDS = Path(__file__).parents[1] / "worlds"
SCRATCH = "model.scratch={layers: 1, hidden_size: 32, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 256}"
WORDS = (
    "model.dtype=float32",
    "agent={loop: 'hanging:Loop', tools: ['hanging:Tools'], max_answer_tokens: 4, max_tokens: 200}",
    "engine={max_num_seqs: 16, cache_tokens: 8192}",
    "algorithm.group_size=4",
    "trainer={steps: 500, tasks_per_step: 4}",
    "checkpoint.every=1000",
    "trackers=[]",
)
ONCE_S, TWICE_S = 20.0, 5.0

pytestmark = pytest.mark.slow


def command(world: str = "hanging:Words", *words: str) -> list[str]:
    return ["train", "--env", world, "--model", "model", "run.name=run", *WORDS, *words]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    folder = tmp_path_factory.mktemp("model")
    words = ["train", "--env", "letters:Letters", "--model", "scratch", "run.name=run", SCRATCH, *WORDS[2:]]
    plain = ["agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 4}"]
    process = start_program([*words, *plain, "trainer={steps: 1, tasks_per_step: 1}"], folder, WORLDS, {})
    join(process)
    assert process.exitcode == 0, (folder / "output").read_text()
    return folder / "runs" / "run" / "model"


@pytest.fixture
def start(model: Path, tmp_path: Path):
    """Start a program whose code hangs, and wait until it does."""
    started: list[BaseProcess] = []

    def run(words: list[str], hang: str, *, reached: set[str] | None = None) -> BaseProcess:
        shutil.copytree(model, tmp_path / "model")
        process = start_program(words, tmp_path, WORLDS, {"HANG": hang})
        started.append(process)
        sites = set(hang.partition(":")[2].split(",")) if reached is None else reached
        until = time.monotonic() + 60 * SLACK
        while missing := [site for site in sites if not (tmp_path / site).exists()]:
            assert process.is_alive(), (tmp_path / "output").read_text()
            assert time.monotonic() < until, f"not reached: {', '.join(missing)}\n{(tmp_path / 'output').read_text()}"
            time.sleep(0.05)
        if words[0] == "train":
            wait_until_named(tmp_path / "runs" / "run", sites)
        else:
            time.sleep(0.2)
        return process

    yield run
    for process in started:
        process.kill()
        join(process)


def interrupt(process: BaseProcess, times: int) -> float:
    """Send Ctrl-C so many times; return the seconds until the process has ended."""
    began = time.monotonic()
    for number in range(times):
        if number:
            time.sleep(0.5)
            began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
    process.join(60 * SLACK)
    return time.monotonic() - began


def check(process: BaseProcess, folder: Path, times: int, *, is_run: bool = True) -> None:
    seconds = interrupt(process, times)
    output = (folder / "output").read_text()
    assert process.exitcode == 130, output
    assert seconds < (ONCE_S if times == 1 else TWICE_S) * SLACK, output
    assert "Traceback" not in output
    if times == 1 and is_run:
        assert "resume with: agentrl train --resume" in output
        assert list((folder / "runs" / "run" / "checkpoints").glob("step-*")), output


SWALLOWING = "reset,step,close,loop,tool,toolset,end_session,toolset_close,scorer"


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("reward", "sites"), [("Single", SWALLOWING), ("Together", "group_scorer")])
def test_code_that_swallows_its_cancellation(start: Callable[..., BaseProcess], tmp_path, times, reward, sites) -> None:
    reached = set(sites.split(",")) - {"close", "toolset_close"}
    words = command("hanging:Words", f"agent.reward=['hanging:{reward}']")
    check(start(words, f"swallow:{sites}", reached=reached), tmp_path, times)


@pytest.mark.parametrize("times", [1, 2])
def test_code_that_blocks_its_own_thread(start: Callable[..., BaseProcess], tmp_path, times) -> None:
    hang = "sleep:reset,thread_tool,thread_reward,close"
    words = command("hanging:BlockingWords", "agent.reward=['hanging:blocking_reward']")
    check(start(words, hang, reached={"reset", "thread_tool", "thread_reward"}), tmp_path, times)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("site", ["step", "loop", "tool", "toolset", "end_session", "scorer", "group_scorer"])
def test_code_that_blocks_the_event_loop(start: Callable[..., BaseProcess], tmp_path, times, site) -> None:
    reward = "Together" if site == "group_scorer" else "Single"
    check(start(command("hanging:Words", f"agent.reward=['hanging:{reward}']"), f"sleep:{site}"), tmp_path, times)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", ["swallow", "sleep"])
def test_an_evaluation_ends(start: Callable[..., BaseProcess], tmp_path, times, way) -> None:
    words = ["eval", "--env", "hanging:Words", "--model", "model", "--tasks", "20", *WORDS[:3]]
    check(start(words, f"{way}:step"), tmp_path, times, is_run=False)


def test_a_run_whose_work_is_done_exits(start: Callable[..., BaseProcess], tmp_path) -> None:
    limits = ["agent.tool_timeout_s=0.5", "environment.step_timeout_s=0.5", "trainer.steps=2"]
    process = start(command("hanging:Words", *limits), "swallow:tool,close", reached={"tool"})
    process.join(100 * SLACK)
    assert process.exitcode == 0, (tmp_path / "output").read_text()


def test_a_tool_that_is_called_by_hand_does_not_keep_the_command(start: Callable[..., BaseProcess], tmp_path) -> None:
    process = start(["tool", "call", "hanging:alone"], "swallow:tool")
    process.join(10 * SLACK)
    assert process.exitcode == 2, (tmp_path / "output").read_text()
    assert "did not answer" in (tmp_path / "output").read_text()
