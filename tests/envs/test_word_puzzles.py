"""The rules of the puzzles with numbers, words and chance: Countdown, Points24, Mastermind, Wordle, cards, crafting."""

from __future__ import annotations

import statistics
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from agentrl.envs.puzzles.arithmetic import MAX_TOKENS, NotArithmetic, compute, reach
from agentrl.envs.puzzles.bandit import Bandit
from agentrl.envs.puzzles.blackjack import Blackjack, total
from agentrl.envs.puzzles.countdown import Countdown
from agentrl.envs.puzzles.crafting import Crafting
from agentrl.envs.puzzles.environment import PuzzleEnv
from agentrl.envs.puzzles.mastermind import Mastermind, compare
from agentrl.envs.puzzles.points24 import Points24
from agentrl.envs.puzzles.rules import Puzzle
from agentrl.envs.puzzles.wordle import WORDS, Wordle, mark
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import UsageError


def started(rules: type[Puzzle], state: dict[str, Any], **options: Any) -> PuzzleEnv:
    env = PuzzleEnv(rules, **options)
    env.reset(seed=0)
    env.game.load({**env.game.state(), **state})
    return env


def texts(depth: int) -> st.SearchStrategy[str]:
    number = st.integers(0, 20).map(str)
    if not depth:
        return number
    below = texts(depth - 1)
    joined = st.tuples(below, st.sampled_from(["+", "-", "*", "/"]), below).map(" ".join)
    return st.one_of(number, joined, joined.map("({})".format), below.map("-({})".format))


@given(text=texts(4))
@settings(deadline=None)
def test_arithmetic_agrees_with_python(text: str) -> None:
    exact = "".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(text))
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(NotArithmetic, match="divides by zero"):
            compute(text)
        return
    if len([part for part in _parts(text) if part.strip()]) <= MAX_TOKENS:
        value = compute(text).value
        assert Fraction(value.over, value.under) == expected
        assert str(value) == str(expected)


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    for character in text:
        if parts and parts[-1].isdigit() and character.isdigit():
            parts[-1] += character
        else:
            parts.append(character)
    return parts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "A number is missing"),
        ("3 +", "A number is missing"),
        ("(3 + 4", "A closing bracket is missing"),
        ("3 4", "cannot be read from '4' on"),
        ("3 + )", "'\\)' does not belong here"),
        ("3 ** 4", "'\\*' does not belong here"),
        ("three", "nothing else"),
        ("__import__('os')", "nothing else"),
        ("(" * 2000, "too long"),
    ],
)
def test_what_is_no_arithmetic_is_told(text: str, reason: str) -> None:
    with pytest.raises(NotArithmetic, match=reason):
        compute(text)


def test_other_spellings_of_operators_are_read() -> None:
    assert compute("6 ÷ 4 × 2 − 1").value.equals(2)


@given(numbers=st.lists(st.integers(1, 13), min_size=3, max_size=4), target=st.integers(1, 30))
@settings(deadline=None, max_examples=40)
def test_what_the_search_finds_is_right(numbers: list[int], target: int) -> None:
    found = reach(target, numbers)
    if found is not None:
        read = compute(found)
        assert read.value.equals(target)
        assert sorted(read.numbers) == sorted(numbers)


@pytest.mark.parametrize(("numbers", "can"), [([3, 3, 8, 8], True), ([1, 1, 1, 1], False), ([4, 4, 10, 10], True)])
def test_the_search_knows_the_hard_cases_of_24(numbers: list[int], can: bool) -> None:
    assert (reach(24, numbers) is not None) == can


def test_countdown_pays_for_the_form_once_and_for_the_target() -> None:
    env = started(Countdown, {"numbers": [1, 3, 5, 7], "target": 21, "has_tried": False})
    for action, note in (
        ("3 * 7", "Use each of the numbers 1, 3, 5, 7 once"),
        ("3 * 7 * 1 * 1", "Use each of the numbers 1, 3, 5, 7 once"),
    ):
        observation, reward, _, _, info = env.step(action)
        assert observation.startswith(note)
        assert (reward, info["valid"]) == (0.0, False)
    observation, reward, _, _, info = env.step("(7 + 5) / 1 / 3")
    assert observation == "That is 4, not 21.\nNumbers: 1, 3, 5, 7. Target: 21."
    assert (reward, info["valid"]) == (0.1, True)
    assert env.step("7 / 5 + 3 - 1")[:2] == ("That is 17/5, not 21.\nNumbers: 1, 3, 5, 7. Target: 21.", 0.0)
    assert env.step("7 + 3 * 5 - 1 = 21")[1:4] == (0.9, True, False)


def points24(cards: list[int], **options: Any) -> PuzzleEnv:
    return started(Points24, {"cards": cards, "formula": []}, **options)


def test_points24_is_written_in_parts_or_at_once() -> None:
    env = points24([1, 3, 8, 12])
    assert env.game.text() == "Cards: A, 3, 8, Q. Formula: empty."
    assert env.step("3 *")[0] == "Cards: A, 3, 8, Q. Formula: 3 *."
    assert env.admissible_actions() == ["1", "8", "10", "+", "-", "*", "/", "(", ")", "="]
    assert env.step("8 * 1 ")[1] == 0.0
    assert env.step("=")[1:3] == (-1.0, True)
    assert points24([1, 3, 8, 3]).step("3 * 8 * 1 / 3 * 3 = 24")[4]["valid"] is False
    assert points24([1, 1, 3, 8]).step("3 * 8 * 1 / 1 = 24")[1:3] == (10.0, True)


def test_points24_takes_ten_for_court_cards() -> None:
    assert points24([4, 10, 11, 12]).step("10 + 10 + 4 * 10 =")[1] == -1.0
    env = points24([2, 2, 10, 13])
    observation, reward, _, _, info = env.step("13 +")
    assert observation.startswith("No card is left for 13.")
    assert (reward, info["valid"]) == (-1.0, False)
    assert env.step("10 + 10 + 2 + 2 =")[1] == 10.0


def test_mastermind_counts_both_kinds() -> None:
    env = started(Mastermind, {"code": "1234", "guesses": []})
    assert env.step("1 4 3 5")[0] == "1 4 3 5: 2 in place, 1 in another place.\nGuesses so far: 1."
    for action, note in (
        ("1 4 3 5", "You have tried this code before."),
        ("1 1 2 3", "All digits of the code are different."),
        ("1 2 3", "Answer with 4 digits from 1 to 6."),
        ("1 2 3 7", "Answer with 4 digits from 1 to 6."),
    ):
        observation, _, _, _, info = env.step(action)
        assert observation.startswith(note)
        assert info["valid"] is False
    assert env.step("1234")[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("rules", "state", "guesses", "pays"),
    [
        (Mastermind, {"code": "1234"}, ["5 6 1 2", "1 4 3 5"], (2.5 - 1) / (4 - 1)),
        (Mastermind, {"code": "1234"}, ["1 4 3 5", "5 6 1 2"], 0.0),
        (Mastermind, {"code": "1234"}, ["1 4 3 5", "1 4 3 5"], 0.0),
        (Wordle, {"word": "label"}, ["vowel", "allow"], 0.0),
        (Wordle, {"word": "label"}, ["allow", "vowel"], (2.0 - 1.5) / (5 - 1.5)),
    ],
)
def test_limit_rewards_the_improvement_over_the_first_guess(
    rules: type[Puzzle], state: dict[str, Any], guesses: list[str], pays: float
) -> None:
    env = started(rules, {**state, "guesses": []}, max_steps=2)
    assert env.step(guesses[0])[1] == 0.0
    assert env.step(guesses[1])[1] == pytest.approx(pays)


@pytest.mark.parametrize(("rules", "guess"), [(Mastermind, "1 2 3 4"), (Wordle, "crane")])
def test_one_guess_and_no_other_pays_nothing(rules: type[Puzzle], guess: str) -> None:
    env = PuzzleEnv(rules)
    totals = []
    for seed in range(40):
        env.reset(seed=seed)
        rewards = [0.0]
        while not env._over:
            rewards.append(env.step(guess)[1])
        totals.append(sum(rewards))
    assert statistics.fmean(totals) < 0.06  # a code in forty is the one that was guessed


@given(guess=st.text("123", min_size=4, max_size=4), code=st.text("123", min_size=4, max_size=4))
@settings(deadline=None)
def test_pegs_agree_with_crossing_out(guess: str, code: str) -> None:
    left, pegs = list(code), [0, 0]
    rest = []
    for one, other in zip(guess, code, strict=True):
        if one == other:
            left.remove(one)
            pegs[0] += 1
        else:
            rest.append(one)
    for digit in rest:
        if digit in left:
            left.remove(digit)
            pegs[1] += 1
    assert compare(guess, code) == tuple(pegs)


@pytest.mark.parametrize("options", [{"repeats": True}, {"length": 5, "digits": 8}, {"length": 2, "digits": 2}])
def test_the_mastermind_expert_plays_other_codes(options: dict[str, Any]) -> None:
    env = PuzzleEnv(Mastermind, **options)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        expert, terminated = env.expert(), False
        while not terminated:
            observation, reward, terminated, truncated, _ = env.step(expert.act(observation))
            assert not truncated
        assert reward == 1.0


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [
        ("speed", "abide", "XXYXY"),
        ("speed", "erase", "YXYYX"),
        ("speed", "steal", "GXGXX"),
        ("geese", "those", "XXXGG"),
    ],
)
def test_letters_that_occur_twice_are_marked_as_often_as_they_occur(guess: str, word: str, marks: str) -> None:
    assert mark(guess, word) == marks


def test_wordle_answers_guesses() -> None:
    env = started(Wordle, {"word": "abide", "guesses": []})
    assert env.step("Speed")[0] == "S P E E D\nX X Y X Y\nGuesses so far: 1."
    for action, note in (
        ("speed", "You have guessed this word before."),
        ("speedy", "Answer with one word of five letters."),
        ("spéed", "Answer with one word of five letters."),
    ):
        assert env.step(action)[0].startswith(note)
    assert env.step("abide")[1:3] == (1.0, True)


def test_the_words_are_sorted_and_of_five_letters() -> None:
    assert list(WORDS) == sorted(set(WORDS))
    assert len(WORDS) > 900
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in WORDS)


def test_blackjack_counts_and_pays() -> None:
    assert [total(cards) for cards in ([1, 1], [1, 1, 10], [10, 9, 3])] == [12, 12, 22]
    env = started(Blackjack, {"player": [1, 9], "dealer": [10, 9]})
    assert env.game.text() == "Your cards: A, 9: 20 (an ace counts as 11). The dealer shows 10."
    observation, reward, terminated, _, info = env.step("stand")
    assert observation.startswith("The dealer has 10, 9: 19. You win.")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert started(Blackjack, {"player": [10, 8], "dealer": [10, 9]}).step("stand")[1] == -1.0
    assert started(Blackjack, {"player": [10, 9], "dealer": [10, 9]}).step("stand")[1] == 0.0
    observation, reward, terminated, *_ = started(Blackjack, {"player": [10, 10, 1], "dealer": [10, 9]}).step("hit")
    assert observation.startswith("You have more than 21.")
    assert (reward, terminated) == (-1.0, True)


def test_the_dealer_draws_to_seventeen() -> None:
    for dice in range(50):
        env = started(Blackjack, {"player": [10, 2], "dealer": [2, 2], "dice": dice})
        env.step("stand")
        dealer = env.game.state()["dealer"]
        assert total(dealer) >= 17
        assert total(dealer[:-1]) < 17


def test_a_bandit_pays_as_often_as_it_should_and_counts() -> None:
    state = {"names": ["dragon", "phoenix", "hydra"], "chances": [0, 100, 40], "dice": 5}
    env = started(Bandit, state, arms=3, pulls=3)
    assert env.step("Dragon")[0] == (
        "The dragon does not pay.\nPaid so far: dragon 0 of 1, phoenix 0 of 0, hydra 0 of 0. Pulls left: 2."
    )
    assert env.step("unicorn")[4]["valid"] is False
    assert env.step("phoenix")[1] == pytest.approx(1 / 3)
    _, reward, terminated, _, info = env.step("phoenix")
    assert (reward, terminated, info["success"]) == (pytest.approx(1 / 3), True, True)
    env = started(Bandit, state, arms=3, pulls=40, max_steps=41)
    for _ in range(40):
        *_, info = env.step("hydra")
    assert 8 <= env.game.state()["paid"][2] <= 24
    assert info["success"] is False


def crafting() -> PuzzleEnv:
    recipes = {"box": {"oak": 2, "nail": 1}, "nail": {"tin": 1}, "rope": {"hemp": 3}}
    return started(Crafting, {"recipes": recipes, "goal": "box", "held": {}})


def test_crafting_requires_the_recipes_ingredients() -> None:
    env = crafting()
    assert env.game.introduction().splitlines() == [
        "Recipes:",
        "craft 1 box using 2 oak, 1 nail",
        "craft 1 nail using 1 tin",
        "craft 1 rope using 3 hemp",
        "Goal: craft 1 box.",
        "You have: nothing.",
    ]
    for action, note in (
        ("craft 1 box using 2 oak, 1 nail", "You need 2 oak and 1 nail for that."),
        ("craft 1 box using 1 oak, 1 nail", "The recipe is: craft 1 box using 2 oak, 1 nail"),
        ("craft lamp", "There is no recipe for lamp."),
        ("get 1 nail", "The nail cannot be got, only crafted."),
        ("get 1 gold", "There is no gold."),
        ("get 10 oak", "You can get 1 to 9 at a time."),
        ("inventory", "Answer with get or craft"),
    ):
        observation, reward, _, _, info = env.step(action)
        assert observation == f"{note}\nYou have: nothing." or observation.startswith(note)
        assert (reward, info["valid"]) == (0.0, False)


def test_crafting_consumes_its_ingredients() -> None:
    env = crafting()
    env.step("get 2 tin || craft nail || get 3 oak")
    assert env.game.text() == "You have: 1 tin, 1 nail, 3 oak."
    assert env.admissible_actions() == [
        "get 1 hemp",
        "get 1 oak",
        "get 1 tin",
        "craft 1 box using 2 oak, 1 nail",
        "craft 1 nail using 1 tin",
    ]
    assert env.step("Craft 1 box using 1 nail, 2 oak")[1:3] == (1.0, True)


@pytest.mark.parametrize("options", [{"depth": 1, "distractors": 0}, {"depth": 4, "distractors": 20, "max_steps": 200}])
def test_the_crafting_expert_goes_as_deep_as_needed(options: dict[str, Any]) -> None:
    env = PuzzleEnv(Crafting, **options)
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        expert, terminated = env.expert(), False
        while not terminated:
            observation, reward, terminated, truncated, _ = env.step(expert.act(observation))
            assert not truncated
        assert reward == 1.0


def test_experts_report_unreadable_texts() -> None:
    for rules in (Countdown, Points24, Blackjack, Crafting):
        with pytest.raises(UsageError):
            PuzzleEnv(rules).expert().act("Good morning.")
    with pytest.raises(UsageError, match="read text only"):
        PuzzleEnv(Wordle).expert().act(())


@pytest.mark.parametrize("reward", ["regret", "ucb"])
def test_a_bandit_may_pay_for_the_choice_instead_of_the_luck(reward: str) -> None:
    game = Bandit(arms=3, pulls=6, reward=reward)
    game.start(Random(4))
    best, found, expected = max(game.chances), [], []
    for arm in (0, 1, 2, 0, 1, 2):
        advised = game.expert().act(game.text())
        expected.append(
            1 - (best - game.chances[arm]) / 100 if reward == "regret" else float(game.names[arm] == advised)
        )
        found.append(6 * game.play(game.names[arm]).reward)
    assert found == pytest.approx(expected)
    assert len(set(expected)) > 1
    with pytest.raises(UsageError, match="unknown reward of bandit"):
        Bandit(reward="luck")
