"""`agentrl env serve` as a process: it prints its address, serves other commands, and exits cleanly on Ctrl-C."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forks import AGENTRL, ForkedProgram

from agentrl.cli import main
from agentrl.cli.server import read_token
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(
    ending: signal.Signals,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    start_python: Callable[..., ForkedProgram],
) -> None:
    words = ["env", "serve", "household", "size=tiny", "--lease", "60"]
    server = start_python(*AGENTRL, *words, variables={"AGENTRL_ENV_TOKEN": ""})
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
    ended = server.wait()
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.splitlines() == [
        f"household is served: agentrl env play {url}; stop with Ctrl-C",
        "closing the sessions",
    ]
    with pytest.raises(UsageError, match="no environment server answers"):
        resolve_environment(env.name)


def test_an_address_that_others_reach_without_a_token_is_pointed_out(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["env", "serve", "household", "size=huge", "--host", "0.0.0.0"])
    assert end.value.code == 2
    said = capfd.readouterr().err
    assert "without --token-file, anyone who can reach 0.0.0.0 can use this server" in said
    assert "huge" in said


def test_a_split_cannot_be_served_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["env", "serve", "household/train"])
    assert end.value.code == 2
    assert "a server offers all splits: got household/train, expected household" in capfd.readouterr().err


def test_only_mcp_is_served_over_standard_input_and_output(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["env", "serve", "guess_number", "--protocol", "openenv", "--stdio"])
    assert end.value.code == 2
    assert "--stdio works only with MCP: got --protocol openenv" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("command", [["env", "serve", "guess_number"], ["sandbox", "serve"]])
def test_a_token_on_the_command_line_is_refused(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Every user of the machine sees it there."""
    with pytest.raises(SystemExit) as end:
        main([*command, "--token", "secret"])
    assert end.value.code == 2
    assert "--token-file" in capfd.readouterr().err


def test_a_token_is_read_from_a_file_or_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.setenv("TOKEN_OF_TEST", "from-variable")
    assert read_token(file, "TOKEN_OF_TEST") == "from-file"
    assert read_token(None, "TOKEN_OF_TEST") == "from-variable"
    monkeypatch.setenv("TOKEN_OF_TEST", "")
    assert read_token(None, "TOKEN_OF_TEST") is None
    assert read_token(None, "NO_SUCH_VARIABLE") is None


@pytest.mark.parametrize(
    "content", [b"", b"  \n", b"a b", b"a\nb", b"a\x1bb", "ä".encode(), b"\xff", b"x" * 5000, None]
)
def test_what_is_no_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match="token"):
        read_token(file, "NO_SUCH_VARIABLE")
