"""Runs that serve clients of OpenAI's package and learn from their feedback: they learn, and a kill loses nothing."""

import importlib.util
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from rich.console import Console

from agentrl.cli.status import describe
from agentrl.config import load_config
from agentrl.observe.files import read_json_lines
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.run_status import read_status
from agentrl.observe.trajectory_store import GroupEnd, read_groups, read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import start_run
from agentrl.runs.stop import StopRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXAMPLE = Path(__file__).parent.parent / "examples" / "13_live_traffic.py"
SMALL = (
    "model={path: scratch, dtype: float32}",
    "trainer={gradient_checkpointing: false, learning_rate: 3e-3}",
)
RUN = "import sys; import agentrl; agentrl.train('live', overrides=sys.argv[1:])"
RESUME = "import sys; import agentrl; agentrl.resume(sys.argv[1], overrides=sys.argv[2:])"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def talk():
    """The conversation of the example's user, whose return value is the reward that it gave."""
    spec = importlib.util.spec_from_file_location("live_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.talk


def test_success_rises_while_the_run_serves(tmp_path, talk):
    port, good, ended = free_port(), [], threading.Event()
    address = f"http://127.0.0.1:{port}"
    run = start_run(
        load_config("live", [*SMALL, "trainer.steps=8", f"agent.options.port={port}", f"run.directory={tmp_path}"]),
        kind="live",
    )
    seen, interruption = [], StopRequest()

    def keep_talking():
        with ThreadPoolExecutor(8) as users, client_of(address) as client:
            while not ended.is_set():
                try:
                    good.extend(users.map(talk, [client] * 32, [address] * 32))
                    seen.append(read_status(run.folder.path))
                except openai.APIError:  # the run has ended, or not begun
                    ended.wait(0.5)
                except BaseException:
                    interruption()
                    raise

    users = threading.Thread(target=keep_talking, daemon=True)
    users.start()
    try:
        result = train(run, interruption=interruption)
    finally:
        ended.set()
        users.join(60)
    assert result.step == 8
    lines = read_metrics(run.folder.metrics_file)
    first, last = (sum(line["reward/mean"] for line in part) / 2 for part in (lines[:2], lines[-2:]))
    assert first < 0.4 < 0.6 < last
    assert sum(good[-32:]) / 32 > 0.6, "clients get the answers of the policy that has learned"
    assert all(line["episodes"] == 32 and line["live/rewarded"] > 0 for line in lines)
    assert max(line["staleness/max"] for line in lines) >= 1, "clients were served during training"
    status = next(one for one in reversed(seen) if one is not None and one.live is not None)
    assert status.live.url == f"http://127.0.0.1:{port}"
    console = Console(record=True, width=200)
    console.print(describe(run.folder.path, status, time.time()))
    assert f"live traffic at http://127.0.0.1:{port}: " in console.export_text()
    assert all(t.trajectory.task_id in t.trajectory.group_id for t in read_trajectories(run.folder.trajectories))


def test_a_killed_run_trains_on_every_session_whose_feedback_it_accepted(tmp_path, talk, start_python):
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    words = [*SMALL, "trainer.tasks_per_step=4", "trainer.steps=5", "checkpoint.every=2"]
    words += [f"agent.options.port={port}", f"run.directory={tmp_path}", "run.name=killed"]
    program = start_python("-c", RUN, *words, folder=tmp_path)
    for _ in range(14):  # three steps, of which the checkpoint has two, and two more sessions
        talk_to(address, talk, program)
    assert program.kill() == -signal.SIGKILL
    folder = RunDirectory(tmp_path / "killed")
    again = start_python("-c", RESUME, str(folder.path), folder=tmp_path)
    for _ in range(6):
        talk_to(address, talk, again)
    assert again.wait().code == 0
    accepted = {line["session"] for line in read_json_lines(folder.path / "sessions.jsonl")}
    names = {one.trajectory.id: one.trajectory.task_id for one in read_trajectories(folder.trajectories)}
    ends = read_groups(folder.trajectories).values()
    trained = {names[episode] for group in ends if group.end is GroupEnd.TRAINED for episode in group.episodes}
    assert len(accepted) == 20
    assert trained == accepted


def client_of(address):
    return openai.OpenAI(base_url=address, api_key="any", max_retries=0)


def talk_to(address, talk, program):
    """Talk once the program listens."""
    deadline = time.monotonic() + 300
    while True:
        try:
            with client_of(address) as client:
                return talk(client, address)
        except openai.APIError:
            assert program.poll() is None, "the run has ended"
            assert time.monotonic() < deadline
            time.sleep(0.5)
