"""The household world as a Gymnasium environment: contract, determinism, snapshots, random play."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import agentrl.envs.registration
import gymnasium
import pytest
from agentrl.envs.household.environment import HouseholdEnv
from agentrl.envs.household.scenes import Size
from agentrl.envs.household.spec import SPEC
from agentrl.envs.household.tasks import rows_of
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import UsageError


def play_randomly(env: HouseholdEnv, steps: int, seed: int) -> list[tuple[Any, ...]]:
    generator = random.Random(seed)
    moments: list[tuple[Any, ...]] = []
    for _ in range(steps):
        action = generator.choice(env.admissible_actions())
        observation, reward, terminated, truncated, info = env.step(action)
        moments.append((action, observation, reward, terminated, truncated, info["valid"], env.state_key()))
        if terminated or truncated:
            break
    return moments


def test_gymnasium_accepts_it() -> None:
    check_env(gymnasium.make("agentrl/Household-v0", size="small").unwrapped, skip_render_check=True)


def test_every_shipped_environment_has_an_id_in_gymnasium() -> None:
    services = {"agentgym", "inspect", "openenv", "openreward", "verifiers", "verifiers_v1"}
    asynchronous = services | {"code", "proposed_programs", "python_math", "repo_fix", "terminal"}
    from_table = {name.replace("_", "") for name in agentrl.envs.PLUGINS["environment"] if name not in asynchronous}
    ids = agentrl.envs.registration.ENTRY_POINTS
    assert {env_id.removeprefix("agentrl/").rpartition("-v")[0].lower() for env_id in ids} == from_table
    assert set(ids) <= set(gymnasium.registry)


@given(seed=st.integers(0, 2**31), size=st.sampled_from(Size), walk=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_random_walk_is_valid_and_other_commands_do_nothing(seed: int, size: Size, walk: int) -> None:
    env = HouseholdEnv(size=size)
    env.reset(seed=seed)
    generator = random.Random(walk)
    mentioned = sorted(env.world.house.objects + env.world.house.receptacles)
    for _ in range(12):
        admissible = env.admissible_actions()
        assert admissible == sorted(set(admissible))
        key, before = env.state_key(), env.snapshot()
        command = _any_command(generator, mentioned)
        if command not in admissible:
            observation, reward, terminated, _, info = env.step(command)
            assert (observation, reward, terminated, info["valid"]) == ("Nothing happens.", 0.0, False, False)
            assert env.state_key() == key
            env.restore(before)
        observation, _, terminated, truncated, info = env.step(generator.choice(admissible))
        assert info["valid"]
        assert observation != "Nothing happens."
        if terminated or truncated:
            break


def _any_command(generator: random.Random, mentioned: list[str]) -> str:
    one, other = generator.choice(mentioned), generator.choice(mentioned)
    return generator.choice(
        [
            f"go to {one}",
            f"take {one} from {other}",
            f"move {one} to {other}",
            f"put {one} in/on {other}",
            f"open {one}",
            f"close {one}",
            f"heat {one} with {other}",
            f"slice {one} with {other}",
            f"use {one}",
            f"examine {one}",
            f"{one}",
        ]
    )


@given(seed=st.integers(0, 2**31), steps=st.integers(0, 30), size=st.sampled_from(Size))
@settings(max_examples=40, deadline=None)
def test_episode_continues_identically_from_a_snapshot(seed: int, steps: int, size: Size) -> None:
    env, other = HouseholdEnv(size=size), HouseholdEnv(size=size)
    env.reset(seed=seed)
    play_randomly(env, steps, seed)
    if env.world.solved:
        return
    saved = json.loads(json.dumps(env.snapshot()))
    here = play_randomly(env, 20, seed + 1)
    for _ in range(2):  # restoring must not tie the environment to the snapshot's own lists
        other.restore(saved)
        assert play_randomly(other, 20, seed + 1) == here


def test_key_distinguishes_states_that_look_equal() -> None:
    env = HouseholdEnv(size="full")
    keys: dict[str, str] = {}
    env.reset(options={"task_id": "valid_unseen-0"})
    observation, _, _, _, _ = env.step("look")
    keys[env.state_key()] = observation
    env.step("inventory")
    assert env.state_key() in keys
    place = next(action for action in env.admissible_actions() if action.startswith("go to countertop"))
    env.step(place)
    assert env.state_key() not in keys


SCRIPT = """
import hashlib, random
from agentrl.envs.household.environment import HouseholdEnv
digest = hashlib.sha256()
for size in ("tiny", "full"):
    env = HouseholdEnv(size=size)
    for seed in range(20):
        digest.update(env.reset(seed=seed)[0].encode())
        for step in range(30):
            action = random.Random(step).choice(env.admissible_actions())
            observation, _, terminated, truncated, _ = env.step(action)
            digest.update(f"{observation}{env.state_key()}".encode())
            if terminated or truncated:
                break
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_every_process_sees_the_same_texts() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_seed_and_a_task_id_decide_the_episode() -> None:
    env, other = HouseholdEnv(size="small"), HouseholdEnv(size="small")
    assert env.reset(seed=5) == other.reset(seed=5)
    assert env.reset()[0] == other.reset()[0]
    row = rows_of("valid_seen")[3]
    by_id = env.reset(options={"task_id": row.task_id})
    assert by_id == other.reset(seed=row.seed, options={"scene": row.scene, "task_type": row.task_type.value})
    assert by_id == env.reset(seed=row.seed, options={"task_id": row.task_id})
    assert by_id[0] != env.reset(seed=row.seed + 1, options={"task_id": row.task_id})[0]
    assert by_id[1]["task_type"] == row.task_type


def test_a_seed_alone_draws_from_the_allowed_training_tasks() -> None:
    env = HouseholdEnv(size="tiny", task_types=["pick_heat_then_place_in_recep"])
    held_out = {row.scene for row in rows_of("valid_unseen")}
    for seed in range(50):
        _, info = env.reset(seed=seed)
        assert info["task_type"] == "pick_heat_then_place_in_recep"
        assert env.world.house.scene not in held_out


def test_an_episode_is_truncated_at_its_limit_and_ends_there() -> None:
    env = HouseholdEnv(size="tiny", max_steps=3)
    env.reset(seed=1)
    ends = [env.step("look")[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    with pytest.raises(UsageError, match="episode is over"):
        env.step("look")


@pytest.mark.parametrize(
    "options",
    [
        {"task": "valid_seen-1"},
        {"task_id": "valid_seen-1", "scene": 3},
        {"scene": 3},
        {"task_type": "look_at_obj_in_light"},
    ],
)
def test_wrong_reset_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot reset with these options"):
        HouseholdEnv().reset(options=options)


def test_nothing_works_before_a_reset() -> None:
    with pytest.raises(UsageError, match="no episode yet"):
        HouseholdEnv().step("look")


def test_random_play_has_the_stated_score() -> None:
    env, solved, episodes = HouseholdEnv(), 0, 0
    for row in rows_of("valid_unseen") * 2:
        env.reset(options={"task_id": row.task_id})
        solved += play_randomly_to_the_end(env, episodes)
        episodes += 1
    assert abs(solved / episodes - SPEC.scores["random"]) <= 0.01


def play_randomly_to_the_end(env: HouseholdEnv, seed: int) -> bool:
    generator = random.Random(seed)
    while True:
        _, _, terminated, truncated, info = env.step(generator.choice(env.admissible_actions()))
        if terminated or truncated:
            return bool(info["success"])
