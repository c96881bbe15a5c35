"""Rows of data sets for verl, as prompts, math problems and search questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from agentrl.envs.math_problems.dataset import read_problems
from agentrl.envs.prompts import tasks as prompt_tasks
from agentrl.envs.search_qa.options import SearchOptions, parse_options
from agentrl.envs.search_qa.questions import questions_of
from agentrl.envs.search_qa.scoring import exact_match, f1
from pyarrow import parquet

from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.testing.task_validation import TaskStatus, validate_tasks

GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "6 * 7? Let's think step by step and output the final answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 0, "question": "6 * 7?", "answer": "It is 42.\n#### 42"},
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve: what is 17 + 17?"}],
    "ability": "MATH",
    "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "34"},
    "extra_info": {"index": "9a9b6eb4"},
}
SEARCH_R1 = {
    "id": "train_0",
    "question": "who got the first prize?",
    "golden_answers": ["Wilhelm", "Conrad"],
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer the given question. Question: who got the first prize?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Wilhelm", "Conrad"]}},
    "extra_info": {"index": 0, "split": "train"},
}
SEARCH_VERL = {
    "data_source": "searchR1_hotpotqa",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "which of the two?"}],
    "reward_model": json.dumps({"style": "rule", "ground_truth": {"target": ["the first"]}}),
    "extra_info": {"index": 1, "question": "which of the two?"},
}


def written(path: Path, *rows: dict[str, Any]) -> str:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


@pytest.mark.slow
def test_math_problems_take_the_question_without_instructions(tmp_path: Path) -> None:
    path = written(tmp_path / "train.parquet", GSM8K)
    assert [tuple(one) for one in read_problems(path)] == [("6 * 7?", "42", "openai/gsm8k")]
    path = written(tmp_path / "dapo.parquet", DAPO)
    assert [tuple(one) for one in read_problems(path)] == [("Solve: what is 17 + 17?", "34", "math_dapo")]
    with pytest.raises(UsageError, match="or a row for verl, with a prompt and a ground_truth"):
        read_problems(written(tmp_path / "bad.parquet", {**GSM8K, "reward_model": {"style": "rule"}}))


def test_search_questions_take_all_targets(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "Prize", "text": "The first prize."}\n')

    def options(name: str, row: dict[str, Any]) -> SearchOptions:
        files = {"test": written(tmp_path / f"{name}.parquet", row)}
        return parse_options(questions=files, corpus=str(tmp_path / "corpus.jsonl"))

    for row, golden in ((SEARCH_R1, ("Wilhelm", "Conrad")), (SEARCH_VERL, ("the first",))):
        (question,) = questions_of("test", options(row["data_source"], row))
        assert (question.golden, question.type) == (golden, row["data_source"])
        assert question.text == row.get("question", "which of the two?")
    bad = options("bad", {**DAPO, "reward_model": None})
    with pytest.raises(UsageError, match=r"row 1 is not a question: got the columns data_source, prompt"):
        questions_of("test", bad)


def test_prompts_have_the_source_as_their_type(tmp_path: Path) -> None:
    (task,) = prompt_tasks("train", files={"train": written(tmp_path / "a.parquet", GSM8K)})
    assert (task.type, task.ground_truth) == ("openai/gsm8k", "42")


@pytest.mark.parametrize("name", ["math_problems", "search_qa"])
def test_tasks_of_files_are_valid_by_their_own_answers(name: str, tmp_path: Path) -> None:
    rows = {"math_problems": GSM8K, "search_qa": SEARCH_R1}
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "Prize", "text": "The first prize."}\n')
    files = {"test": written(tmp_path / "test.parquet", rows[name])}
    options = {"math_problems": {"files": files}, "search_qa": {"questions": files, "corpus": str(corpus)}}[name]
    spec = resolve_environment(name)
    given = {**spec.options, **options}
    (found,) = validate_tasks(spec, given, list(spec.tasks("test", **given)))
    assert (found.status, found.problems) == (TaskStatus.VALID, ())


@pytest.mark.parametrize(
    ("truth", "answer"), [('["18"]', "18"), (["18"], "18"), ({"target": ["18"]}, "18"), (1e20, "1" + 20 * "0")]
)
def test_an_answer_may_be_a_list_of_one(truth: Any, answer: str, tmp_path: Path) -> None:  # Skywork-OR1's rows
    path = written(tmp_path / "train.parquet", {**GSM8K, "reward_model": {"ground_truth": truth}})
    assert read_problems(path)[0].answer == answer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward_model": {"ground_truth": ["1", "2"]}}, "2 different answers"),
        ({"reward_model": {"ground_truth": {"value": "1"}}}, "not a text or a number"),
        ({"question": GSM8K["prompt"]}, "question: .*, not text"),
        ({"extra_info": None, "prompt": [{"role": "user", "content": "x = 2"}] * 2}, "is a conversation"),
    ],
)
def test_what_would_be_lost_of_a_problem_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_problems(written(tmp_path / "bad.parquet", {**GSM8K, **change}))


@pytest.mark.parametrize(
    ("golden", "found"),
    [
        ('["a", "b"]', ("a", "b")),
        ([1995.0, None], None),
        ([1995.0], ("1995",)),
        ("['a' 'b']", None),
        ([["a"]], None),
        ([""], None),
        ([], None),
    ],
)
def test_golden_answers_are_texts(golden: Any, found: tuple[str, ...] | None, tmp_path: Path) -> None:
    row = {"question": "who?", "golden_answers": golden}
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "Prize", "text": "The first prize."}\n')
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    options = parse_options(questions={"test": str(tmp_path / "test.jsonl")}, corpus=str(tmp_path / "corpus.jsonl"))
    if found is None:
        with pytest.raises(UsageError, match="line 1 is not a question"):
            questions_of("test", options)
    else:
        assert questions_of("test", options)[0].golden == found


def test_an_answer_without_words_is_wrong() -> None:
    assert [exact_match(answer, ["A"]) for answer in ("A", "a", "", "the", ".")] == [1, 1, 0, 0, 0]
    assert (f1("", ["The"]), f1("the", ["The"])) == (0, 1)
