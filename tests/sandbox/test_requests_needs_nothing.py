"""What becomes of a command's own settings, and what a server makes of a client's; no bubblewrap is needed."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agentrl.errors import UsageError
from agentrl.remote.server import ServerSettings, sandboxes
from agentrl.remote.server.sandboxes import SandboxServer, ServedSandbox
from agentrl.remote.wire import Refusal
from agentrl.sandbox import Limits, Sandbox, SandboxFileError, SandboxSpec, open_sandbox
from agentrl.sandbox.allow_list import AllowList
from agentrl.sandbox.http import SANDBOXES, _write_command, changed_limits
from agentrl.sandbox.local import UNCONFINED
from agentrl.sandbox.spec import DEFAULT_LIMITS

OPEN: dict[str, Any] = {"network": "all", "options": {"unconfined": UNCONFINED}}
LIMITS = Limits(seconds=9.0, cpu_seconds=8.0, file_bytes=7000, output_bytes=6000, processes=5)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with open_sandbox(SandboxSpec(limits=LIMITS, env={"WORD": "spec"}, **OPEN)) as opened:
        yield opened


def test_every_setting_of_a_command_is_in_its_request() -> None:
    made: Any = open_sandbox(SandboxSpec(limits=LIMITS, env={"WORD": "spec"}, **OPEN))
    plain = made._exec_request("true")
    assert (plain["argv"], plain["cwd"]) == (["/bin/sh", "-c", "true"], made.folder)
    assert (plain["seconds"], plain["output"], plain["env"]["WORD"]) == (9.0, 6000, "spec")
    own = made._exec_request(
        ["ls", "-l"],
        cwd="/elsewhere",
        env={"WORD": "own"},
        limits=Limits(seconds=4.0, output_bytes=3000, file_bytes=9000, cpu_seconds=2.0),
    )
    assert (own["argv"], own["cwd"], own["env"]["WORD"]) == (["ls", "-l"], "/elsewhere", "own")
    assert (own["seconds"], own["output"]) == (4.0, 3000)
    limits = dict(own["limits"])
    assert limits[resource.RLIMIT_FSIZE] == 7000, "the lower of both"
    assert limits[resource.RLIMIT_CPU] == 2
    wide = made._exec_request("true", limits=Limits(seconds=100.0, output_bytes=9000))
    assert (wide["seconds"], wide["output"]) == (9.0, 6000)


def test_a_group_of_processes_replaces_the_sandboxs_memory_limit_and_no_commands_own() -> None:
    made: Any = open_sandbox(SandboxSpec(limits=Limits(memory_bytes=2**30), **OPEN))
    for counts, own, expected in (
        (False, None, 2**30),
        (False, Limits(memory_bytes=2**20), 2**20),
        (True, None, None),
        (True, Limits(memory_bytes=2**20), 2**20),
    ):
        made.counts_memory = counts
        found = dict(made._exec_request("true", limits=own)["limits"])
        assert found.get(resource.RLIMIT_AS) == expected, (counts, own)


async def test_a_command_runs_in_the_folder_that_it_names(sandbox: Sandbox) -> None:
    await sandbox.write("inner/a.txt", b"x")
    assert (await sandbox.exec("ls", cwd=f"{sandbox.folder}/inner")).stdout == b"a.txt\n"
    assert (await sandbox.exec("ls")).stdout == b"inner\n"


async def test_a_program_that_keeps_running_has_no_deadline_of_the_sandbox() -> None:
    async with open_sandbox(SandboxSpec(limits=Limits(seconds=0.3), **OPEN)) as sandbox:
        assert (await sandbox.exec("sleep 5")).timed_out
        program = await sandbox.spawn("sleep 0.5; echo done")
        assert (await program.read_line(), (await program.wait()).timed_out) == (b"done\n", False)


async def test_file_size_limit_is_exact(sandbox: Sandbox) -> None:
    await sandbox.write("a", b"x" * 5000)
    assert await sandbox.read("a", most=5000) == b"x" * 5000
    with pytest.raises(SandboxFileError, match="cannot read"):
        await sandbox.read("a", most=4999)


def test_own_ports_are_those_listed_for_loopback() -> None:
    hosts = AllowList.read(["example.org:8443", "127.0.0.1:81", "10.0.0.5:82", "127.0.0.1:83", "127.0.0.1", "[::1]:84"])
    assert hosts.own_ports == (81, 83)


@pytest.mark.parametrize("name", list(DEFAULT_LIMITS.non_null))
def test_non_default_limits_are_explicit_demands(name: str) -> None:
    default = DEFAULT_LIMITS.non_null[name]
    for value in (default - 1, default + 1):
        assert changed_limits(Limits(**{**DEFAULT_LIMITS.non_null, name: value})) == [name]
    assert changed_limits(DEFAULT_LIMITS) == []


def server(**fields: Any) -> SandboxServer:
    return SandboxServer(SandboxSpec(**fields), ServerSettings())


def test_client_gets_the_lower_limits_and_its_variables() -> None:
    served = server(
        limits=Limits(seconds=20.0, processes=40), env={"WORD": "server", "MORE": "kept"}, network="gateway"
    )
    wanted = {"limits": {"seconds": 5.0, "processes": 100}, "demanded": ["seconds"], "env": {"WORD": "client"}}
    spec = served._narrow_spec(wanted)
    assert (spec.limits.seconds, spec.limits.processes, spec.network) == (5.0, 40, "none")
    assert spec.env == {"WORD": "client", "MORE": "kept"}
    assert served._narrow_spec({**wanted, "network": "gateway"}).network == "gateway"
    with pytest.raises(UsageError, match=r"lower limits: got limits.processes=100, expected at most 40"):
        served._narrow_spec({**wanted, "demanded": ["processes", "seconds"]})
    with pytest.raises(UsageError, match="does not allow this network: got all, expected gateway"):
        served._narrow_spec({**wanted, "network": "all"})


async def test_call_id_cannot_be_reused_for_another_method() -> None:
    served = SandboxServer(SandboxSpec(**OPEN), ServerSettings())
    await served.start()
    place, call = f"{served.url}{SANDBOXES}/name-of-it", {"id": "first", "command": "true", "stdin": "", "env": {}}
    try:
        async with aiohttp.ClientSession() as session:
            async with session.put(place, json={"env": {}, "network": "all"}) as answer:
                assert answer.status == 200
            statuses = []
            for method in ("exec", "spawn", "exec"):
                async with session.post(f"{place}/{method}", json=call) as answer:
                    statuses.append(answer.status)
            assert statuses == [200, 409, 200]
    finally:
        await served.close()


async def test_the_newest_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "KEPT", 2)
    done = []
    sandbox: Any = None
    served = ServedSandbox(sandbox, lambda: 0.0)

    async def ask(call_id: str, request: bytes) -> bytes:
        async def do() -> dict[str, Any]:
            done.append(call_id)
            return {"number": len(done)}

        return (await served.answer(call_id, request, do)).body

    first = [await ask(name, b"exec") for name in "abcd"]
    assert await ask("d", b"exec") == first[3]
    assert await ask("c", b"exec") == first[2]
    assert done == list("abcd")
    assert await ask("a", b"exec") != first[0], "it was forgotten, and is done again"
    with pytest.raises(Refusal, match="used for a different call"):
        await ask("d", b"spawn")


def test_command_options_are_sent_in_separate_fields() -> None:
    sent = _write_command(["ls", "-l"], cwd="/elsewhere", env={"A": "1"}, limits=Limits(seconds=7))
    assert sent == {"command": ["ls", "-l"], "cwd": "/elsewhere", "env": {"A": "1"}, "limits": {"seconds": 7}}
    assert _write_command("ls") == {"command": "ls", "cwd": None, "env": {}, "limits": None}
