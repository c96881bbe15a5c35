"""Environments, tools, the machine, configs and benchmarks from the command line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.doctor import GIB, Machine, advice
from agentrl.models.load import Accelerator
from agentrl.registry import Kind, names

Cli = Callable[..., Any]


def test_environments_are_listed_and_shown(agentrl: Cli) -> None:
    listed = agentrl("env", "list").out
    assert all(name in listed for name in names(Kind.ENVIRONMENT))
    shown = agentrl("env", "show", "household").out
    assert "at most 50" in shown
    assert "at most 80" in agentrl("env", "show", "household", "max_steps=80").out
    one = agentrl("env", "show", "household/valid_seen").out
    assert "split valid_seen" in one
    assert "split train" not in one
    assert "has no split of this name: got 'valid_sen'" in agentrl("env", "show", "household/valid_sen").err
    assert "version 1" in " ".join(agentrl("env", "show", "frozen_lake").out.split())
    assert "134 tasks" in shown
    assert "take apple 1 from fridge 1" in shown


@pytest.mark.slow
def test_checking_prints_each_rule_and_fails_where_one_is_broken(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = agentrl("env", "check", "guess_number", "--episodes", "2", "--quick")
    assert ended.code == 0, ended.err
    assert re.search("passed +is deterministic +", ended.out)
    (workplace / "shaky_world.py").write_text(
        "import gymnasium as gym, itertools\n"
        "counter = itertools.count()\n"
        "class Shaky(gym.Env):\n"
        "    observation_space = action_space = gym.spaces.Text(50)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return f'number {next(counter)}', {}\n"
        "    def step(self, action):\n"
        "        return 'end', 0.0, True, False, {}\n"
    )
    monkeypatch.syspath_prepend(str(workplace))
    ended = agentrl("env", "check", "shaky_world:Shaky", "--episodes", "2", "--quick")
    assert ended.code == 1
    assert re.search("failed +is deterministic +", ended.out)
    assert "→ is deterministic: draw only from" in ended.out
    assert "breaks rules" in ended.err


RULE = ("--only", "has tasks")


def test_a_check_is_written_as_json(agentrl: Cli, workplace: Path) -> None:
    printed = json.loads(agentrl("env", "check", "guess_number", *RULE, "--json", "-").out)
    assert [row["status"] for row in printed["rows"]] == ["passed"]
    assert "100,000" in agentrl("env", "check", "guess_number", *RULE, "--json", "report.json").out
    assert json.loads((workplace / "report.json").read_text())["environment"] == "guess_number"


SLOW_WORLD = """
import time

import gymnasium as gym


class Slow(gym.Env):
    observation_space = action_space = gym.spaces.Text(50)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        time.sleep(2.0)
        return "number", {}

    def step(self, action):
        return "end", 0.0, True, False, {}
"""


@pytest.mark.parametrize("command", ["check", "integrity"])
@pytest.mark.slow
def test_a_call_has_the_time_that_is_given(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (workplace / "slow_world.py").write_text(SLOW_WORLD)
    monkeypatch.syspath_prepend(str(workplace))
    ended = agentrl("env", command, "slow_world:Slow", "--episodes", "1", "--call-timeout", "0.5")
    assert ended.code == 1
    assert "0.5 s" in " ".join(ended.out.split())


@pytest.mark.parametrize(
    ("command", "rules"),
    [
        ("check", ("has tasks", "keeps splits apart", "is deterministic")),
        ("integrity", ("silence earns nothing", "handing in earns nothing", "repeating earns nothing")),
    ],
)
def test_rules_are_chosen_and_skipped(agentrl: Cli, command: str, rules: tuple[str, ...]) -> None:
    only = [word for rule in rules for word in ("--only", rule)]
    ended = agentrl("env", command, "guess_number", "--episodes", "1", *only, "--skip", rules[1], "--json", "-")
    assert ended.code == 0, ended.err
    statuses = {row["check"]: row["status"] for row in json.loads(ended.out)["rows"]}
    assert {rule for rule, status in statuses.items() if status != "skipped"} == {rules[0], rules[2]}


def test_the_integrity_of_a_reward_is_reported(agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = agentrl("env", "integrity", "guess_number/valid", "--episodes", "3", "--json", "report.json")
    assert ended.code == 0, ended.err
    assert re.search("passed +silence earns nothing +mean return 0, of a solution 1", ended.out)
    written = json.loads((workplace / "report.json").read_text())
    assert (written["split"], written["rows"][0]["check"]) == ("valid", "hides the answer")
    (workplace / "generous_world.py").write_text(
        "import gymnasium as gym\n"
        "class Generous(gym.Env):\n"
        "    observation_space = action_space = gym.spaces.Text(50)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return 'Do your best.', {}\n"
        "    def step(self, action):\n"
        "        return 'end', 1.0, True, False, {}\n"
        "    def expert(self):\n"
        "        return self\n"
        "    def act(self, observation):\n"
        "        return 'my best'\n"
    )
    monkeypatch.syspath_prepend(str(workplace))
    ended = agentrl("env", "integrity", "generous_world:Generous", "--episodes", "2")
    assert ended.code == 1
    assert re.search("failed +silence earns nothing +mean return 1, of a solution 1", ended.out)
    assert "→ silence earns nothing: reward results of actions" in ended.out
    assert agentrl("env", "integrity", "guess_number", "--only", "silence").code == 2


@pytest.mark.slow
def test_all_environments_are_checked_and_those_without_their_data_are_left_out(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(workplace))
    ended = agentrl("env", "check", "--all", *RULE, "--json", "report.json")
    assert ended.code == 0, ended.err
    assert re.search("household +passed +1 of 1 ", ended.out)
    assert re.search("alfworld +skipped +no games", ended.out)
    written = json.loads((workplace / "report.json").read_text())
    assert written["skipped"]["openenv"].startswith("the OpenEnv server is not set")
    assert written["skipped"]["agentgym"].startswith("the range of tasks of split train is not valid")
    assert {report["environment"] for report in written["environments"]} | {*written["skipped"]} == {
        *names(Kind.ENVIRONMENT)
    }


@pytest.mark.parametrize("words", [(), ("household", "--all"), ("--all", "--only", "has task")])
def test_a_check_of_nothing_is_wrong_usage(agentrl: Cli, words: tuple[str, ...]) -> None:
    assert agentrl("env", "check", *words).code == 2


def play(agentrl: Cli, monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    ended = agentrl("env", "play", *words)
    assert ended.code == 0, ended.err
    return str(ended.out)


def test_a_person_plays(agentrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    every_number = "\n".join(map(str, range(1, 12)))
    out = play(agentrl, monkeypatch, f"?\nfifty\n{every_number}\n", "guess_number")
    assert "a whole number" in out
    assert "That is not a number. Guess a whole number" in out
    assert "after 10 turns" in out


def test_a_person_calls_tools(agentrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "?\n/search query=mirror\n/serch query=mirror\n/search 'query\n/search\nq\n"
    out = play(agentrl, monkeypatch, typed, "search_qa")
    assert "/search query=…   Searches for passages." in out
    assert "Doc 1(Title:" in out
    assert "there is no tool 'serch', expected search" in out
    assert "Error: No closing quotation" in out
    assert "query is missing" in out


def test_a_tool_may_end_what_a_person_plays(agentrl: Cli, monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    (workplace / "vault_world.py").write_text(
        "import gymnasium as gym\n"
        "import agentrl\n"
        "class Vault(gym.Env):\n"
        "    observation_space = action_space = gym.spaces.Text(50)\n"
        "    def __init__(self):\n"
        "        self.tools = [agentrl.tool(self.turn)]\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'Open the vault.', {}\n"
        "    def step(self, action):\n"
        "        return '', 0.0, False, False, {}\n"
        "    def turn(self, number: int) -> agentrl.ToolResult:\n"
        "        'Turns the wheel.\\n\\nArgs:\\n    number: Where to.'\n"
        "        return agentrl.ToolResult('It clicks.', reward=1.0, stop=number == 7, success=number == 7)\n"
    )
    monkeypatch.syspath_prepend(str(workplace))
    out = play(agentrl, monkeypatch, "/turn number=7\n", "vault_world:Vault")
    assert "Solved. Return 1 after 1 turns" in out


def test_the_expert_helps_a_person(agentrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    out = play(agentrl, monkeypatch, "?\n" + "!\n" * 50, "household", "size=tiny", "--task", "2")
    assert "go to" in out
    assert "Solved. Return 1" in out


def test_a_person_leaves(agentrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Return" not in play(agentrl, monkeypatch, "q\n", "frozen_lake")
    assert "Return" not in play(agentrl, monkeypatch, "", "household/valid_seen")


def test_tools_are_listed_shown_and_called(agentrl: Cli) -> None:
    assert "calculator" in agentrl("tool", "list").out
    assert json.loads(agentrl("tool", "show", "calculator").out)["function"]["name"] == "calculator"
    assert agentrl("tool", "call", "calculator", "expression=6 * 7").out == "42\n"
    refused = agentrl("tool", "call", "calculator", "expresion=1")
    assert refused.code
    assert "the policy would read: wrong arguments for calculator: expression is missing" in refused.err
    assert "WrongArguments" not in refused.err, "the same text is not repeated"


@pytest.mark.parametrize("command", ["call", "check"])
def test_what_a_tool_prints_is_not_among_the_results(agentrl: Cli, workplace: Path, command: str) -> None:
    shout = 'def shout() -> str:\n    """Shout."""\n    print("noise")\n    return "ok"\n'
    (workplace / "noisy.py").write_text(f"import agentrl\n\n\n@agentrl.tool\n{shout}")
    ended = agentrl("tool", command, "noisy:shout")
    assert ended.out == "ok\n" if command == "call" else ended.out.startswith("tool shout\npassed ")
    assert "noise" not in ended.out
    assert ended.err.startswith("noise\n") or command == "check"


def test_what_no_encoding_knows_is_replaced_in_results(agentrl: Cli, workplace: Path) -> None:
    (workplace / "halves.py").write_text(
        'import agentrl\n\n\n@agentrl.tool\ndef half() -> str:\n    """Half."""\n    return \'a\\ud800b\'\n'
    )
    assert agentrl("tool", "call", "halves:half").out == "a\ufffdb\n"


def test_tools_take_options_and_are_checked(agentrl: Cli, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        connection.execute("create table t as select 7 as x")
    connection.close()
    option = ("-o", f"database={tmp_path / 'a.db'}")
    assert json.loads(agentrl("tool", "show", "sql").out)["function"]["parameters"]["required"] == ["query"]
    assert agentrl("tool", "call", "sql", "query=select x from t", *option).out == "x\n7\n"
    checked = agentrl("tool", "check", "sql", "query=select x from t", *option).out
    assert "passed   wrong arguments are refused" in checked
    failed = agentrl("tool", "check", "sql", "query=select nothing", *option)
    assert failed.code
    assert "failed   examples succeed" in failed.out
    assert "tool bash needs a sandbox" in agentrl("tool", "call", "bash", "command=ls").err
    nowhere = agentrl("tool", "call", "bash", "command=ls", "--sandbox", "nowhere")
    assert "unknown sandbox: got 'nowhere'" in nowhere.err
    checked = agentrl("tool", "check", "bash", "command=ls", "--sandbox", "nowhere").out
    assert "unknown sandbox" in " ".join(checked.split())
    shown = agentrl("tool", "show", "sql", "-o", "name_of_no_option=1")
    assert "name_of_no_option" in shown.err
    assert "database is missing" in agentrl("tool", "call", "sql", "query=select 1").err


def test_the_doctor_tells_versions_machine_and_next_step(agentrl: Cli) -> None:
    ended = agentrl("doctor")
    assert ended.code == 0, ended.err
    for word in ("torch", "cores", "memory", "GPUs", "engines", "local", "household", "extras", "→"):
        assert word in ended.out
    text = " ".join(ended.out.split())
    for tracker in ("tensorboard", "wandb"):
        state = text.partition(f" tracker {tracker} ")[2]
        assert state.startswith(("present ", f"missing; to install it: pip install {tracker} "))


GPU = Accelerator(device="cuda:0", name="Big GPU", memory_bytes=80 * GIB)


@pytest.mark.parametrize(
    ("machine", "advised"),
    [
        (Machine(cores=2, memory_bytes=8 * GIB, free_disk_bytes=9 * GIB, gpus=[], has_nvidia_driver=False), "demo"),
        (Machine(cores=2, memory_bytes=2 * GIB, free_disk_bytes=9 * GIB, gpus=[], has_nvidia_driver=False), "memory"),
        (Machine(cores=2, memory_bytes=8 * GIB, free_disk_bytes=1 * GIB, gpus=[], has_nvidia_driver=False), "disk"),
        (Machine(cores=2, memory_bytes=8 * GIB, free_disk_bytes=9 * GIB, gpus=[], has_nvidia_driver=True), "for CUDA"),
        (Machine(cores=8, memory_bytes=99 * GIB, free_disk_bytes=99 * GIB, gpus=[GPU], has_nvidia_driver=True), "real"),
    ],
)
def test_the_doctors_advice_fits_the_machine(machine: Machine, advised: str) -> None:
    assert advised in advice(machine)[0]


def test_configs_are_listed_and_documented(agentrl: Cli, workplace: Path) -> None:
    assert "quickstart" in agentrl("config", "list").out.split()
    assert "| `trainer.steps` |" in agentrl("config", "reference").out
    assert agentrl("config", "reference", "--output", "keys.md").code == 0
    assert "| `trainer.steps` |" in (workplace / "keys.md").read_text()


def test_benchmarks_are_found_and_run(agentrl: Cli, workplace: Path) -> None:
    folder = workplace / "benchmarks"
    folder.mkdir()
    (folder / "sums.py").write_text(
        "def run(*, terms=2):\n    return {'sum': {'per_s': 12345.0}, 'machine': 'here', 'terms': terms}\n"
    )
    (folder / "empty.py").write_text('"""Measures nothing.\n\nAnd has no end."""')
    assert [line.split(maxsplit=1)[1:] for line in agentrl("bench").out.splitlines()[1:]] == [["Measures nothing."], []]
    ended = agentrl("bench", "sums", "--json", "sums.json")
    assert ended.code == 0, ended.err
    assert "1.234e+04" in ended.out
    assert json.loads((workplace / "sums.json").read_text())["machine"] == "here"
    assert re.search(r"terms +\[3, 4\]", agentrl("bench", "sums", "terms=[3, 4]").out)
    assert (
        "benchmark sums has no such option: got engine, expected terms" in agentrl("bench", "sums", "engine=vllm").err
    )
    (folder / "words.py").write_text(
        "def run(*, engine='a', model='b', url='c', versus='d'):\n"
        "    return {'engine': engine, 'model': model, 'url': url, 'versus': versus}\n"
    )
    given = ("--engine", "vllm", "--model", "m", "--url", "http://u", "--versus", "trl")
    for name, value in zip(given[::2], given[1::2], strict=True):
        assert re.search(rf"{name[2:]} +{value} *$", agentrl("bench", "words", name, value).out, re.MULTILINE)
    assert "no function run()" in agentrl("bench", "empty").err
    assert "expected one of empty, sums" in agentrl("bench", "other").err


def test_a_person_is_told_where_a_picture_is(agentrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    text = play(agentrl, monkeypatch, "!\n", "frozen_lake", "observation=image")
    first, second = re.findall(r"\[image: (\S+/\d\.png)\]", text)
    assert Path(first).read_bytes() != Path(second).read_bytes()
    assert re.search(r"^[FGHPS]( [FGHPS]){4}$", text, re.MULTILINE)


def test_env_prompt_shows_the_default_loop_with_its_tools_and_special_tokens(agentrl: Cli) -> None:
    shown = agentrl("env", "prompt", "guess_number").out
    assert "agent loop: tool_calling" in shown
    assert shown.index("── prompt") < shown.index("<|im_start|>system") < shown.index('"name": "act", "description"')
    answer = '<tool_call>\n{"name": "act", "arguments": {"action": "50"}}\n</tool_call><|im_end|>'
    assert f"── the expert's answer\n{answer}" in shown
    assert "<tool_response>" in shown.partition("── reply")[2]
    wrong = shown.partition("── reply to a wrong first answer: I am not sure what to do.")[2]
    assert wrong.index("<tool_call>") < wrong.index('"arguments"') < wrong.index("</tool_call><|im_end|>")


def test_env_prompt_takes_the_loop_that_is_asked_for_and_examples(agentrl: Cli) -> None:
    words = ("agent.loop=react_text", "agent.options.format=action_tag", "agent.few_shot_turns=1")
    shown = agentrl("env", "prompt", "guess_number", *words).out
    assert shown.index("── prompt") < shown.index("Here are some examples") < shown.index("── the expert's answer")
    assert shown.partition("── the expert's answer")[0].count("I think of a number from 1 to 100. Guess.") == 2
    assert "<tools>" not in shown
    assert shown.rstrip().endswith("in this form:\n<action>50</action><|im_end|>\n<|im_start|>assistant")
    random = agentrl("env", "prompt", "gymnasium/train", "--turns", "1")
    assert "── a random answer" in random.out


@pytest.mark.parametrize("loop", ["react_text", "tool_calling", "step_independent", "single_turn"])
@pytest.mark.parametrize("name", ["household", "webshop", "countdown", "search_qa", "retail", "frozen_lake"])
def test_env_prompt_knows_every_loop(agentrl: Cli, name: str, loop: str) -> None:
    reads_whole_answers = name in ("search_qa", "retail") and loop in ("react_text", "step_independent")
    form = ["agent.options.format=free"] if reads_whole_answers else []
    ended = agentrl("env", "prompt", name, f"agent.loop={loop}", *form, "--turns", "1")
    assert ended.code == 0, ended.err
    assert "answer" in ended.out.partition("── prompt")[2]
    assert "(your action)" not in ended.out


def test_a_function_among_the_tools_of_an_environment_is_named(
    agentrl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_tools.py").write_text(
        "import gymnasium\n\nclass Game(gymnasium.Env):\n    action_space = gymnasium.spaces.Text(9)\n"
        "    tools = [print]\n\n    def reset(self, *, seed=None, options=None):\n        return 'Go.', {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    expected = "a tool of the environment is invalid: got builtin_function_or_method"
    shown = agentrl("env", "show", "plain_tools:Game")
    assert shown.code == 0
    assert expected in shown.err
    played = agentrl("env", "play", "plain_tools:Game")
    assert played.code == 2
    assert expected in played.err
    sys.modules.pop("plain_tools", None)
