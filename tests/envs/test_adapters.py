"""What adapters to other libraries do where the library is not installed; with it, see tests/originals."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import agentrl.envs.registration
import numpy as np
import pytest
from agentrl.envs.adapters.global_random import GlobalRandom
from agentrl.envs.adapters.reasoning_gym import MAX_DRAWS, STRIDE
from agentrl.envs.adapters.textarena import take_listed_move
from agentrl.envs.adapters.verifiers import VerifiersEnv, scored_rollout
from agentrl.envs.adapters.verifiers_client import read_calls
from agentrl.envs.splits import split_of_seed, split_of_text

from agentrl import registry
from agentrl.cli import main
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.registry import Extra, Kind
from agentrl.testing.env_check import check_env

ADAPTERS = {
    "gem": "gem",
    "minigrid": "minigrid",
    "reasoning_gym": "reasoning_gym",
    "skyrl_gym": "skyrl_gym",
    "textarena": "textarena",
    "verifiers": "verifiers",
    "verifiers_v1": "verifiers",
}
"""Registry name to the module that it needs."""
SELECTED = {"verifiers": {"environment": "some_env"}, "verifiers_v1": {"taskset": "some_taskset"}}
NEEDED = [(name, SELECTED.get(name, {})) for name in ADAPTERS]


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an installation without extras, whatever is installed here."""
    find, load = importlib.util.find_spec, importlib.import_module
    missing = set(ADAPTERS.values())

    def find_others(name: str, package: str | None = None) -> Any:
        return None if name in missing else find(name, package)

    def load_others(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    monkeypatch.setattr(importlib, "import_module", load_others)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_error_names_its_requirement(name: str) -> None:
    spec = resolve_environment(name)
    assert spec.extra is not None
    assert spec.extra.module == ADAPTERS[name]
    assert name in registry.names(Kind.ENVIRONMENT)
    assert spec.description.count(". ") >= 1


@pytest.mark.usefixtures("_nothing_installed")
@pytest.mark.parametrize(("name", "options"), NEEDED)
def test_a_missing_package_names_the_extra(name: str, options: dict[str, str]) -> None:
    spec = resolve_environment(name)
    assert spec.extra is not None
    words = rf'the extra {spec.extra.name} is not installed: .*pip install "agentrl\[{spec.extra.name}\]"'
    with pytest.raises(UsageError, match=words):
        spec.make(**{**spec.options, **options})
    with pytest.raises(UsageError, match=words):
        check_env(name)


@pytest.mark.usefixtures("_nothing_installed")
def test_listing_and_showing_need_no_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    for words in (["env", "list"], ["env", "show", "reasoning_gym"], ["env", "show", "verifiers"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code
    printed = capsys.readouterr().out
    assert "(needs agentrl[minigrid])" in printed
    assert "agentrl[reasoning-gym], not installed" in printed
    assert "100,000 tasks" in printed
    assert "environment=module:load_environment, or environment=NAME" in printed


def test_incomplete_extra_error_names_the_missing_package() -> None:
    assert Extra(name="json", module="json").is_installed
    with pytest.raises(UsageError, match=r"got No module named 'json\.nothing'"):
        Extra(name="json", module="json").load("json.nothing")


@pytest.mark.parametrize("env_id", ["Gem", "Gymnasium", "MiniGrid", "ReasoningGym", "TextArena"])
def test_gymnasium_ids_stand_for_the_registry_names(env_id: str) -> None:
    assert f"agentrl/{env_id}-v0" in agentrl.envs.registration.ENTRY_POINTS
    assert resolve_environment(f"agentrl/{env_id}-v0").name in registry.names(Kind.ENVIRONMENT)


class Rollouts:
    """What `scored_rollout` needs of an environment of verifiers."""

    def __init__(self, *, error: object = None, breaks: bool = False) -> None:
        self.rubric, self.error, self.breaks, self.done = self, error, breaks, list[str]()

    async def rollout(self, row: dict[str, Any], _client: Any, _model: str, _sampling: Any) -> dict[str, Any]:
        return {**row, "error": self.error}

    async def score_rollout(self, state: dict[str, Any]) -> None:
        self.done.append("score")
        if self.breaks:
            raise ValueError("no score")
        state["reward"] = 1.0

    async def cleanup(self, _state: dict[str, Any]) -> None:
        self.done.append("cleanup")


async def test_verifiers_rubric_always_cleans_up() -> None:
    good, failed, broken = Rollouts(), Rollouts(error="lost"), Rollouts(breaks=True)
    assert (await scored_rollout(good, {"row": 1}, None))["reward"] == 1.0
    assert "reward" not in await scored_rollout(failed, {}, None)
    with pytest.raises(ValueError, match="no score"):
        await scored_rollout(broken, {}, None)
    assert [one.done for one in (good, failed, broken)] == [["score", "cleanup"], ["cleanup"], ["score", "cleanup"]]


def test_verifiers_asks_for_an_environment() -> None:
    with pytest.raises(UsageError, match="environment=module:load_environment"):
        VerifiersEnv()
    with pytest.raises(UsageError, match="the option environment of verifiers is not set"):
        resolve_environment("verifiers").tasks("train")


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', [("add", '{"a": 1}')]),
        ('[{"name": "add"}, {"name": "sub", "arguments": {}}]', [("add", "{}"), ("sub", "{}")]),
        ("The answer is 3.", []),
        ('{"name": "add"', []),
        ('{"names": "add"}', []),
        ("[1, 2]", []),
        ("7", []),
    ],
)
def test_an_answer_is_calls_or_words(answer: str, calls: list[tuple[str, str]]) -> None:
    assert [(call["name"], call["arguments"]) for call in read_calls(answer)] == calls


def test_the_random_opponent_takes_the_moves_listed_last() -> None:
    told = "Available Moves: '[0]', '[1]'\nThen\nAvailable Moves: '[4]', '[7]'"
    rng = random.Random(0)
    assert {take_listed_move(told, rng) for _ in range(20)} == {"[4]", "[7]"}
    with pytest.raises(UsageError, match="opponent=module:function"):
        take_listed_move("Say something.", rng)


def test_stream_replaces_the_global_generators() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    one, other = GlobalRandom(5), GlobalRandom(5)
    drawn = []
    for _ in range(2):
        for stream in (one, other):
            with stream.use():
                drawn.append((random.random(), float(np.random.rand())))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_splits_depend_on_the_text_and_the_seeds_range() -> None:
    assert [split_of_seed(seed) for seed in (0, 10_000_000, 29_999_999, 30_000_000, -1)] == [
        "train",
        "valid",
        "test",
        "train",
        "train",
    ]
    owned = [split_of_text(f"question {number}") for number in range(2000)]
    assert set(owned) == {"train", "valid", "test"}
    assert 900 < owned.count("train") < 1100
    assert 400 < owned.count("valid") < 600
    assert MAX_DRAWS * STRIDE < 2**32
