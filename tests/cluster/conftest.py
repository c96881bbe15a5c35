"""Simulated nodes on this machine, for tests of runs on a cluster; without Ray they are skipped."""

import os
import signal
import socket
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl.observe.progress import RunWatcher
from agentrl.serving.launch.guard import descendants

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-cluster")

ACTION_S = 10.0
"""Maximum seconds for which a run waits for the action of its story."""
QUICK_HEALTH_CHECKS = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}
"""Ray's head declares a silent node dead after about 12 s; its own settings take more than a minute."""


@pytest.fixture(scope="session", autouse=True)
def _quiet_ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture(scope="session")
def client_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="session")
def nodes(client_port):
    """A cluster whose first node trains and whose second one has room for engines."""
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 4,
        "resources": {"trainer": 4},
        "include_dashboard": False,
        "_system_config": QUICK_HEALTH_CHECKS,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves the log files of its client server open
        cluster = Cluster(initialize_head=True, head_node_args={**head, "ray_client_server_port": client_port})
    cluster.add_node(num_cpus=4, resources={"engine": 4})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def client_address(nodes, client_port):
    """Address of the head's server for processes outside the cluster."""
    return f"ray://127.0.0.1:{client_port}"


@pytest.fixture
def spare_node(nodes):
    """Add a node that a test may kill; what is left at its end is removed."""
    added = []

    def add(**resources):
        added.append(nodes.add_node(num_cpus=2, resources=resources))
        return added[-1]

    yield add
    for node in added:
        if node in nodes.list_all_nodes():
            nodes.remove_node(node, allow_graceful=False)


@pytest.fixture
def placed(nodes):
    """Overrides of a run on them."""
    return (
        f"cluster={{address: '{nodes.address}', rank: {{CPU: 1, trainer: 1}}, engine: {{CPU: 1, engine: 1}}}}",
        "cluster.timeout_s=120",
    )


class Story(RunWatcher):
    """Remembers what a run says, and does something once, after a step."""

    def __init__(self, step=None, action=lambda: None):
        self.step, self.action, self.at, self.said = step, action, None, []

    def on_step(self, step, metrics):
        if step == self.step and self.at is None:
            self.at = time.monotonic()
            acting = threading.Thread(target=self.action)
            acting.start()
            acting.join(ACTION_S)  # quick runs would end before it

    def on_message(self, text):
        self.said.append(text)

    def places(self):
        """The nodes on which actors were placed, by name."""
        return dict(text.partition(", with")[0].split(" is on ") for text in self.said if ", with " in text)


@pytest.fixture
def story():
    return Story


def node_of(nodes, told, name):
    """The node of an actor, by the actor's name in a story."""
    (node,) = [node for node in nodes.list_all_nodes() if f"({node.node_id[:8]})" in told.places()[name]]
    return node


@pytest.fixture
def remove_node_of(nodes):
    """Remove the node of an actor, by the actor's name in a story; return the beginning of the node's id."""

    def remove(told, name):
        node = node_of(nodes, told, name)
        nodes.remove_node(node, allow_graceful=False)
        return node.node_id[:8]

    return remove


@pytest.fixture
def stop_node_of(nodes):
    """Stop all processes of the node of an actor, as if its machine hung; return the beginning of the node's id."""
    stopped = []

    def stop(told, name):
        node = node_of(nodes, told, name)
        for (process,) in node.all_processes.values():
            stopped.extend([process.process.pid, *descendants(process.process.pid)])
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        return node.node_id[:8]

    yield stop
    for process in stopped:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def pids_of(kind):
    """The processes of actors of one class, below the nodes of this process."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if title.startswith(f"ray::{kind}"):
            found.append(pid)
    return found


@pytest.fixture
def send_signal():
    """Send a signal to the first process of an actor's class."""

    def send(kind, number=signal.SIGKILL):
        os.kill(min(pids_of(kind)), number)

    return send


@pytest.fixture
def actor_processes():
    return pids_of
