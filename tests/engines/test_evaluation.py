"""Evaluations and the throughput benchmark on real servers, launched or attached, from the command line."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from agentrl.builders.scratch import write_scratch_model
from agentrl.cli import main
from agentrl.cli.bench import load_run
from agentrl.config import load_config
from agentrl.evaluation.panel import read_episodes

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
PROGRAM = str(Path(sys.executable).with_name("agentrl"))
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rollout.py"
PLAY = (
    "environment.options={size: tiny, rooms: [kitchen]}",
    "agent={loop: react_text, max_turns: 3, max_answer_tokens: 8}",
    "agent.options={format: plain, restate_goal: true, explain: false}",
)
EVALUATE = ("eval", "--env", "household/valid_unseen", "--tasks", "6")


def agentrl(*words: str, folder: Path) -> int:
    """Run a command in a folder; its exit code."""
    with chdir(folder):
        try:
            main(words)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def household_model(tmp_path_factory) -> Path:
    """A model with random weights that knows the household's words."""
    folder = tmp_path_factory.mktemp("models") / "household"
    sizes = "model.scratch={layers: 1, hidden_size: 64, heads: 2, kv_heads: 1, initializer_range: 0.2}"
    asyncio.run(write_scratch_model(load_config("quickstart", [sizes]), folder))
    return folder


@pytest.fixture(scope="module")
def greedy(household_model, tmp_path_factory):
    """Play greedily with any engine; the tokens of each episode, and the result."""

    def play(*words: str) -> tuple[dict[str, list[int]], dict]:
        folder = tmp_path_factory.mktemp("greedy")
        told = (*EVALUATE, "--model", str(household_model), "--temperature", "0", "--json", "result.json")
        assert agentrl(*told, *words, *PLAY, folder=folder) == 0
        (episodes,) = folder.glob("runs/evaluations/*/episodes.jsonl")
        tokens = {episode.task_id: episode.trajectory.sequences[0].ids_list() for episode in read_episodes(episodes)}
        return tokens, json.loads((folder / "result.json").read_text())

    return play


@pytest.fixture(scope="module")
def local(greedy) -> dict[str, list[int]]:
    """What the engine in this process plays."""
    return greedy("--engine", "local")[0]


@pytest.fixture(scope="module")
def url(engine, household_model, tmp_path_factory):
    """A server that `agentrl serve` runs, until it is interrupted."""
    folder = tmp_path_factory.mktemp("serve")
    words = [
        "serve",
        "--engine",
        engine,
        "--model",
        str(household_model),
        "--folder",
        "serve",
        "engine.max_num_seqs=16",
    ]
    with subprocess.Popen([PROGRAM, *words], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


@pytest.mark.capability("{engine}", "evaluation")
def test_a_launched_server_plays_what_the_local_engine_plays(engine, greedy, local):
    tokens, result = greedy("--engine", engine)
    assert tokens == local
    assert (result["failed"], result["turns"], len(tokens)) == (0, 3, 6)


@pytest.mark.capability("attached {engine}", "evaluation")
def test_an_attached_server_plays_what_the_local_engine_plays(engine, url, greedy, local):
    assert greedy("--engine", engine, "--url", url)[0] == local


def test_a_server_of_other_weights_is_refused(engine, url, household_model, tmp_path, capsys):
    other = shutil.copytree(household_model, tmp_path / "other")
    weights = {name: 1.1 * tensor for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    words = ("--model", str(other), "--engine", engine, "--url", url)
    assert agentrl(*EVALUATE, *words, *PLAY, folder=tmp_path) == 2
    assert f"the servers do not serve {other}" in capsys.readouterr().err


def test_the_chat_route_of_a_server_is_a_service(engine, url, household_model, tmp_path):
    name = "policy" if engine == "vllm" else str(household_model)
    words = ("--engine", "openai", "--url", f"{url}/v1", "--model", name, "--json", "result.json")
    assert agentrl(*EVALUATE, *words, *PLAY, folder=tmp_path) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["failed"], result["turns"]) == (0, 3)
    assert result["outcomes"] == {"truncated_turns": 6}


def test_the_benchmark_plays_the_same_tokens_with_the_bare_client(engine, url, household_model):
    sizes = {"episodes": 6, "turns": 2, "concurrency": 4, "rounds": 2}
    figures = load_run(BENCHMARK)(engine=engine, model=str(household_model), url=url, **sizes)
    assert figures["engine"].startswith(f"{engine} ")
    assert (figures["turns_per_episode"], len(figures["ratios"])) == (2, 2)
    assert 0 < figures["answer_tokens_per_turn"] <= 64
    assert min(figures["ratios"]) <= figures["ratio_to_bare_client"] <= max(figures["ratios"])
