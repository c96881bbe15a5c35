"""Queries of an environment before a run, with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from support.models import tiny_model
from support.tokenizers import build_tokenizer

import agentrl
from agentrl.cli import env as env_commands
from agentrl.config import Config, load_config
from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation, optional_part
from agentrl.env.lookup import resolve_environment, spec_of
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.rollout.environment_probe import EnvironmentTimeout, check_environments, has_expert, probe_environment
from agentrl.rollout.loop_choice import select_default_loop

DEADLINE_S = 0.05


class World(gymnasium.Env[str, str]):
    """Something to ask."""

    observation_space = action_space = gymnasium.spaces.Text(100)
    released = threading.Event()
    """Ends every call that hangs."""
    closed = 0

    def __init__(self, colour: str = "blue") -> None:
        self.colour = colour

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return self.colour, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.colour, 0.0, True, False, {}

    def close(self) -> None:
        World.closed += 1


class HangingConstructor(World):
    """Never made."""

    def __init__(self) -> None:
        World.released.wait()


class HangingTools(World):
    """Made, but its tools are never told."""

    @property
    def tools(self) -> list[Any]:
        World.released.wait()
        return []


class HangingClose(World):
    """Answers, but is never closed."""

    def close(self) -> None:
        World.released.wait()


class FailingClose(World):
    """Answers, but cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("the port is gone")


class NeedsLoop(AsyncEnv):
    """Can be made in an event loop only, as one that opens an HTTP session is."""

    closed = 0

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        NeedsLoop.closed += 1


@pytest.fixture(autouse=True)
def _released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(World, "released", threading.Event())
    monkeypatch.setattr(World, "closed", 0)
    yield
    World.released.set()


def name_of(world: type) -> str:
    return f"{__name__}:{world.__name__}"


def config_of(world: type, *words: str) -> Config:
    deadline = f"environment.reset_timeout_s={DEADLINE_S}"
    return load_config(None, [f"environment={name_of(world)}", "model.path=scratch", deadline, *words])


def test_an_environment_is_made_with_its_options_queried_and_closed() -> None:
    assert probe_environment(spec_of(World), {"colour": "red"}, lambda env: optional_part(env, "colour")) == "red"
    assert World.closed == 1


@pytest.mark.parametrize("world", [HangingConstructor, HangingTools])
def test_an_environment_that_never_answers_is_reported_with_the_deadline(world: type) -> None:
    with pytest.raises(EnvironmentTimeout) as raised:
        probe_environment(spec_of(world), {}, lambda env: optional_part(env, "tools"), deadline_s=DEADLINE_S)
    assert f"environment {name_of(world)} hangs before its first reset: got no answer in 0.05 s" in str(raised.value)
    assert f"agentrl env check {name_of(world)}" in str(raised.value)


@pytest.mark.parametrize(
    ("world", "warning"),
    [(HangingClose, "was not closed in 0.05 s"), (FailingClose, "failed: got RuntimeError: the port is gone")],
)
def test_an_environment_that_cannot_be_closed_still_answers(
    world: type, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = probe_environment(spec_of(world), {}, lambda env: optional_part(env, "colour"), deadline_s=DEADLINE_S)
    assert found == "blue"
    [line] = caplog.messages
    assert warning in line
    assert name_of(world) in line
    assert "making" not in line


def test_an_error_of_the_query_is_an_environment_failure_and_the_environment_is_closed() -> None:
    with pytest.raises(EnvironmentFailure, match="KeyError: 'no such part'"):
        probe_environment(spec_of(World), {}, lambda env: {}["no such part"])
    assert World.closed == 1


def test_an_inline_environment_is_made_in_the_event_loop_that_closes_it() -> None:
    spec = EnvironmentSpec(name="inline", make=NeedsLoop, tasks=spec_of(World).tasks, isolation=Isolation.INLINE)
    assert probe_environment(spec, {}, lambda env: type(env)) is NeedsLoop
    assert NeedsLoop.closed == 1
    with pytest.raises(EnvironmentFailure, match="no running event loop"):
        probe_environment(spec, {}, lambda env: type(env), isolation=Isolation.THREAD)


async def test_an_environment_is_asked_from_inside_an_event_loop_too() -> None:
    assert probe_environment(spec_of(World), {}, lambda env: True)


@pytest.mark.parametrize("isolation", ["thread", "inline"])
@pytest.mark.parametrize("check", [check_environments, lambda config: has_expert(spec_for(config), config)])
def test_the_start_of_a_run_does_not_wait_for_ever(check: Callable[[Config], object], isolation: str) -> None:
    with pytest.raises(UsageError, match="HangingConstructor hangs before its first reset"):
        check(config_of(HangingConstructor, f"environment.isolation={isolation}"))


def spec_for(config: Config) -> EnvironmentSpec:
    return resolve_environment(config.sole_environment.name)


def test_the_choice_of_a_loop_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_MODELS", str(tmp_path / "models"))
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    build_tokenizer("qwen2.5").save_pretrained(model)
    (model / "chat_template.jinja").write_text("{%- for m in messages -%}<|im_start|>{{ m.content }}{% endfor -%}")
    config = config_of(HangingTools, f"model.path={model}")
    with pytest.raises(EnvironmentTimeout, match="HangingTools"):
        select_default_loop(config, say=lambda _: None)


def test_env_show_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe_environment.__kwdefaults__, "deadline_s", DEADLINE_S)
    with pytest.raises(EnvironmentTimeout, match="HangingTools"):
        env_commands.show(name_of(HangingTools), [])


def test_env_show_lists_own_tools_or_says_why_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    env_commands.show(name_of(WithTool), [])
    assert "press" in capsys.readouterr().out
    env_commands.show(name_of(Broken), [])
    assert "own tools are unknown" in (shown := " ".join(capsys.readouterr().err.split()))
    assert "RuntimeError: no board" in shown


class Broken(World):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no board")


class WithTool(World):
    """Brings a tool."""

    def __init__(self) -> None:
        self.tools = [agentrl.tool(self.press)]

    def press(self, number: int) -> str:
        """Press a button.

        Args:
            number: Its number.
        """
        return str(number)
