"""A command line in this process."""

import pytest

from agentrl.cli import main


@pytest.fixture
def agentrl_out(capsys, monkeypatch):
    """Run a command; give what it prints."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words, code=0):
        capsys.readouterr()
        ended = 0
        try:
            main(words)
        except SystemExit as end:
            ended = int(end.code or 0)
        captured = capsys.readouterr()
        assert ended == code, captured.err
        return captured.out if code == 0 else captured.err

    return run
