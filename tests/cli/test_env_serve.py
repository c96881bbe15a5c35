"""`agentrl env serve` as a process: it says where it is, is used by other commands, and Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.env_lookup import resolve_environment
from agentrl.errors import UsageError

PROGRAM = "from agentrl.cli import main; main()"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(ending: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-c", PROGRAM, "env", "serve", "household", "size=tiny", "--lease", "60"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "AGENTRL_ENV_TOKEN": ""}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        if ending is signal.SIGINT:
            arguments = ["--policy", "expert", "--tasks", "2", "--json", str(tmp_path / "eval.json")]
            with pytest.raises(SystemExit) as end:
                main(["eval", "--env", f"{url}/valid_unseen", *arguments])
            assert not end.value.code
            assert json.loads((tmp_path / "eval.json").read_text())["success"]["mean"] == 1.0
        env = resolve_environment(url)
        server.send_signal(ending)
        said = server.communicate()
    assert server.returncode == 0
    assert said[0] == ""
    assert said[1].splitlines() == [
        f"household is served: agentrl env play {url}; Ctrl-C ends it",
        "closing the sessions",
    ]
    with pytest.raises(UsageError, match="no environment server answers"):
        resolve_environment(env.name)


def test_an_address_that_others_reach_without_a_token_is_pointed_out(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["env", "serve", "household", "size=huge", "--host", "0.0.0.0"])
    assert end.value.code == 2
    said = capfd.readouterr().err
    assert "without --token, everybody who reaches 0.0.0.0 can use this server" in said
    assert "huge" in said
