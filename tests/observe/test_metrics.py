import json

from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe.metrics import MetricsFile, read_metrics


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_floats_keep_every_bit(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step, value in enumerate(values):
        metrics.append_step(step, {"x": value, "n": 3})
    metrics.close()
    assert [line["x"] for line in read_metrics(path)] == values


def test_non_finite_numbers_are_null(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.append_step(1, {"a": float("nan"), "b": float("inf")})
    metrics.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()).items() >= {"step": 1, "a": None, "b": None}.items()
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}]


def test_steps_after_a_checkpoint_are_removed_and_written_again(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.append_step(1, {"a": 1})
    position = metrics.position
    metrics.append_step(2, {"a": 2})
    metrics.close()
    (tmp_path / "m.jsonl").write_bytes((tmp_path / "m.jsonl").read_bytes() + b'{"step": 3, "a"')
    resumed = MetricsFile(tmp_path / "m.jsonl")
    resumed.truncate(position)
    resumed.append_step(2, {"a": 22})
    resumed.close()
    assert [line["a"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 22]


def test_a_line_cut_short_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st')
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}]
    writer = MetricsFile(tmp_path / "m.jsonl")
    writer.append_step(2, {})
    writer.close()
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2]


def test_values_that_are_not_numbers_are_left_out(tmp_path, caplog):
    rows = [
        '{"step": 1, "reward/mean": "high", "success/mean": {"a": 1}, "episodes": [4], "x": null, "time/step_s": 0.5}',
        '{"step": -1}',
        '{"step": 1e3}',
        '{"step": true}',
        '{"step": 99999999999999999999}',
        '{"step": 2, "reward/mean": NaN}',
        "",
        '["step", 3]',
        '{"step": 4, "episodes": 2}',
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(rows) + "\n")
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 1, "time/step_s": 0.5},
        {"step": 4, "episodes": 2},
    ]
    assert "skipped 6 damaged records" in caplog.text
