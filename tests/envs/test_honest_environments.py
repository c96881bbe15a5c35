"""Environments measure reading: no start of validation or test occurs in training, and blind play solves little."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from agentrl.envs.frozen_lake import MOVES, FrozenLake
from agentrl.envs.puzzles.hanoi import Hanoi
from agentrl.envs.puzzles.tic_tac_toe import CAREFUL, TicTacToe
from agentrl.envs.terminal.tasks import errand_of

from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.testing import CheckDepth, check_env
from agentrl.testing.env_rules import blind

SHOWN = {
    "bandit": 200,
    "blackjack": 400,
    "frozen_lake": 100,
    "game_2048": 200,
    "hanoi": 200,
    "maze": 60,
    "tic_tac_toe": 200,
}
"""Environments whose first observation shows the start, and how many tasks of each split are looked at."""


def starts(name: str, split: str, count: int) -> set[str]:
    spec = resolve_environment(name)
    env: Any = spec.make(**spec.options)
    tasks = spec.tasks(split)
    return {str(env.reset(seed=tasks[n].seed, options=dict(tasks[n].options))[0]) for n in range(count)}


@pytest.mark.parametrize(("name", "count"), SHOWN.items())
def test_no_start_of_validation_or_test_occurs_in_training(name: str, count: int) -> None:
    train = starts(name, "train", 2 * count)
    valid, test = starts(name, "valid", count), starts(name, "test", count)
    assert not train & valid
    assert not train & test
    assert not valid & test
    assert min(len(train), len(valid), len(test)) >= 20


def success(name: str, choose: Callable[[Any, int], str], episodes: int = 200, split: str = "valid") -> float:
    """Share of solved tasks of a split of a policy that sees the environment and the number of the turn."""
    spec = resolve_environment(name)
    env: Any = spec.make(**spec.options)
    solved = 0
    for number in range(episodes):
        env.reset(seed=spec.tasks(split)[number].seed)
        done, turn, info = False, 0, {}
        while not done:
            *_, terminated, truncated, info = env.step(choose(env, turn))
            done, turn = terminated or truncated, turn + 1
        solved += info["success"]
    return solved / episodes


def stated(name: str) -> float:
    return resolve_environment(name).scores["blind"]


@pytest.mark.slow
def test_one_sequence_solves_few_lakes() -> None:
    """No sequence of six moves solves 13 % of the lakes; from corner to corner, one solves over a third."""

    def best(env: FrozenLake, count: int = 120) -> float:
        env.reset(seed=0)
        maps = [(env.reset(seed=seed), env.rows)[1] for seed in range(count)]
        ways = itertools.product(MOVES, repeat=6)
        return max(sum(_arrives(rows, way) for rows in maps) for way in ways) / count

    assert best(FrozenLake(), 60) < 0.13
    assert best(FrozenLake(size=4, layout="corners"), 60) > 0.35


def _arrives(rows: Sequence[str], way: Sequence[str]) -> bool:
    last = len(rows) - 1
    row, column = next((r, line.index("S")) for r, line in enumerate(rows) if "S" in line)
    for name in way:
        down, right = MOVES[name]
        row, column = min(max(row + down, 0), last), min(max(column + right, 0), last)
        if rows[row][column] in "GH":
            return rows[row][column] == "G"
    return False


def fixed_order(fields: str) -> Callable[[Any, int], str]:
    """Return the policy that takes the first free field of an order."""
    return lambda env, _turn: next(field for field in fields if field in env.admissible_actions())


@pytest.mark.parametrize(
    ("split", "fields", "share"),
    [("train", "714539628", 0.28), ("valid", "875391264", 0.12), ("test", "391756284", 0.19)],
)
def test_best_fixed_order_of_fields_reaches_the_stated_score(split: str, fields: str, share: float) -> None:
    assert abs(success("tic_tac_toe", fixed_order(fields), 1000, split) - share) < 0.04
    assert share <= stated("tic_tac_toe")


@pytest.mark.parametrize("fields", ["795381642", "978513246"])
def test_other_good_orders_of_fields_win_no_more_than_is_stated(fields: str) -> None:
    assert success("tic_tac_toe", fixed_order(fields), 1000, "train") < stated("tic_tac_toe") + 0.02


def test_constant_arm_reaches_the_stated_score() -> None:
    assert abs(success("bandit", lambda env, _turn: env.game.names[0]) - stated("bandit")) < 0.08


def test_always_standing_reaches_the_stated_score() -> None:
    assert abs(success("blackjack", lambda _env, _turn: "stand", 600) - stated("blackjack")) < 0.08


@pytest.mark.slow
def test_cycle_of_moves_reaches_the_stated_score() -> None:
    cycle = ("left", "down", "left", "up")
    assert abs(success("game_2048", lambda _env, turn: cycle[turn % 4]) - stated("game_2048")) < 0.08


def solution(name: str, number: int) -> list[str]:
    """Return the actions of the expert in a training task."""
    spec = resolve_environment(name)
    env: Any = spec.make(**spec.options)
    observation, _ = env.reset(seed=spec.tasks("train")[number].seed)
    expert, actions, done = env.expert(), list[str](), False
    while not done:
        actions.append(expert.act(observation))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        done = terminated or truncated
    return actions


@pytest.mark.slow
def test_repeated_solutions_reach_the_stated_blind_score() -> None:
    longest = sorted((solution("hanoi", number) for number in range(60)), key=len)[-3:]
    shares = [success("hanoi", lambda _env, turn, way=way: way[turn % len(way)]) for way in longest]
    assert abs(max(shares) - stated("hanoi")) < 0.06


def test_commands_that_solve_training_errands_solve_no_others() -> None:
    tasks = {split: resolve_environment("terminal").tasks(split) for split in ("train", "valid", "test")}
    errands = {split: [errand_of(task.id) for task in found] for split, found in tasks.items()}
    known = {" ".join(errand.commands) for errand in errands["train"]}
    assert not any(" ".join(errand.commands) in known for split in ("valid", "test") for errand in errands[split])
    seen = [{errand.instruction for errand in found} for found in errands.values()]
    assert not any(one & other for one, other in itertools.combinations(seen, 2))
    assert min(len(found) for found in seen) > 70


def test_the_careful_opponent_completes_its_row_and_blocks_yours() -> None:
    game = TicTacToe(opponent=CAREFUL)
    game.start(random.Random(3))
    game.load({"board": "OO.XX....", "to_move": "X", "mine": "X", "strikes": 0, "dice": 1})
    assert "O took field 3. O wins." in game.play("9").note
    game.load({"board": "X...O....", "to_move": "X", "mine": "X", "strikes": 0, "dice": 1})
    assert "O took field 2." in game.play("3").note


def test_hanoi_has_hundreds_of_starts() -> None:
    game, found = Hanoi(), set()
    for seed in range(3000):
        game.start(random.Random(seed))
        found.add(str(game.identity()))
    assert len(found) > 600


def test_the_first_hit_with_the_named_options_earns_most_of_webshops_reward() -> None:
    spec = resolve_environment("webshop")
    env: Any = spec.make()
    returns, tasks = [], spec.tasks("valid")
    for number in range(60):
        observation, _ = env.reset(seed=tasks[number].seed, options=dict(tasks[number].options))
        wish = re.search(r"Instruction: \[SEP\] (.*?) \[SEP\]", observation)
        assert wish is not None
        observation = env.step(f"search[{wish[1].partition(', and price')[0]}]")[0]
        env.step(f"click[{re.findall(r'B0[0-9A-Z]{8}', observation)[0]}]")
        buttons = {"click[buy now]", "click[back to search]", "click[< prev]"}
        for action in env.admissible_actions():
            if action.startswith("click[") and action not in buttons and action[6:-1] in wish[1]:
                env.step(action)
        returns.append(env.step("click[Buy Now]")[1])
    assert "0.63" in spec.description
    assert abs(sum(returns) / len(returns) - 0.63) < 0.08


def test_check_prints_the_score_of_blind_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blind, "until", lambda seconds, candidates: candidates)  # a busy machine tries fewer
    (row,) = check_env("guess_number", thoroughness=CheckDepth.QUICK, only=["blind play solves little"]).rows
    for kind in ("nothing", "submit", "one action (", "fixed sequence ("):
        assert kind in row.detail
    assert row.figures["nothing"] == 0.0


def test_an_id_of_another_version_is_rejected() -> None:
    assert resolve_environment("agentrl/FrozenLake-v1").version == 1
    with pytest.raises(UsageError, match=r"agentrl/FrozenLake-v1"):
        resolve_environment("agentrl/FrozenLake-v0")
