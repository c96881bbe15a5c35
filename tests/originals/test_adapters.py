"""Adapters to other libraries play what these libraries have, and keep the rules."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.rollout.env_pool import EnvPool
from agentrl.testing.env_check import LAZY, check_env

pytestmark = [pytest.mark.originals, pytest.mark.timeout(1800)]
PAGE = Path(__file__).parent.parent.parent / "docs" / "environments" / "adapters.md"
EXAMPLE = re.compile(r"^```py\n(.*?)^```", re.MULTILINE | re.DOTALL)

EXAMPLES = "verifiers_examples"
PLAYED: list[tuple[str, Mapping[str, Any]]] = [
    ("minigrid", {}),
    ("minigrid", {"env_id": "MiniGrid-Dynamic-Obstacles-5x5-v0", "view": "grid"}),
    ("minigrid", {"env_id": "BabyAI-GoToLocal-v0"}),
    ("reasoning_gym", {}),
    ("reasoning_gym", {"dataset": "countdown", "min_numbers": 3, "max_numbers": 3}),
    ("textarena", {}),
    ("textarena", {"game": "TicTacToe-v0"}),
    ("gem", {}),
    ("gem", {"game": "game:Minesweeper-v0-easy"}),
    ("verifiers", {"environment": f"{EXAMPLES}:load_single_turn"}),
    ("verifiers", {"environment": f"{EXAMPLES}:load_multi_turn"}),
    ("verifiers", {"environment": f"{EXAMPLES}:load_tools"}),
]


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example environments of verifiers importable, in worker processes too."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.mark.parametrize(("name", "options"), PLAYED, ids=lambda value: str(value))
def test_adapters_keep_the_rules(name: str, options: Mapping[str, Any]) -> None:
    # what these worlds pay for doing nothing is the choice of their authors
    report = check_env(name, options=options, episodes=4, skip=[rule.name for rule in LAZY])
    assert report.passed, str(report)
    assert resolve_environment(name).extra is not None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("minigrid", {"env_id": "MiniGrid-Emty-5x5-v0"}, "MiniGrid-Emty-5x5-v0 of minigrid cannot be created"),
        ("minigrid", {"env_id": "CartPole-v1"}, "not a world of minigrid"),
        ("minigrid", {"colour": 1}, "cannot be created: got .*'colour'"),
        ("reasoning_gym", {"dataset": "leg_count"}, "Did you mean 'leg_counting'"),
        ("reasoning_gym", {"colour": 1}, "leg_counting of reasoning-gym cannot be created: got .*'colour'"),
        ("textarena", {"game": "TicTacTo-v0"}, "Did you mean 'TicTacToe-v0'"),
        ("textarena", {"game": "Mastermind-v0", "colour": 1}, "Mastermind-v0 of textarena cannot be created"),
        ("gem", {"game": "game:Sudoku-v0-esy"}, "Did you mean 'game:Sudoku-v0-easy'"),
        ("verifiers", {"environment": f"{EXAMPLES}:load_tools", "colour": {}, "tools": 1}, "cannot be created"),
        ("verifiers", {"environment": "no-such-environment"}, "no-such-environment of verifiers cannot be created"),
        ("reasoning_gym", {"min_animals": 9, "max_animals": 2}, "leg_counting of reasoning-gym cannot be created"),
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


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("countdown", "open({0!r}, 'w')"),
        ("countdown", "open({0!r}, 'w')!"),
        ("puzzle24", "(open)({0!r}, 'w')"),
        ("puzzle24", 'sin("open({0!r}, chr(119))")'),
        ("simple_integration", "f\"open{{40:c}}{0!r},'w'{{41:c}}\""),
        ("polynomial_multiplication", "x.open\f({0!r}, 'w')"),
        ("n_queens", "[open({0!r}, 'w')]"),
        ("spiral_matrix", "  [open(name, 'w') for name in [{0!r}]]"),
        ("string_insertion", "{{open({0!r}, 'w')}}"),
        ("binary_matrix", "(lambda: open({0!r}, 'w'))()"),
    ],
)
def test_reasoning_gym_runs_no_answer(dataset: str, answer: str, tmp_path: Path) -> None:
    env: Any = resolve_environment("reasoning_gym").make(dataset=dataset)
    env.reset(seed=1)
    written = tmp_path / "written"
    *_, info = env.step(answer.format(str(written)))
    assert (written.exists(), info["valid"], info["success"]) == (False, False, False)


@pytest.mark.parametrize(
    "dataset",
    ["countdown", "simple_integration", "polynomial_multiplication", "n_queens", "spiral_matrix", "string_insertion"],
)
def test_reasoning_gym_scores_formulas_and_lists(dataset: str) -> None:
    env: Any = resolve_environment("reasoning_gym").make(dataset=dataset)
    env.reset(seed=1)
    assert env.step(str(env.entry["answer"]))[1] == 1.0


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


def test_textarena_is_played_against_a_random_opponent() -> None:
    env: Any = resolve_environment("textarena").make(game="TicTacToe-v0")
    for seed in range(3):
        observation, info = env.reset(seed=seed)
        assert "You are Player 0" in observation
        over, steps = False, 0
        while not over:
            free = re.findall(r"\[\d\]", observation.rpartition("Available Moves")[2])
            observation, reward, over, truncated, info = env.step(free[0])
            assert (truncated, info["valid"]) == (False, True)
            steps += 1
        assert reward in (-1.0, 0.0, 1.0)
        assert info["success"] == (reward == 1)
        assert 3 <= steps <= 5


def test_all_players_of_textarena_can_act() -> None:
    env: Any = resolve_environment("textarena").make(game="TicTacToe-v0", opponent="self")
    observation, info = env.reset(seed=0)
    assert (info["players"], info["player"]) == (["0", "1"], "0")
    assert "You are Player 0" in observation
    seen = [env.step(action) for action in ("[0]", "[0]", "[1]", "[4]", "[2]", "[8]")]
    assert [step[4]["player"] for step in seen[:-1]] == ["1", "1", "0", "1", "0"]
    assert [step[4]["valid"] for step in seen] == [True, False, True, True, True, True]
    assert "You are Player 1" in seen[0][0]
    assert (seen[-1][1], seen[-1][2], seen[-1][4]["rewards"]) == (0.0, True, {"0": 1.0, "1": -1.0})
    assert seen[-1][4]["success"]
    with pytest.raises(UsageError, match="is for one player"):
        resolve_environment("textarena").make(game="Mastermind-v0", opponent="self")


def test_textarena_tells_a_move_that_is_not_allowed() -> None:
    env: Any = resolve_environment("textarena").make(game="Mastermind-v0")
    env.reset(seed=0)
    observation, reward, over, _, info = env.step("a word")
    assert "invalid move" in observation
    assert (reward, over, info["valid"]) == (0.0, False, False)
    assert env.step("[1 2 3 4]")[4]["valid"] is True
    env.step("[9 9 9 9]")
    assert env.step("[9 9 9 9]")[2] is True


def test_gem_has_its_own_rewards_and_endings() -> None:
    env: Any = resolve_environment("gem").make(game="game:GuessTheNumber-v0-easy", max_turns=2)
    first, _ = env.reset(seed=0)
    assert "between 1 and 10" in first
    assert env.step("no number")[1:] == (
        -0.1,
        True,
        False,
        {"success": False, "task_type": "game:GuessTheNumber-v0-easy", "valid": False},
    )
    endings = set()
    for guess in range(1, 11):
        env.reset(seed=0)
        endings.add(env.step(rf"\boxed{{{guess}}}")[1:4])
    assert endings == {(0.0, False, False), (1.0, True, False)}
    env.reset(seed=0)
    wrong = "2" if "lower" in env.step(r"\boxed{1}")[0] else "1"
    assert env.step(rf"\boxed{{{wrong}}}")[2:4] in {(False, True), (True, False)}


async def test_verifiers_scores_with_the_rubric() -> None:
    env: Any = resolve_environment("verifiers").make(environment=f"{EXAMPLES}:load_single_turn")
    first, _ = await env.reset(options={"split": "train", "row": 3})
    assert first == "Answer with a number.\n\nWhat is 3 plus 4?"
    _, reward, terminated, truncated, info = await env.step("7")
    assert (reward, terminated, truncated, info["success"]) == (1.5, True, False, True)
    assert info["reward_components"]["right"] == info["reward_components"]["short"] == 1.0
    with pytest.raises(UsageError, match="is over"):
        await env.step("7")


async def test_verifiers_plays_several_turns_at_once() -> None:
    make = resolve_environment("verifiers").make
    one: Any = make(environment=f"{EXAMPLES}:load_multi_turn")
    other: Any = make(environment=f"{EXAMPLES}:load_multi_turn")
    await asyncio.gather(*(env.reset(options={"split": "train", "row": row}) for row, env in enumerate((one, other))))
    told = await asyncio.gather(one.step("5"), other.step("5"))
    assert [step[0] for step in told] == ["Lower.", "Higher."]
    assert (await one.step("3"))[:4] == ("Right!", 1.0, True, False)
    for guess in ("6", "7"):
        assert (await other.step(guess))[0] == "Higher."
    assert (await other.step("9"))[1:4] == (0.0, False, True)
    await other.reset(seed=1)
    await other.close()


async def test_verifiers_calls_its_tools_from_text() -> None:
    spec = resolve_environment("verifiers")
    options = {"environment": f"{EXAMPLES}:load_tools"}
    assert [len(spec.tasks(split, **options)) for split in spec.splits] == [4, 2]
    env: Any = spec.make(**options)
    first, _ = await env.reset(options={"split": "test", "row": 1})
    assert first.startswith("What is 1 plus 2?")
    assert "- add: Add two numbers." in first
    assert (await env.step('{"name": "add", "arguments": {"a": 1, "b": 2}}'))[:2] == ("3", 0.0)
    *_, info = ended = await env.step("It is 3.")
    assert ended[1:4] == (1.0, True, False)
    assert info["reward_components"]["add_calls"] == 1


@pytest.mark.parametrize(
    ("name", "options", "action", "words"),
    [
        ("verifiers", {"environment": f"{EXAMPLES}:load_multi_turn"}, "9", "Lower."),
        ("textarena", {"game": "TicTacToe-v0"}, "[4]", "in cell 4"),
        ("gem", {}, r"\boxed{99}", "outside the range"),
    ],
)
async def test_adapters_play_in_worker_processes(name: str, options: dict[str, Any], action: str, words: str) -> None:
    spec = resolve_environment(name)
    tasks = spec.tasks("train", **options)
    pool = EnvPool(spec, options=options, workers=1, reset_timeout_s=300, step_timeout_s=300)
    try:
        async with pool.borrow("one") as one, pool.borrow("other") as other:
            await asyncio.gather(one.reset(tasks[0]), other.reset(tasks[0]))
            told = await asyncio.gather(one.step(action), other.step(action))
            assert words in str(told[0].result.observation)
            assert told[0].result.observation == told[1].result.observation
    finally:
        await pool.close()


def test_rows_without_evaluation_data_are_shared_out() -> None:
    spec = resolve_environment("verifiers")
    tasks = {split: spec.tasks(split, environment=f"{EXAMPLES}:load_single_turn") for split in spec.splits}
    assert {split: len(source) for split, source in tasks.items()} == {"train": 27, "test": 3}
    assert tasks["test"][2].options == {"split": "test", "row": 2}


@pytest.mark.parametrize("code", EXAMPLE.findall(PAGE.read_text()))
def test_examples_of_the_docs_run(code: str) -> None:
    names: dict[str, Any] = {"__name__": "docs_adapters"}
    exec(compile(code, str(PAGE), "exec"), names)
    made = names["env"] if "env" in names else names["load_environment"]()
    assert {"Env", "AsyncEnv", "Environment"} & {base.__name__ for base in type(made).__mro__}
