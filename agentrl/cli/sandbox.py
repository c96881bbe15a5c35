"""`agentrl sandbox`: check back ends, run a command in a sandbox, serve sandboxes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.arguments import json_pairs
from agentrl.cli.check import check_back_ends
from agentrl.cli.help_pages import examples
from agentrl.cli.server import Host, Lease, Port, read_token, serve_until_stopped, token_option
from agentrl.errors import UsageError
from agentrl.observe.console import note, visible
from agentrl.remote.server import SandboxServer, ServerSettings
from agentrl.runs.stop import run_until_stopped
from agentrl.sandbox import ExecResult, SandboxSpec, open_sandbox, read_spec
from agentrl.sandbox.http import TOKEN_VARIABLE

app = typer.Typer(no_args_is_help=True)
_DEFAULTS = ServerSettings()

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Sandbox setting, such as limits.seconds=5 or network=all; may be repeated."
    ),
]
Type = Annotated[str, typer.Option("--type", help="Back end: local, docker, http, or your own.")]


@app.command(
    epilog=examples(
        "agentrl sandbox check",
        "agentrl sandbox check local --json -",
        "agentrl sandbox check http --set url=http://127.0.0.1:8300",
        "agentrl sandbox check local --only stops-a-fork-bomb",
    )
)
def check(
    type_: Annotated[
        str | None, typer.Argument(metavar="[TYPE]", help="Back end; default: all that this machine can run.")
    ] = None,
    settings: Settings = None,
    only: Annotated[list[str] | None, typer.Option(help="Check only this rule; may be repeated.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the report to this file; - prints it.")] = None,
) -> None:
    """Check that sandboxes work and resist attacks."""
    specs = None if type_ is None else [spec_of(type_, settings)]
    if specs is None and settings:
        raise UsageError("--set needs a back end", hint="name it: agentrl sandbox check local")
    check_back_ends(specs, only=only or [], json_file=json_file)


@app.command(
    epilog=examples(
        "agentrl sandbox run -- python3 -c 'print(6 * 7)'",
        "agentrl sandbox run --set limits.seconds=2 -- sleep 60",
        "echo hello | agentrl sandbox run --stdin -- tr a-z A-Z",
    )
)
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Program and its arguments.")],
    type_: Type = "local",
    settings: Settings = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Pass standard input to the command.")] = False,
) -> None:
    """Run a command in a new sandbox, and exit with the command's exit code."""
    data = sys.stdin.buffer.read() if stdin else b""
    result = run_until_stopped(_run(spec_of(type_, settings), command, data))
    for stream, output in ((sys.stdout, result.stdout), (sys.stderr, result.stderr)):
        text = output.decode(errors="replace")
        stream.write(visible(text) if stream.isatty() else text)
        stream.flush()
    endings = (
        (result.timed_out, f"killed after {result.seconds:.1f} s"),
        (result.truncated, "the middle of the output was dropped (limits.output_bytes)"),
        (result.out_of_memory, "out of memory"),
    )
    notices = [what for holds, what in endings if holds]
    if notices and not (result.stderr or result.stdout or b"\n").endswith(b"\n"):
        note("")  # the output does not end with a newline
    for notice in notices:
        note(notice)
    raise typer.Exit(result.exit_code)


def spec_of(type_: str, settings: list[str] | None) -> SandboxSpec:
    """Build a sandbox spec from options; ``SECTION.KEY`` sets a key of a section.

    Raises:
        UsageError: an unknown key.
    """
    values: dict[str, Any] = {"type": type_}
    for key, value in json_pairs(settings).items():
        section, dot, name = key.partition(".")
        if dot:
            values.setdefault(section, {})[name] = value
        else:
            values[key] = value
    return read_spec(values)


async def _run(spec: SandboxSpec, command: list[str], stdin: bytes) -> ExecResult:
    async with open_sandbox(spec) as sandbox:
        return await sandbox.exec(command, stdin=stdin)


@app.command(
    epilog=examples(
        "agentrl sandbox serve --port 8300",
        "agentrl sandbox serve --host 0.0.0.0 --token-file token.txt --set limits.memory_bytes=536870912",
        "agentrl sandbox run --type http --set url=http://127.0.0.1:8300 -- uname -a",
    )
)
def serve(
    type_: Type = "local",
    settings: Settings = None,
    host: Host = _DEFAULTS.host,
    port: Port = _DEFAULTS.port,
    token_file: Annotated[Path | None, token_option(TOKEN_VARIABLE)] = None,
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent sandboxes.")
    ] = _DEFAULTS.max_sessions,
    lease_s: Lease = _DEFAULTS.lease_s,
) -> None:
    """Serve sandboxes over HTTP; stop with Ctrl-C.

    Prints the address, which clients set as the url of sandboxes of type http. Clients can lower the limits, but not
    raise them.
    """
    token = read_token(token_file, TOKEN_VARIABLE)
    chosen = ServerSettings(host=host, port=port, token=token, max_sessions=max_sessions, lease_s=lease_s)
    spec = spec_of(type_, settings)
    serve_until_stopped(
        SandboxServer(spec, chosen),
        chosen,
        open_to_all="run programs here",
        usage=f"{spec.type} sandboxes are served: type http, url {{url}}",
    )
