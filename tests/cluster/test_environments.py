"""Environments and sandboxes on nodes of a cluster, and what happens when a node is lost."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from agentrl.builders.cluster import open_cluster
from agentrl.builders.environment_nodes import open_environment_nodes
from agentrl.builders.ray import environments
from agentrl.env.lookup import resolve_environment
from agentrl.errors import EnvironmentFailure
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.rollout.env_pool import EnvPool
from agentrl.runs.rl import train
from agentrl.task import Task

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
ON_NODES = ("environment.isolation=process", "environment.workers=2", "cluster.environments=2")


@pytest.fixture
def env_nodes(spare_node):
    """Two nodes with room for environments."""
    return [spare_node(env=1) for _ in range(2)]


def words(placed):
    return (*placed, *ON_NODES, "cluster.environment={CPU: 1, env: 1}")


def finished(run, story):
    """Train to the end; return the stored attempts."""
    assert train(run, watcher=story).step == run.config.trainer.steps
    lines = read_metrics(run.folder.metrics_file)
    assert all(line["episodes"] == 6 for line in lines)
    assert all(line["outcome/environment_error"] == 0 for line in lines), "failed attempts are played again"
    return [stored.trajectory for stored in read_trajectories(run.folder.trajectories)]


def test_environments_are_spread_over_nodes(placed, env_nodes, tiny_run, story):
    told = story()
    attempts = finished(tiny_run(*words(placed), "trainer.steps=2"), told)
    places = told.places()
    assert places["environments-0"] != places["environments-1"]
    assert places["rank 0"] not in (places["environments-0"], places["environments-1"])
    assert all(trajectory.outcome.is_trainable for trajectory in attempts)


def lost_and_found(story):
    """Messages about the loss and the replacement of the only environment actor."""
    (lost,) = [text for text in story.said if text.startswith("environments-0 was lost on node")]
    (found,) = [text for text in story.said if text.startswith("environments-0 is on node") and text.endswith(" now")]
    assert lost.endswith("It is being restarted, and its episodes are played again")
    return lost, found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_waits_for_its_only_environment_actor(
    number, placed, env_nodes, tiny_run, story, send_signal, monkeypatch
):
    monkeypatch.setattr(environments, "NODE_PING_S", 3.0)
    told = story(2, lambda: send_signal("EnvironmentActor", number))
    attempts = finished(tiny_run(*words(placed), "cluster.environments=1", "trainer.steps=6"), told)
    lost_and_found(told)
    assert not any(trajectory.is_trainable for trajectory in attempts if trajectory.error)


def test_environments_of_a_lost_node_run_on_another_one(placed, env_nodes, tiny_run, story, remove_node_of):
    removed = []
    told = story(2, lambda: removed.append(remove_node_of(told, "environments-0")))
    finished(tiny_run(*words(placed), "cluster.environments=1", "trainer.steps=6"), told)
    lost, found = lost_and_found(told)
    assert removed[0] in lost
    assert removed[0] not in found


@asynccontextmanager
async def opened(config, folder, said):
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    async with (
        open_cluster(config, folder, say=said.put_nowait) as cluster,
        open_environment_nodes(cluster, config, say=said.put_nowait) as places,
    ):
        yield places


@pytest.fixture
def config(placed, env_nodes, tiny_run):
    return tiny_run(*words(placed)).config


async def heard(said, words):
    """Wait for a message with these words."""
    while words not in (text := await asyncio.wait_for(said.get(), 120)):
        pass
    return text


async def play(pool, task="letters-0"):
    """An episode of three turns; return the process that played it."""
    async with pool.borrow("episode") as handle:
        await handle.reset(Task(id=task, environment="letters", seed=1))
        for _ in range(3):
            stepped = await handle.step("aeiou")
        return stepped


async def test_a_call_to_a_lost_node_is_a_failure_of_the_environment(config, tmp_path, send_signal):
    said = asyncio.Queue()
    async with opened(config, tmp_path, said) as places:
        spec = resolve_environment(config.environment.name)
        pool = EnvPool.from_config(spec, config.environment, worker=places.workers(1))
        try:
            await asyncio.gather(*(play(pool) for _ in range(4)))
            send_signal("EnvironmentActor")
            outcomes = await asyncio.gather(*(play(pool) for _ in range(6)), return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            assert all(isinstance(failure, EnvironmentFailure) for failure in failures)
            assert len(failures) < 6
            await heard(said, " now")
            await asyncio.gather(*(play(pool) for _ in range(6)))
        finally:
            await pool.close()


async def test_sandboxes_open_on_the_nodes_and_on_the_next_one_after_a_loss(config, tmp_path, send_signal):
    agent = config.agent.model_copy(update={"sandbox": {"type": "local", "limits": {"seconds": 20}}})
    config, said = config.model_copy(update={"agent": agent}), asyncio.Queue()
    async with opened(config, tmp_path, said) as places:
        for _ in range(2):
            async with places.make_sandbox() as sandbox:
                assert sandbox.spec.type == "http"
                assert (await sandbox.exec("echo $((6 * 7))")).stdout == b"42\n"
        send_signal("EnvironmentActor")
        await heard(said, "its episodes are played again")
        async with places.make_sandbox() as sandbox:
            assert (await sandbox.exec("echo again")).stdout == b"again\n"
    assert "AGENTRL_SANDBOX_TOKEN" not in os.environ
