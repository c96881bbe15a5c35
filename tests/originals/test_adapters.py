"""Adapters to other libraries play what these libraries have, and keep the rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agentrl.env_lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.testing.env_check import check_env

pytestmark = [pytest.mark.originals, pytest.mark.timeout(600)]

PLAYED: list[tuple[str, Mapping[str, Any]]] = [
    ("minigrid", {}),
    ("minigrid", {"env_id": "MiniGrid-Dynamic-Obstacles-5x5-v0", "view": "grid"}),
    ("minigrid", {"env_id": "BabyAI-GoToLocal-v0"}),
    ("reasoning_gym", {}),
    ("reasoning_gym", {"dataset": "countdown", "min_numbers": 3, "max_numbers": 3}),
]


@pytest.mark.parametrize(("name", "options"), PLAYED, ids=lambda value: str(value))
def test_adapters_keep_the_rules(name: str, options: Mapping[str, Any]) -> None:
    report = check_env(name, options=options, episodes=4)
    assert report.passed, report
    assert resolve_environment(name).extra is not None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("minigrid", {"env_id": "MiniGrid-Emty-5x5-v0"}, "MiniGrid-Emty-5x5-v0 of minigrid cannot be made"),
        ("minigrid", {"env_id": "CartPole-v1"}, "no world of minigrid"),
        ("minigrid", {"colour": 1}, "cannot be made: got .*'colour'"),
        ("reasoning_gym", {"dataset": "leg_count"}, "Did you mean 'leg_counting'"),
        ("reasoning_gym", {"colour": 1}, "leg_counting of reasoning-gym cannot be made: got .*'colour'"),
        ("reasoning_gym", {"min_animals": 9, "max_animals": 2}, "leg_counting of reasoning-gym cannot be made"),
    ],
)
def test_wrong_options_say_what_is_wrong(name: str, options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_environment(name).make(**options)


def test_minigrid_is_solved_by_walking_to_the_goal() -> None:
    env: Any = resolve_environment("minigrid").make(env_id="MiniGrid-Empty-5x5-v0")
    first, _ = env.reset(seed=0)
    assert first == (
        "Your mission: get to the green goal square\nYou face east and carry nothing.\nYou see:\n"
        "- a green goal 2 steps ahead and 2 steps to your right\n"
        "- a wall 1 step to your left\n- a wall 3 steps straight ahead\n- a wall 3 steps to your right"
    )
    assert env.step("fly")[4]["valid"] is False
    walked = [env.step(action) for action in ("forward", "forward", "right", "forward", "forward")]
    assert [step[4]["success"] for step in walked] == [False] * 4 + [True]
    assert walked[-1][1:4] == (pytest.approx(1 - 0.9 * 5 / 100), True, False)


def test_minigrid_shows_what_is_carried_and_a_grid() -> None:
    env: Any = resolve_environment("minigrid").make(env_id="MiniGrid-DoorKey-6x6-v0", view="grid")
    first, _ = env.reset(seed=0)
    assert "- a yellow key 1 step to your left" in first
    assert first.splitlines()[-2] == "? # k ^ # ? ?"
    env.step("left")
    key = env.state_key()
    assert "carry a yellow key" in env.step("pickup")[0]
    assert env.state_key() != key


def test_reasoning_gym_scores_with_its_own_function() -> None:
    env: Any = resolve_environment("reasoning_gym").make(dataset="leg_counting")
    first, _ = env.reset(seed=5)
    assert "how many legs" in first
    answer = env.entry["answer"]
    assert env.step(f"I think it is <answer>{answer}</answer>")[1:4] == (1.0, True, False)
    env.reset(seed=5)
    *_, info = env.step("no idea")
    assert (info["success"], info["task_type"], info["valid"]) == (False, "leg_counting", True)
    with pytest.raises(UsageError, match="is over"):
        env.step(answer)


def test_reasoning_gyms_splits_share_no_question() -> None:
    spec = resolve_environment("reasoning_gym")
    env: Any = spec.make(dataset="leg_counting", min_animals=1, max_animals=1)
    asked = {}
    for split in spec.splits:
        tasks = spec.tasks(split)
        asked[split] = {env.reset(seed=tasks[i].seed)[0] for i in range(40)}
    assert all(len(questions) > 10 for questions in asked.values())
    assert not asked["train"] & asked["valid"]
    assert not asked["test"] & (asked["train"] | asked["valid"])
