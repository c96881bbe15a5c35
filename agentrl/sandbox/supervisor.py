"""Supervisor: the first process inside a sandbox, which runs commands for the host over a socket or two pipes.

The host sends it as compiled code, with two helper modules; it imports only modules that load quickly. Each command
runs below a reaper, a process that adopts the command's orphans. When the reaper ends, on its own or killed at the
deadline, its descendants become this process's children and are killed; they are stopped first, so that a fork bomb
cannot outrun this process.

A request is ``<II`` (bytes of the header and the body), a marshalled dictionary, and the body. An answer is `ANSWER`
(request, flags, exit code, seconds, bytes of the two payloads), and the payloads.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import resource
import select
import struct
import time

from agentrl.sandbox import supervisor_files, supervisor_ports

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing these takes as long as the start of Python
    from collections.abc import Callable
    from typing import Any, NoReturn

REQUEST = struct.Struct("<II")
ANSWER = struct.Struct("<IBidII")
TIMED_OUT, TRUNCATED, BROKEN, OUT_OF_MEMORY = 1, 2, 4, 8
MAX_FD = 1 << 20
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
CANNOT_RUN, NOT_FOUND = 126, 127
FILE_ERROR = 1
THREADS = 17
"""Index of the thread count in ``/proc/PID/stat``, counted after the name."""
ROUNDS = 100
MAX_POLL_S = 1e6
MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Files of a container's own control group, under v2 and v1."""
FIRST_TO_DIE = b"1000"

SIGINT, SIGKILL, SIGTERM, SIGSTOP = 2, 9, 15, 19
SIGHUP, SIGPIPE, SIGXFSZ = 1, 13, 25
DEFAULT, IGNORE = 0, 1
PIECE = 65536

_libc = ctypes.CDLL(None)


class RunningCommand:
    """Command, or action on a file, that runs below its reaper."""

    def __init__(
        self, request: dict[str, Any], stdin: bytes, reaper: int, pipes: tuple[int, int, int], kills: int
    ) -> None:
        self.number: int = request["number"]
        self.reaper = reaper
        self.handle = os.pidfd_open(reaper)
        self.stdin, self.stdout, self.stderr = pipes
        self.is_spawned: bool = request["spawned"]
        self.most: int = request["output"]
        self.started = time.monotonic()
        self.deadline: float = self.started + request["seconds"]
        self.timed_out = self.truncated = self.ended = False
        self.out, self.err = bytearray(), bytearray()
        self.to_write: list[tuple[int, bytes | memoryview]] = [(0, stdin)] if stdin else []
        self.pull = 0
        self.kills = kills
        for fd in pipes:
            os.set_blocking(fd, False)

    def keep(self, kept: bytearray, data: bytes) -> None:
        """Append output; the buffer may exceed the limit by a quarter, so that dropping the middle costs little."""
        kept += data
        if len(kept) > self.most + self.most // 4:
            self.cut(kept)

    def cut(self, kept: bytearray) -> bytearray:
        """Drop the middle of output that is longer than the limit."""
        if len(kept) > self.most:
            self.truncated = True
            del kept[self.most // 2 : self.most // 2 + len(kept) - self.most]
        return kept


class Supervisor:
    """Server for the host's requests. It ends when the socket closes, and all processes in the sandbox end with it.

    Args:
        settings: Settings from the host: user of commands, control groups to join, working folder, file descriptor for
            answers. In a container, which the host does not kill, also the lifetime in seconds and seccomp filters.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.is_in_container = "life" in settings
        self.end = time.monotonic() + settings.get("life", float("inf"))
        self.jobs: dict[int, RunningCommand] = {}
        self.received = bytearray()
        self.poll = select.poll()
        self.on_event: dict[int, Callable[[], None]] = {}
        self.ports = supervisor_ports.SupervisorPorts(self._watch, self._forget, self._answer)
        self._watch(0, select.POLLIN, self._receive)

    def serve(self) -> NoReturn:
        """Report that the supervisor is ready, and serve until the host closes its end."""
        self._answer(0)
        while True:
            for fd, _ in self.poll.poll(self._patience()):
                if fd in self.on_event:
                    self.on_event[fd]()
            now = time.monotonic()
            if now >= self.end:
                os._exit(0)
            for job in list(self.jobs.values()):
                if now >= job.deadline and not job.ended and not job.timed_out:
                    job.timed_out = True
                    self._signal(job, SIGKILL)

    def _patience(self) -> float:
        """Return the milliseconds until the next deadline."""
        deadlines = [job.deadline for job in self.jobs.values() if not job.ended and not job.timed_out]
        left: float = min([*deadlines, self.end]) - time.monotonic()
        return min(max(0.0, left), MAX_POLL_S) * 1000 + 1

    def _watch(self, fd: int, events: int, action: Callable[[], None]) -> None:
        self.poll.register(fd, events)
        self.on_event[fd] = action

    def _forget(self, fd: int) -> None:
        if self.on_event.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def _close(self, fd: int) -> int:
        if fd >= 0:
            self._forget(fd)
            os.close(fd)
        return -1

    def _receive(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)
        self.received += data
        while len(self.received) >= REQUEST.size:
            head, body = REQUEST.unpack_from(self.received)
            if len(self.received) < REQUEST.size + head + body:
                return
            split = REQUEST.size + head
            request = marshal.loads(self.received[REQUEST.size : split])
            content = bytes(memoryview(self.received)[split : split + body])
            del self.received[: split + body]
            self._handle(request, content)

    def _handle(self, request: dict[str, Any], body: bytes) -> None:
        target = self.jobs.get(request.get("target", 0))
        match request["method"]:
            case "start":
                self._start(request, body)
            case "push":
                self._push(request["number"], target, body)
            case "pull":
                self._pull(request["number"], target)
            case "signal":
                self._signal(target, request["signal"])
                self._answer(request["number"])
            case "kill_all":
                for job in list(self.jobs.values()):
                    self._signal(job, SIGKILL)
                self._answer(request["number"])
            case "release" if target is not None:
                self._release(target)
            case "live":
                self.end = time.monotonic() + request["seconds"]
            case method if method in supervisor_ports.METHODS:
                self.ports.handle(request, body)

    def _answer(
        self,
        number: int,
        *,
        flags: int = 0,
        code: int = 0,
        seconds: float = 0.0,
        out: bytes | bytearray = b"",
        err: bytes | bytearray = b"",
    ) -> None:
        parts = [ANSWER.pack(number, flags, code, seconds, len(out), len(err)), out, err]
        for part in parts if len(out) > PIECE else [b"".join(parts)]:  # large output is not copied
            left = memoryview(part)
            while left:
                left = left[os.write(self.settings["answers"], left) :]

    def _start(self, request: dict[str, Any], stdin: bytes) -> None:
        try:
            theirs, ours = _pipes()
            reaper = os.fork()
        except OSError as error:
            self._answer(request["number"], flags=BROKEN, err=f"cannot create a process: {error}".encode())
            return
        if reaper == 0:
            _keep(request, self.settings, theirs)
        for fd in theirs:
            os.close(fd)
        job = RunningCommand(request, stdin, reaper, ours, self._memory_kills())
        self.jobs[job.number] = job
        self._watch(job.handle, select.POLLIN, lambda: self._end(job))
        self._watch(job.stderr, select.POLLIN, lambda: self._read_error(job))
        if not job.is_spawned:
            self._watch(job.stdout, select.POLLIN, lambda: self._read_output(job))
            job.to_write.append((-1, b""))
        self._feed(job)

    def _read_output(self, job: RunningCommand) -> None:
        if (data := _read(job.stdout)) == b"":
            job.stdout = self._close(job.stdout)
        job.keep(job.out, data or b"")

    def _read_error(self, job: RunningCommand) -> None:
        if (data := _read(job.stderr)) == b"":
            job.stderr = self._close(job.stderr)
        job.keep(job.err, data or b"")

    def _feed(self, job: RunningCommand) -> None:
        """Write pending input of the command; an entry without data closes its input."""
        while job.to_write and job.stdin >= 0:
            number, data = job.to_write.pop(0)
            try:
                written = os.write(job.stdin, data) if data else 0
            except BlockingIOError:
                job.to_write.insert(0, (number, data))
                self._watch(job.stdin, select.POLLOUT, lambda: self._feed(job))
                return
            except OSError:
                job.to_write.insert(0, (number, data))
                break
            if written < len(data):
                job.to_write.insert(0, (number, memoryview(data)[written:]))  # the rest is not copied
            elif number > 0:
                self._answer(number)
            elif number < 0:
                job.stdin = self._close(job.stdin)
        if job.to_write:
            self._refuse_input(job)
        elif job.stdin >= 0:
            self._forget(job.stdin)

    def _refuse_input(self, job: RunningCommand) -> None:
        job.stdin = self._close(job.stdin)
        for number, _ in job.to_write:
            if number > 0:
                self._answer(number, code=errno.EPIPE)
        job.to_write.clear()

    def _push(self, number: int, job: RunningCommand | None, data: bytes) -> None:
        if job is None or job.stdin < 0:
            self._answer(number, code=errno.EPIPE)
            return
        job.to_write.append((number, data))
        self._feed(job)

    def _pull(self, number: int, job: RunningCommand | None) -> None:
        if job is None or job.stdout < 0:
            self._answer(number)
            return
        job.pull = number
        self._watch(job.stdout, select.POLLIN, lambda: self._deliver(job))
        if job.ended:
            self._deliver(job)

    def _deliver(self, job: RunningCommand) -> None:
        """Answer the pending pull; after the program has ended, its pipe contains all remaining output."""
        data = _read(job.stdout)
        if data is None and not job.ended:
            return
        self._forget(job.stdout)
        if not data:
            self._release(job)
        number, job.pull = job.pull, 0
        self._answer(number, out=data or b"")

    def _release(self, job: RunningCommand) -> None:
        """Close the output of a program and stop reading it."""
        job.stdout = self._close(job.stdout)
        if job.ended:
            self.jobs.pop(job.number, None)

    def _signal(self, job: RunningCommand | None, number: int) -> None:
        if job is None or job.ended:
            return
        if number == SIGKILL:
            send_signal(job.reaper, SIGKILL)
            return
        for pid in processes_below({job.reaper}, process_parents()) - {job.reaper}:
            send_signal(pid, number)

    def _end(self, job: RunningCommand) -> None:
        """Handle the end of a reaper: kill remaining processes, read the last output, and answer."""
        job.handle = self._close(job.handle)
        code = os.waitstatus_to_exitcode(os.waitpid(job.reaper, 0)[1])
        job.ended = True
        self._kill_strays()
        if not job.is_spawned:
            _drain(job.stdout, lambda data: job.keep(job.out, data))
            job.stdout = self._close(job.stdout)
        if job.stdout < 0:
            del self.jobs[job.number]
        _drain(job.stderr, lambda data: job.keep(job.err, data))
        job.stderr = self._close(job.stderr)
        self._refuse_input(job)
        out, err = job.cut(job.out), job.cut(job.err)
        self._answer(
            job.number,
            flags=TIMED_OUT * job.timed_out
            | TRUNCATED * job.truncated
            | OUT_OF_MEMORY * (self._memory_kills() > job.kills),
            code=128 - code if code < 0 else code,
            seconds=time.monotonic() - job.started,
            out=out,
            err=err,
        )
        if job.pull:
            self._deliver(job)

    def _memory_kills(self) -> int:
        """Return the number of this container's processes that the kernel has killed at the memory limit."""
        for path in MEMORY_EVENTS if self.is_in_container else ():
            try:
                with open(path, "rb") as file:
                    words = file.read().split()
            except OSError:
                continue
            return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0
        return 0

    def _kill_strays(self) -> None:
        """Kill every descendant of this process that is not below the reaper of a running job."""
        reapers = {job.reaper for job in self.jobs.values() if not job.ended}
        stopped: set[int] = set()
        for _ in range(ROUNDS):
            parents = process_parents()
            kept = processes_below(reapers, parents) | {os.getpid()} | stopped
            strays = processes_below({os.getpid()}, parents) - kept
            if not strays:
                break
            for pid in strays:
                send_signal(pid, SIGSTOP)
            stopped |= strays
        else:
            _kill_all()
        for pid in stopped:
            send_signal(pid, SIGKILL)
        _reap(stopped)
        while _reap_any(reapers):
            pass


def process_parents() -> dict[int, int]:
    """Return the parent of each living process, including zombies with running threads."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] not in b"ZX" or int(fields[THREADS]) > 1:
                parents[int(name)] = int(fields[1])
    return parents


def processes_below(roots: set[int], parents: dict[int, int]) -> set[int]:
    """Return the roots and all their descendants."""
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def kill_tree(root: int) -> None:
    """Kill a process and all its descendants; they are stopped first, so that they cannot fork.

    Processes that are already stopped are killed, too. The caller must be the parent of `root`, so that its PID is not
    reused.
    """
    stopped: set[int] = set()
    for _ in range(ROUNDS):
        found = processes_below({root}, process_parents()) - stopped
        if not found:
            break
        for pid in found:
            send_signal(pid, SIGSTOP)
        stopped |= found
    for pid in stopped:
        send_signal(pid, SIGKILL)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal; returns False if the process does not exist."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _kill_all() -> None:
    """Kill all processes, including other jobs, because a process cannot be stopped."""
    if os.getpid() != 1:
        os._exit(1)
    os.kill(-1, SIGKILL)


def _reap(killed: set[int]) -> None:
    """Wait for killed processes. Descendants of another process become this process's children when that one ends."""
    waiting, before = set(killed), len(killed) + 1
    while len(waiting) < before:
        before = len(waiting)
        waiting = {pid for pid in waiting if not _reap_one(pid)}


def _reap_any(reapers: set[int]) -> bool:
    """Reap one dead child; return False if there is none, or if it is a reaper whose event is still to be handled."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is not None and found.si_pid not in reapers and _reap_one(found.si_pid)


def _reap_one(pid: int) -> bool:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return False
    return True


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Create pipes for standard input, output and error; returns the command's ends and this process's ends."""
    opened: list[int] = []
    try:
        for _ in range(3):
            opened += os.pipe()
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    return (opened[0], opened[3], opened[5]), (opened[1], opened[2], opened[4])


def _read(fd: int) -> bytes | None:
    """Read the content of a pipe; empty at its end, ``None`` if no data is available."""
    try:
        return os.read(fd, PIECE)
    except BlockingIOError:
        return None


def _drain(fd: int, keep: Callable[[bytes], None]) -> None:
    """Read the rest of a pipe, at most its capacity, because another process may still hold its other end open."""
    for _ in range(17):
        data = _read(fd) if fd >= 0 else None
        if not data:
            return
        keep(data)


def _keep(request: dict[str, Any], settings: dict[str, Any], pipes: tuple[int, int, int]) -> NoReturn:
    """Start the command, adopt its orphans, and exit with its exit code."""
    code = CANNOT_RUN
    try:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        command = os.fork()
        if command == 0:
            _become(request, settings, pipes)
        os.closerange(0, MAX_FD)
        pid = 0
        while pid != command:
            pid, status = os.waitpid(-1, 0)
        code = os.waitstatus_to_exitcode(status)
    finally:
        os._exit(128 - code if code < 0 else code)


def _become(request: dict[str, Any], settings: dict[str, Any], pipes: tuple[int, int, int]) -> NoReturn:
    """Set up the command's process and run the command in it."""
    code = CANNOT_RUN
    try:
        os.setsid()
        for fd, pipe in enumerate(pipes):
            os.dup2(pipe, fd)
        for group in settings["groups"]:
            os.write(group, b"0")
        os.closerange(3, MAX_FD)
        if "life" in settings:
            with open("/proc/self/oom_score_adj", "wb") as file:
                file.write(FIRST_TO_DIE)  # protects the supervisor, which is in the same control group
        for number in (SIGPIPE, SIGXFSZ, SIGINT, SIGTERM, SIGHUP):
            _libc.signal(number, DEFAULT)
        for kind, most in request["limits"]:
            hard = resource.getrlimit(kind)[1]
            allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (allowed, allowed))
        if settings["user"]:
            os.setgroups([])
            os.setresgid(settings["user"], settings["user"], settings["user"])
            os.setresuid(settings["user"], settings["user"], settings["user"])
        if "filters" in settings:
            _filter(settings["filters"][os.uname().machine])
        os.umask(0o022)
        if request["cwd"] != settings["folder"]:  # else it is this folder, even if commands may no longer enter it
            os.chdir(request["cwd"])
        code = _run(request)
    except FileNotFoundError as error:
        code = NOT_FOUND
        _complain(error)
    except OSError as error:
        _complain(error)
    except ValueError as error:  # a text cannot be encoded
        os.write(2, f"{error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def _filter(program: bytes) -> None:
    """Install a seccomp filter for this process and its descendants."""
    steps = ctypes.create_string_buffer(program, len(program))
    argument = struct.pack("HP", len(program) // 8, ctypes.addressof(steps))
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(argument), 0, 0) != 0:
        raise OSError("a seccomp filter cannot be installed")


def _complain(error: OSError) -> None:
    name = error.filename
    text = f"{name.decode() if isinstance(name, bytes) else name}: {error.strerror}" if name else str(error.strerror)
    os.write(2, f"{text}\n".encode(errors="surrogateescape"))


def _run(request: dict[str, Any]) -> int:
    action = request["action"]
    if action == "exec":
        _execute(request["argv"], request["env"])
    try:
        supervisor_files.ACTIONS[action](request)
    except OSError as error:
        _complain(error)
        return FILE_ERROR
    return 0


def _execute(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Replace this process with a program, which is looked up as in a shell."""
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    refused: OSError = FileNotFoundError(errno.ENOENT, "command not found", argv[0])
    for folder in env.get("PATH", os.defpath).split(":"):
        try:
            os.execve(f"{folder}/{argv[0]}", argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            error.filename = argv[0]
            refused = error
    raise refused


def main(settings: dict[str, Any]) -> NoReturn:
    """Apply the host's settings and serve."""
    _libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (SIGINT, SIGTERM, SIGHUP):
        _libc.signal(number, IGNORE)
    for fd in settings["groups"]:
        os.set_inheritable(fd, False)
    for folder in settings.get("owned", [settings["folder"]]) if settings["user"] else []:
        os.chown(folder, settings["user"], settings["user"])
    if "filters" in settings and os.uname().machine not in settings["filters"]:
        os.write(2, f"no seccomp filter for {os.uname().machine}".encode())
        os._exit(1)
    os.chdir(settings["folder"])
    Supervisor(settings).serve()
