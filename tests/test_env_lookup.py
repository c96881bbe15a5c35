from __future__ import annotations

import importlib.metadata
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentrl import registry
from agentrl.env import EnvironmentSpec, Isolation, lookup
from agentrl.env.lookup import check_split, make_gymnasium, parse_env_name, resolve_environment
from agentrl.errors import UnknownNameError, UsageError
from agentrl.registry import Kind

GAME = '''
import gymnasium as gym
from agentrl.env import EnvironmentSpec
from agentrl.task import SeedTasks

class Echo(gym.Env):
    """Says it again.

    And again.
    """
    observation_space = action_space = gym.spaces.Text(20)
    instructions = """
        Say something.
        It comes back.
    """
    def __init__(self, prefix=""):
        self.prefix = prefix
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}
    def step(self, action):
        return self.prefix + action, 1.0, False, False, {}

class Plain:
    def reset(self, seed=None):
        return "hello"
    def step(self, action):
        return action, 0.0, True, {}

SPEC = EnvironmentSpec(name="echo", make=Echo, tasks=lambda split, **options: SeedTasks("echo", split))
not_an_environment = 3
gym.register("LookupEcho-v0", Echo, max_episode_steps=7, reward_threshold=2.5)
gym.register("lookup/Echo-v3", "lookup_game:Echo")
'''

TOLD = "Say something.\nIt comes back."


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "lookup_game.py").write_text(GAME)
    (tmp_path / "lookup_needs.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "lookup_game"
    sys.modules.pop("lookup_game", None)
    for env_id in ("LookupEcho-v0", "lookup/Echo-v3"):
        gymnasium.registry.pop(env_id, None)


@pytest.mark.parametrize(
    ("text", "name", "split"),
    [
        ("household", "household", None),
        ("household/valid_unseen", "household", "valid_unseen"),
        ("agentrl/Household-v0", "agentrl/Household-v0", None),
        ("agentrl/Household-v0/valid_seen", "agentrl/Household-v0", "valid_seen"),
        ("my_game:GuessNumber-v0", "my_game:GuessNumber-v0", None),
        ("my_game:GuessNumber-v0/valid", "my_game:GuessNumber-v0", "valid"),
        ("my_game:mine/GuessNumber-v0", "my_game:mine/GuessNumber-v0", None),
        ("my.game:Class/test", "my.game:Class", "test"),
    ],
)
def test_names_and_splits_are_taken_apart(text: str, name: str, split: str | None) -> None:
    assert parse_env_name(text) == (name, split)


def test_a_registry_name_and_its_gymnasium_id_give_the_same_spec() -> None:
    assert resolve_environment("household") is resolve_environment("agentrl/Household-v0")
    assert resolve_environment("frozen_lake") is resolve_environment("agentrl/FrozenLake-v1")


def test_a_class_gets_a_plain_spec(game: str) -> None:
    spec = resolve_environment(f"{game}:Echo")
    assert (spec.name, spec.description, spec.isolation) == (f"{game}:Echo", "Says it again.", Isolation.THREAD)
    assert spec.splits == ("train", "valid", "test")
    assert spec.instructions == TOLD
    task = spec.tasks("valid", prefix="> ")[2]
    assert (task.id, task.environment, task.options) == ("valid-2", f"{game}:Echo", {})
    env: Any = spec.make(prefix="> ")
    assert env.reset(seed=task.seed)[0] == "hello"
    assert env.step("you")[0] == "> you"


@pytest.mark.parametrize("name", ["LookupEcho-v0", "lookup_game:LookupEcho-v0", "lookup_game:lookup/Echo-v3"])
def test_a_gymnasium_id_gets_a_plain_spec(game: str, name: str) -> None:
    registry.load_module(game)
    spec = resolve_environment(name)
    registered = gymnasium.spec(name.rpartition(":")[2])
    assert (spec.max_turns, spec.success_threshold) == (registered.max_episode_steps, registered.reward_threshold)
    assert spec.instructions == TOLD
    make = pickle.loads(pickle.dumps(spec.make))
    assert make(prefix="> ").reset()[0] == "hello"


def test_an_id_is_known_in_a_process_that_has_not_registered_it(game: str, tmp_path: Path) -> None:
    registry.load_module(game)
    made = tmp_path / "spec.pickle"
    made.write_bytes(pickle.dumps(resolve_environment("LookupEcho-v0").make))
    code = f"import pickle; print(pickle.load(open({str(made)!r}, 'rb'))(prefix='> ').reset()[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("hello\n", 0), done.stderr


def test_a_spec_in_a_module_is_taken_as_it_is(game: str) -> None:
    assert resolve_environment(f"{game}:SPEC") is registry.load(f"{game}:SPEC")


def test_environments_registered_in_this_process_are_found(game: str) -> None:
    registry.register(Kind.ENVIRONMENT, "my_echo", f"{game}:Echo")
    try:
        assert resolve_environment("my_echo").name == "my_echo"
    finally:
        registry.unregister(Kind.ENVIRONMENT, "my_echo")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("hosehold", UnknownNameError, "unknown environment: got 'hosehold'.*Did you mean household"),
        ("agentrl/Houshold-v0", UnknownNameError, "Did you mean agentrl/Household-v0"),
        ("lookup_game:LokupEcho-v0", UnknownNameError, "no such environment.*Did you mean lookup_game:LookupEcho-v0"),
        ("lookup_game:Other-v0", UnknownNameError, "expected one of LookupEcho-v0, lookup/Echo-v3, Echo, SPEC"),
        ("lookup_gmae:LookupEcho-v0", UsageError, "no module lookup_gmae"),
        ("lookup_needs:Echo-v0", UsageError, "needs a package that is not installed: got no no_such_package"),
        ("lookup_game:Ecko", UsageError, "has no 'Ecko'. Did you mean 'Echo'"),
        ("./game.txt:Echo", UsageError, "'./game.txt' is not the name of a module, expected a module such as .*.py"),
        (":Echo", UsageError, "'' is not the name of a module"),
        ("lookup_game:Zzz", UsageError, "has no 'Zzz'. .*lookup_game.py defines .*Echo"),
        ("lookup_game:not_an_environment", UsageError, "is not an environment: got int"),
        ("lookup_game:Plain", UsageError, "is not an environment: got a class without .*Derive it from gymnasium.Env"),
    ],
)
def test_invalid_name_is_explained(game: str, name: str, error: type[UsageError], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve_environment(name)


def test_an_environment_of_numbers_is_put_into_text(game: str) -> None:
    env: Any = make_gymnasium("FrozenLake-v1", is_slippery=False)
    assert "{red:S}FFF" in env.reset(seed=0)[0]
    assert env.step("down")[0].endswith("SFFF\n{red:F}HFH\nFFFH\nHFFG")
    by_class: Any = resolve_environment("gymnasium.envs.classic_control:CartPoleEnv").make()
    assert by_class.reset(seed=0)[0] == "[0.0137 -0.02302 -0.0459 -0.04835]"


def test_failed_creation_reports_the_reason(game: str) -> None:
    with pytest.raises(UsageError, match=r"lookup_game:LookupEcho-v0 cannot be created: got .*'colour'"):
        make_gymnasium("lookup_game:LookupEcho-v0", colour=3)


def test_a_wrong_split_gets_the_nearest_one() -> None:
    spec: EnvironmentSpec = resolve_environment("household")
    assert check_split(spec, "valid_unseen") == "valid_unseen"
    with pytest.raises(UnknownNameError, match="Did you mean household/valid_unseen"):
        check_split(spec, "valid_unsen")


class _BrokenPackage:
    """An entry point of another package, which cannot be imported."""

    name = "broken_games"
    value = "broken_games:register"
    dist = None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def load(self) -> Callable[[], None]:
        raise self.error


@pytest.fixture
def broken_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    errors = [ImportError("no module named numpy.core"), RuntimeError("no display"), SyntaxError("print 'x'")]
    real = importlib.metadata.entry_points

    def entry_points(**asked: str) -> Any:
        return [_BrokenPackage(error) for error in errors] if asked == {"group": "gymnasium.envs"} else real(**asked)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    lookup._load_gymnasium_plugins.cache_clear()
    yield
    lookup._load_gymnasium_plugins.cache_clear()


@pytest.mark.usefixtures("broken_plugins")
def test_broken_packages_of_others_do_not_break_an_environment() -> None:
    assert resolve_environment("CartPole-v1").name == "CartPole-v1"
    with pytest.raises(UnknownNameError, match="Did you mean CartPole") as near:
        resolve_environment("CartPol-v1")
    assert "broken_games:register (RuntimeError: no display)" in str(near.value)
    with pytest.raises(UnknownNameError, match="broken_games:register") as unknown:
        resolve_environment("Zxqvy-v7")
    assert "could not register" in str(unknown.value)
    gymnasium.register("AfterBrokenPackages-v0", lambda: None)
    try:
        assert "AfterBrokenPackages-v0" in gymnasium.registry  # and not broken_games/AfterBrokenPackages-v0
    finally:
        gymnasium.registry.pop("AfterBrokenPackages-v0", None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def (:\n", "cannot be imported: got SyntaxError: invalid syntax"),
        ("x = 1\ny = x / 0\n", r"cannot be imported: got ZeroDivisionError.*broken_game.py line 2: y = x / 0"),
        ("from math import no_such\n", "cannot be imported: got ImportError: cannot import name 'no_such'"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_game.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=words):
        resolve_environment("broken_game:Game")
    sys.modules.pop("broken_game", None)


def test_a_file_without_a_class_names_its_environments(game: str, tmp_path: Path) -> None:
    file = f"{tmp_path}/{game}.py"
    assert parse_env_name(file) == (file, None)
    with pytest.raises(UnknownNameError, match=rf"expected .*{game}\.py:Echo or .*{game}\.py:SPEC"):
        resolve_environment(file)
    with pytest.raises(UnknownNameError, match=f"Did you mean {game}:Echo"):
        resolve_environment(f"{game}.Echo")


def test_instructions_that_are_not_text_are_refused() -> None:
    class Listed(gymnasium.Env[str, str]):
        instructions = ("Say something.",)

    with pytest.raises(UsageError, match=r"instructions of Listed are not valid: got tuple .*, expected text"):
        lookup.spec_of(Listed)


def test_an_object_without_a_module_is_named_by_its_value() -> None:
    with pytest.raises(UsageError, match=r"^3 is not an environment: got int"):
        lookup.spec_of(3)
