"""One run or evaluation that the viewer shows: its files, its index, its tokenizer, and its line on the first page."""

from __future__ import annotations

import shlex
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from agentrl.errors import UsageError
from agentrl.evaluation.diagnosis.watch import read_findings
from agentrl.observe.index_file import MAX_DAMAGE, DamagedFile
from agentrl.observe.run_status import STATUS_FILE, RunSnapshot
from agentrl.observe.token_table import steps as steps_with_tables
from agentrl.observe.trajectory_index import EpisodeRow, TrajectoryIndex
from agentrl.observe.trajectory_store import step_files
from agentrl.viewer.decoding import TokenDecoder, load_decoder, model_of_evaluation, model_of_run
from agentrl.viewer.metrics_table import MetricColumns, MetricsTable
from agentrl.viewer.run_state import ConfigSummary, SourceState, is_over, read_settings, state_of
from agentrl.viewer.sources import OpenedFolders, SourceFolder, SourceKind, UnknownAddress
from agentrl.viewer.store_index import IndexBuilder, StoreIndex

SPARKLINE = 60
"""Maximum number of points of a sparkline."""
MAX_RESULT_BYTES = 16 * 2**20
"""Maximum bytes of an evaluation's result that are read."""
OPENING_S = 5.0
"""Timeout in seconds of the first request for a source, which waits until its index is open."""
BUILDING_S = 0.1
"""Seconds for which a request waits until the index of a small store is built."""
SMALL_STORE = 8 * 2**20
"""Maximum bytes of a small store."""
MAX_ID_CHARS = 1000
"""Maximum number of characters of an episode's id in an address."""


class OpenedSource:
    """Run or evaluation, with the data read from its files so far.

    Args:
        folders: Opened folders, outside of which nothing is read.
        source: The run or evaluation.
        builder: Builder of its index.
    """

    def __init__(self, folders: OpenedFolders, source: SourceFolder, builder: IndexBuilder) -> None:
        self.folders, self.source = folders, source
        self._builder = builder
        self._metrics = MetricsTable(source.run.metrics_file)
        self._decoder: TokenDecoder | None = None
        self._decoding = threading.Lock()
        self.decoder_problem: str | None = None
        """Reason why no decoder could be loaded."""
        self.settings = ConfigSummary()
        self.index = StoreIndex(source.key, lambda: folders.check_store(source), decode=self._decode)
        self.line: dict[str, Any] = {}
        """Its line on the first page, see `refresh`."""

    def panel_hash(self) -> str | None:
        """Return the digest of the tasks and seeds of an evaluation; ``None`` for runs and unfinished evaluations.

        Raises:
            UsageError: the result's file is outside the opened folders.
        """
        found = self._result().get("panel_hash")
        return found if isinstance(found, str) else None

    def refresh(self) -> dict[str, Any]:
        """Read the files again for the line on the first page, and return it.

        Raises:
            UsageError: a file is outside the opened folders.
        """
        source, found = self.source, self.metrics()
        self._load_settings()
        status = self.folders.read_status(source)
        result = self._result()
        step = int(found.steps[-1]) if len(found.steps) else None
        steps, written = self.settings.steps, [_changed_at(path) for path in self.watched_files()]
        is_complete = is_over(source, step=step, steps=steps)
        started = self._start_time(status)
        updated = max([time for time in written if time is not None], default=None)
        curve = _first_known(found, ("success/mean", "reward/mean", "sft/loss", "preferences/loss"))
        self.line = {
            **self._names(),
            "state": state_of(source, status, is_complete=is_complete, changed=updated or 0.0).value,
            "step": step,
            "steps": steps,
            "environments": list(self.settings.environments) or _words(result.get("env")),
            "model": self.settings.model or result.get("model") or result.get("policy"),
            "started": started,
            "updated": updated,
            "success": _mean(result.get("success")) if result else found.last("success/mean"),
            "reward": _mean(result.get("reward")) if result else found.last("reward/mean"),
            "evaluated": found.last("eval/success"),
            "sparkline": [] if curve is None else _sparkline(curve),
            "index": self.index_progress(),
            "problem": None,
        }
        return self.line

    def failed_line(self, problem: str) -> dict[str, Any]:
        """Return the line of a source whose files cannot be read."""
        unknown = ("step", "steps", "model", "started", "updated", "success", "reward", "evaluated")
        return {
            **self._names(),
            "state": SourceState.CRASHED.value,
            **dict.fromkeys(unknown),
            "environments": [],
            "sparkline": [],
            "index": self.index_progress(),
            "problem": problem,
        }

    def _names(self) -> dict[str, Any]:
        source = self.source
        return {"key": source.key, "kind": source.kind.value, "path": str(source.path), "name": source.name}

    def index_progress(self) -> dict[str, Any]:
        """Return the progress of the store's index."""
        progress, problem = self.index.progress, self.index.problem
        return {
            "done_bytes": progress.done,
            "total_bytes": progress.total,
            "complete": progress.is_complete and self.index.place is not None,
            "problem": None if problem is None or isinstance(problem, UnknownAddress) else str(problem),
        }

    def watched_files(self) -> list[Path]:
        """Return the files whose changes update the pages."""
        run, store = self.source.run, self.source.store
        newest = step_files(store)[-1:] if store.is_dir() else [store]
        own = [run.metrics_file, run.diagnosis_file, self.source.path / STATUS_FILE, self.source.result_file]
        return [*own, *newest]

    def document(self) -> dict[str, Any]:
        """Return the document of the run's page."""
        source = self.source
        self.folders.file(source, source.run.diagnosis_file.name)
        problems = read_findings(source.run)
        return {
            **self.refresh(),
            "config": dict(self.settings.changed),
            "command": self._command(),
            "splits": self._splits(),
            "has_tokens": bool(steps_with_tables(source.path)),
            "problems": [problem.to_json() for problem in problems] or list(self._result().get("problems", ())),
            "result": self._result(),
            "tokenizer_problem": self.decoder_problem,
            "damage": self.damage(),
        }

    def metrics(self) -> MetricColumns:
        """Return the metrics of the run; none for an evaluation.

        Raises:
            UsageError: the file is outside the opened folders.
        """
        self.folders.file(self.source, "metrics.jsonl")
        return self._metrics.read()

    def damage(self) -> list[dict[str, Any]]:
        """Return the files with records that cannot be read, and the lines of the first ones."""
        found: list[DamagedFile] = []
        if self.index.place is not None:
            found += self.index.get_or_make("damage", lambda index: index.damage())
        if lines := self._metrics.damaged:
            found.append(DamagedFile(path=self.source.run.metrics_file, records=len(lines), lines=lines[:MAX_DAMAGE]))
        return [
            {"file": file.path.relative_to(self.source.path).as_posix(), "records": file.records, "lines": file.lines}
            for file in found
        ]

    def want_index(self) -> None:
        """Build or update the index in the background; the first time, also load the tokenizer."""
        if self.index.place is None:
            threading.Thread(target=self.decoder, name="agentrl-tokenizer", daemon=True).start()
        self._builder.want(self.index)

    def wait_for_index(self) -> None:
        """Request the index if it is not open, wait until it is, and then a short time until it is complete.

        Raises:
            UsageError: it cannot be opened.
        """
        with suppress(UsageError):  # `refresh` reports it
            self._load_settings()  # the index is filtered by splits
        if not self.index.opened.is_set():
            self.want_index()
            self.index.opened.wait(OPENING_S)
        if self.index.progress.total < SMALL_STORE:
            self.index.scanned.wait(BUILDING_S)
        if self.index.place is None:
            raise self.index.problem or UsageError("the index is being opened", hint="try again")

    def find_row(self, index: TrajectoryIndex, identity: str) -> EpisodeRow:
        """Return the row of an episode.

        Raises:
            UnknownAddress: there is no such episode.
        """
        row = index.find(identity) if len(identity) <= MAX_ID_CHARS else None
        if row is None:
            hint = "the index is not complete yet" if not self.index.progress.is_complete else None
            raise UnknownAddress(f"no such episode in {self.source.name}", got=repr(identity[:200]), hint=hint)
        return row

    def decoder(self) -> TokenDecoder | None:
        """Return the decoder of the episodes' tokens; ``None`` if there is none, see `decoder_problem`."""
        with self._decoding:
            if self._decoder is None and (self.decoder_problem is None or self.line.get("state") == "running"):
                try:
                    self._decoder = load_decoder(self._model())
                    self.decoder_problem = None
                except UsageError as error:
                    self.decoder_problem = str(error)
            return self._decoder

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    def _decode(self, ids: list[int]) -> str:
        decoder = self.decoder()
        return "" if decoder is None else decoder.text(ids)

    def _model(self) -> str:
        source = self.source
        return model_of_run(source.run) if source.kind is SourceKind.RUN else model_of_evaluation(source.path)

    def _load_settings(self) -> None:
        if not self.settings.environments:
            self.settings = self._read_settings()
            self.index.splits.update(self.settings.splits)

    def _read_settings(self) -> ConfigSummary:
        if self.source.kind is SourceKind.EVALUATION:
            environment = str(self._result().get("env") or "")
            name, _, split = environment.partition("/")
            return ConfigSummary(environments=(name,), splits={name: split}) if split else ConfigSummary()
        return read_settings(self.folders.file(self.source, "config.yaml"))

    def _result(self) -> dict[str, Any]:
        """Return the result of an evaluation; empty if it is not finished, or damaged."""
        if self.source.kind is SourceKind.RUN:
            return {}
        file = self.folders.file(self.source, self.source.result_file.name)
        with suppress(OSError, ValueError):
            if file is not None and file.stat().st_size <= MAX_RESULT_BYTES:
                result = orjson.loads(file.read_bytes())
                return result if isinstance(result, dict) else {}
        return {}

    def _splits(self) -> dict[str, list[str]]:
        return {name: [split] for name, split in self.settings.splits.items()}

    def _command(self) -> str:
        """Return a command that repeats the run."""
        path = shlex.quote(str(self.source.path))
        if self.source.kind is SourceKind.EVALUATION:
            return f"agentrl view {path}"
        if self.source.run.rollout_file.is_file():
            return f"agentrl rollout {shlex.quote(str(self.source.run.config_file))}"
        return f"agentrl train {shlex.quote(str(self.source.run.config_file))}"

    def _start_time(self, status: RunSnapshot | None) -> float | None:
        if status is not None and status.started:
            return status.started
        return _changed_at(self.source.run.config_file) if self.source.kind is SourceKind.RUN else None


def _changed_at(path: Path) -> float | None:
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def _first_known(found: MetricColumns, names: tuple[str, ...]) -> npt.NDArray[np.float64] | None:
    return next((found.columns[name] for name in names if name in found.columns), None)


def _sparkline(values: npt.NDArray[np.float64]) -> list[float]:
    """Return the means of at most `SPARKLINE` intervals of steps."""
    known = values[~np.isnan(values)]
    parts = np.array_split(known, min(SPARKLINE, len(known))) if len(known) else []
    return [float(part.mean()) for part in parts]


def _mean(estimate: object) -> float | None:
    return estimate.get("mean") if isinstance(estimate, dict) else None


def _words(value: object) -> list[str]:
    return [value.partition("/")[0]] if isinstance(value, str) else []
