"""Rules about repeated play: equal tasks give equal episodes, and different tasks give different ones.

This includes play in another process, after other episodes, concurrently with others, after a cancellation, and from a
snapshot.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import pickle
import sys
import threading
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any, cast

from agentrl.env import AsyncEnv, Isolation, maybe_await
from agentrl.task import Task, copy_options
from agentrl.testing.env_session import (
    LONG_CALL,
    EnvSession,
    PlayedEpisode,
    StepSnapshot,
    asking,
    is_call,
    make_environment,
    moment_of,
    play,
    random_policy,
    replay,
    replay_in,
)
from agentrl.testing.env_subject import Subject, process_settings, transcript, until
from agentrl.testing.report import RuleFailed, RuleSkipped, RuleWarned, rule

_TASKS_COMPARED = 32
"""Maximum number of tasks; more would reject a small environment with about a hundred different episodes."""
_STEPS_COMPARED = 5
"""Maximum number of steps in which different tasks must differ under the same random policy."""
_STEPS_AFTER = 10
TRUSTED = frozenset({"aiohttp", "gymnasium", "numpy", "orjson", "PIL", "pydantic", "rapidfuzz", "agentrl"})
"""Packages with native code that this framework itself uses."""
_THREADS_OF_PYTHON = ("asyncio_", "waitpid-", "environment check")
"""Name prefixes of threads that do not belong to the environment."""
HANGING_S = 60.0
"""Seconds after which an operation counts as hanging."""
_SHORT_TURN_S = 1e-5
"""Seconds between thread switches, short so that conflicts appear sooner."""


def require_equal(first: Sequence[StepSnapshot], second: Sequence[StepSnapshot], what: str) -> None:
    """Raise `RuleFailed` with the first difference unless both are equal."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if repr(one) != repr(other):  # nan is not equal to itself
            raise RuleFailed(f"{what} at observation {number}: {_difference(one, other)}")
    if len(first) != len(second):
        raise RuleFailed(f"{what} in length: {len(first)} and {len(second)} observations")


def _difference(one: StepSnapshot, other: StepSnapshot) -> str:
    if one.observation != other.observation:
        return f"{one.observation[:60]!r} and {other.observation[:60]!r}"
    field = next(name for name in StepSnapshot._fields if repr(getattr(one, name)) != repr(getattr(other, name)))
    return f"{field} {getattr(one, field)!r} and {getattr(other, field)!r}"


@rule("draw only from `self.np_random`; use no global generator, no clock, and no order of a set")
def is_deterministic(subject: Subject) -> str:
    """A second environment gives the same episodes."""
    second = transcript(subject.spec.make, subject.options, subject.tasks, subject.limit)
    require_equal(subject.transcript, second, "two environments differ")
    return f"{len(second)} observations equal"


@rule("sort the contents of sets and folders, and do not use `hash()`; make `make` importable from a module by name")
def is_the_same_everywhere(subject: Subject) -> str:
    """Another process gives the same episodes."""
    elsewhere = subject.elsewhere
    if elsewhere.unknown and subject.spec.isolation_under(subject.options) is not Isolation.PROCESS:
        hint = "" if ":" in subject.spec.name else "; use the name module:EnvId to run it in worker processes"
        raise RuleSkipped(f"{elsewhere.unknown}{hint}")
    if problem := elsewhere.unknown or elsewhere.failure or elsewhere.end:
        raise RuleFailed(problem)
    require_equal(subject.transcript, elsewhere.moments, "two processes differ")
    return f"{len(elsewhere.moments)} observations equal"


@rule("set every attribute of an episode in `reset`")
def resets_completely(subject: Subject) -> str:
    """No episode, finished or abandoned, changes the next one."""
    task = subject.tasks[0]
    with subject.session() as session:
        fresh = play(session, task, random_policy(task.seed), subject.limit)
        for number, steps in enumerate((1, 0, 3, subject.limit)):
            other = subject.tasks[number % len(subject.tasks)]
            play(session, other, random_policy(other.seed + 1), steps)
        again = play(session, task, random_policy(task.seed), subject.limit)
    require_equal(fresh.moments, again.moments, "an episode depends on those before it")
    return "an episode is the same after other episodes"


@rule("use the seed or the options in `reset`; offer fewer tasks if there are no more")
def differs_between_tasks(subject: Subject) -> str:
    """Different tasks are different episodes: a seed or an option changes the observations or the hidden state."""
    count = min(subject.effort.openings, _TASKS_COMPARED, len(subject.source))
    if count < 2:
        raise RuleSkipped("only one task")
    seen: set[str] = set()
    with subject.session() as session:
        numbers = list(until(subject.effort.openings_s, range(count)))
        for number in numbers:
            seen.add(_evidence(session, subject.source[number], min(subject.limit, _STEPS_COMPARED)))
        if 2 * len(seen) >= len(numbers) > 1:
            return f"{len(seen)} different episodes in {len(numbers)} tasks"
        hidden = {_hidden_state(session, subject.source[number]) for number in numbers}
    return _judge_hidden(len(numbers), seen, hidden)


def _judge_hidden(played: int, seen: set[str], hidden: set[str | None]) -> str:
    """Judge tasks that mostly look alike, by their hidden states."""
    different = max(len(seen), len(hidden))
    if None in hidden:
        raise RuleWarned(
            f"{played} tasks look like {len(seen)} different ones, and their states cannot be compared: add state_key()"
        )
    if different == 1:
        raise RuleFailed(f"{played} tasks are the same episode: are their seeds or options used?")
    if 2 * different < played:
        raise RuleWarned(f"only {different} different episodes in {played} tasks")
    return f"{played} tasks look like {len(seen)} different ones and have {len(hidden)} different hidden states"


def _evidence(session: EnvSession, task: Task, steps: int) -> str:
    """Return an identity of a task: its opening and state key or, without a key, its first steps."""
    observation = session.reset(task)
    key = session.call("state_key")
    if key is not None:
        return repr((observation, key))
    return repr(play(session, task, random_policy(0), steps).moments)


def _hidden_state(session: EnvSession, task: Task) -> str | None:
    """Return a checksum of the environment's attributes at the start of a task; ``None`` if they are not plain data.

    Generators are excluded: they differ with the seed even if nothing is drawn.
    """
    session.reset(task)
    bare = getattr(session.env, "unwrapped", session.env)
    state = {name: value for name, value in vars(bare).items() if not name.startswith("_np_random")}
    try:
        return hashlib.sha256(pickle.dumps(state)).hexdigest()
    except Exception:  # an attribute that cannot be pickled is not plain data
        return None


@rule("compute the key only from the state, as text: from sorted plain data, or as its checksum")
def has_stable_state_keys(subject: Subject) -> str:
    """`state_key()` is text, and the same for the same state, in a second call and in another environment."""
    compared = 0
    with subject.session() as session, subject.session() as other:
        if session.find("state_key") is None:
            raise RuleSkipped("no state_key()")
        for task, played in zip(subject.tasks, subject.single_episodes, strict=False):
            is_same = session.reset(task) == other.reset(task)
            _require_equal_keys(session, other)
            for action in played.actions:
                is_same = is_same and session.step(action).observation == other.step(action).observation
                if not is_same:  # another rule reports this
                    break
                _require_equal_keys(session, other)
                compared += 1
    return f"{compared} states have equal keys"


def _require_equal_keys(session: EnvSession, other: EnvSession) -> None:
    key = session.call("state_key")
    if not isinstance(key, str):
        raise RuleFailed(f"state_key() gave a {type(key).__name__}, expected text")
    if session.call("state_key") != key:
        raise RuleFailed("state_key() returns another key in a second call")
    if other.call("state_key") != key:
        raise RuleFailed("state_key() differs between two environments after the same actions")


@rule("save the whole state, including step counts and generators, as JSON types")
def restores_snapshots(subject: Subject) -> str:
    """A snapshot is plain data, and an episode continues from it in another environment as in the original."""
    task = subject.tasks[0]
    with subject.session() as session, subject.session() as other:
        if session.find("snapshot") is None or session.find("restore") is None:
            raise RuleSkipped("no snapshot() and restore()")
        for steps in (3, 2, 1, 0):  # an episode may be over after one step
            if not play(session, task, random_policy(task.seed), limit=steps).done:
                break
        key, saved = session.call("state_key"), json.dumps(session.call("snapshot"))
        here = _walk(session, task.seed)
        if session.find("tools") and not other.find("tools"):  # a remote one learns its tools in the first reset
            other.reset(task)
        other.call("restore", json.loads(saved))
        if other.call("state_key") != key:
            raise RuleFailed("state_key() differs after restore()")
        require_equal(here, _walk(other, task.seed), "the episode continues differently after restore()")
    return f"{len(saved)} bytes; {len(here)} steps equal after restore()"


def _walk(session: EnvSession, seed: int) -> list[StepSnapshot]:
    policy, moments = random_policy(seed + 1), list[StepSnapshot]()
    for _ in range(_STEPS_AFTER):
        action = policy(session, "")
        result = session.step(action)
        moments.append(moment_of(action, result))
        if result.done:
            break
    return moments


@rule("state `isolation=Isolation.PROCESS`, where crashes and changed settings concern the episodes of one worker only")
def is_isolated_enough(subject: Subject) -> str:
    """Environments that may end the process, or change settings of all its threads, run in worker processes."""
    if subject.spec.isolation_under(subject.options) is Isolation.PROCESS:
        raise RuleSkipped("it runs in worker processes")
    before = set(threading.enumerate())
    with subject.session() as session:
        session.reset(subject.tasks[0])
        started = [thread.name for thread in set(threading.enumerate()) - before]
        native = _native_packages(type(getattr(session.env, "unwrapped", session.env)))
    if changed := [name for name, value in process_settings().items() if value != subject.settings[name]]:
        raise RuleWarned(f"it changes {', '.join(changed)} for the whole process: the trainer and other episodes, too")
    if own := [name for name in started if not name.startswith(_THREADS_OF_PYTHON)]:
        raise RuleWarned(f"it starts threads ({', '.join(sorted(own)[:3])}): a crash in one of them ends the run")
    if native:
        raise RuleWarned(f"its module uses native code ({', '.join(native[:3])}): a crash there ends the run")
    return "no native code, threads and changed settings found"


def _native_packages(kind: type) -> list[str]:
    """Return the packages with extension modules that the modules of an environment's classes import."""
    modules = [sys.modules.get(base.__module__) for base in kind.__mro__]
    names = {name for module in modules if module is not None for name in _imported_modules(module)}
    roots = {name.partition(".")[0] for name in names} - TRUSTED - sys.stdlib_module_names
    return sorted(root for root in roots if _has_extension(root))


def _imported_modules(module: ModuleType) -> set[str]:
    """Return the names of the modules that a module's globals are or come from."""
    values = list(vars(module).values())
    named = {value.__name__ for value in values if isinstance(value, ModuleType)}
    return named | {value.__module__ for value in values if isinstance(getattr(value, "__module__", None), str)}


def _has_extension(root: str) -> bool:
    loaded = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == root]
    files = [str(getattr(module, "__file__", None)) for module in loaded]
    return any(file.endswith(tuple(EXTENSION_SUFFIXES)) for file in files)


@rule("keep an episode's state in the instance, not in the class, the module or a shared file")
def runs_interleaved(subject: Subject) -> str:
    """Interleaved episodes in one process are equal to episodes that run alone."""
    single = subject.single_episodes
    with ExitStack() as stack:
        sessions = [stack.enter_context(subject.session()) for _ in single]
        if isinstance(sessions[0].env, AsyncEnv):
            together = asyncio.run(_take_turns(subject, single))
        else:
            plays = (replay_in(*played) for played in zip(sessions, subject.tasks, _actions(single), strict=False))
            turns = zip(*itertools.zip_longest(*plays), strict=True)
            together = [[moment for moment in moments if moment is not None] for moments in turns]
    for one, other in zip(single, together, strict=True):
        require_equal(one.moments, other, "an interleaved episode differs from the same episode alone")
    return f"{len(single)} interleaved episodes are equal to single ones"


async def _take_turns(subject: Subject, single: Sequence[PlayedEpisode]) -> list[list[StepSnapshot]]:
    envs = [make_environment(subject.spec.make, subject.options) for _ in single]
    try:
        plays = (replay(*played) for played in zip(envs, subject.tasks, _actions(single), strict=False))
        return list(await asyncio.gather(*plays))
    finally:
        for env in envs:
            await maybe_await(env.close())


def _actions(episodes: Sequence[PlayedEpisode]) -> list[Sequence[str]]:
    return [episode.actions for episode in episodes]


@rule("share no mutable state, or state `isolation=Isolation.PROCESS`")
def runs_in_threads(subject: Subject) -> str:
    """Concurrent episodes in several threads are equal to episodes that run alone."""
    if subject.spec.isolation_under(subject.options) is not Isolation.THREAD:
        raise RuleSkipped("its code does not run in threads")
    single = subject.single_episodes
    with subject.session() as session:
        if isinstance(session.env, AsyncEnv):
            raise RuleSkipped("its steps are awaited in the event loop")
    for one, other in zip(single, _play_in_threads(subject, single), strict=True):
        require_equal(one.moments, other, "an episode in one of several threads differs from the same episode alone")
    return f"{len(single)} episodes in threads are equal to single ones"


def _play_in_threads(subject: Subject, single: Sequence[PlayedEpisode]) -> list[list[StepSnapshot]]:
    start = threading.Barrier(len(single))
    ended: dict[int, list[StepSnapshot] | Exception] = {}

    def run(number: int, task: Task, actions: Sequence[str]) -> None:
        try:
            with subject.session() as session:
                start.wait(HANGING_S)
                ended[number] = list(replay_in(session, task, actions))
        except Exception as error:  # the rule raises a thread's error
            start.abort()
            ended.setdefault(number, error)

    plays = enumerate(zip(subject.tasks, _actions(single), strict=False))
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
            thread.join(HANGING_S)
    finally:
        sys.setswitchinterval(before)
    if any(thread.is_alive() for thread in threads):
        raise RuleFailed(f"an episode in one of several threads did not end within {HANGING_S:g} s")


@rule("release in `finally` what was acquired before an `await`; let `reset` start from any state")
def survives_cancellation(subject: Subject) -> str:
    """A cancelled reset or step does not change the next episode."""
    with subject.session() as session:
        if not isinstance(session.env, AsyncEnv):
            raise RuleSkipped("nothing is awaited, so nothing can be cancelled")
    fresh = subject.single_episodes[0]
    with asking("a call after a cancelled one", times=LONG_CALL):
        cut = asyncio.run(_cancel_and_continue(subject, fresh))
    if not cut:
        raise RuleSkipped("its steps ended before they could be cancelled")
    return f"an episode is the same after {cut} cancelled calls"


async def _cancel_and_continue(subject: Subject, fresh: PlayedEpisode) -> int:
    task = subject.tasks[0]
    env = cast("AsyncEnv", make_environment(subject.spec.make, subject.options))
    cut = 0
    try:
        for pauses in range(1, 4):
            cut += await _cancel(env.reset(seed=task.seed, options=copy_options(task.options)), pauses)
            async with asyncio.timeout(HANGING_S):
                await env.reset(seed=task.seed, options=copy_options(task.options))
            cut += await _cancel(
                env.step(next((action for action in fresh.actions if not is_call(action)), "")), pauses
            )
            async with asyncio.timeout(HANGING_S):
                again = await replay(env, task, fresh.actions)
            require_equal(fresh.moments, again, "an episode after a cancelled one differs")
    finally:
        await env.close()
    return cut


async def _cancel(call: Coroutine[Any, Any, Any], pauses: int) -> bool:
    """Cancel a call after some turns of the event loop; return True if it was still running."""
    running = asyncio.ensure_future(call)
    for _ in range(pauses):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=HANGING_S)
    if not running.done():
        raise RuleFailed(f"a cancelled call continued for {HANGING_S:g} s")
    if not running.cancelled():
        running.exception()
    return running.cancelled()
