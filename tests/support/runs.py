"""Whole runs: their metrics, and copies of their folders while they run."""

import shutil

from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory


def numbers(folder):
    """Return the metrics of a run's steps without measured times, which differ between equal runs."""
    lines = read_metrics(RunDirectory(folder).metrics_file)
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


PARTIAL = shutil.ignore_patterns("*.partial")
"""Files that threads are writing, which are renamed when they are whole."""


class Snapshots(RunWatcher):
    """Copies the run's folder at some events: what a killed process would leave. Everything is written unbuffered."""

    def __init__(self, target, moments):
        self.target, self.moments, self.events = target, moments, 0

    def on_start(self, folder, status):
        self.folder = folder

    def on_status(self, status):
        self.events += 1
        self.sampled = status.sampled_tokens
        if self.events in self.moments:
            shutil.copytree(self.folder, self.target / str(self.events), symlinks=True, ignore=PARTIAL)
