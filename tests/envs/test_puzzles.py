"""Every puzzle keeps the contract that they share: splits, scores, snapshots, answers to rubbish."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import agentrl.envs.registration
import gymnasium
import pytest
from agentrl.envs.manifests import load_manifest
from agentrl.envs.puzzles.environment import PuzzleEnv
from agentrl.envs.puzzles.manifest import build_manifest, puzzle_names, puzzle_spec_of
from agentrl.envs.splits import split_of_seed
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import UsageError
from agentrl.task import SeedTasks

PUZZLES = puzzle_names()
EXPERT_EPISODES, RANDOM_EPISODES = 60, 200
LIMIT_OF_RANDOM_ACTIONS = 6000


def make(name: str, **options: Any) -> PuzzleEnv:
    env = puzzle_spec_of(name).make(**options)
    assert isinstance(env, PuzzleEnv)
    return env


def seed_of(split: str, index: int) -> int:
    return SeedTasks.SPLITS.index(split) * SeedTasks.SPLIT_SIZE + index


def random_action(env: PuzzleEnv, generator: random.Random) -> str:
    return generator.choice(env.admissible_actions() or [env.game.guess(generator)])


def play_randomly(env: PuzzleEnv, generator: random.Random, steps: int = 10_000) -> list[tuple[Any, ...]]:
    moments: list[tuple[Any, ...]] = []
    while len(moments) < steps:
        action = random_action(env, generator)
        moments.append((action, *env.step(action), env.state_key()))
        if moments[-1][3] or moments[-1][4]:
            break
    return moments


def play_expert(env: PuzzleEnv, seed: int) -> tuple[float, bool]:
    observation, _ = env.reset(seed=seed)
    expert, total = env.expert(), 0.0
    while True:
        observation, reward, terminated, truncated, info = env.step(expert.act(observation))
        total += reward
        if terminated or truncated:
            return total, info["success"]


def is_near(found: float, stated: float, episodes: int) -> bool:
    """Within four standard deviations, or what rounding the stated share leaves."""
    return abs(found - stated) <= 4 * math.sqrt(max(stated * (1 - stated), 0.01) / episodes)


@pytest.mark.parametrize("name", PUZZLES)
def test_gymnasium_accepts_it(name: str) -> None:
    env_id = f"agentrl/{name.title().replace('_', '')}-v{puzzle_spec_of(name).version}"
    assert env_id in agentrl.envs.registration.ENTRY_POINTS
    check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("name", PUZZLES)
def test_no_two_splits_share_an_instance(name: str) -> None:
    env, found = make(name), {}
    for split in SeedTasks.SPLITS:
        keys = set()
        for index in range(40):
            env.reset(seed=seed_of(split, index))
            keys.add(env.state_key())
        found[split] = keys
    assert not found["train"] & found["valid"]
    assert not found["train"] & found["test"]
    assert not found["valid"] & found["test"]
    assert len(found["train"]) > 10


@pytest.mark.parametrize("name", PUZZLES)
def test_the_expert_has_the_stated_score(name: str) -> None:
    spec, env = puzzle_spec_of(name), make(name)
    played = [play_expert(env, seed_of(SeedTasks.SPLITS[i % 3], i)) for i in range(EXPERT_EPISODES)]
    low, high = spec.reward_range
    assert all(low <= total <= high for total, _ in played)
    share = sum(won for _, won in played) / EXPERT_EPISODES
    assert share == 1.0 if spec.scores["expert"] == 1.0 else is_near(share, spec.scores["expert"], EXPERT_EPISODES)


@pytest.mark.parametrize("name", PUZZLES)
def test_random_play_has_the_stated_score(name: str) -> None:
    spec, env = puzzle_spec_of(name), make(name)
    low, high = spec.reward_range
    generator, won, episodes, actions = random.Random(name), 0, 0, 0
    while episodes < RANDOM_EPISODES and actions < LIMIT_OF_RANDOM_ACTIONS:
        env.reset(seed=seed_of("train", episodes))
        moments = play_randomly(env, generator)
        assert low <= sum(moment[2] for moment in moments) <= high
        won, episodes, actions = won + moments[-1][5]["success"], episodes + 1, actions + len(moments)
    assert is_near(won / episodes, spec.scores["random"], episodes)


@pytest.mark.parametrize("name", PUZZLES)
def test_listed_actions_are_legal_and_random_ones_are_mostly(name: str) -> None:
    env, generator = make(name), random.Random(1)
    env.reset(seed=1)
    for _ in range(3):
        saved = env.snapshot()
        for action in env.admissible_actions() or []:
            assert env.step(action)[4]["valid"], action
            env.restore(saved)
        if env.step(random_action(env, generator))[2]:
            break
    samples = {env.action_space.sample() for _ in range(20)}
    assert env.admissible_actions() is not None or len(samples) > 1


@pytest.mark.parametrize("name", PUZZLES)
@given(seed=st.integers(0, 2**40), steps=st.integers(0, 12))
@settings(max_examples=8, deadline=None)
def test_episode_continues_identically_from_a_snapshot(name: str, seed: int, steps: int) -> None:
    env, other = make(name), make(name)
    env.reset(seed=seed)
    moments = play_randomly(env, random.Random(seed), steps)
    if moments and (moments[-1][3] or moments[-1][4]):
        return
    saved = json.loads(json.dumps(env.snapshot()))
    here = play_randomly(env, random.Random(seed + 1), 15)
    for _ in range(2):  # restoring must not tie the environment to the snapshot's own lists
        other.restore(saved)
        assert play_randomly(other, random.Random(seed + 1), 15) == here


@pytest.mark.parametrize("name", PUZZLES)
@given(text=st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_no_text_makes_it_raise(name: str, text: str) -> None:
    env = make(name)
    env.reset(seed=3)
    key = env.state_key()
    for action in (text, f"{text} || {text}", f"{random_action(env, random.Random(text))} {text}"):
        observation, _, terminated, truncated, info = env.step(action)
        assert isinstance(observation, str)
        if not info["valid"] and key is not None:
            assert env.state_key() == key
            assert not info["success"]
        key = env.state_key() if info["valid"] else key
        if terminated or truncated:
            break


@pytest.mark.parametrize("name", PUZZLES)
def test_rubbish_is_answered_and_costs_a_step(name: str) -> None:
    env = make(name, max_steps=2)
    first, _ = env.reset(seed=5)
    observation, reward, terminated, truncated, info = env.step("please do the right thing")
    assert (terminated, truncated, info["valid"], info["success"]) == (False, False, False, False)
    assert reward == env.game.illegal_reward
    assert observation != first
    assert env.step("")[3]
    with pytest.raises(UsageError, match="is over"):
        env.step("")


@pytest.mark.parametrize("name", PUZZLES)
@pytest.mark.parametrize("text", ["", "please do the right thing"])
def test_stalling_until_the_limit_earns_at_most_the_reward_of_a_loss(name: str, text: str) -> None:
    env = make(name)
    for seed in range(5):
        env.reset(seed=seed)
        total, truncated = 0.0, False
        while not truncated:
            _, reward, _, truncated, _ = env.step(text)
            total += reward
        assert total == pytest.approx(env.max_steps * env.game.illegal_reward + env.game.loss_reward)


@pytest.mark.parametrize("name", PUZZLES)
def test_unknown_options_are_named(name: str) -> None:
    with pytest.raises(UsageError, match="has no option 'colour'"):
        make(name, colour=3)
    with pytest.raises(UsageError, match=r"a limit of .* is too small"):
        make(name, max_steps=0)
    with pytest.raises(UsageError, match="reset"):
        make(name).reset(seed=1, options={"size": 3})


@pytest.mark.parametrize("name", PUZZLES)
def test_the_spec_tells_the_model_how_to_play(name: str) -> None:
    spec, env = puzzle_spec_of(name), make(name)
    assert spec.name == name
    assert len(spec.instructions) > 100
    assert len(spec.description) > 40
    assert env.action_hint
    assert set(spec.scores) - {"blind"} == {"random", "expert"}


def test_seeds_belong_to_splits() -> None:
    found = [split_of_seed(seed) for seed in (0, 9_999_999, 10_000_000, 20_000_000, 30_000_000, -1)]
    assert found == ["train", "train", "valid", "test", "train", "train"]


@pytest.mark.slow
def test_the_shipped_manifest_is_what_the_code_makes() -> None:
    assert load_manifest("agentrl.envs.puzzles") == build_manifest()
