"""The environment around a puzzle: several actions in a turn, limits, snapshots."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from agentrl.envs.puzzles.environment import PuzzleEnv
from agentrl.envs.puzzles.rules import ChancePuzzle, Illegal, Played, Puzzle

from agentrl.errors import UsageError


class Stairs(Puzzle):
    """Go up to the top; stumbling is not allowed."""

    name, fields, action_hint = "stairs", ("step", "top"), "up"
    max_steps, actions_per_turn, illegal_reward = 6, 3, -0.5
    step: int
    top: int

    def start(self, rng: Random) -> None:
        self.step, self.top = 0, rng.randint(4, 1000)

    def play(self, action: str) -> Played:
        if action != "up":
            raise Illegal("Stairs go up.")
        self.step += 1
        won = self.step == self.top
        return Played(reward=0.1, note=f"Step {self.step}.", over=won, won=won)

    def text(self) -> str:
        return f"{self.top - self.step} to go"

    def progress(self) -> float:
        return self.step / 10

    def expert(self) -> Any:
        raise NotImplementedError


class OneStair(Stairs):
    def start(self, rng: Random) -> None:
        self.step, self.top = 0, 4


EMPTY_SPLITS_OF_ONE_STAIR = (10_000_000, 20_000_000)


def stairs(top: int = 4, **options: Any) -> PuzzleEnv:
    env = PuzzleEnv(Stairs, **options)
    env.reset(seed=0)
    env.game.load({"step": 0, "top": top})
    return env


def test_a_turn_may_hold_several_actions() -> None:
    observation, reward, terminated, truncated, info = stairs().step(" Up || UP||up ")
    assert observation == "Step 1.\nStep 2.\nStep 3.\n1 to go"
    assert (reward, terminated, truncated) == (pytest.approx(0.3), False, False)
    assert info == {"success": False, "task_type": "stairs", "valid": True}


def test_the_game_may_end_within_a_turn() -> None:
    env = stairs(top=2)
    observation, reward, terminated, truncated, info = env.step("up || up || up")
    assert observation == "Step 1.\nStep 2.\nActions taken: 2 of 3.\n0 to go"
    assert (reward, terminated, truncated, info["success"]) == (pytest.approx(0.2), True, False, True)


def test_actions_beyond_the_number_of_a_turn_are_not_taken() -> None:
    assert stairs().step("up || up || up || up")[0].endswith("Actions taken: 3 of 4.\n1 to go")
    assert stairs(actions_per_turn=1).step("up || up")[0] == "Stairs go up.\n4 to go"  # no action


def test_what_follows_an_illegal_action_is_not_taken() -> None:
    observation, reward, _, _, info = stairs().step("up || down || up")
    assert observation == "Step 1.\nStairs go up.\nActions taken: 2 of 3.\n3 to go"
    assert (reward, info["valid"]) == (pytest.approx(-0.4), False)


def test_limit_counts_actions_and_pays_the_pending_reward() -> None:
    env = stairs(top=9)
    env.step("up || up || up")
    assert env.step("up || up")[3] is False
    _, reward, terminated, truncated, _ = env.step("up || up || up")
    assert (reward, terminated, truncated) == (pytest.approx(0.1 + 0.6), False, True)
    with pytest.raises(UsageError, match="the episode of stairs is over"):
        env.step("up")


def test_a_win_with_the_last_action_is_no_truncation() -> None:
    env = stairs(top=6)
    env.step("up || up || up")
    assert env.step("up || up || up")[1:4] == (pytest.approx(0.3), True, False)


def test_a_snapshot_keeps_the_count_and_the_end() -> None:
    env, other = stairs(top=2, max_steps=3), stairs(max_steps=3)
    env.step("up")
    saved = env.snapshot()
    assert saved == {"game": {"step": 1, "top": 2}, "steps": 1, "over": False, "progress_at_start": 0.0}
    env.step("up")
    other.restore(env.snapshot())
    with pytest.raises(UsageError, match="is over"):
        other.step("up")
    other.restore(saved)
    assert other.step("sideways || up")[3] is False
    assert other.step("sideways")[3] is True


def test_steps_do_not_show_in_the_key() -> None:
    env = stairs()
    key = env.state_key()
    env.step("down")
    assert env.state_key() == key
    env.step("up")
    assert env.state_key() != key


def test_a_puzzle_must_be_reset_first_and_needs_instances_for_each_split() -> None:
    env = PuzzleEnv(OneStair)
    with pytest.raises(UsageError, match="is over"):
        env.step("up")
    for seed in EMPTY_SPLITS_OF_ONE_STAIR:
        with pytest.raises(UsageError, match="too few instances"):
            env.reset(seed=seed)


def test_actions_are_shown_with_their_separator() -> None:
    assert stairs().action_hint == "up; or up to 3 actions with || between them"
    assert stairs(actions_per_turn=1).action_hint == "up"


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match=r"is too small.*actions_per_turn 0"):
        stairs(actions_per_turn=0)


class Dice(ChancePuzzle):
    name, fields, action_hint, max_steps = "dice", ("dice",), "roll", 9

    def start(self, rng: Random) -> None:
        self.dice = rng.getrandbits(48)

    def play(self, action: str) -> Played:
        return Played()

    def text(self) -> str:
        return ""

    def expert(self) -> Any:
        raise NotImplementedError


def test_dice_are_fair_and_are_the_sequence_of_drand48() -> None:
    dice = Dice()
    dice.dice = 0x1234ABCD330E  # srand48(0x1234ABCD); the first numbers of mrand48 divided by 2**32 are drand48's
    assert [dice.roll(2**32) for _ in range(3)] == _drand48(0x1234ABCD330E)
    dice.dice = 7
    counts = [0] * 6
    for _ in range(12_000):
        counts[dice.roll(6)] += 1
    assert all(abs(count - 2000) < 200 for count in counts)


def _drand48(state: int) -> list[int]:
    numbers = []
    for _ in range(3):
        state = (25214903917 * state + 11) % 2**48
        numbers.append(state // 2**16)
    return numbers
