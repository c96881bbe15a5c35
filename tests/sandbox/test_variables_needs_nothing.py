"""Which environment variables commands of a sandbox get, in one without walls: no bubblewrap is needed."""

from typing import Any

import pytest

from agentrl.remote.server import ServerSettings
from agentrl.remote.server.sandboxes import SandboxServer
from agentrl.sandbox import Sandbox, SandboxSpec, open_sandbox
from agentrl.sandbox.local import UNCONFINED

OPEN: dict[str, Any] = {"network": "all", "options": {"unconfined": UNCONFINED}}
ASKED = 'echo "$WORD $OTHER $HOME $USER $LANG"'
OWN = {"WORD": "own", "HOME": "/elsewhere", "LANG": "C"}
OF_SPEC = {"WORD": "spec", "OTHER": "kept", "USER": "fern"}


async def spawned(sandbox: Sandbox, command: str, env: dict[str, str]) -> bytes:
    program = await sandbox.spawn(command, env=env)
    said = b""
    while piece := await program.read():
        said += piece
    assert (await program.wait()).exit_code == 0
    return said


async def test_command_variables_override_the_specs() -> None:
    async with open_sandbox(SandboxSpec(env=OF_SPEC, **OPEN)) as sandbox:
        plain = f"spec kept {sandbox.folder} fern C.UTF-8\n".encode()
        assert (await sandbox.exec(ASKED)).stdout == plain
        assert (await sandbox.exec(ASKED, env=OWN)).stdout == b"own kept /elsewhere fern C\n"
        assert await spawned(sandbox, ASKED, OWN) == b"own kept /elsewhere fern C\n"
        assert (await sandbox.exec(ASKED)).stdout == plain


async def test_spec_variables_override_the_defaults() -> None:
    spec = SandboxSpec(env={"HOME": "/own", "LANG": "C", "OMP_NUM_THREADS": "3"}, **OPEN)
    async with open_sandbox(spec) as sandbox:
        ran = await sandbox.exec("echo $HOME $LANG $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS")
        assert ran.stdout == b"/own C 3 1\n"


async def test_no_variable_of_this_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_HOST", "1")
    async with open_sandbox(SandboxSpec(**OPEN)) as sandbox:
        assert (await sandbox.exec("echo x$SECRET_OF_HOST")).stdout == b"x\n"


async def test_variables_arrive_at_a_served_sandbox_in_the_same_order() -> None:
    server = SandboxServer(SandboxSpec(env={"WORD": "server"}, **OPEN), ServerSettings(max_sessions=2))
    await server.start()
    try:
        spec = SandboxSpec(type="http", url=server.url, network="all", env=OF_SPEC)
        async with open_sandbox(spec) as sandbox:
            assert (await sandbox.exec("echo $WORD $OTHER")).stdout == b"spec kept\n"
            assert (await sandbox.exec("echo $WORD $OTHER", env=OWN)).stdout == b"own kept\n"
            assert await spawned(sandbox, "echo $WORD $OTHER", OWN) == b"own kept\n"
    finally:
        await server.close()
