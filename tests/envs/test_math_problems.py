"""Problems of mathematics: answers, the calculator, generated kinds, files."""

from __future__ import annotations

import importlib.util
import json
import sys
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest
from agentrl.envs.math_problems.answers import number_of, same_answer, stated_answer
from agentrl.envs.math_problems.dataset import read_problems
from agentrl.envs.math_problems.judges import Judge, is_small, judge_named
from agentrl.envs.math_problems.kinds import KINDS, Kind
from agentrl.envs.math_problems.problems import FORMS, SPEC, MathEnv, MathExpert
from agentrl.envs.math_problems.verifier import Verifier
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.env import Isolation
from agentrl.errors import EnvironmentFailure, UsageError

PROBLEM = {"question": "What is 6 * 7?", "answer": "42", "kind": "product"}
HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None


def posed(**changes: str) -> MathEnv:
    env = MathEnv()
    env.reset(seed=1, options={**PROBLEM, **changes})
    return env


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", Fraction(42)),
        ("-3.50", Fraction(-7, 2)),
        ("1,234,567", Fraction(1234567)),
        ("$12.", Fraction(12)),
        ("15%", Fraction(15)),
        ("15\\%", Fraction(15)),
        ("6/-4", Fraction(-3, 2)),
        ("\\frac{6}{4}", Fraction(3, 2)),
        ("-\\dfrac{1}{3}", Fraction(-1, 3)),
        ("\\frac12", Fraction(1, 2)),
        ("-\\dfrac 3{14}", Fraction(-3, 14)),
        ("11 5/6", Fraction(71, 6)),
        ("4 10/3", Fraction(22, 3)),
        ("2\\frac{1}{2}", Fraction(5, 2)),
        ("−7", Fraction(-7)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("-2\\frac{1}{2}", Fraction(-5, 2)),
        ("-0\\frac{1}{2}", Fraction(-1, 2)),
        ("4 2", None),
        ("1/0", None),
        ("12 apples", None),
        ("x + 1", None),
        ("", None),
        ("9" * 100, None),
    ],
)
def test_numbers_are_read_exactly(text: str, number: Fraction | None) -> None:
    assert number_of(text) == number


@given(over=st.integers(-999, 999), under=st.integers(1, 999))
@settings(deadline=None)
def test_fractions_are_the_same_in_all_forms(over: int, under: int) -> None:
    forms = [f"{over}/{under}", f"{2 * over}/{2 * under}", str(Fraction(over, under))]
    forms.append(f"{'-' if over < 0 else ''}\\frac{{{abs(over)}}}{{{under}}}")
    assert all(same_answer(said, right) for said in forms for right in forms)
    assert not any(same_answer(f"{over + 1}/{under}", right) for right in forms)


@pytest.mark.parametrize(
    ("said", "right", "is_right"),
    [
        ("0.5", "1/2", True),
        ("0.333", "1/3", False),
        ("(1, 2)", "\\left(1,2\\right)", True),
        ("\\text{Monday}", "monday", True),
        ("x+1", "x + 1", True),
        ("1 + x", "x + 1", False),
    ],
)
def test_answers_are_compared(said: str, right: str, is_right: bool) -> None:
    assert same_answer(said, right) == is_right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("answer 7/5", "7/5"),
        ("Answer: 12", "12"),
        ("**Answer: 42**", "42"),
        ("**Final answer:** 42 apples, because 6 * 7 is 42.", "42 apples"),
        ("The answer is 1.5. There are 3 left.", "1.5"),
        ('{"answer": 42}', "42}"),
        ("<answer> 42 </answer>", "42"),
        ("answer 41\nanswer 42", "42"),
        ("So it is 42.", "42"),
        ("42 apples", "42 apples"),
        ("I do not know the answer.", None),
        ("I do not know the answer. 5 steps are left.", None),
        ("What is the answer? I think of 42", None),
        ("3 apples. Then he buys 4 more.", None),
        ("Let me think about 42", None),
        ("", None),
        ("First 3, so the answer is 4", "4"),
        ("He has 72.\n#### 72", "72"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("42", "42"),
        ("\\boxed{}", None),
        ("\\boxed{4", None),
    ],
)
def test_the_answer_is_found_in_a_text(text: str, answer: str | None) -> None:
    assert stated_answer(text) == answer


@pytest.mark.parametrize("text", ["(" * 30_000, "<answer>" * 10_000 + "."])
def test_what_never_ends_is_read_in_linear_time(text: str) -> None:
    """A regular expression that begins anew at each character would take hours: the timeout of the tests tells."""
    assert stated_answer(f"<answer>{text}<answer>42</answer>") == "42"


def test_calculations_go_on_and_an_answer_ends() -> None:
    env = posed()
    observation, reward, terminated, _, info = env.step("calculate 6 * 7 / 4")
    assert observation == "6 * 7 / 4 = 21/2\nProblem: What is 6 * 7?"
    assert (reward, terminated, info["valid"]) == (0.0, False, True)
    for action, note in (
        ("calculate six", "Write one expression of numbers"),
        ("calculate 1 / 0", "This divides by zero."),
        ("let me think about 42", f"This does not state an answer. {FORMS}"),
        ("I do not know the answer", f"This does not state an answer. {FORMS}"),
        ("answer 41 or 42", f"You gave several answers. {FORMS}"),
        ("answer a few", f"This answer is not a number. {FORMS}"),
    ):
        observation, _, terminated, _, info = env.step(action)
        assert observation.startswith(note)
        assert (terminated, info["valid"]) == (False, False)
    observation, reward, terminated, _, info = env.step("answer 42.0")
    assert observation.startswith("Right.")
    assert (reward, terminated, info["success"], info["task_type"]) == (1.0, True, True, "product")


FORMS_OF_AN_ANSWER = [
    "N",
    "N.",
    "$N",
    "N apples",
    "**N**",
    "\\(N\\)",
    "\\[ N \\]",
    "So it is \\boxed{N}.",
    "\\boxed{N \\text{ apples}}",
    "\\boxed{\\$N.00}",
    "#### N",
    "**Answer: N**",
    "**Answer:** N",
    "Answer: \\(N\\)",
    "The answer is N, because 6 * 7 is N, not 43.",
    "The answer is N!",
    "First 6, then 7. The final answer is x = N.",
    "<answer>N</answer>",
]


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        *[(text.replace("N", "42"), 1.0) for text in FORMS_OF_AN_ANSWER],
        *[(text.replace("N", "41"), 0.0) for text in FORMS_OF_AN_ANSWER],
        ("-42", 0.0),
        ("84/2", 1.0),
        ("answer 84/2 = 42", 1.0),
        ("answer: 41. No. Answer: 42", 1.0),
        ("answer: 42. No. Answer: 41", 0.0),
    ],
)
def test_an_answer_may_be_written_in_several_ways(action: str, reward: float) -> None:
    assert posed().step(action)[1:3] == (reward, True)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Answer: 1,234", "1234"),
        ("Answer: $1,234,567.50", "2469135/2"),
        ("-1 1/2", "-3/2"),
        ("answer -1\\frac{1}{2}", "-1.5"),
        ("answer −3/4 of it", "-0.75"),
    ],
)
def test_numbers_of_all_kinds_are_graded(text: str, right: str) -> None:
    assert posed(answer=right).step(text)[1:3] == (1.0, True)
    assert posed(answer="7").step(text)[1:3] == (0.0, True)


@pytest.mark.parametrize(
    "text",
    [
        " ".join(map(str, range(100))),
        f"answer {', '.join(map(str, range(100)))}",
        "answer 41 or 42",
        "answer 42 (or 41)",
        "\\boxed{41, 42}",
        "answer 42/41 and 42",
        "answer 40 + 2",
        "answer 6*7",
        "answer 10-5",
        "answer \\sqrt{42}",
        "answer 42^1",
        "answer 42x",
    ],
)
def test_several_answers_and_formulas_are_no_answer(text: str) -> None:
    env = posed()
    observation, reward, terminated, _, info = env.step(text)
    assert observation.startswith(("You gave several answers. ", "This "))
    assert (reward, terminated, info["valid"]) == (0.0, False, False)
    assert env.step("answer 42")[1:3] == (1.0, True)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_reads_its_own_problems(kind: Kind) -> None:
    for seed in range(20):
        drawn = kind.draw(Random(seed))
        text = kind.text.format(**drawn)
        assert kind.read(text) == drawn
        assert [other.name for other in KINDS if other.read(text)] == [kind.name]
        answer = number_of(str(kind.answer(drawn)))
        assert answer is not None
        assert answer >= 0
        assert kind.level == 3 or answer.denominator == 1


def test_answers_of_kinds_by_hand() -> None:
    by_name = {kind.name: kind for kind in KINDS}
    assert str(by_name["shopping"].answer({"a": 2, "b": 50, "c": 1, "d": 300, "e": 1000})) == "600"
    assert str(by_name["weeks"].answer({"a": 10, "b": 5, "c": 1, "d": 2})) == "104"
    assert str(by_name["working together"].answer({"a": 3, "b": 6})) == "2"
    assert str(by_name["fractions"].answer({"a": 1, "b": 2, "c": 1, "d": 3})) == "5/6"


@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels_choose_kinds(level: int) -> None:
    env = MathEnv(level=level)
    found = {env.reset(seed=seed)[1]["task_type"] for seed in range(60)}
    assert found == {kind.name for kind in KINDS if kind.level == level}


def test_the_expert_calculates_first() -> None:
    env = MathEnv()
    observation, _ = env.reset(seed=3)
    expert = env.expert()
    first = expert.act(observation)
    assert first.startswith("calculate ")
    observation, *_ = env.step(first)
    assert env.step(expert.act(observation))[1] == 1.0
    with pytest.raises(UsageError, match="generated problems only"):
        MathExpert().act("Problem: Why?")


LINES: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "6 * 7?", "answer": "It is 6 * 7 = <<6*7=42>>42.\n#### 42"},
        {"question": "b", "answer": "-1"},
    ],
    "math": [{"problem": "half?", "solution": "Thus $\\boxed{\\frac{1}{2}}$.", "type": "Algebra", "level": "Level 1"}],
    "math500": [
        {"problem": "p", "solution": "long", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "Geo"}
    ],
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, rows in LINES.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return {name: str(tmp_path / f"{name}.jsonl") for name in LINES}


def test_files_of_three_forms_are_read(files: dict[str, str]) -> None:
    assert read_problems(files["gsm8k"]) == [("6 * 7?", "42", "gsm8k"), ("b", "-1", "gsm8k")]
    assert read_problems(files["math"]) == [("half?", "\\frac{1}{2}", "Algebra")]
    assert read_problems(files["math500"]) == [("p", "\\left( 3, \\frac{\\pi}{2} \\right)", "Geo")]


def test_tasks_of_files_are_played(files: dict[str, str]) -> None:
    options = {"files": {"train": files["gsm8k"], "test": files["math"]}}
    source = SPEC.tasks("test", **options)
    assert (len(source), source[0].id, source[0].ground_truth) == (1, "test-0", "\\frac{1}{2}")
    env = SPEC.make(**options)
    assert isinstance(env, MathEnv)
    observation, info = env.reset(seed=source[0].seed, options=dict(source[0].options))
    assert (observation, info["task_type"]) == ("Problem: half?", "Algebra")
    assert env.step("answer 0.5")[1] == 1.0
    assert SPEC.tasks("train", **options)[1].options["answer"] == "-1"
    with pytest.raises(UsageError, match="split valid has no file with problems of math_problems"):
        SPEC.tasks("valid", **options)
    with pytest.raises(UsageError, match="train and test share the problems"):
        SPEC.tasks("test", files={"train": files["gsm8k"], "test": files["gsm8k"]})
    with pytest.raises(UsageError, match="all splits would share"):
        SPEC.tasks("test", files=files["gsm8k"])


def test_bars_in_an_answer_are_no_separators() -> None:
    assert posed(answer="|x||y|").step("answer |x||y|")[1:3] == (1.0, True)


def test_there_is_one_way_to_calculate_and_one_to_answer() -> None:
    env = posed()
    assert not hasattr(env, "tools")
    assert not SPEC.tool_instructions
    for shown in ("calculate (3 + 4) / 5", "answer 7/5"):
        assert f"for example: {shown}\n" in SPEC.instructions
        assert env.step(shown)[4]["valid"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[1]", "row 1 is not an object"),
        ('{"question": "why?"}', "line 1 is not a problem"),
        ('{"problem": "p", "solution": "no box"}', "line 1 is not a problem"),
        ("", "is empty"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(line)
    with pytest.raises(UsageError, match=message):
        read_problems(str(file))
    with pytest.raises(UsageError, match="cannot read file of problems"):
        read_problems(str(tmp_path / "missing.jsonl"))


def test_options_that_are_wrong() -> None:
    with pytest.raises(UsageError, match="level of math_problems"):
        MathEnv(level=4)
    with pytest.raises(UsageError, match="unknown judge"):
        MathEnv(judge="oracle")
    with pytest.raises(UsageError, match="cannot reset"):
        MathEnv().reset(seed=1, options={"question": "why?"})


@pytest.mark.skipif(HAS_MATH_VERIFY, reason="the package is installed")
def test_missing_judge_package_error_has_the_install_command() -> None:
    with pytest.raises(UsageError, match=r"agentrl\[math\]"):
        judge_named(Judge.MATH_VERIFY)


FAKE_JUDGE = """
import json, signal, sys
print("ready", flush=True)
for line in sys.stdin:
    right, said = json.loads(line)
    if said == "hang":
        signal.setitimer(signal.ITIMER_PROF, 0.01)
        while True: pass
    if said == "die":
        sys.exit(3)
    print(json.dumps(right == said), flush=True)
"""


def test_a_formula_that_takes_too_long_is_wrong_and_the_next_one_is_judged() -> None:
    verifier = Verifier([sys.executable, "-c", FAKE_JUDGE])
    try:
        assert [verifier.is_same("x", said) for said in ("x", "y", "hang", "x")] == [True, False, False, True]
        with pytest.raises(EnvironmentFailure, match="exit code 3"):
            verifier.is_same("x", "die")
        assert verifier.is_same("x", "x")
    finally:
        verifier.close()


def test_a_judge_that_does_not_start_is_a_failure_of_the_environment() -> None:
    with pytest.raises(EnvironmentFailure, match="does not start"):
        Verifier([sys.executable, "-c", "import sys; sys.exit(7)"]).is_same("x", "x")


@pytest.mark.parametrize(
    ("formula", "is_worked_out"),
    [
        ("x^{2} + 2^{10}", True),
        ("e^{x^{2}}", True),
        ("2^{-3}", True),
        ("9^{9^{9^{9}}}", False),
        ("9^9^9", False),
        ("9**9**9", False),
        ("10^{100000000}", False),
        ("2^{10!}", False),
        ("1 + " * 200 + "1", False),
    ],
)
def test_huge_formulas_are_not_worked_out(formula: str, is_worked_out: bool) -> None:
    assert is_small(formula) == is_worked_out


def test_only_the_exact_judge_runs_in_the_event_loop() -> None:
    assert SPEC.isolation_under({}) is Isolation.INLINE
    assert SPEC.isolation_under({"level": 2, "judge": "exact"}) is Isolation.INLINE
    assert SPEC.isolation_under({"judge": "math_verify"}) is Isolation.PROCESS


@pytest.mark.skipif(not HAS_MATH_VERIFY, reason="needs the optional package math-verify")
def test_math_verify_knows_formulas_and_gives_up_on_some() -> None:
    judge = judge_named(Judge.MATH_VERIFY)
    assert judge("answer 1 + x", "x + 1")
    assert not judge("answer 2 + x", "x + 1")
    assert not judge("\\boxed{9^{9^{9^{9}}}}", "3")
    assert not judge("\\boxed{(100000000)!}", "3")
    assert judge("\\boxed{(3, 1 + x)}", "(3, x + 1)")
