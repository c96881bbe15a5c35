from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from agentrl.envs.text_adapter import TextAdapter, describe
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from agentrl.errors import UsageError


class Line(gymnasium.Env[Any, Any]):
    """Walk from 0 to 3 on a line; remembers whether it was closed."""

    observation_space = spaces.Discrete(4)

    def __init__(self, action_space: spaces.Space[Any] | None = None) -> None:
        self.action_space = action_space or spaces.Discrete(2, start=5)
        self.closed = False
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return self.place, {"place": 0}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        self.place = max(0, self.place + (1 if np.all(action == 6) else -1))
        return self.place, float(self.place == 3), self.place == 3, False, {"place": self.place}

    def close(self) -> None:
        self.closed = True


def adapted() -> TextAdapter:
    env = TextAdapter(Line(), actions=("left", "right"), max_steps=5)
    env.reset(seed=1)
    return env


@pytest.mark.parametrize(
    ("said", "understood"),
    [("right", 6), ("Right", 6), (" left\n", 5), ("I go right.", 6), ("0", 5), ("1", 6), ("2", None), ("-1", None),
     ("up", None), ("left or right", None), ("rightly", None), ("", None), ("go 1", None), ("9" * 5000, None)],
)  # fmt: skip
def test_an_action_is_a_name_or_a_number(said: str, understood: int | None) -> None:
    assert adapted().parse(said) == understood


def test_invalid_action_gets_an_example() -> None:
    env = adapted()
    observation, reward, terminated, truncated, info = env.step("fly away")
    assert observation == (
        "'fly away' is not an action, so nothing happened. An action is left or right, for example: left\n0"
    )
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"valid": False})
    assert env.step("right")[0] == "1"


def test_episodes_end_with_the_inner_ones_or_at_the_limit() -> None:
    env = adapted()
    assert [env.step("right")[1:4] for _ in range(3)] == [(0.0, False, False), (0.0, False, False), (1.0, True, False)]
    env.reset()
    assert [env.step("what")[3] for _ in range(5)] == [False] * 4 + [True]


def test_it_offers_its_actions_and_closes_the_inner_environment() -> None:
    env = adapted()
    assert env.admissible_actions() == ["left", "right"]
    assert env.action_hint == "left or right, for example: left"
    env.close()
    assert isinstance(env.inner, Line)
    assert env.inner.closed


@pytest.mark.parametrize(
    ("space", "said", "understood"),
    [
        (spaces.MultiDiscrete([3, 4]), "2 3", [2, 3]),
        (spaces.MultiDiscrete([3, 4]), "2, 4", None),
        (spaces.MultiDiscrete([3, 4]), "2", None),
        (spaces.MultiBinary(2), "1 0", [1, 0]),
        (spaces.Box(-1, 1, (2,)), "0.5 -1e-1", [0.5, -0.1]),
        (spaces.Box(-1, 1, (2,)), "0.5 7", None),
        (spaces.Box(-1, 1, (2,)), "0.5 1e99", None),
    ],
)
def test_other_actions_are_numbers(space: spaces.Space[Any], said: str, understood: list[float] | None) -> None:
    env = TextAdapter(Line(space))
    parsed = env.parse(said)
    assert parsed is None if understood is None else np.allclose(parsed, understood)
    assert env.admissible_actions() is None
    assert env.action_hint == "2 numbers separated by spaces, for example: 0 0"


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiDiscrete([2, 2], start=[5, -3]),
        spaces.MultiBinary((2, 2)),
        spaces.Box(-1, 1, (2,), dtype=np.float16),
        spaces.Box(0.3, 7, (3,), dtype=np.float64),
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(200, 255, (2,), dtype=np.uint8),
    ],
)
def test_random_numbers_and_the_example_of_the_hint_are_actions(space: spaces.Space[Any]) -> None:
    env = TextAdapter(Line(space))
    assert env.parse(env.action_hint.rpartition(": ")[2]) is not None
    env.action_space.seed(3)
    texts = [env.action_space.sample() for _ in range(20)]
    assert all(env.parse(text) is not None for text in texts)
    env.action_space.seed(3)
    assert texts == [env.action_space.sample() for _ in range(20)]
    assert len(set(texts)) > 3


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Discrete(4), np.int64(2), "2"),
        (spaces.Text(9), "hello", "hello"),
        (spaces.Box(0, 1, (3,)), np.array([0.25, 1, 1 / 3]), "[0.25 1 0.3333]"),
        (spaces.MultiBinary((2, 2)), np.array([[0, 1], [1, 0]], dtype=np.int8), "[0 1]\n[1 0]"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(9)]), (1, 8), "1\n8"),
        (spaces.Dict(hand=spaces.Discrete(2), sum=spaces.Discrete(32)), {"hand": 1, "sum": 20}, "hand: 1\nsum: 20"),
    ],
)
def test_observations_become_text(space: spaces.Space[Any], value: object, text: str) -> None:
    assert describe(space, value) == text


@pytest.mark.parametrize(
    ("env", "names", "words"),
    [
        (Line(), ("left",), "action names do not fit the space"),
        (Line(), ("left", "left"), "action names do not fit the space"),
        (Line(spaces.Text(4)), None, "these actions have no text form"),
        (Line(spaces.MultiBinary(2)), ("a", "b"), "these actions have no text form"),
    ],
)
def test_spaces_without_a_text_form_are_rejected(env: Line, names: tuple[str, ...] | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TextAdapter(env, actions=names)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1"])
def test_gymnasiums_own_environments_can_be_adapted(env_id: str) -> None:
    env = TextAdapter(gymnasium.make(env_id))
    check_env(env, skip_render_check=True)
    observation, _ = env.reset(seed=3)
    assert observation
    actions = env.admissible_actions()
    answer = env.step(actions[0] if actions else "0.5")
    assert answer[4]["valid"]
