"""Episodes beside each other, and episodes that are cut off."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any, cast

from agentrl.env import AsyncEnv, Isolation, settled
from agentrl.task import Task
from agentrl.testing.env_rules.determinism import require_equal
from agentrl.testing.env_session import LONG_CALL, Moment, Played, asking, is_call, made, replay
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject, Suspect

TRUSTED = frozenset({"aiohttp", "gymnasium", "numpy", "orjson", "PIL", "pydantic", "rapidfuzz", "agentrl"})
"""Packages with native code that this framework itself runs on."""
_THREADS_OF_PYTHON = ("asyncio_", "waitpid-", "environment check")
"""Beginnings of names of threads that an environment did not start itself."""
DEADLINE_S = 60.0
"""Seconds after which something hangs."""
_SHORT_TURN_S = 1e-5
"""Threads take turns this often: what they must not share is then shared sooner."""


def is_isolated_enough(subject: Subject) -> Finding:
    """Environments that may end the process (native code, threads of their own) run in worker processes."""
    if subject.spec.isolation_under(subject.options) is Isolation.PROCESS:
        raise Missing("it runs in worker processes")
    before = set(threading.enumerate())
    with subject.session() as session:
        session.reset(subject.tasks[0])
        started = [thread.name for thread in set(threading.enumerate()) - before]
        native = _native_packages(type(getattr(session.env, "unwrapped", session.env)))
    if own := [name for name in started if not name.startswith(_THREADS_OF_PYTHON)]:
        raise Suspect(f"it starts threads ({', '.join(sorted(own)[:3])}): what one of them breaks ends the run")
    if native:
        raise Suspect(f"its module uses native code ({', '.join(native[:3])}): a crash there ends the run")
    return Finding(detail="no native code and no threads seen")


def _native_packages(kind: type) -> list[str]:
    """Packages with extension modules that the modules of an environment's classes have imported."""
    modules = [sys.modules.get(base.__module__) for base in kind.__mro__]
    names = {name for module in modules if module is not None for name in _imported(module)}
    roots = {name.partition(".")[0] for name in names} - TRUSTED - sys.stdlib_module_names
    return sorted(root for root in roots if _has_extension(root))


def _imported(module: ModuleType) -> set[str]:
    """Names of the modules that a module's globals are, or come from."""
    values = list(vars(module).values())
    named = {value.__name__ for value in values if isinstance(value, ModuleType)}
    return named | {value.__module__ for value in values if isinstance(getattr(value, "__module__", None), str)}


def _has_extension(root: str) -> bool:
    loaded = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == root]
    files = [str(getattr(module, "__file__", None)) for module in loaded]
    return any(file.endswith(tuple(EXTENSION_SUFFIXES)) for file in files)


def runs_interleaved(subject: Subject) -> Finding:
    """Episodes that take turns in one process are as if alone."""
    alone = subject.alone
    together = asyncio.run(_take_turns(subject, alone))
    for one, other in zip(alone, together, strict=True):
        require_equal(one.moments, other, "an episode beside others differs from the same alone")
    return Finding(detail=f"{len(alone)} episodes at once are as if alone")


async def _take_turns(subject: Subject, alone: Sequence[Played]) -> list[list[Moment]]:
    envs = [made(subject.spec.make, subject.options) for _ in alone]
    try:
        plays = (replay(*played) for played in zip(envs, subject.tasks, (e.actions for e in alone), strict=False))
        return list(await asyncio.gather(*plays))
    finally:
        for env in envs:
            await settled(env.close())


def runs_in_threads(subject: Subject) -> Finding:
    """Episodes in several threads at once are as if alone."""
    if subject.spec.isolation_under(subject.options) is not Isolation.THREAD:
        raise Missing("its code does not run in threads")
    alone = subject.alone
    with subject.session() as session:
        if isinstance(session.env, AsyncEnv):
            raise Missing("its steps are awaited in the event loop")
    for one, other in zip(alone, _play_in_threads(subject, alone), strict=True):
        require_equal(one.moments, other, "an episode in a thread beside others differs from the same alone")
    return Finding(detail=f"{len(alone)} episodes in threads are as if alone")


def _play_in_threads(subject: Subject, alone: Sequence[Played]) -> list[list[Moment]]:
    start = threading.Barrier(len(alone))
    ended: dict[int, list[Moment] | Exception] = {}

    def run(number: int, task: Task, actions: Sequence[str]) -> None:
        try:
            env = made(subject.spec.make, subject.options)
            start.wait(DEADLINE_S)
            try:
                ended[number] = asyncio.run(replay(env, task, actions))
            finally:
                env.close()
        except Exception as error:  # a thread's error is the rule's
            start.abort()
            ended.setdefault(number, error)

    plays = enumerate(zip(subject.tasks, (episode.actions for episode in alone), strict=False))
    threads = [threading.Thread(target=run, args=(number, *play), daemon=True) for number, play in plays]
    _run_threads(threads)
    results = [ended.get(number) for number in range(len(threads))]
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [result for result in results if isinstance(result, list)]


def _run_threads(threads: Sequence[threading.Thread]) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SHORT_TURN_S)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    finally:
        sys.setswitchinterval(before)
    if any(thread.is_alive() for thread in threads):
        raise Broken(f"an episode in a thread beside others did not end within {DEADLINE_S:g} s")


def survives_cancellation(subject: Subject) -> Finding:
    """After a reset or a step that was cancelled while it was awaited, the next episode is as new."""
    with subject.session() as session:
        if not isinstance(session.env, AsyncEnv):
            raise Missing("nothing is awaited, so nothing can be cancelled")
    fresh = subject.alone[0]
    with asking("a call after a cancelled one", times=LONG_CALL):
        cut = asyncio.run(_cut_and_go_on(subject, fresh))
    if not cut:
        raise Missing("its steps were over before they could be cancelled")
    return Finding(detail=f"an episode is the same after {cut} cancelled calls")


async def _cut_and_go_on(subject: Subject, fresh: Played) -> int:
    task = subject.tasks[0]
    env = cast("AsyncEnv", made(subject.spec.make, subject.options))
    cut = 0
    try:
        for pauses in range(1, 4):
            cut += await _cancel(env.reset(seed=task.seed, options=dict(task.options)), pauses)
            async with asyncio.timeout(DEADLINE_S):
                await env.reset(seed=task.seed, options=dict(task.options))
            cut += await _cancel(env.step(next((said for said in fresh.actions if not is_call(said)), "")), pauses)
            async with asyncio.timeout(DEADLINE_S):
                again = await replay(env, task, fresh.actions)
            require_equal(fresh.moments, again, "an episode after a cancelled one differs")
    finally:
        await env.close()
    return cut


async def _cancel(call: Coroutine[Any, Any, Any], pauses: int) -> bool:
    """Whether a call was still awaited after some turns of the event loop, and could be cancelled."""
    running = asyncio.ensure_future(call)
    for _ in range(pauses):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=DEADLINE_S)
    if not running.done():
        raise Broken(f"a cancelled call went on for {DEADLINE_S:g} s")
    if not running.cancelled():
        running.exception()
    return running.cancelled()
