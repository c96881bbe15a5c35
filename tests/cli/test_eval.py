"""Evaluation from the command line and from Python."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.guess_number import GuessNumber

import agentrl as library
from agentrl.cli import evaluate
from agentrl.config.engines import OpenAIEngineConfig
from agentrl.errors import UsageError
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.session import EvaluationRequest, FinishedEvaluation

Cli = Callable[..., Any]


def test_the_expert_solves_the_household_and_the_json_says_so(agentrl: Cli, workplace: Path) -> None:
    words = ("eval", "--env", "household/valid_unseen", "--policy", "expert", "--tasks", "12")
    ended = agentrl(*words, "--json", "expert.json", "environment.options={size: tiny}")
    assert ended.code == 0, ended.err
    content = json.loads((workplace / "expert.json").read_text())
    assert content["success"]["mean"] == 1.0
    assert content["n_tasks"] == 12
    assert content["env"] == "household/valid_unseen"
    assert content["outcomes"] == {"finished": 12}
    assert sum(found["n_tasks"] for found in content["by_task_type"].values()) == 12
    assert "100.0 % (75.8 to 100.0)" in ended.out


@pytest.mark.slow
def test_a_run_is_measured_with_its_own_settings_and_found_again(agentrl: Cli, trained_run: Path) -> None:
    words = ("eval", "--model", str(trained_run), "--tasks", "3", "--samples", "2")
    others = set((trained_run / "evaluations").glob("*"))
    first = agentrl(*words, "--report")
    assert first.code == 0, first.err
    assert "guess_number/valid" in first.out
    (folder,) = set((trained_run / "evaluations").iterdir()) - others
    assert {"episodes.jsonl", "evaluation.json", "report.md", "report.html", "learning_curve.png"} <= {
        path.name for path in folder.iterdir()
    }
    stored = (folder / "episodes.jsonl").read_bytes()
    assert agentrl(*words).code == 0
    assert (folder / "episodes.jsonl").read_bytes() == stored

    assert agentrl("eval", "--model", str(trained_run), "--tasks", "4", "--samples", "2").code == 0
    assert (folder / "episodes.jsonl").read_bytes().count(b"\n") == 8
    assert agentrl(*words, "--temperature", "0").code == 0
    assert len(set((trained_run / "evaluations").iterdir()) - others) == 2


def test_a_config_is_evaluated_as_train_takes_one(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    settings = "environment: guess_number\nagent: {loop: react_text, max_turns: 2, max_answer_tokens: 4}\n"
    (workplace / "mine.yaml").write_text(f"{settings}model: {trained_run}\nevaluation: {{split: test}}\n")
    (workplace / "new.yaml").write_text(settings)
    ended = agentrl("eval", "mine.yaml", "--tasks", "2", "--json", "a.json", "agent.max_tokens=512")
    assert ended.code == 0, ended.err
    found = json.loads((workplace / "a.json").read_text())
    assert found["env"] == "guess_number/test"
    assert found["settings"]["agent"]["max_turns"] == 2
    told = agentrl("eval", "new.yaml", "--model", str(trained_run), "--tasks", "2", "--json", "b.json")
    assert told.code == 0, told.err
    assert json.loads((workplace / "b.json").read_text())["settings"]["agent"]["max_turns"] == 2
    without = agentrl("eval", "new.yaml")
    assert without.code == 2
    assert "add --model runs/latest" in without.err
    assert agentrl("eval", "quickstart", "--policy", "expert", "--tasks", "2").code == 0


def test_the_same_seed_gives_the_same_episodes(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    rewards = []
    for concurrency in ("1", "4"):
        words = ("--seed", "5", "--tasks", "3", "--concurrency", concurrency)
        ended = agentrl(
            "eval", "--model", str(trained_run), *words, "--json", "r.json", f"engine.max_num_seqs={concurrency}"
        )
        assert ended.code == 0, ended.err
        assert json.loads((workplace / "r.json").read_text())["reused"] == 0
        rewards.append(json.loads((workplace / "r.json").read_text())["tokens"])
    assert rewards[0] == rewards[1]


OPENAI = ("eval", "--env", "guess_number", "--engine", "openai", "--model", "m", "--tasks", "2")


@pytest.fixture
def service() -> Iterator[Callable[..., str]]:
    """Starts a server that answers every POST the same, but for the check before the first episode."""
    running: list[http.server.ThreadingHTTPServer] = []

    def start(status: int, said: str, *, check_status: int = 400) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps({"error": {"message": said}}).encode()
                self.send_response(status if asked["messages"] else check_status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        running.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_address[1]}/v1"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_service_that_is_not_there_is_told_before_any_episode(agentrl: Cli, workplace: Path) -> None:
    ended = agentrl(*OPENAI, "--url", "http://127.0.0.1:9/v1")
    assert ended.code == 1
    assert "error: the service at http://127.0.0.1:9/v1 cannot be reached" in ended.err
    assert "including /v1" in ended.err
    assert "/2 episodes" not in ended.err


@pytest.mark.parametrize("url", ["127.0.0.1:9/v1", "localhost", "http:///v1"])
def test_an_address_that_is_none_is_told(url: str, agentrl: Cli, workplace: Path) -> None:
    ended = agentrl(*OPENAI, "--url", url)
    assert ended.code == 2, ended.err
    assert f"{url} is not an address: write http://HOST:PORT" in ended.err


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_without_a_chat_is_told_before_any_episode(
    status: int, agentrl: Cli, workplace: Path, service: Callable[..., str]
) -> None:
    url = service(status, "<html>m</html>", check_status=status)
    ended = agentrl(*OPENAI, "--url", url)
    assert ended.code == 2, ended.err
    assert f"no chat service found at {url}: got {status}" in ended.err
    assert "including /v1" in ended.err


def test_a_model_that_the_service_does_not_know_is_told_before_any_episode(
    agentrl: Cli, workplace: Path, service: Callable[..., str]
) -> None:
    ended = agentrl(*OPENAI, "--url", service(404, "The model `m` does not exist.", check_status=404))
    assert ended.code == 2, ended.err
    assert "does not serve model 'm'" in ended.err
    assert "--model is the name that the service uses for the model" in ended.err


def test_a_service_that_takes_no_tools_ends_the_evaluation_with_what_to_set(
    agentrl: Cli, workplace: Path, service: Callable[..., str]
) -> None:
    said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    ended = agentrl(*OPENAI, "--url", service(400, said))
    assert ended.code == 2, ended.err
    assert "does not support tool calls" in ended.err
    assert "Set agent.loop=react_text" in ended.err
    assert "env check" not in ended.err


def test_a_context_that_is_too_small_names_the_keys(agentrl: Cli, workplace: Path, service: Callable[..., str]) -> None:
    said = "This model's maximum context length is 64 tokens. However, your request has 90."
    ended = agentrl(*OPENAI, "--url", service(400, said), "rollout.retries=0")
    assert ended.code == 1
    assert "error: no episode could be played (engine_error): " in ended.err
    assert "Set agent.max_tokens to its context" in ended.err
    assert "env check" not in ended.err


def test_an_environment_that_fails_every_episode_is_to_be_checked(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no board")

    monkeypatch.setattr("agentrl.envs.guess_number.GuessNumber.reset", broken)
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "1", "rollout.retries=0")
    ended = agentrl(*words, "environment.isolation=inline")
    assert ended.code == 1
    assert "(environment_error)" in ended.err
    assert "run: agentrl env check guess_number" in ended.err


REWARDS = """
import itertools

calls = itertools.count()


def half(trajectory, task):
    if next(calls) % 2:
        raise LookupError("every other time")
    return len(trajectory.completions) / 100
"""


def test_an_evaluation_ends_with_its_worst_problems(agentrl: Cli, workplace: Path) -> None:
    (workplace / "faulty_rewards.py").write_text(REWARDS)
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "12", "--json", "r.json", "--report")
    ended = agentrl(*words, "--reward", "faulty_rewards:half", "rollout.retries=0", "rollout.max_concurrent=1")
    assert ended.code == 0, ended.err
    (problem, *_) = json.loads((workplace / "r.json").read_text())["problems"]
    assert (problem["kind"], problem["count"], problem["of"], problem["line"]) == ("reward_error", 6, 12, 9)
    assert problem["file"].endswith("faulty_rewards.py")
    assert f"problem 1: {problem['text']}" in ended.err
    (report,) = workplace.rglob("report.md")
    assert problem["text"] in report.read_text()


def test_problems_are_kept_for_the_same_evaluation_found_again(agentrl: Cli, workplace: Path) -> None:
    (workplace / "other_rewards.py").write_text(REWARDS)
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "6", "--json", "r.json")
    words = (*words, "--reward", "other_rewards:half", "rollout.retries=1", "rollout.max_concurrent=1")
    counts = []
    for _ in range(2):
        assert agentrl(*words).code == 0
        (problem, *_) = json.loads((workplace / "r.json").read_text())["problems"]
        counts.append((problem["count"], problem["of"]))
    assert counts[0] == counts[1], "all episodes were found: nothing is counted twice"


def test_an_agent_loop_that_raises_is_named_with_its_line(agentrl: Cli, workplace: Path) -> None:
    lines = [
        "from agentrl import AgentLoop",
        "class Bad(AgentLoop):",
        "    async def run(self, episode):",
        "        1 / 0",
    ]
    (workplace / "raising_loop.py").write_text("\n".join(lines))
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "1", "rollout.retries=0")
    ended = agentrl(*words, "agent.loop=raising_loop:Bad")
    assert ended.code == 1
    assert "raising_loop.py line 4: 1 / 0" in ended.err
    assert "env check" not in ended.err, "the environment is not what failed"


def test_a_reward_function_that_raises_is_named_with_its_line(agentrl: Cli, workplace: Path) -> None:
    (workplace / "raising.py").write_text("def bad(trajectory, task):\n    return 1 / 0\n")
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "1", "rollout.retries=0")
    ended = agentrl(*words, "--reward", "raising:bad")
    assert ended.code == 1
    assert "no episode could be scored (reward_error): reward function raising:bad (" in ended.err
    assert "raising.py line 2: return 1 / 0" in ended.err
    assert "Fix the error in the message; the same command then plays these episodes" in ended.err
    assert "env check" not in ended.err
    assert "problem " not in ended.err, "the error is this problem"
    (record,) = workplace.rglob("evaluation.json")
    assert json.loads(record.read_text())["problems"][0]["kind"] == "reward_error"


def test_of_several_failures_the_error_tells_one_and_the_problems_the_others(agentrl: Cli, workplace: Path) -> None:
    (workplace / "twofold.py").write_text(TWOFOLD)
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "4", "rollout.retries=0")
    ended = agentrl(*words, "--reward", "twofold:bad", "rollout.max_concurrent=1")
    assert ended.code == 1
    told = next(line for line in (4, 5) if f"twofold.py line {line}: " in ended.err.rpartition("error: no episode")[2])
    (problem,) = [line for line in ended.err.splitlines() if line.startswith("problem ")]
    assert f"twofold.py line {9 - told})" in problem


TWOFOLD = """import itertools
calls = itertools.count()
def bad(trajectory, task):
    if next(calls) % 2: raise LookupError("odd")
    raise KeyError("even")
"""


def test_from_a_program(trained_run: Path, workplace: Path) -> None:
    result = library.evaluate(model=str(trained_run), tasks=2, temperature=0.5)
    assert result.panel.environment == "guess_number/valid"
    assert result.panel.settings["sampling"]["temperature"] == 0.5
    assert "guess_number" in str(result)
    with pytest.raises(UsageError, match="unknown policy"):
        library.evaluate("guess_number", policy="nobody")


def test_training_from_a_program_takes_tools_as_objects(workplace: Path) -> None:
    @library.tool
    def double(number: int) -> int:
        """Twice a number.

        Args:
            number: Which.
        """
        return 2 * number

    run = library.train(
        env="guess_number",
        model="scratch",
        algorithm="rloo",
        tools=[double, "calculator"],
        steps=1,
        seed=3,
        overrides=[
            *("trainer.tasks_per_step=1", "algorithm.group_size=2", "agent.max_turns=2", "agent.max_answer_tokens=8"),
            *("model.scratch.hidden_size=32", "model.scratch.layers=1", "trackers=[]"),
        ],
    )
    assert run.step == 1
    assert not run.interrupted
    assert Path(run.checkpoint, "model", "config.json").is_file()
    config = (run.folder / "config.yaml").read_text()
    assert "double\n  - calculator" in config
    assert "advantage: rloo" in config


SILENT = """
import gymnasium

class Silent(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        return "?", {}

    def step(self, action):
        return self.nowhere, 0.0, True, False, {}
"""


def test_an_environment_that_explains_nothing_is_told_so_and_its_failure_has_a_line(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (workplace / "silent_game.py").write_text(SILENT)
    monkeypatch.syspath_prepend(workplace)
    ended = agentrl("eval", "--env", "silent_game:Silent", "--policy", "random", "--tasks", "1", "rollout.retries=0")
    assert "environment silent_game:Silent does not describe its actions" in caplog.text
    assert ended.code == 1
    assert f"It was raised in {workplace}/silent_game.py line 11: return self.nowhere" in caplog.text
    assert "silent_game.py line 11" in ended.err


WANDERER = """
import os
import gymnasium

class Wanderer(gymnasium.Env):
    action_hint = "a word"
    observation_space = action_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        os.chdir("/")
        return "?", {}

    def step(self, action):
        return "", 1.0, True, False, {}
"""


def test_paths_are_shown_from_the_users_folder_if_an_environment_changes_it(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "wanderer.py").write_text(WANDERER)
    monkeypatch.syspath_prepend(workplace)
    ended = agentrl("eval", "--env", "wanderer:Wanderer", "--policy", "random", "--tasks", "1")
    assert ended.code == 0, ended.err
    assert Path.cwd() == Path("/")
    assert "episodes are kept in runs/evaluations/random-" in ended.err


@pytest.fixture
def chat() -> Iterator[Callable[[dict[str, int] | None], str]]:
    """Starts a chat service that guesses 50, and counts tokens as it is told."""
    running: list[http.server.ThreadingHTTPServer] = []

    def start(usage: dict[str, int] | None) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_error(404)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answer: dict[str, Any] = {"choices": [{"message": {"content": "50"}, "finish_reason": "stop"}]}
                body = json.dumps(answer if usage is None else {**answer, "usage": usage}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        running.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_address[1]}/v1"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("usage", "tokens", "shown"),
    [
        ({"prompt_tokens": 90, "completion_tokens": 7}, 21.0, "tokens per episode       21"),
        (None, 0.0, "tokens per episode       not counted"),
    ],
)
def test_the_tokens_that_a_service_counts_are_shown(
    usage: dict[str, int] | None,
    tokens: float,
    shown: str,
    agentrl: Cli,
    workplace: Path,
    chat: Callable[[dict[str, int] | None], str],
) -> None:
    words = ("agent.loop=react_text", "agent.options={format: plain}", "agent.max_turns=3", "--json", "r.json")
    ended = agentrl(*OPENAI[:-1], "1", "--seed", "1", "--url", chat(usage), *words)
    assert ended.code == 0, ended.err
    found = json.loads((workplace / "r.json").read_text())
    assert (found["turns"], found["tokens"]) == (3.0, tokens)
    assert shown in ended.out
    again = agentrl(*OPENAI[:-1], "1", "--seed", "1", "--url", chat(usage), *words)
    assert shown in again.out  # from the file of episodes


def test_one_failed_episode_does_not_fail_the_command(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three tasks one breaks: the other two are measured, and the exit code is that of success."""
    original, seen = GuessNumber.reset, []

    def sometimes(self: GuessNumber, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        seen.append(seed)
        if seed == seen[0]:
            raise RuntimeError("no board")
        return original(self, seed=seed, options=options)

    monkeypatch.setattr(GuessNumber, "reset", sometimes)
    words = ("eval", "--env", "guess_number", "--policy", "expert", "--tasks", "3", "--concurrency", "1")
    ended = agentrl(*words, "rollout.retries=0", "environment.isolation=inline", "--json", "r.json")
    assert ended.code == 0, ended.err
    found = json.loads((workplace / "r.json").read_text())
    assert (found["failed"], found["success"]["mean"]) == (1, 1.0)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("--env", "guess_number/test"), "env", "guess_number/test"),
        (("--policy", "expert"), "policy", "expert"),
        (("--tasks", "3"), "n_tasks", 3),
        (("--samples", "2"), "samples", 2),
        (("--seed", "7"), "seed", 7),
        (("--reward", "environment=2"), "settings.agent.reward", [{"name": "environment", "weight": 2.0}]),
        (("agent.max_turns=2",), "settings.agent.max_turns", 2),
    ],
)
def test_every_option_shows_in_the_result(
    words: tuple[str, ...], key: str, value: object, agentrl: Cli, workplace: Path
) -> None:
    defaults = {"--env": "guess_number/valid", "--policy": "random", "--tasks": "1"}
    given = dict(zip(words[::2], words[1::2], strict=False)) if words[0].startswith("--") else {}
    options = [part for pair in ({**defaults, **given}).items() for part in pair]
    ended = agentrl("eval", *options, *(word for word in words if "=" in word and not given), "--json", "r.json")
    assert ended.code == 0, ended.err
    found: Any = json.loads((workplace / "r.json").read_text())
    for part in key.split("."):
        found = found[part]
    assert found == value


def test_every_option_arrives_in_the_request(agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[EvaluationRequest] = []

    def play(request: EvaluationRequest) -> FinishedEvaluation:
        requests.append(request)
        raise UsageError("not played")

    monkeypatch.setattr(evaluate, "play_request", play)
    (workplace / "asked.jsonl").write_text('{"prompt": "one"}\n' * 5)
    agentrl("eval", "--prompts", "asked.jsonl", "--policy", "random", "--reward", "environment")
    words = ("--tasks", "4", "--samples", "3", "--seed", "9", "--concurrency", "7", "--fresh")
    agentrl("eval", "--env", "guess_number", "--policy", "expert", *words)
    agentrl("eval", "--env", "guess_number", "--url", "http://127.0.0.1:1/v1", "--engine", "openai", "--model", "m")
    first, second, third = requests
    assert (first.config.sole_environment.name, first.n_tasks, first.samples) == ("prompts", 5, 1)
    assert "asked.jsonl" in str(first.config.sole_environment.options)
    assert (first.seed, first.fresh, first.policy) == (0, False, PolicyKind.RANDOM)
    assert (second.n_tasks, second.samples, second.seed, second.fresh) == (4, 3, 9, True)
    assert (second.config.rollout.max_concurrent, second.policy) == (7, PolicyKind.EXPERT)
    assert isinstance(third.config.engine, OpenAIEngineConfig)
    assert (third.config.engine.url, third.config.engine.model) == ("http://127.0.0.1:1/v1", "m")


def test_a_report_is_written_where_it_is_asked_for(agentrl: Cli, workplace: Path) -> None:
    words = ("eval", "--env", "guess_number/valid", "--policy", "random", "--tasks", "1")
    assert agentrl(*words).code == 0
    assert not list(workplace.rglob("report.*"))
    ended = agentrl(*words, "--report")
    assert ended.code == 0, ended.err
    assert {file.suffix for file in workplace.rglob("report.*")} == {".md", ".html"}


def test_the_program_and_the_temperature_are_part_of_the_settings(
    agentrl: Cli, trained_run: Path, workplace: Path
) -> None:
    words = ("eval", "--model", str(trained_run), "--tasks", "1", "--json", "r.json")
    assert agentrl(*words, "--temperature", "0.25").code == 0
    assert json.loads((workplace / "r.json").read_text())["settings"]["sampling"]["temperature"] == 0.25
    agentrl(*words, "--program", "{python} -c 'print(1)'", "rollout.retries=0")
    agent = json.loads((workplace / "r.json").read_text())["settings"]["agent"]
    assert (agent["loop"], agent["options"]) == ("external", {"command": "{python} -c 'print(1)'"})


def test_an_environment_may_be_a_class_in_a_file(agentrl: Cli, workplace: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (workplace / "my games").mkdir()
    text = SILENT.replace("self.nowhere, 0.0, True, False, {}", "'.', 0.75, True, False, {}")
    (workplace / "my games" / "filed_game.py").write_text(text)
    words = ("--policy", "random", "--tasks", "1", "--json", "r.json")
    ended = agentrl("eval", "--env", "./my games/filed_game.py:Silent/test", *words)
    assert ended.code == 0, ended.err
    found = json.loads((workplace / "r.json").read_text())
    assert (found["env"], found["reward"]["mean"]) == ("./my games/filed_game.py:Silent/test", 0.75)
    assert "Did you mean 'Silent'?" in agentrl("eval", "--env", "my games/filed_game.py:Silnt").err
    assert "no file nowhere.py" in agentrl("eval", "--env", "./nowhere.py:Game").err
    (workplace / "json.py").write_text(text)
    assert "json.py has the name of another module" in agentrl("eval", "--env", "./json.py:Silent").err
