"""A short campaign over real runs: no episode is lost, trained twice or mislabelled, and nothing hangs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.testing.chaos.servers import AGENTRL

FAULTS = 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_faults_of_two_runs(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    words = ["chaos", "--faults", str(FAULTS), "--seed", "1", "--per-run", "2", "--patience", "6", "--stall", "300"]
    kinds = ["--scenario", "synchronous", "--scenario", "asynchronous", "--json", str(file)]
    done = subprocess.run([*AGENTRL, *words, *kinds], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(file.read_text())
    assert result["counts"] == {"lost": 0, "duplicated": 0, "mislabelled": 0, "hung": 0, "unclear": 0}
    assert len(result["faults"]) == FAULTS
    assert all(fault["ended"] for fault in result["faults"])
    assert [run["name"] for run in result["runs"]] == ["00-synchronous", "01-asynchronous"]
    assert result["episodes_trained"] > 0
    assert done.stderr.count(" -> ") == FAULTS, "one line per fault"


def test_error_names_the_unknown_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["chaos", "--scenario", "none"])
    assert end.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "one of synchronous, asynchronous, two-ranks, served-environment" in said
