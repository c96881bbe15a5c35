"""Few-shot examples, from the agent section to the episode runner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentrl import registry
from agentrl.agent_loop import AgentLoop
from agentrl.builders.episodes import build_env_pool, build_run_environments, build_runner, close_run_environments
from agentrl.config import load_config
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import deadlines
from agentrl.registry import Kind
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.task import SeedTasks, Task


class Spoken(gymnasium.Env[str, str]):
    """The expert says the seed of its task, so that an example tells where it comes from."""

    observation_space = action_space = gymnasium.spaces.Text(20)
    action_hint = "a number"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.seed_of_task = seed
        return f"Say {seed}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "Said.", 1.0, True, False, {"success": True}

    def expert(self) -> Spoken:
        return self

    def act(self, observation: str) -> str:
        return str(self.seed_of_task)


def tasks_of(split: str) -> SeedTasks:
    return SeedTasks("spoken", split)


@pytest.fixture
def _spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, splits in {"spoken": ("train", "valid", "test"), "spoken_test": ("valid", "test")}.items():
        spec = EnvironmentSpec(name=name, make=Spoken, tasks=tasks_of, splits=splits, isolation=Isolation.INLINE)
        monkeypatch.setitem(registry._registered[Kind.ENVIRONMENT], name, spec)


TRAIN, VALID = tasks_of("train"), tasks_of("valid")


@pytest.mark.usefixtures("_spoken")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("spoken/valid", [TRAIN[0].seed, TRAIN[1].seed]),
        ("spoken/test", [TRAIN[0].seed, TRAIN[1].seed]),
        ("spoken/train", [TRAIN[0].seed, TRAIN[1].seed]),
        ("spoken_test/valid", [VALID[0].seed, VALID[1].seed]),
    ],
)
async def test_examples_come_from_the_training_split_where_there_is_one(environment: str, expected: list[int]) -> None:
    assert await shown(f"environment={environment}") == [str(seed) for seed in expected]


@pytest.mark.usefixtures("_spoken")
async def test_examples_come_from_the_file_of_tasks_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "seed": 41}\n{"id": "b", "seed": 43}\n{"id": "c", "seed": 47}\n')
    assert await shown("environment=spoken", f"environment.tasks={tmp_path}/tasks.jsonl") == ["41", "43"]


async def test_without_few_shot_turns_there_are_no_examples() -> None:
    config = load_config(None, ["environment=guess_number/valid", "agent.loop=react_text"])
    pool = build_env_pool(config)
    assert build_runner(config, pool, ScriptedEpisodePolicy(ScriptedPolicy.RANDOM)).policy_wrapper is None
    await pool.close()


@pytest.mark.parametrize("is_early", [True, False])
async def test_an_interruption_limits_the_time_of_closing_environments(
    monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    monkeypatch.setattr(deadlines, "INTERRUPTED_CLOSING_S", 0.05)
    closed = []

    async def hang(loop: AgentLoop) -> None:
        await asyncio.Event().wait()

    async def close() -> None:
        closed.append(True)

    monkeypatch.setattr(AgentLoop, "close", hang)
    config = load_config(None, ["environment=guess_number", "agent.loop=react_text"])
    environments = build_run_environments(config, ScriptedEpisodePolicy(ScriptedPolicy.RANDOM))
    environments[0].pool.cleanup.push_async_callback(close)

    async def work() -> None:
        try:
            await asyncio.Event().wait() if is_early else None
        finally:
            await close_run_environments(environments)

    working = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    working.cancel()
    await asyncio.wait({working}, timeout=60)
    assert (working.cancelled(), closed) == (True, [True])


async def shown(*words: str) -> list[str]:
    """Return what the expert says in the examples of a prompt with two of them."""
    settings = ("agent.loop=react_text", "agent.options={format: plain}", "agent.few_shot_turns=2")
    config = load_config(None, [*words, *settings])
    pool = build_env_pool(config)
    runner = build_runner(config, pool, ScriptedEpisodePolicy(ScriptedPolicy.EXPERT))
    assert runner.policy_wrapper is not None
    messages = await runner.policy_wrapper.messages(runner, Task(id="other", environment="spoken", seed=5))
    await pool.close()
    return [message.text for message in messages if message.role == "assistant"]
