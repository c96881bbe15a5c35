from __future__ import annotations

import json
from typing import Any

import pytest
from agentrl.envs.frozen_lake import SPEC, FrozenLake, FrozenLakeExpert
from agentrl.envs.guess_number import SPEC as GUESSING
from agentrl.envs.guess_number import GuessNumber
from gymnasium.utils.env_checker import check_env

from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError


@pytest.mark.parametrize("name", ["frozen_lake", "guess_number"])
def test_gymnasium_accepts_them(name: str) -> None:
    env: Any = resolve_environment(name).make()
    check_env(env, skip_render_check=True)


def test_frozen_lake_shows_a_map_with_the_agent() -> None:
    env = FrozenLake()
    observation, _ = env.reset(seed=1)
    assert len(observation.splitlines()) == 5
    assert (observation.count("P"), observation.count("G")) == (1, 1)
    assert observation == FrozenLake().reset(seed=1)[0]
    rows = FrozenLake(size=4, layout="corners").reset(seed=1)[0].splitlines()
    assert (len(rows), rows[0][0], rows[3][-1]) == (4, "P", "G")
    assert len({env.reset(seed=seed)[0] for seed in range(10)}) > 5


def test_no_two_splits_share_a_lake() -> None:
    env = FrozenLake()
    maps = [{env.reset(seed=SPEC.tasks(split)[number].seed)[0] for number in range(60)} for split in SPEC.splits]
    assert min(map(len, maps)) > 20
    assert len(set.union(*maps)) == sum(map(len, maps))


@pytest.mark.parametrize("size", [1, 33, 100_000])
def test_the_frozen_lake_has_bounds(size: int) -> None:
    with pytest.raises(UsageError, match=f"got {size}, expected 2 to 32"):
        FrozenLake(size=size)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_frozen_lake_expert_always_arrives(size: int) -> None:
    env = FrozenLake(size=size)
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        expert, terminated, info = env.expert(), False, {}
        while not terminated:
            observation, reward, terminated, truncated, info = env.step(expert.act(observation))
            assert not truncated
        assert (reward, info["success"]) == (1.0, True)


def test_the_frozen_lake_expert_reads_the_map_after_a_message() -> None:
    env = FrozenLake()
    env.reset(seed=1)
    observation, *_ = env.step("fly")
    assert FrozenLakeExpert().act(observation) in env.admissible_actions()
    with pytest.raises(UsageError, match="no path leads to the goal"):
        FrozenLakeExpert().act("P H\nH G")


def test_a_hole_ends_the_walk_without_success() -> None:
    env = FrozenLake()
    env.restore({"map": ["SH", "FG"], "position": 0, "steps": 0})
    observation, reward, terminated, _, info = env.step("right")
    assert (observation, reward, terminated, info["success"]) == ("S P\nF G", 0.0, True, False)


def test_frozen_lake_continues_from_a_snapshot() -> None:
    env, other = FrozenLake(), FrozenLake()
    env.reset(seed=2)
    env.step("down")
    saved = json.loads(json.dumps(env.snapshot()))
    other.restore(saved)
    assert env.state_key() == other.state_key()
    assert env.step("right") == other.step("right")
    assert env.state_key() == other.state_key()


def test_random_walks_over_the_lake_have_the_stated_score() -> None:
    env, solved = FrozenLake(), 0
    for seed in range(400):
        env.reset(seed=seed)
        env.action_space.seed(seed)
        generator, done = env.np_random, False
        while not done:
            _, reward, terminated, truncated, _ = env.step(str(generator.integers(4)))
            done = terminated or truncated
        solved += int(reward)
    assert abs(solved / 400 - SPEC.scores["random"]) < 0.05


def test_guesses_are_answered() -> None:
    env = GuessNumber()
    assert env.reset(seed=3)[0] == "I think of a number from 1 to 100. Guess."
    low, high, answer = 1, 100, ("", 0.0, False, False, {})
    assert env.step("dunno")[:2] == ("That is not a number. Guess a whole number from 1 to 100, for example: 50", 0.0)
    for _ in range(7):
        middle = (low + high) // 2
        answer = env.step(f"Is it {middle}?")
        if answer[2]:
            break
        low, high = (middle + 1, high) if answer[0] == "Higher." else (low, middle - 1)
    assert answer[1:] == (1.0, True, False, {"success": True, "valid": True})


def test_halving_finds_every_number() -> None:
    env = GuessNumber()
    for secret in range(1, 101):
        env.restore({"secret": secret, "turns": 0})
        expert, answer = env.expert(), ("", 0.0, False, False, {})
        for _ in range(7):
            if not answer[2]:
                answer = env.step(expert.act(answer[0]))
        assert answer[1:3] == (1.0, True)


def test_no_two_splits_share_a_number() -> None:
    env, secrets = GuessNumber(), []
    for split in GUESSING.splits:
        secrets.append(set())
        for index in range(300):
            env.reset(seed=GUESSING.tasks(split)[index].seed)
            secrets[-1].add(env.secret)
    assert len(set.union(*secrets)) == sum(map(len, secrets)) > 90


def test_guessing_continues_from_a_snapshot() -> None:
    env, other = GuessNumber(), GuessNumber()
    env.reset(seed=3)
    for _ in range(9):
        env.step("0")
    other.restore(json.loads(json.dumps(env.snapshot())))
    assert other.state_key() == env.state_key()
    assert other.step("0") == env.step("0") == ("Higher.", 0.0, False, True, {"success": False, "valid": True})


def test_ten_guesses_are_all() -> None:
    env = GuessNumber()
    env.reset(seed=3)
    assert [env.step("0")[3] for _ in range(10)] == [False] * 9 + [True]
