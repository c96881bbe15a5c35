"""Trackers of experiment services: Weights & Biases, MLflow, SwanLab and Trackio.

Each gets config, metrics and a table of episodes. All work without a network (Weights & Biases with
``WANDB_MODE=offline``); the services' own variables send the data elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.observe.traces import EpisodeTrace
from agentrl.observe.trackers import Tracker, known_identity, run_identity, store_identity

PROJECT = "agentrl"
MAX_ROWS = 200
"""Maximum number of episodes of a step in a table."""
COLUMNS = ("episode", "environment", "task", "outcome", "reward", "success", "turns", "sampled_tokens", "seconds")
"""Columns of a table of episodes."""


class EpisodeTableTracker(Tracker):
    """Tracker with a table of the episodes of each step."""

    traces = True

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows: list[list[Any]] = []

    def trace(self, trace: EpisodeTrace) -> None:
        """Add an episode to the table of the step."""
        if trace.group and len(self._rows) < MAX_ROWS:
            tokens = sum(turn.answer_tokens for turn in trace.turns)
            result = (trace.outcome, trace.reward, trace.success, len(trace.turns), tokens, round(trace.seconds, 3))
            self._rows.append([trace.name, trace.environment, trace.task, *result])

    def take_rows(self) -> list[list[Any]]:
        """Return the episodes since the last call, as rows of `COLUMNS`."""
        rows, self._rows = self._rows, []
        return rows


class WandbTracker(EpisodeTableTracker):
    """A run of the Weights & Biases project ``agentrl``, or of ``WANDB_PROJECT``; needs the package wandb.

    Steps are a separate metric, because the service drops rows whose step is not new, such as those that a resumed run
    repeats.
    """

    package = "wandb"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        super().__init__(folder, name, config)
        self._exit_code = 0
        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run_identity(folder),
            name=name,
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one history row, with the table of the step."""
        values: dict[str, Any] = {**metrics, "step": step}
        if rows := self.take_rows():
            values["episodes"] = self._table(columns=list(COLUMNS), data=rows, allow_mixed_types=True)
        self._run.log(values)

    def fail(self, reason: str) -> None:
        """Make `close` report a failure."""
        self._exit_code = 1

    def close(self) -> None:
        """Finish the run."""
        self._run.finish(exit_code=self._exit_code)


class MLflowTracker(EpisodeTableTracker):
    """A run of the MLflow experiment ``agentrl``, or of ``MLFLOW_EXPERIMENT_NAME``; needs the package mlflow.

    ``MLFLOW_TRACKING_URI`` names a server; by default, it is the file ``logs/mlflow/mlflow.db`` of the run's folder.
    """

    package = "mlflow"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        super().__init__(folder, name, config)
        self._metric, self._status = Metric, "FINISHED"
        local = f"sqlite:///{folder.resolve()}/mlflow.db"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or local)
        self._run = self._find_run(folder, name)
        self._client.update_run(self._run, status="RUNNING")
        known = self._client.get_run(self._run).data.params  # which cannot be changed
        settings = {_mlflow_name(key): str(value)[:500] for key, value in flat(config).items()}
        params = [Param(key, value) for key, value in settings.items() if key not in known]
        for some in _parts(params, 100):
            self._client.log_batch(self._run, params=some)

    def _find_run(self, folder: Path, name: str) -> str:
        """Return the id of the run that this one resumes, if the server has it; otherwise that of a new run."""
        from mlflow.exceptions import MlflowException

        if (identity := known_identity(folder)) is not None:
            try:
                return str(self._client.get_run(identity).info.run_id)
            except MlflowException as error:  # with another server than before
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        artifacts = None if "MLFLOW_TRACKING_URI" in os.environ else (folder / "artifacts").resolve().as_uri()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            try:
                self._client.create_experiment(experiment, artifacts)
            except MlflowException as error:  # another run, started at the same moment, has created it
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self._client.get_experiment_by_name(experiment)
        return store_identity(folder, self._client.create_run(found.experiment_id, run_name=name).info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of a step, and its table as an artifact."""
        now = int(time.time() * 1000)
        values = [self._metric(_mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        for some in _parts(values, 1000):
            self._client.log_batch(self._run, metrics=some)
        if rows := self.take_rows():
            self._client.log_dict(self._run, {"columns": COLUMNS, "data": rows}, f"episodes/step-{step:06d}.json")

    def fail(self, reason: str) -> None:
        """Make `close` report a failure, and store the reason as a tag."""
        self._status = "FAILED"
        self._client.set_tag(self._run, "error", reason[:5000])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run, self._status)


class SwanLabTracker(EpisodeTableTracker):
    """A run of the SwanLab project ``agentrl``, or of ``SWANLAB_PROJ_NAME``; needs the package swanlab.

    ``SWANLAB_MODE`` is ``offline`` by default: files in ``logs/swanlab``, which ``swanlab sync`` uploads.
    """

    package = "swanlab"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import swanlab

        super().__init__(folder, name, config)
        self._end: dict[str, Any] = {}
        self._table = swanlab.echarts.Table
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME") or PROJECT,
            name=name,
            id=run_identity(folder)[:21],
            resume="allow",
            config=dict(config),
            log_dir=str(folder),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics and the table of a step."""
        values: dict[str, Any] = {name: float(value) for name, value in metrics.items()}
        if rows := self.take_rows():
            table = self._table()
            table.add(list(COLUMNS), [[str(cell) for cell in row] for row in rows])
            values["episodes"] = table
        self._run.log(values, step=step)

    def fail(self, reason: str) -> None:
        """Make `close` report a failure."""
        self._end = {"state": "crashed", "error": reason}

    def close(self) -> None:
        """Finish the run."""
        self._run.finish(**self._end)


class TrackioTracker(EpisodeTableTracker):
    """A run of the Trackio project ``agentrl``; needs the package trackio.

    ``TRACKIO_DIR`` is the folder of its database; by default, Trackio's own: ``trackio show --project agentrl``.
    """

    package = "trackio"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import trackio

        super().__init__(folder, name, config)
        self._table = trackio.Table
        is_resumed = known_identity(folder) is not None
        run_identity(folder)
        self._run = trackio.init(
            project=PROJECT,
            name=name,
            config=dict(config),
            resume="allow" if is_resumed else "never",  # by the name: a new run must not continue one of the same name
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics and the table of a step."""
        values: dict[str, Any] = dict(metrics)
        if rows := self.take_rows():
            values["episodes"] = self._table(columns=list(COLUMNS), data=rows, allow_mixed_types=True)
        self._run.log(values, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under their dotted names; lists are values.

    >>> flat({"trainer": {"steps": 3}, "trackers": ["mlflow"]})
    {'trainer.steps': 3, 'trackers': ['mlflow']}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _mlflow_name(name: str) -> str:
    """Return the name of a metric or setting with the characters, path and length that MLflow allows.

    >>> _mlflow_name("reward/component/mean@8"), _mlflow_name("/a//b/../c")
    ('reward/component/mean_8', 'a/b/_/c')
    """
    allowed = "".join(letter if letter.isalnum() or letter in "_-. /:" else "_" for letter in name)
    parts = ["_" if part in (".", "..") else part for part in allowed.split("/") if part]
    return "/".join(parts)[:250].rstrip("/") or "_"


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
