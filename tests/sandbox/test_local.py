"""What only local sandboxes have: their walls, their supervisor, their control groups."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.waiting import wait_until

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import Limits, SandboxFileError, SandboxSpec, isolation, open_sandbox, supervised
from agentrl.sandbox.control_groups import PREFIX, ControlGroup, Hierarchy, find_hierarchy
from agentrl.sandbox.isolation import _CHECKED, _DENIED, _UNACCOUNTED, filter_program, find_bubblewrap, own_folders
from agentrl.sandbox.local import END_DEADLINE_S, UNCONFINED, LocalSandbox
from agentrl.sandbox.supervisor import process_parents, processes_below

HEADERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
AGENTRL = (sys.executable, "-c", "from agentrl.cli import main; main()")
OWNER = """
import asyncio, json, os, sys
from agentrl.sandbox import open_sandbox
async def main():
    sandbox = open_sandbox()
    await sandbox.start()
    program = await sandbox.spawn("echo ready; exec sleep 987")
    await program.read_line()
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def processes_with(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_sandbox_dies_with_the_process_that_made_it():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == "ready\n"
            wait_until(lambda: processes_with("987"), "a process of the sandbox")
        finally:
            owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes_with("987"), "the end of the sandbox")
    find_hierarchy.cache_clear()
    hierarchy = find_hierarchy()
    folders = hierarchy.folders.values() if hierarchy is not None else ()
    assert [group for folder in folders for group in folder.glob(f"{PREFIX}{owner.pid}-*")] == []


async def test_a_start_that_is_given_up_leaves_no_process():
    word = f"given-up-{os.getpid()}"
    for moment in range(40):
        sandbox = open_sandbox(SandboxSpec(env={"WORD": word}))
        start = asyncio.ensure_future(sandbox.start())
        await asyncio.sleep(moment * 0.0005)
        start.cancel()
        await sandbox.close()
        await asyncio.gather(start, return_exceptions=True)
    wait_until(lambda: not processes_with(word), "the end of the program")


async def test_a_killed_sandbox_is_a_failure_of_the_machinery():
    async with open_sandbox() as sandbox:
        program = await sandbox.spawn("sleep 100")
        call = asyncio.create_task(sandbox.exec("sleep 100"))
        await sandbox.exec("true")
        os.kill(sandbox._program._process.pid, signal.SIGKILL)
        for waiting in (call, program.wait(), program.read()):
            with pytest.raises(SandboxError, match="the sandbox is gone"):
                await waiting
        with pytest.raises(SandboxError, match="the sandbox is gone"):
            await sandbox.exec("true")


def stop_everything(sandbox: LocalSandbox) -> set[int]:
    """Stop all processes of a sandbox, as a debugger or a user could."""
    processes = processes_below({sandbox._program._process.pid}, process_parents())
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    return processes


UNWALLED = SandboxSpec(network="all", options={"unconfined": UNCONFINED})


@pytest.mark.parametrize("spec", [SandboxSpec(), UNWALLED])
async def test_a_sandbox_whose_processes_are_all_stopped_closes(spec: SandboxSpec):
    sandbox = open_sandbox(spec)
    await sandbox.start()
    program = await sandbox.spawn("echo ready; exec sleep 988")
    await program.read_line()
    processes = stop_everything(sandbox)
    assert len(processes) >= 3
    async with asyncio.timeout(END_DEADLINE_S / 2):
        await sandbox.close()
    wait_until(lambda: not processes & process_parents().keys(), "the end of all processes")


async def test_a_sandbox_whose_processes_are_all_stopped_keeps_its_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervised, "COMMAND_GRACE_S", 0.3)
    monkeypatch.setattr(supervised, "SUPERVISOR_ANSWER_S", 0.3)
    async with open_sandbox() as sandbox:
        program = await sandbox.spawn("exec sleep 989")
        await asyncio.to_thread(wait_until, lambda: processes_with("989"), "a process of the sandbox")
        processes = stop_everything(sandbox)
        with pytest.raises(SandboxError, match=r"does not answer: got no answer to the request signal in 0\.3 s"):
            await program.kill()
        assert processes_with("989")
        with pytest.raises(SandboxError, match=r"the sandbox does not answer and was killed: got no answer in 0\.5 s"):
            await sandbox.exec("true", limits=Limits(seconds=0.2))
        wait_until(lambda: not processes & process_parents().keys(), "the end of all processes")
        with pytest.raises(SandboxError, match="the sandbox is gone"):
            await sandbox.exec("true")


async def test_commands_that_cannot_be_started_say_why():
    async with open_sandbox() as sandbox:
        long = await sandbox.exec(["echo", "x" * 3_000_000])
        assert (long.exit_code, b"Argument list too long" in long.stderr) == (126, True)
        broken = await sandbox.exec(["echo", "\ud800"])
        assert (broken.exit_code, b"surrogates not allowed" in broken.stderr) == (126, True)
        for command in ("echo a\0b", ["a\0b"]):
            null = await sandbox.exec(command)
            assert (null.exit_code, b"embedded null" in null.stderr) == (126, True)
        for command, env in (([], {}), ("true", {"A=B": "c"}), ("true", {"A": "\0"})):
            with pytest.raises(UsageError, match="a command is invalid"):
                await sandbox.exec(command, env=env)


async def test_input_takes_time_in_proportion_to_its_size():
    """If each write copied the rest of the input, the sandbox would not answer in time and be killed."""
    async with open_sandbox() as sandbox:
        counted = await sandbox.exec("wc -c", stdin=bytes(100 * 2**20))
    assert counted.stdout.split() == [b"104857600"]


async def test_error_names_the_path_that_cannot_be_written():
    async with open_sandbox() as sandbox:
        with pytest.raises(SandboxFileError, match=r"a path is invalid: got 'a\\ud800'"):
            await sandbox.write("a\ud800", b"x")
        await sandbox.write("a\udcff", b"x")
        assert [entry.name for entry in await sandbox.list()] == ["a\udcff"]


async def test_calls_of_a_closed_sandbox_raise():
    sandbox = open_sandbox()
    await sandbox.start()
    await sandbox.close()
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        await sandbox.read("file")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody may read."""
    (tmp_path / "data.txt").write_text("host data")
    tmp_path.chmod(0o755)
    return tmp_path


async def test_the_specs_files_variables_and_folders_are_there(shared: Path):
    options = {"readable": [str(shared)]}
    spec = {"type": "local", "files": {"in/a.txt": "text"}, "env": {"WHO": "me"}, "options": options}
    async with open_sandbox(spec) as sandbox:
        seen = await sandbox.exec(["sh", "-c", 'cat in/a.txt "$0"/data.txt; echo " $WHO"; touch "$0/x"', str(shared)])
    assert seen.stdout == b"texthost data me\n"
    assert os.listdir(shared) == ["data.txt"]


async def test_writable_folders_and_the_working_folder_are_options():
    options = {"writable": ["/logs", "/opt/task/data"], "folder": "/app"}
    async with open_sandbox({"options": options}) as sandbox:
        await sandbox.write("a.txt", b"1")
        await sandbox.write(
            "/logs/run.sh", b"#!/bin/sh\npwd; cat a.txt; touch /opt/task/data/x; touch /opt/x", executable=True
        )
        seen = await sandbox.exec(["/logs/run.sh"])
        assert seen.stdout == b"/app\n1"
        assert b"/opt/x" in seen.stderr
        assert [entry.name for entry in await sandbox.list("/opt/task/data")] == ["x"]
        saved = await sandbox.snapshot()
        assert (await sandbox.exec("echo $HOME; touch /work/x")).stdout == b"/app\n"
    async with open_sandbox({"options": options}) as sandbox:
        await sandbox.restore(saved)
        assert (await sandbox.exec("cat /app/a.txt; ls /logs")).stdout == b"1"


async def test_the_code_of_agentrl_is_hidden():
    root = Path(__file__).parents[2]
    async with open_sandbox({"options": {"readable": [str(root)]}}) as sandbox:
        seen = await sandbox.exec(["sh", "-c", 'cd "$0"; ls agentrl envs tools agent_loops; ls README.md', str(root)])
        assert seen.stdout.decode().split("\n\n") == ["agent_loops:", "agentrl:", "envs:", "tools:\nREADME.md\n"]
        made = await sandbox.exec(["sh", "-c", 'cd "$0"; touch envs/x', str(root)])
        assert not made.is_success


async def test_an_agentrl_that_is_installed_for_the_python_inside_is_hidden(shared: Path, monkeypatch):
    installed = shared / "lib/python3.11/site-packages/agentrl"
    installed.mkdir(parents=True)
    (installed / "secret.py").write_text("answer = 42")
    monkeypatch.setattr(isolation, "INSTALLED_IN", (shared,))
    own_folders.cache_clear()
    try:
        assert installed in own_folders()
        async with open_sandbox({"options": {"readable": [str(shared)]}}) as sandbox:
            assert (await sandbox.exec(["ls", str(installed)])).stdout == b""
    finally:
        own_folders.cache_clear()


async def test_without_walls_only_in_these_words():
    for words in ("yes", "true", UNCONFINED[:-1]):
        with pytest.raises(UsageError, match="needs exactly this text"):
            open_sandbox({"network": "all", "options": {"unconfined": words}})
    async with open_sandbox({"network": "all", "options": {"unconfined": UNCONFINED}}) as sandbox:
        result = await sandbox.exec("pwd; sleep 100 & echo done")
        assert result.stdout.decode().split() == [sandbox.folder, "done"]
        assert (await sandbox.exec("sleep 100", limits=Limits(seconds=0.2))).timed_out
        await sandbox.write("file", b"data")
        assert os.listdir(sandbox.folder) == ["file"]
    assert Path(sandbox.folder).name not in os.listdir(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"image": "debian"}, "has no image"),
        ({"url": "http://127.0.0.1"}, "has no url"),
        ({"network": "al"}, "Did you mean 'all'"),
        ({"network": []}, "expected none, gateway, all, or a list of hosts"),
        ({"network": 3}, "expected none, all, or a list of hosts"),
        ({"network": ["example.org", "all"]}, "sandbox.network is invalid"),
        ({"network": ["https://example.org"]}, "Remove any scheme and path"),
        ({"network": "gateway"}, "only the external loop's sandbox"),
        ({"network": ["gateway", "example.org"]}, "only the external loop's sandbox"),
        ({"options": {"unconfined": UNCONFINED}}, "can use this machine's whole network: got network none"),
        ({"network": ["example.org"], "options": {"unconfined": UNCONFINED}}, "can use this machine's whole network"),
        ({"options": {"readible": ["/usr"]}}, "option of local sandboxes is invalid"),
        ({"options": {"readable": ["no/such"]}}, "does not exist"),
        ({"options": {"readable": "/usr"}}, "expected a list"),
        ({"options": {"writable": "/logs"}}, "writable folders of a sandbox are invalid"),
        ({"options": {"folder": 3}}, "the folder of a sandbox is invalid"),
        ({"options": {"folder": "app"}}, "cannot be made writable: got app"),
        ({"options": {"folder": "/"}}, "cannot be made writable"),
        ({"options": {"writable": ["/usr/share/x"]}}, "cannot be made writable: got /usr/share/x"),
        ({"options": {"writable": ["/a/../usr"]}}, "cannot be made writable"),
        ({"options": {"writable": ["/work/x"], "folder": "/work/x/y"}}, "cannot be made writable"),
        ({"options": {"writable": ["/a"], "folder": "/a/b"}}, "cannot be made writable: got /a"),
        ({"options": {"writable": ["/usr/"], "readable": ["/usr"]}}, "cannot be made writable"),
        ({"limit": {}}, "Did you mean 'limits'"),
        ({"limits": {"second": 5}}, "Did you mean 'seconds'"),
        ({"limits": {"seconds": "5"}}, "expected a number above 0"),
        ({"limits": 5}, "expected keys and values"),
        ({"env": ["A"]}, "expected keys and values"),
        ({"type": "locl"}, "Did you mean 'local'"),
    ],
)
def test_unsupported_specs_are_rejected(spec, message):
    with pytest.raises(UsageError, match=message):
        open_sandbox(spec)


def test_error_suggests_installing_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt-get install bubblewrap"):
        find_bubblewrap()
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(UsageError, match=r"No permissions to create new namespace.*docker run --privileged"):
        find_bubblewrap()


@pytest.mark.skipif(not HEADERS.exists(), reason="no kernel headers here")
def test_numbers_of_system_calls_are_the_kernels():
    told = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADERS.read_text()))
    known = {name: numbers[0] for name, numbers in (_DENIED | _UNACCOUNTED | _CHECKED).items()}
    assert {name: number for name, number in known.items() if name in told and int(told[name]) != number} == {}
    assert len(known.keys() & told.keys()) > 40


def test_filter_depends_only_on_a_known_processor():
    assert len(filter_program(is_memory_counted=False, machine="aarch64")) % 8 == 0
    with pytest.raises(UsageError, match="expected x86_64 or aarch64"):
        filter_program(is_memory_counted=True, machine="riscv64")


def test_a_group_of_version_2_needs_nothing_else(tmp_path: Path):
    group = ControlGroup(Hierarchy({"memory": tmp_path, "pids": tmp_path}, 2), Limits(memory_bytes=5, processes=7))
    (folder,) = tmp_path.iterdir()
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {"memory.max": "5", "pids.max": "7"}
    (folder / "memory.events").write_text("low 0\nmax 9\noom 4\noom_kill 3\n")
    assert group.memory_kills() == 3


async def test_many_commands_leave_no_open_files_in_the_supervisor():
    async with open_sandbox() as sandbox:
        count = "ls /proc/1/fd | wc -l" if os.geteuid() else "true"
        for _ in range(20):
            await sandbox.exec(count)
            program = await sandbox.spawn("echo a; sleep 50")
            await program.read_line()
            await program.kill()
        pid = sandbox._program._process.pid
        assert len(os.listdir(f"/proc/{child_of(pid)}/fd")) < 12


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.slow
def test_run_prints_the_output_and_ends_with_the_commands_code():
    words = [sys.executable, "-c", "from agentrl.cli import main; main()", "sandbox", "run", "--stdin", "--"]
    ended = subprocess.run(
        [*words, "sh", "-c", "cat; exit 9"], input="text", capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (9, "text")


@pytest.mark.slow
def test_notices_start_on_a_new_line():
    command = [*AGENTRL, "sandbox", "run", "--set", "limits.output_bytes=3", "--", "echo", "hello"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert ended.stdout == "ho\nthe middle of the output was dropped (limits.output_bytes)\n"


@pytest.mark.slow
def test_check_writes_its_report(tmp_path: Path):
    words = [*AGENTRL, "sandbox", "check", "local", "--json", "-"]
    ended = subprocess.run([*words, "--only", "runs-commands"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (back_end,) = json.loads(ended.stdout)["back_ends"]
    assert (back_end["passed"], back_end["rows"][0]["check"]) == (True, "runs commands")


def test_a_ready_spec_needs_nothing_more():
    spec = SandboxSpec(limits=Limits(seconds=3.0))
    assert (spec.limits.seconds, spec.limits.processes) == (3.0, 128)
