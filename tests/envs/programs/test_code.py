"""The code environment: problems, attempts, grading."""

from __future__ import annotations

import hashlib
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.code import pipelines, tiny
from agentrl.envs.code.environment import CodeEnv
from agentrl.envs.code.options import parse_options
from agentrl.envs.code.problem import read_code
from agentrl.envs.code.spec import tasks
from agentrl.envs.code.tasks import problem_of
from agentrl.envs.task_ids import SPLITS

from agentrl.errors import SandboxError, UsageError

DIGESTS = {
    "tiny": {"train": "53e77561fd92e605", "valid": "aca6875e126385b8", "test": "7ec34e214c392eaa"},
    "small": {"train": "dfd20ef00994deb8", "valid": "e3d396b4a5ef5ada", "test": "8256945cdf3f1827"},
}
"""Of all task ids, statements and hidden tests of a split: a change of the generator is a change of the benchmark."""
MBPP = {
    "task_id": 1,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 5) == 4"],
    "test_setup_code": "",
    "challenge_test_list": ["assert add(10**20, 1) == 10**20 + 1"],
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """The sum of numbers."""\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(numbers)\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n"
    "    assert candidate([]) == 0\n",
}


def env(**options: Any) -> CodeEnv:
    return CodeEnv(sandbox="plain", **options)


@pytest.mark.parametrize("size", DIGESTS)
@pytest.mark.slow
def test_splits_are_unchanged_and_disjoint(size: str) -> None:
    options, digests, solutions = parse_options(size=size), {}, []
    for split in SPLITS:
        problems = [problem_of(task.id, options) for task in tasks(split, size=size, sandbox="plain")]
        text = "\n".join(repr((p.id, p.statement, p.hidden)) for p in problems)
        digests[split] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        solutions += [problem.solution for problem in problems]
    assert digests == DIGESTS[size]
    assert len(solutions) == len(set(solutions))


def test_grammar_has_the_stated_size() -> None:
    known = tiny.lines()
    assert len({line.code for line in known}) == len(known) == 6180


STEPS = {
    "plus": operator.add,
    "add": operator.add,
    "minus": operator.sub,
    "subtract": operator.sub,
    "times": operator.mul,
    "multiply by": operator.mul,
    "larger": max,
    "smaller": min,
}


def follow_words(words: str, values: dict[str, int]) -> int:
    """Compute the value of a description step by step, from its words only."""
    result = 0
    for number, step in enumerate(words.split(", then ")):
        names = re.findall(r"\b(?:[abc](?= |$)|\d+)", step)
        operands = [values[name] if name in values else int(name) for name in names]
        word = next(word for word in STEPS if re.search(rf"\b{word}\b", step))
        result = STEPS[word](*([result] if number else []), *operands)
    return result


def test_the_solution_of_a_tiny_function_does_what_its_words_say() -> None:
    values = {"a": 7, "b": -3, "c": 11}
    for line in tiny.lines():
        assert eval(line.code, dict(values)) == follow_words(line.words, values), line


def test_no_tiny_function_is_a_parameter_or_a_constant() -> None:
    for number in range(0, len(tiny.lines()), 7):
        problem = tiny.problem_of(tiny.lines()[number], "train-0")
        values = [case.value for case in problem.hidden]
        assert len(set(values)) > 1
        assert all(values != [case.arguments[place] for case in problem.hidden] for place in range(3))


def test_examples_are_not_among_the_hidden_tests() -> None:
    options = parse_options()
    for index in range(0, 240, 5):
        problem = problem_of(f"valid-{index}", options)
        shown = {repr(case.arguments) for case in problem.examples}
        assert shown.isdisjoint(repr(case.arguments) for case in problem.hidden)
        assert len(problem.examples) == pipelines.EXAMPLES


@pytest.mark.parametrize("size", DIGESTS)
@pytest.mark.parametrize("index", [0, 1, 2, 3, 100])
async def test_the_expert_solves(size: str, index: int) -> None:
    world = env(size=size)
    task = tasks("valid", size=size)[index]
    await world.reset(seed=task.seed, options=dict(task.options))
    observation, reward, terminated, truncated, info = await world.step(world.expert().act(""))
    await world.close()
    assert (observation, reward, terminated, truncated) == ("Your code is right.", 1.0, True, False)
    assert info["success"]
    assert info["task_type"] == task.type


async def test_an_attempt_that_fails_the_examples_may_be_mended() -> None:
    world = env()
    await world.reset(options={"task_id": "train-0"})
    observation, reward, terminated, _, info = await world.step("```python\ndef solve(items):\n    return None\n```")
    assert "0 of 3 examples pass" in observation
    assert "returned None, expected" in observation
    assert (reward, terminated, info["valid"]) == (0.0, False, True)
    *_, terminated, _, info = await world.step(world.expert().act(observation))
    await world.close()
    assert terminated
    assert info["success"]


async def test_answers_copied_from_the_examples_pass_no_hidden_test() -> None:
    world = env()
    await world.reset(options={"task_id": "train-0"})
    known = {repr(case.arguments[0]): case.value for case in world.problem.examples}
    code = f"def solve(items):\n    return {known!r}.get(repr(items), 'unknown')"
    observation, reward, terminated, _, info = await world.step(f"```python\n{code}\n```")
    await world.close()
    assert observation == "Your code is not right."
    assert (reward, terminated, info["reward_components"]) == (0.0, True, {"hidden_tests": 0.0})


async def test_the_last_attempt_is_graded() -> None:
    world = env(max_steps=2, reward="share")
    await world.reset(options={"task_id": "train-0"})
    await world.step("no code here")
    *_, reward, terminated, truncated, _ = await world.step("def solve(items):\n    return []")
    await world.close()
    assert (terminated, truncated) == (True, False)
    assert 0 <= reward < 1


async def test_answers_without_code_end_an_episode() -> None:
    world = env(max_steps=1)
    await world.reset(options={"task_id": "train-0"})
    observation, reward, terminated, truncated, info = await world.step("I do not know.")
    assert observation.startswith("Your answer has no code block, so nothing was run.")
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, True, False)
    with pytest.raises(UsageError, match="the code episode is over"):
        await world.step("again")


async def test_tools_try_and_do_not_hand_in() -> None:
    world = env()
    await world.reset(options={"task_id": "train-3"})
    assert await world.run_tests(world.problem.solution) == "All examples pass."
    assert "0 of 3" in await world.run_tests("def solve(items):\n    return None")
    assert await world.run_python("print(6 * 7)") == "42"
    assert await world.run_python("raise SystemExit(3)") == "[exit code 3]"
    assert "ZeroDivisionError" in await world.run_python("1 / 0")
    *_, info = await world.step(world.expert().act(""))
    await world.close()
    assert info["success"]


async def test_a_lost_sandbox_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    from plain_sandbox import PlainSandbox

    async def fail(self: PlainSandbox) -> None:
        raise SandboxError("no room")

    monkeypatch.setattr(PlainSandbox, "_start", fail)
    world = env()
    await world.reset(options={"task_id": "train-0"})
    with pytest.raises(SandboxError, match="no room"):
        await world.step(world.expert().act(""))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, row in (("train", MBPP), ("test", HUMAN_EVAL)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n\n", encoding="utf-8")
    return {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}


@pytest.mark.parametrize("split", ["train", "test"])
async def test_problems_of_files_are_solved_by_their_solutions(files: dict[str, str], split: str) -> None:
    world = env(files=files)
    (task,) = list(tasks(split, files=files))
    statement, _ = await world.reset(seed=task.seed, options=dict(task.options))
    assert "10**20" not in str(statement)
    assert "candidate" not in str(statement)
    observation, reward, *_ = await world.step(world.expert().act(""))
    await world.close()
    assert (observation, reward) == ("Your code is right.", 1.0)


async def test_a_file_shows_some_of_its_tests(files: dict[str, str]) -> None:
    world = env(files=files, shown=2)
    statement, _ = await world.reset(options={"task_id": "train-0"})
    assert str(statement).endswith("assert add(1, 2) == 3\nassert add(0, 0) == 0")
    observation, *_ = await world.step("def add(a, b): return a * b")
    assert observation.startswith("1 of 2 examples pass")
    *_, info = await world.step("return a + b")  # the body alone
    await world.close()
    assert info["success"]


async def test_a_function_may_be_continued(files: dict[str, str]) -> None:
    world = env(files=files)
    await world.reset(options={"task_id": "test-0"})
    *_, info = await world.step("```python\n    return sum(numbers)\n```")
    await world.close()
    assert info["success"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is empty"),
        ("nonsense", "line 1 is not valid JSON"),
        ("[]", "is empty"),
        ('{"text": "x", "code": "def f(): pass", "test_list": []}', "line 1 is not a problem"),
        (
            '{"text": "x", "code": "def f(): pass", "test_list": ["assert g()", "assert g()"]}',
            "line 1 is not a problem",
        ),
        ('{"prompt": "def f():", "entry_point": "g", "test": ""}', "line 1 is not a problem"),
    ],
)
def test_broken_files_are_rejected(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        tasks("train", files={"train": str(path)})


@pytest.mark.parametrize(
    "options",
    [
        {"size": "huge"},
        {"level": 4},
        {"reward": "some"},
        {"shown": -1},
        {"max_steps": 0},
        {"seconds": 0},
        {"sandbox": {"typ": "local"}},
        {"size": "tiny", "level": 3},
        {"files": {"train": "/nowhere.jsonl"}},
        {"files": {"valid": "/nowhere.jsonl"}},
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        tasks("train", **options)


@pytest.mark.parametrize("task_id", ["train", "train-x", "other-1", "train-99999", "valid-240"])
def test_unknown_tasks_are_rejected(task_id: str) -> None:
    with pytest.raises(UsageError, match="no such code task"):
        problem_of(task_id, parse_options())


def test_code_is_read_from_answers() -> None:
    assert read_code("First:\n```py\na\n```\nNo:\n```\nb\n```") == "b\n"
    assert read_code("def f(): return 1") == "def f(): return 1"
    assert read_code("I return it") is None
    assert read_code("```python\n\n```") is None
