"""Environments inline, in threads and in worker processes, and their failures."""

import asyncio
import contextlib
import functools
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium
import pytest
import rollout_worlds
from support import SLACK
from support.waiting import wait_until

import agentrl
from agentrl.config.environment import EnvironmentConfig
from agentrl.env import ExpertAction, Isolation
from agentrl.errors import EnvironmentFailure, Outcome, UsageError
from agentrl.message import TextPart
from agentrl.remote.env_methods import ADMISSIBLE_ACTIONS, EXPERT_ACTION, RANDOM_ACTION, SAMPLE, EnvMethod
from agentrl.rollout import env_pool, env_processes
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.env_processes import HEADER
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.sandbox.supervisor import process_parents, processes_below, send_signal
from agentrl.task import Task

TASK = Task(id="t", environment="world", seed=5)


def faulty(fault):
    return Task(id="t", environment="world", options={"fault": fault})


async def play_one_step(pool, task):
    async with pool.borrow("e") as world:
        await world.reset(task)
        return await world.step("x")


BLOCKING = [Isolation.THREAD, Isolation.PROCESS]


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_an_episode_is_the_same_wherever_it_runs(make_pool, worlds, isolation):
    pool = make_pool(worlds.Corridor, isolation, workers=1, options={"length": 2})
    async with pool.borrow("e") as world:
        start = await world.reset(TASK)
        assert (start.observation, start.info) == ("You are at 0. Your task is to: reach 2.", {"task_type": "walk"})
        assert (start.state_key, start.action_hint, start.tools) == ("place 0", "forward or back", ())
        assert await world.call(ADMISSIBLE_ACTIONS) == ["forward", "back"]
        assert await world.call(EXPERT_ACTION, start.observation) == ExpertAction(text="forward")
        assert await world.call(RANDOM_ACTION, 1) in ("forward", "back")
        first = await world.step("forward")
        assert (first.result.observation, first.result.done, first.state_key) == ("You are at 1.", False, "place 1")
        last = await world.step("forward")
        assert (last.result.reward, last.result.terminated, last.result.info["success"]) == (1.0, True, True)


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.slow
async def test_tools_of_an_environment_run_beside_it(make_pool, worlds, isolation):
    pool = make_pool(worlds.Whispering, isolation, workers=1)
    async with pool.borrow("e") as world:
        start = await world.reset(TASK)
        (tool,) = start.tools
        assert tool.schema["function"]["name"] == "whisper"
        async with contextlib.AsyncExitStack() as stack:
            said = await tool.call(await tool.open(stack), {"text": "hush"})
        assert said == f"{start.info['process']} heard hush"
        assert (start.info["process"] != os.getpid()) == (isolation is Isolation.PROCESS)


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "step of environment world (task t, step 1) failed.*ValueError: boom"),
        ("nan", "step of environment world (task t, step 1) failed.*the reward is nan, expected a finite number"),
        ("four", "step of environment world (task t, step 1) failed.*step returned 4 values, expected 5: observation"),
        (
            "success",
            "failed.*success of info is invalid: got str 'no', expected True or False",
        ),
        ("task_type", "failed.*task_type of info is invalid: got int 5, expected text"),
        ("surrogate", "failed.*observation of step is invalid.*expected text without lone surrogates"),
    ],
)
async def test_faults_become_one_error_wherever_they_happen(make_pool, worlds, isolation, fault, message):
    pool = make_pool(worlds.Faulty, isolation, workers=1)
    task = faulty(fault)
    message = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(EnvironmentFailure, match=message):
        await play_one_step(pool, task)


CHILD = {"fault": "child", "apart": False}
APART = {"fault": "child", "apart": True}
"""A process of the environment that leaves its session."""


@pytest.mark.parametrize(
    ("dies", "options"), [("closed", CHILD), ("closed", APART), ("exit", APART), ("hang", APART), ("stop", APART)]
)
async def test_what_an_environment_started_ends_with_its_worker(make_pool, worlds, tmp_path, options, dies):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    closed = asyncio.create_task(asyncio.to_thread(pipe.read_bytes))
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1, step_timeout_s=0.2)
    async with pool.borrow("e") as world:
        await world.reset(Task(id="t", environment="world", options={**options, "pipe": str(pipe)}))
        if dies != "closed":
            with pytest.raises(EnvironmentFailure):
                await asyncio.wait_for(world.call(EnvMethod(name="go_wrong"), dies), timeout=60)
    await asyncio.wait_for(pool.close(), timeout=env_processes.WORKER_KILL_S)  # it ends once nothing is left
    assert await asyncio.wait_for(closed, timeout=60) == b""


TRAINER = """
import asyncio, sys
import rollout_worlds
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.rollout.env_pool import EnvPool
from agentrl.task import SeedTasks, Task

async def main():
    isolation = Isolation(sys.argv[2])
    spec = EnvironmentSpec(name="w", make=rollout_worlds.Faulty, tasks=SeedTasks, isolation=isolation)
    pool = EnvPool(spec, workers=1)
    async with pool.borrow("e") as world:
        options = {"fault": "child", "apart": True, "pipe": sys.argv[1]}
        await world.reset(Task(id="t", environment="w", options=options))
        print(pool._workers[0]._process.pid if isolation is Isolation.PROCESS else 0, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("isolation", "is_stopped"), [(Isolation.PROCESS, False), (Isolation.PROCESS, True), (Isolation.THREAD, False)]
)
def test_nothing_survives_a_killed_trainer(tmp_path, isolation, is_stopped):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    with (
        subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(pipe), isolation.value], env=environment, stdout=subprocess.PIPE
        ) as trainer,
        ThreadPoolExecutor() as threads,
    ):
        closed = threads.submit(pipe.read_bytes)
        supervisor = int(trainer.stdout.readline())
        assert not closed.done()
        for process in processes_below({supervisor}, process_parents()) if is_stopped else ():
            os.kill(process, signal.SIGSTOP)
        trainer.kill()
        assert closed.result(timeout=60) == b""


def wait_for_end(processes):
    wait_until(lambda: not processes & process_parents().keys(), "the end of the worker", within_s=30 * SLACK)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_a_supervisor_ends_it_and_its_worker_without_a_traceback(make_pool, worlds, capfd, number):
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1)
    async with pool.borrow("e") as world:
        await world.reset(TASK)
        supervisor = pool._workers[0]._process.pid
        processes = processes_below({supervisor}, process_parents())
        os.kill(supervisor, number)
        await asyncio.to_thread(wait_for_end, processes)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("stops_again", [False, True])
async def test_a_worker_whose_processes_are_all_stopped_is_killed_and_replaced(
    make_pool, worlds, monkeypatch, stops_again
):
    monkeypatch.setattr(env_processes, "SUPERVISOR_END_S", 0.3 if stops_again else 60.0)
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1, step_timeout_s=1.0)
    async with pool.borrow("e") as world:
        await world.reset(TASK)
        supervisor = pool._workers[0]._process.pid
        processes = processes_below({supervisor}, process_parents())
        assert len(processes) == 2

        async def stop():
            while True:
                for process in processes:
                    send_signal(process, signal.SIGSTOP)
                await asyncio.sleep(0.01 if stops_again else 3600)

        stopping = asyncio.create_task(stop())
        await asyncio.sleep(0)
        with pytest.raises(
            EnvironmentFailure, match=r"step of environment world \(task t, step 1\) missed its deadline"
        ):
            await asyncio.wait_for(world.step("x"), timeout=60)
        stopping.cancel()
    await asyncio.to_thread(wait_for_end, processes)
    assert (await play_one_step(pool, TASK)).result.done


async def test_a_pool_closes_although_a_call_hangs(make_pool, worlds, monkeypatch):
    monkeypatch.setattr(env_pool, "DRAIN_S", 0.2)
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1, step_timeout_s=600.0)
    supervisors = []

    async def fail():
        async with pool.borrow("e") as world:
            await world.reset(faulty("stop"))
            supervisors.append(pool._workers[0]._process)
            step = asyncio.create_task(world.step("x"))
            await asyncio.sleep(0)
            step.cancel()
            raise ZeroDivisionError  # the episode fails while its environment still works

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(fail(), timeout=60)
    await asyncio.wait_for(pool.close(), timeout=60)
    assert supervisors[0].returncode is not None


async def test_a_pool_awaits_the_closing_of_environments_whose_episodes_failed(make_pool, monkeypatch):
    monkeypatch.setattr(env_pool, "DRAIN_S", 0.0)
    closed = []

    class Rented(agentrl.AsyncEnv):
        async def reset(self, *, seed=None, options=None):
            return "Hello.", {}

        async def step(self, action):
            return "Bye.", 1.0, True, False, {}

        async def close(self):
            await asyncio.sleep(0.05)
            closed.append(self)

    async def fail():
        async with pool.borrow("e") as world:
            await world.reset(TASK)
            raise ZeroDivisionError

    pool = make_pool(Rented)
    with pytest.raises(ZeroDivisionError):
        await fail()
    assert not closed
    await pool.close()
    assert len(closed) == 1


async def test_a_pool_closes_its_workers_although_its_tools_cannot_be_closed(make_pool, worlds, caplog):
    pool = make_pool(worlds.Corridor, Isolation.PROCESS, workers=1)
    closed = []

    async def fail():
        raise RuntimeError("the browser is gone")

    async def close():
        closed.append(True)

    pool.cleanup.push_async_callback(close)
    pool.cleanup.push_async_callback(fail)
    await play_one_step(pool, TASK)
    supervisor = pool._workers[0]._process
    await pool.close()
    assert (closed, supervisor.returncode is not None) == ([True], True)
    assert "closing the tools of world failed: RuntimeError: the browser is gone" in caplog.text


@pytest.mark.parametrize("isolation", BLOCKING)
async def test_a_hanging_step_misses_its_deadline_and_the_worker_is_replaced(make_pool, worlds, isolation):
    pool = make_pool(
        worlds.Faulty, isolation, workers=1, step_timeout_s=1.0 if isolation is Isolation.PROCESS else 0.05
    )
    with pytest.raises(EnvironmentFailure, match="missed its deadline"):
        await play_one_step(pool, faulty("hang"))
    assert (await play_one_step(pool, faulty("none"))).result.done


async def test_a_hanging_asynchronous_environment_meets_its_deadline(make_pool, worlds):
    pool = make_pool(functools.partial(worlds.Remote, hang=True), Isolation.THREAD, step_timeout_s=0.02)
    with pytest.raises(EnvironmentFailure, match=r"no answer in 0\.02 s"):
        await play_one_step(pool, TASK)


class Slow(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        return "", {"step_timeout_s": (options or {}).get("asked", 0)}

    def step(self, action):
        threading.Event().wait(0.05)
        return "done", 0.0, True, False, {}


async def test_a_task_may_ask_for_longer_steps_and_not_for_shorter_ones(make_pool):
    pool = make_pool(Slow, Isolation.THREAD, step_timeout_s=0.001)
    assert (await play_one_step(pool, Task(id="t", environment="w", options={"asked": 20}))).result.terminated
    with pytest.raises(EnvironmentFailure, match=r"no answer in 0\.001 s"):
        await play_one_step(pool, Task(id="t", environment="w"))
    patient = make_pool(Slow, Isolation.THREAD, step_timeout_s=20)
    assert (await play_one_step(patient, Task(id="t", environment="w", options={"asked": 0.001}))).result.terminated


@pytest.mark.parametrize("asked", [-1, "9", True, float("nan"), float("inf"), None])
async def test_a_time_limit_that_cannot_be_used_is_named(make_pool, asked):
    pool = make_pool(Slow, Isolation.THREAD)
    with pytest.raises(EnvironmentFailure, match=r'info\["step_timeout_s"\] of environment world cannot be used'):
        await play_one_step(pool, Task(id="t", environment="w", options={"asked": asked}))


async def test_asynchronous_environments_run_in_the_event_loop(make_pool, worlds):
    made = []

    def factory():
        made.append(worlds.Remote())
        return made[-1]

    pool = make_pool(factory, Isolation.THREAD, workers=1)
    async with pool.borrow("a") as first, pool.borrow("b") as second:
        await asyncio.gather(first.reset(TASK), second.reset(TASK))
        results = await asyncio.gather(first.step("x"), second.step("x"))
    assert [result.result.reward for result in results] == [1.0, 1.0]
    await pool.close()
    assert [world.closed for world in made] == [True, True]


async def test_a_crash_costs_the_episodes_of_its_worker_only(make_pool, worlds):
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=2)
    crash = faulty("exit")
    async with pool.borrow("bystander elsewhere") as elsewhere:
        before = (await elsewhere.reset(TASK)).info["process"]
        with pytest.raises(EnvironmentFailure, match=r"worker died \(exit code 3"):
            await play_one_step(pool, crash)
        assert (await elsewhere.step("x")).result.info["process"] == before


async def test_neighbours_of_a_crash_fail_and_a_new_worker_serves_on(make_pool, worlds):
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1)
    async with pool.borrow("neighbour") as neighbour:
        old = (await neighbour.reset(TASK)).info["process"]
        with pytest.raises(EnvironmentFailure, match="worker died"):
            await play_one_step(pool, faulty("exit"))
        with pytest.raises(EnvironmentFailure, match="worker process is gone: exit code 3"):
            await neighbour.step("x")
    async with pool.borrow("next") as world:
        assert (await world.reset(TASK)).info["process"] != old


async def test_what_cannot_be_sent_is_said(make_pool, worlds):
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1)
    with pytest.raises(EnvironmentFailure, match="cannot be sent to the runtime"):
        await play_one_step(pool, faulty("function"))
    unnamed = make_pool(lambda: worlds.Faulty(), Isolation.PROCESS)
    with pytest.raises(UsageError, match="isolation to thread"):
        async with unnamed.borrow("e"):
            pass


async def test_an_unused_environment_is_reused(make_pool, worlds):
    made = []
    pool = make_pool(lambda: made.append(worlds.Faulty()) or made[-1], Isolation.THREAD, workers=1)
    for name in ("a", "b"):
        async with pool.borrow(name):
            pass
    assert len(made) == 1


async def test_what_a_worker_cannot_read_is_said(make_pool, worlds):
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1)
    with pytest.raises(UsageError, match="nothing to read here"):
        await play_one_step(pool, Task(id="t", environment="world", options={"x": worlds.Unreadable()}))


async def test_a_terminated_worker_ends_at_once(make_pool, worlds):
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1)
    with pytest.raises(EnvironmentFailure, match="worker died"):
        await play_one_step(pool, faulty("terminate"))


async def test_environments_that_print_or_read_do_not_disturb_their_worker(make_pool, worlds):
    pool = make_pool(worlds.Faulty, Isolation.PROCESS, workers=1)
    assert (await play_one_step(pool, faulty("talk"))).result.done


async def test_a_crash_is_tried_again_in_a_new_process(make_runner, play, worlds):
    runner = make_runner(worlds.Faulty, "x", isolation=Isolation.PROCESS, workers=1, retries=1)
    trajectory = await play(runner, options={"fault": "exit"})
    assert (trajectory.attempt, trajectory.outcome) == (1, Outcome.ENVIRONMENT_ERROR)
    assert (await play(runner, options={"fault": "none"})).outcome is Outcome.FINISHED


async def test_environments_are_used_again_unless_their_episode_failed(make_runner, play, worlds):
    made = []

    def factory():
        made.append(worlds.Faulty())
        return made[-1]

    runner = make_runner(factory, "x")
    for _ in range(3):
        await play(runner)
    assert len(made) == 1
    await play(runner, options={"fault": "raise"})
    await play(runner, options={"fault": "none"})
    assert len(made) == 2


async def test_no_more_environments_are_lent_than_allowed(make_pool, worlds):
    pool = make_pool(worlds.Corridor, max_concurrent=2)
    lent, most = 0, 0

    async def use(number):
        nonlocal lent, most
        async with pool.borrow(str(number)) as world:
            lent += 1
            most = max(most, lent)
            await world.reset(TASK)
            await asyncio.sleep(0)
            lent -= 1

    await asyncio.gather(*(use(number) for number in range(7)))
    assert most == 2


async def test_cancelling_a_step_leaves_the_worker_in_step(make_pool, worlds):
    pool = make_pool(worlds.Corridor, Isolation.THREAD, workers=1)
    async with pool.borrow("a") as kept:
        await kept.reset(TASK)

        async def impatient():
            async with pool.borrow("b") as world:
                await world.reset(TASK)
                await world.step("forward")

        episode = asyncio.create_task(impatient())
        await asyncio.sleep(0)
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        assert (await kept.step("forward")).result.observation == "You are at 1."


def test_the_config_describes_a_host(make_spec, worlds):
    config = EnvironmentConfig(name="world", options={"length": 7}, isolation=Isolation.THREAD, workers=2)

    async def observe():
        pool = EnvPool.from_config(make_spec(worlds.Corridor), config)
        async with pool.borrow("e") as world:
            observation = (await world.reset(TASK)).observation
        await pool.close()
        return observation

    assert asyncio.run(observe()).endswith("reach 7.")


async def test_scripted_policies_say_what_they_miss(make_pool, worlds):
    pool = make_pool(worlds.Remote)
    with pytest.raises(UsageError, match="no expert"):
        async with pool.borrow("e") as world:
            await world.call(EXPERT_ACTION, "x")
    with pytest.raises(UsageError, match="action_space"):
        async with pool.borrow("e") as world:
            await world.call(RANDOM_ACTION, 1)


async def test_random_actions_without_a_list_come_from_the_action_space_and_the_seed(make_pool, worlds):
    async def sample(seed):
        pool = make_pool(worlds.Faulty)
        async with pool.borrow("e") as world:
            await world.reset(TASK)
            return [await world.call(RANDOM_ACTION, seed) for _ in range(3)]

    assert await sample(1) == await sample(1) != await sample(2)


@pytest.mark.parametrize(("least", "most", "longest"), [(0, 10**8, 32), (1, 257, 32), (40, 10**8, 40), (0, 256, 256)])
async def test_random_actions_are_short_where_a_space_allows_long_texts(make_pool, worlds, least, most, longest):
    class Wordy(worlds.Faulty):
        action_space = gymnasium.spaces.Text(most, min_length=least)

    pool = make_pool(Wordy)
    async with pool.borrow("e") as world:
        await world.reset(TASK)
        lengths = [len(await world.call(RANDOM_ACTION, 7)) for _ in range(50)]
        samples = [len(await world.call(SAMPLE, seed)) for seed in (7, None, None)]
    assert samples == lengths[:3]
    assert least <= min(lengths) < max(lengths) or least == longest == max(lengths)
    assert longest * 0.8 <= max(lengths) <= longest


class Loud(rollout_worlds.Faulty):
    """Says as much as its task wants, at the places that it names."""

    def reset(self, *, seed=None, options=None):
        self.options = options
        return self._text("reset"), {"goal": self._text("goal")}

    def step(self, action):
        parts = (TextPart(text=self._text("parts")), TextPart(text="."))
        return parts, 1.0, True, False, {"junk": bytes(self.options.get("junk", 0))}

    def _text(self, place):
        return "loud " * (self.options.get(place, 5) // 5)


@pytest.mark.parametrize("place", ["reset", "parts"])
async def test_an_observation_of_any_length_is_cut_or_refused(make_runner, play, renderer, monkeypatch, place):
    limits = EpisodeLimits(max_observation_tokens=50)
    runner = make_runner(Loud, "x", limits=limits)
    encoded = []
    encode = renderer.encoder._backend.encode
    backend = SimpleNamespace(
        encode=lambda text, **options: encoded.append(len(text)) or encode(text, **options),
        get_vocab=renderer.encoder._backend.get_vocab,
        decode=renderer.encoder._backend.decode,
    )
    monkeypatch.setattr(renderer.encoder, "_backend", backend)
    trajectory = await play(runner, options={place: 9_999_990, "goal": 5_000_000})
    assert trajectory.outcome is Outcome.FINISHED
    assert sum(encoded) < 20_000
    trajectory = await play(runner, options={place: 50_000_000})
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "has 50,000,00" in trajectory.error
    assert "characters, expected at most 10,000,000" in trajectory.error
    assert sum(encoded) < 40_000


def test_a_reply_of_a_worker_process_is_bounded(monkeypatch):
    monkeypatch.setattr(env_processes, "MAX_REPLY_BYTES", 1000)
    for size, fits in ((900, True), (1000, False)):
        sent = io.BytesIO()
        env_processes._reply(sent, (True, bytes(size)))
        succeeded, value = pickle.loads(sent.getvalue()[HEADER.size :])
        assert succeeded == fits
        assert fits or value == (EnvironmentFailure, "the returned value has 1,021 bytes, expected at most 1,000", None)


def test_a_worker_serves_the_process_that_started_it_only():
    program = [sys.executable, "-P", "-c", env_processes.START]
    served = [
        subprocess.run([*program, str(trainer), json.dumps(sys.path)], stdin=subprocess.DEVNULL).returncode
        for trainer in (os.getpid(), os.getppid())
    ]
    assert served == [0, 1]


async def test_an_environment_that_a_worker_cannot_import_is_a_usage_error(make_pool, worlds, monkeypatch):
    script = ModuleType("only_in_this_process")
    script.Mine = type("Mine", (worlds.Corridor,), {"__module__": script.__name__, "__qualname__": "Mine"})
    monkeypatch.setitem(sys.modules, script.__name__, script)
    pool = make_pool(script.Mine, Isolation.PROCESS, workers=1)
    with pytest.raises(UsageError, match=r"cannot read the call: .*only_in_this_process.*Move the env"):
        await play_one_step(pool, TASK)


async def test_files_in_the_current_folder_do_not_shadow_packages_in_a_worker(make_pool, worlds, monkeypatch, tmp_path):
    for name in ("vllm", "sglang", "aiohttp", "gymnasium", "asyncio"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hidden')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path] + [str(tmp_path)])
    pool = make_pool(worlds.Corridor, Isolation.PROCESS, workers=1)
    assert (await play_one_step(pool, TASK)).result.observation == "You are at 0."


async def test_a_closed_worker_leaves_no_thread():
    worker = ThreadWorker()
    thread = await worker.submit(threading.current_thread, what="it", deadline_s=30)
    await worker.close()
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
