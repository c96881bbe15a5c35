"""Reports that commands write: the pieces come from a run's folder or an evaluation."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.assembly.models import load_tokenizer
from agentrl.evaluation.report import Report, ReportFiles, choose_examples, write_report
from agentrl.evaluation.session import FinishedEvaluation
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_directory import find_run


def write_evaluation_report(finished: FinishedEvaluation) -> ReportFiles:
    """A report beside the evaluation's episodes; with the learning curve of the run that the model comes from."""
    result = finished.result
    run = None if result.panel.model is None else find_run(result.panel.model)
    report = Report(
        title=f"{result.panel.environment}: {result.panel.policy}",
        results={"result": result},
        metrics=[] if run is None else read_metrics(run.metrics_file),
        examples=choose_examples([episode.trajectory for episode in result.episodes]),
    )
    return write_report(report, finished.folder, None if finished.model_path is None else decoder(finished.model_path))


def decoder(model_path: str) -> Callable[[int], str]:
    """The text of a token id, by the model's own tokenizer."""
    tokenizer = load_tokenizer(model_path)
    return lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))
