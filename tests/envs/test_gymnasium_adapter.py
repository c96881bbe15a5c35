from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from agentrl.envs.adapters.gymnasium_text import GymnasiumText, make
from agentrl.envs.adapters.gymnasium_words import WORDS
from gymnasium import spaces

from agentrl.errors import UsageError
from agentrl.testing.env_check import check_env


def newest(name: str) -> str:
    """The id of an environment's highest version."""
    found = [spec for spec in gymnasium.registry.values() if spec.name == name and spec.namespace is None]
    return max(found, key=lambda spec: spec.version or 0).id


@pytest.mark.parametrize(("name", "options"), [("gymnasium", {"env_id": "FrozenLake-v1"}), ("Pendulum-v1", {})])
@pytest.mark.slow
def test_gymnasiums_own_environments_keep_the_rules(name: str, options: dict[str, Any]) -> None:
    report = check_env(name, options=options, episodes=1)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_words_fit_the_newest_version(name: str) -> None:
    try:
        env: Any = make(env_id=newest(name))
    except UsageError as error:
        pytest.skip(str(error))  # Box2D is not installed
    first, _ = env.reset(seed=1)
    assert first.startswith(WORDS[name].goal + "\n")
    assert all(f"\n{part}: " in first for part in WORDS[name].parts)
    assert env.admissible_actions() == (list(WORDS[name].actions) or None)
    if env.admissible_actions():
        assert env.step(WORDS[name].actions[-1])[4]["valid"]


def test_a_drawing_keeps_its_colours_in_words() -> None:
    env: Any = make(env_id=newest("Taxi"))
    first, _ = env.reset(seed=0)
    assert all(piece in first for piece in ("{yellow: }", "{magenta:Y}", "{blue:B}"))
    assert "\x1b" not in first
    assert "(North)" in env.step("north")[0]


def test_steps_that_were_not_understood_count_to_the_limit() -> None:
    env: Any = make(env_id="FrozenLake-v1", max_episode_steps=2)
    env.reset(seed=0)
    assert env.step("fly")[2:] == (False, False, {"valid": False, "success": False})
    assert env.step("left")[3]


def test_success_is_the_threshold_of_the_registered_environment() -> None:
    env: Any = make(env_id="FrozenLake-v1", is_slippery=False)
    env.reset(seed=0)
    walked = [env.step(move) for move in ("down", "down", "right", "right", "down", "right")]
    assert [step[4]["success"] for step in walked] == [False] * 5 + [True]
    blackjack: Any = make(env_id="Blackjack-v1")
    blackjack.reset(seed=0)
    assert "success" not in blackjack.step("stick")[4]


class Pictures(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(0, 255, (64, 64, 3))
    action_space = spaces.Discrete(2)


class Talking(Pictures):
    observation_space = spaces.Dict(seen=spaces.Discrete(3), said=spaces.Sequence(spaces.Discrete(2)))


class Talker(gymnasium.Env[Any, Any]):
    observation_space = action_space = spaces.Text(9)


class Sized(gymnasium.Env[Any, Any]):
    observation_space = action_space = spaces.Text(9)

    def __init__(self, size: int) -> None:
        self.half = size / 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"env_id": Sized}, r":Sized cannot be created: got .*'size'. The arguments .* keys of environment\.options"),
        (
            {"env_id": Sized, "size": "2"},
            r"created: got .* It was raised in .* line \d+: self.half = size / 2",
        ),
        ({"env_id": Pictures}, "too large for text: got 12,288 numbers.*TextAdapter"),
        ({"env_id": Talking}, "has no text form: got Sequence"),
        ({"env_id": Talker, "actions": ["a"]}, "uses text already"),
        ({"env_id": "CartPole-v1", "actions": ["left"]}, "action names do not fit"),
        (
            {"env_id": "CartPole-v1", "colour": 1},
            r"CartPole-v1 cannot be created: .*'colour'.*environment\.options",
        ),
        ({"env_id": "NoSuchGame-v0"}, "NoSuchGame-v0 cannot be created: got .*NoSuchGame"),
        ({"env_id": "no_such_module:Game-v0"}, "cannot be created: got .*no_such_module"),
    ],
)
def test_what_cannot_be_put_into_text_is_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(**options)


def test_one_of_text_is_left_alone() -> None:
    assert isinstance(make(env_id=Talker), Talker)
    assert isinstance(make(env_id="CartPole-v1", actions=["push left", "push right"]), GymnasiumText)


def test_a_vector_environment_is_refused() -> None:
    def make_two() -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")

    with pytest.raises(UsageError, match=r"makes several environments at once: got a VectorEnv with num_envs=2"):
        make(env_id=make_two)
