"""Contents of reports, which need no other files."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from agentrl.errors import Outcome
from agentrl.evaluation.panel import EvaluatedEpisode, Panel
from agentrl.evaluation.report import (
    Report,
    choose_examples,
    draw_learning_curve,
    markdown,
    panel_warnings,
    write_report,
)
from agentrl.evaluation.result import EvaluationResult, summarize
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

PNG = b"\x89PNG\r\n\x1a\n"


def trajectory(name: str, *, success: bool, task_type: str = "clean", tokens: int = 3) -> Trajectory:
    sequence = TokenSequence()
    if tokens:
        sequence.extend([1], Source.PROMPT)
        sequence.extend_sampled([2] * tokens, logprobs=[-0.5] * tokens, versions=[0] * tokens)
    sequence.turns.append(Turn(index=0, start=len(sequence) - tokens, end=len(sequence)))
    return Trajectory(
        id=name,
        task_id=name,
        environment="world",
        seed=0,
        group_id=name,
        sequences=[sequence],
        outcome=Outcome.FINISHED if success else Outcome.TRUNCATED_TURNS,
        success=success,
        reward=float(success),
        task_type=task_type,
    )


def result(*solved: bool, samples: int = 1) -> EvaluationResult:
    panel = Panel(environment="world/test", policy="engine", model="m|1", n_tasks=len(solved), samples=samples, seed=0)
    episodes = [
        EvaluatedEpisode(task_id=str(i), sample=s, trajectory=trajectory(str(i), success=won))
        for i, won in enumerate(solved)
        for s in range(samples)
    ]
    return summarize(panel, episodes, seconds=2.0)


def test_markdown_compares_before_and_after() -> None:
    text = markdown(
        Report(title="Demo", results={"before": result(False, True), "after": result(True, True, samples=2)})
    )
    assert "# Demo" in text
    assert "| success (95 % interval) | 50.0 % (9.5 to 90.5) | 100.0 % (34.2 to 100.0) |" in text
    assert "| pass^2 | not measured | 100.0 % |" in text
    assert "| truncated_turns | 1 | 0 |" in text
    assert "| mean reward | 0.500 | 1.000 |" in text
    assert re.search(r"\| tokens/s \| [\d,]+ \| [\d,]+ \|", text)
    assert "m\\|1" in text
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {4, 10}, "the table of the comparison has nine columns"
    assert "| after against before | different | success | +50.0 % " in text


def test_repaired_calls_are_shown_where_there_are_some() -> None:
    before, after = result(False, True), result(True, True)
    assert "repaired" not in markdown(Report(title="Demo", results={"before": before, "after": after}))
    before.episodes[1].trajectory.turns[0].repaired_calls = 3
    text = markdown(Report(title="Demo", results={"before": before, "after": after}))
    assert "| repaired tool calls | 3 | 0 |" in text


def test_a_report_without_results_still_shows_its_notes() -> None:
    assert markdown(Report(title="Run", notes=["It ended early."])) == "# Run\n\nIt ended early.\n"


def test_problems_are_numbered_after_the_notes_each_on_one_line() -> None:
    text = markdown(Report(title="Run", notes=["It ended early."], problems=["no\n  reward", "no tool"]))
    assert text == "# Run\n\nIt ended early.\n\n## Problems\n\n1. no reward\n2. no tool\n"


def test_there_is_no_heading_without_types_of_tasks() -> None:
    failed = EvaluatedEpisode(task_id="t", sample=0, trajectory=trajectory("t", success=False))
    failed.trajectory.outcome = Outcome.ENGINE_ERROR
    nothing = summarize(result(True).panel, [failed], 1.0)
    assert "by type of task" not in markdown(Report(title="Run", results={"now": nothing}))


def test_files_stand_alone(tmp_path: Path) -> None:
    metrics = [{"step": step, "success/mean": step / 10, "reward/mean": None} for step in range(5)]
    report = Report(
        title="A <run>",
        results={"now": result(True)},
        metrics=metrics,
        examples=[trajectory("put a mug", success=True)],
    )
    files = write_report(report, tmp_path / "deep" / "folder", {1: "Q: ", 2: "a & b"}.__getitem__)
    assert files.curve is not None
    assert files.curve.read_bytes().startswith(PNG)
    page = files.html.read_text()
    assert "A &lt;run&gt;" in page
    assert "a &amp; b" in page
    assert "put a mug" in page
    assert re.findall(r'src="(.{15})', page) == ["data:image/png;"]
    assert "](learning_curve.png)" in files.markdown.read_text()


def test_without_metrics_there_is_no_curve_and_without_a_decoder_no_example(tmp_path: Path) -> None:
    report = Report(title="t", results={"now": result(True)}, examples=[trajectory("x", success=True)])
    files = write_report(report, tmp_path, None)
    assert files.curve is None
    assert "token by token" not in files.html.read_text()
    with pytest.raises(ValueError, match="no metric to draw"):
        draw_learning_curve([{"step": 1, "other": 2.0}], tmp_path / "x.png")


def test_examples_mix_solved_and_unsolved_and_kinds() -> None:
    episodes = [
        trajectory("a", success=True),
        trajectory("b", success=True),
        trajectory("c", success=True, task_type="heat"),
        trajectory("d", success=False),
        trajectory("empty", success=False, tokens=0),
    ]
    assert [t.id for t in choose_examples(episodes, 4)] == ["a", "d", "c", "b"]
    assert [t.id for t in choose_examples(episodes[:3], 2)] == ["a", "c"]


def test_any_and_all_of_the_samples_are_different_rows() -> None:
    """One task solved by both samples, one by the second alone: pass@2 is 100 %, pass^2 50 %."""
    panel = Panel(environment="world/test", policy="engine", model="m", n_tasks=2, samples=2, seed=0)
    won = {("a", 0): True, ("a", 1): True, ("b", 0): False, ("b", 1): True}
    episodes = [
        EvaluatedEpisode(task_id=task, sample=sample, trajectory=trajectory(task, success=success))
        for (task, sample), success in won.items()
    ]
    text = markdown(Report(title="Run", results={"now": summarize(panel, episodes, 1.0)}))
    assert "| pass@2 | 100.0 % |" in text
    assert "| pass^2 | 50.0 % |" in text
    assert ("pass@1" in text, "pass^1" in text) == (False, False), "both are the success"


def test_a_pass_at_k_names_its_tasks_if_failures_left_some_out() -> None:
    whole = result(True, False, samples=2)
    failed = dataclasses.replace(whole.episodes[3], trajectory=trajectory("1", success=False))
    failed.trajectory.outcome = Outcome.ENGINE_ERROR
    part = summarize(whole.panel, [*whole.episodes[:3], failed], seconds=1.0)
    text = markdown(Report(title="Demo", results={"whole": whole, "part": part}))
    assert "| pass@2 | 50.0 % | 100.0 % (of 1 tasks) |" in text
    assert "| pass^2 | 50.0 % | 100.0 % (of 1 tasks) |" in text


def test_another_panel_is_named_and_the_policy_is_not_part_of_it(tmp_path: Path) -> None:
    base, same, more = result(True, False), result(False, False), result(True, False, True)
    assert base.panel_hash == same.panel_hash == base.to_json()["panel_hash"]
    assert panel_warnings({"a": base, "b": same}) == []
    other_seed = summarize(dataclasses.replace(base.panel, seed=1), base.episodes, 1.0)
    changed = [dataclasses.replace(episode, task="other content") for episode in base.episodes]
    for other in (more, other_seed, summarize(base.panel, changed, 1.0)):
        (warning,) = panel_warnings({"a": base, "b": other})
        assert warning.startswith(f"b was evaluated on a different panel from a ({other.panel_hash} instead of")
    unknown = dataclasses.replace(base, panel_hash=None)
    assert panel_warnings({"a": base, "b": unknown}) == panel_warnings({}) == []
    report = write_report(Report(title="T", results={"a": base, "b": more}), tmp_path, None)
    assert f"| panel | {base.panel_hash} | {more.panel_hash} |" in report.markdown.read_text()
