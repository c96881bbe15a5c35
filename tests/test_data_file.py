"""Data files as others write them: separators inside text, encodings, arrays, nulls, and faults named by line."""

from __future__ import annotations

import gzip
import json
import math
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from agentrl.envs.code.dataset import read_problems as read_code
from agentrl.envs.math_problems.dataset import read_problems as read_mathematics
from agentrl.envs.search_qa.options import parse_options
from agentrl.envs.search_qa.questions import questions_of
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from agentrl.errors import UsageError
from agentrl.message.data_file import Row, UniqueIds, read_rows, texts_of
from agentrl.observe.files import JsonLinesWriter, read_json_lines

SEPARATED = "one\u2028two\u2029three\u0085four\u000bfive"
TWO = [{"text": SEPARATED, "n": 0}, {"text": "é", "n": None}]


def lines(rows: list[Any], end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def written(folder: Path, data: bytes | str, name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


@pytest.mark.parametrize(
    "data",
    [
        lines(TWO).encode(),
        lines(TWO).encode("utf-8-sig"),
        lines(TWO, end="\r\n").encode(),
        lines(TWO).rstrip().encode(),
        (lines(TWO) + "\n \r\n\t\n").encode(),
        lines(TWO).encode("utf-16"),
        lines(TWO).encode("utf-32"),
        gzip.compress(lines(TWO).encode("utf-8-sig")),
        json.dumps(TWO).encode(),
        ("\n" + json.dumps(TWO, indent=2, ensure_ascii=False) + "\n").encode("utf-8-sig"),
    ],
    ids=["plain", "mark", "crlf", "no-end", "empty-lines", "utf-16", "utf-32", "gzip", "array", "printed-array"],
)
def test_the_same_rows_are_read_from_every_form(tmp_path: Path, data: bytes) -> None:
    assert [row.values for row in read_rows(written(tmp_path, data))] == TWO


@pytest.mark.parametrize("name", ["rows.parquet", "rows.data"])
def test_parquet_is_known_by_its_content(tmp_path: Path, name: str) -> None:
    parquet.write_table(pa.Table.from_pylist(TWO), tmp_path / name)
    assert [(row.location[-5:], row.values) for row in read_rows(tmp_path / name)] == list(
        zip(["row 1", "row 2"], TWO, strict=True)
    )


def test_whole_numbers_of_a_column_with_gaps_stay_whole(tmp_path: Path) -> None:
    """pandas has no gaps in columns of whole numbers, and writes such a column as floats."""
    columns = {
        "answer": [18.0, math.nan, 3.0],
        "null": [1.0, None, 2.0],
        "score": [0.5, math.nan, 1.0],
        "price": [1.0, 2.0, 3.0],
        "large": [1e300, math.nan, 1.0],
        "endless": [math.inf, math.nan, 1.0],
    }
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    rows = [row.values for row in read_rows(tmp_path / "rows.parquet")]
    assert [repr(row["answer"]) for row in rows] == ["18", "None", "3"]
    assert [repr(row["null"]) for row in rows] == ["1", "None", "2"]
    assert [repr(row["score"]) for row in rows] == ["0.5", "None", "1.0"]
    assert [repr(row["price"]) for row in rows] == ["1.0", "2.0", "3.0"]
    assert [repr(row["large"]) for row in rows] == ["1e+300", "None", "1.0"]
    assert [repr(row["endless"]) for row in rows] == ["inf", "None", "1.0"]


def test_numbers_in_json_are_read_as_they_are_written(tmp_path: Path) -> None:
    file = written(tmp_path, '{"a": 18.0, "b": 18}\n{"a": null, "b": null}\n')
    assert [repr(row.values["a"]) for row in read_rows(file)] == ["18.0", "None"]
    assert [repr(row.values["b"]) for row in read_rows(file)] == ["18", "None"]


def test_a_row_knows_its_line_its_columns_and_the_first_that_is_not_null(tmp_path: Path) -> None:
    file = written(tmp_path, '{"a": null, "b": 0, "c": 3}\n\n{"a": "", "c": 1}\n')
    first, second = read_rows(file)
    assert (first.location, second.location) == (f"{file} line 1", f"{file} line 3")
    assert (first.number, second.number) == (1, 3)
    assert (first.columns, first.first("a", "b", "c"), second.first("a", "c")) == (["b", "c"], 0, "")
    assert first.first("a", "missing") is None


@given(st.text())
def test_any_text_round_trips(tmp_path_factory: Any, text: str) -> None:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    writer = JsonLinesWriter(file)
    writer.append({"text": text})
    writer.append({"text": "next"})
    writer.close()
    assert [row.values["text"] for row in read_rows(file)] == [text, "next"]
    assert [record["text"] for record in read_json_lines(file)] == [text, "next"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1}\n\n{"a"', "line 3 is not valid JSON: got Expecting ':' delimiter at column 5"),
        (b'{"a": "x\n', "line 1 is not valid JSON: got Invalid control character at column 9"),
        (b'{"a": 1}\n"b"\n', "line 2 is not an object: got str"),
        (b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", r"line 2 is not valid JSON: got a whole number of more than 4,300"),
        (b'{"a": 1}\n{"a": ' + b"[" * 100_000 + b"}", "line 2 is not valid JSON: got values that are nested too"),
        (b'{"a": 1}\n{"a": "\xff"}', "line 2 is not text: got byte 0xff, which is not UTF-8"),
        (b'\xff\xfe{\x00"', "is not text: got byte .*which is not UTF-16"),
        (b'[{"a": 1}, 2]', "row 2 is not an object: got int"),
        (b'[{"a": 1},\n{"a": ]', "line 2 is not valid JSON"),
        (b'["a"]\n{"a": 1}', "line 2 is not valid JSON: got Extra data"),
        (b'{"a": 1}{"a": 2}', "line 1 is not valid JSON: got Extra data"),
        (b'{"a": 1}\n{"a": 1, "b": 2, "a": 1}', "line 2 has an object with a key twice: got 'a', expected unique keys"),
        (b'{"a": {"b": [{"c": 1, "c": 2}]}}', "line 1 has an object with a key twice: got 'c'"),
        (gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-12], "cannot read rows .*rows.jsonl"),
        (gzip.compress(b'{"a": 1}\n{', mtime=0), "line 2 is not valid JSON"),
        (b"PAR1 and nothing else", "cannot be read as Parquet"),
        (b"\x28\xb5\x2f\xfd\x04", "line 1 is not text"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        list(read_rows(written(tmp_path, data), "rows"))


def test_a_name_on_the_hub_and_a_table_of_text_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"For a data set of the Hugging Face hub, write hf://datasets/openai/gsm8k/"):
        list(read_rows("openai/gsm8k"))
    with pytest.raises(UsageError, match=r"rows\.csv is a CSV file, .*Convert it: pandas.*\.convert_dtypes\(\)"):
        list(read_rows(written(tmp_path, "prompt,answer\na,b\n", "rows.csv")))
    with pytest.raises(UsageError, match=r"rows\.tsv is a TSV file, .*pandas\.read_csv\(FILE, sep='\\t'\)"):
        list(read_rows(written(tmp_path, "prompt\tanswer\na\tb\n", "rows.tsv")))


def test_error_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read task file .*none.jsonl: got No such file"):
        list(read_rows(tmp_path / "none.jsonl", "task file"))
    with pytest.raises(UsageError, match="got an empty folder"):
        list(read_rows(tmp_path))


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "3 - 3?", "answer": 0}, "0"),
        ({"question": "1 > 2?", "answer": False}, "False"),
        ({"question": "3 - 3?", "answer": 0.0}, "0"),
        ({"question": None, "problem": "p", "answer": None, "solution": "It is \\boxed{0}."}, "0"),
        ({"problem": "p", "answer": "", "solution": "\\boxed{x}"}, "x"),
        ({"question": "q", "answer": "So\n#### 0"}, "0"),
    ],
)
def test_zero_is_an_answer_and_null_is_none(tmp_path: Path, row: dict[str, Any], answer: str) -> None:
    assert [problem.answer for problem in read_mathematics(str(written(tmp_path, lines([row]))))] == [answer]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "q", "answer": ""}, "line 1 is not a problem: got no answer to 'q'"),
        ({"question": "q", "answer": None}, "line 1 is not a problem: got no answer"),
        ({"solution": "x"}, "line 1 is not a problem: got the columns solution"),
    ],
)
def test_error_names_the_problem_without_an_answer(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_mathematics(str(written(tmp_path, lines([row]))))


def test_nulls_of_merged_problems_are_columns_of_other_rows(tmp_path: Path) -> None:
    mbpp = {"text": "Add.", "code": "def f(a):\n    return a", "test_list": ["assert f(1) == 1", "assert f(2) == 2"]}
    human = {"prompt": "def g():\n", "entry_point": "g", "test": "def check(c): pass", "canonical_solution": "  1\n"}
    names = [*mbpp, *human]
    merged = [{name: row.get(name) for name in names} for row in (mbpp, human)]
    found = read_code(str(written(tmp_path, lines(merged))), "test", 1)
    assert [problem.function for problem in found.values()] == ["f", "g"]
    with pytest.raises(UsageError, match="line 1 is not a problem: got KeyError: 'prompt'"):
        read_code(str(written(tmp_path, lines([{"code": "x", "test_list": []}]), "other.jsonl")), "test", 1)


def test_questions_have_answers_that_are_numbers_or_null_in_one_of_two_columns(tmp_path: Path) -> None:
    rows = [
        {"question": "0?", "golden_answers": None, "answer": 0, "type": None},
        {"question": "a?", "golden_answers": ["a", 2], "answer": None, "type": "x"},
    ]
    file = written(tmp_path, lines(rows).encode("utf-8-sig"))
    found = questions_of("test", parse_options(questions={"test": str(file)}, url="http://example.com"))
    assert [question[2] for question in found] == [("0",), ("a", "2")]


def test_a_row_is_named_in_full() -> None:
    assert Row("file line 1", {"a": None, "b": 1}, 1).columns == ["b"]


def test_nan_is_a_null_wherever_a_file_has_it(tmp_path: Path) -> None:
    text = '{"answer": NaN, "more": [1.5, {"x": NaN}], "most": -Infinity}\n'
    expected = {"answer": None, "more": [1.5, {"x": None}], "most": -math.inf}
    (row,) = read_rows(written(tmp_path, text))
    assert row.values == expected
    columns = {"answer": [math.nan, 2.0], "more": [{"x": math.nan, "y": [1.5, math.nan]}, None]}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    first, second = read_rows(tmp_path / "rows.parquet")
    assert first.values == {"answer": None, "more": {"x": None, "y": [1.5, None]}}
    assert second.values == {"answer": 2.0, "more": None}


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    kind = pa.schema([("extra_info", pa.map_(pa.string(), pa.string()))])
    parquet.write_table(pa.table({"extra_info": [[("question", "6 * 7?")]]}, kind), tmp_path / "rows.parquet")
    (row,) = read_rows(tmp_path / "rows.parquet")
    assert row.values == {"extra_info": {"question": "6 * 7?"}}
    parquet.write_table(pa.table({"extra_info": [[("a", "1"), ("a", "2")]]}, kind), tmp_path / "rows.parquet")
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        list(read_rows(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_lone_surrogates_become_question_marks(tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = form.replace("{}", '{"prompt": "so \\ud83d\\ude00"}')
    assert [row.values for row in read_rows(written(tmp_path, whole))] == [{"prompt": "so \U0001f600"}]
    half = form.replace("{}", '{"prompt": "so \\ud83d"}')
    (row,) = read_rows(written(tmp_path, half))
    assert row.values == {"prompt": "so ?"}
    assert re.search(r"(line|row) 1 has half of a character, .ud83d", caplog.text)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (["a", None, "b"], ("a", "b")),
        ('["a", "b"]', ("a", "b")),
        ("['a', 'b']", ("a", "b")),
        ("import math", ("import math",)),
        ("[ -f a ] && pytest", ("[ -f a ] && pytest",)),
    ],
)
def test_a_list_of_texts_may_be_a_text(value: Any, texts: tuple[str, ...]) -> None:
    assert texts_of(value) == texts


@pytest.mark.parametrize("value", [["a", 1], {"a": "b"}, 1.5, "['a' 'b']", "['a'\n 'b']", "[1]"])
def test_other_values_are_no_texts(value: Any) -> None:
    with pytest.raises(ValueError, match=r"not texts|NumPy"):
        texts_of(value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"test": "assert half(6) == 3"}, "the test defines no function check"),
        ({"prompt": "def halves(x):\n"}, "the prompt does not define the entry point"),
    ],
)
def test_error_names_programs_that_could_not_be_judged(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    row = {"prompt": "def half(x):\n", "entry_point": "half", "test": "def check(c):\n    assert c(6) == 3\n"}
    assert len(read_code(str(written(tmp_path, lines([row]))), "test", 0)) == 1
    with pytest.raises(UsageError, match=words):
        read_code(str(written(tmp_path, lines([row | change]), "bad.jsonl")), "test", 0)


def test_imports_of_a_problem_may_be_one_text(tmp_path: Path) -> None:
    row = {"text": "t", "code": "def f(x):\n    return x", "test_list": "['assert f(1) == 1']"}
    row["test_imports"] = "import math"
    (problem,) = read_code(str(written(tmp_path, lines([row]))), "test", 0).values()
    assert (problem.setup, problem.hidden_tests) == ("\nimport math", ("assert f(1) == 1",))


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_times_with_nanoseconds_are_read_as_times_of_python(tmp_path: Path, form: str) -> None:
    """Pandas stores them in columns that no reward function reads: they must not prevent the file from being read."""
    stamp = pa.array([1577836800000000001], pa.timestamp("ns"))
    nested = pa.StructArray.from_arrays([stamp, pa.array([[1500]], pa.list_(pa.duration("ns")))], ["at", "took"])
    table = pa.table({"prompt": ["a"], "at": stamp, "log": nested, "text": pa.array(["x"]).dictionary_encode()})
    file = tmp_path / f"rows.{form}"
    if form == "parquet":
        parquet.write_table(table, file)
    else:
        with pa.ipc.new_file(str(file), table.schema) as opened:
            opened.write_table(table)
    (row,) = read_rows(file)
    moment, microsecond = datetime(2020, 1, 1), timedelta(microseconds=1)
    expected = {"prompt": "a", "at": moment, "log": {"at": moment, "took": [microsecond]}, "text": "x"}
    assert row.values == expected


def test_error_names_the_rows_with_equal_ids() -> None:
    ids = UniqueIds("the file rows.jsonl")
    ids.add("7", "rows.jsonl line 2")
    ids.add("8", "rows.jsonl line 3")
    with pytest.raises(UsageError, match=r"got '7' in rows[.]jsonl line 2 and rows[.]jsonl line 900, expected"):
        ids.add("7", "rows.jsonl line 900")
