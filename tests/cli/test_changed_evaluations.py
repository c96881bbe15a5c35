"""A change of code, data, weights or settings starts a new evaluation; without a change, results are reused."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

Cli = Callable[..., Any]

FILES = {
    "my_env.py": """
from pathlib import Path
import gymnasium
from my_rules import paid

class Lottery(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(20)

    def __init__(self, table="table.json"):
        self.table = table

    def reset(self, *, seed=None, options=None):
        self.prize = float((Path(__file__).parent / "levels" / "prize.txt").read_text())
        return "Draw.", {}

    def step(self, action):
        return "Drawn.", paid(self.prize), True, False, {}

    def admissible_actions(self):
        return ["draw"]

gymnasium.register("Lottery-v0", Lottery)
""",
    "my_rules.py": "from my_constants import FACTOR\n\ndef paid(prize):\n    return prize * FACTOR\n",
    "my_constants.py": "FACTOR = 1.0\n",
    "levels/prize.txt": "1.0\n",
    "my_rewards.py": "import my_scale\n\ndef scaled(trajectory, task):\n    return my_scale.scale(1.0)\n",
    "my_scale.py": "def scale(value):\n    return value * 1.0\n",
    "my_tools.py": 'import agentrl\n\n@agentrl.tool\ndef look() -> str:\n    """Look."""\n    return "1.0"\n',
    "my_loop.py": (
        "from agentrl.agent_loop import AgentLoop\nfrom agentrl.message import Message, user\n\n"
        "class Once(AgentLoop):\n    offers_tools = True\n\n    async def run(self, episode):\n"
        "        tools = list(episode.tools.values())\n"
        "        conversation = episode.open([user(await episode.reset())], tools=tools)\n"
        "        for _ in range(int(1.0)):\n"
        "            if (await episode.step((await conversation.generate()).text)).done:\n                return\n\n"
        "    def demonstrate(self, action):\n        return Message(role='assistant', content=action)\n"
    ),
    "table.json": "[1.0]\n",
    "tasks.jsonl": '{"id": "a", "prompt": "first 1.0"}\n{"id": "b", "prompt": "second"}\n',
}
WORDS = (
    *("eval", "--env", "my_env:Lottery", "--policy", "random", "--tasks", "2"),
    *("--reward", "environment=1", "--reward", "my_rewards:scaled=1"),
    *("agent.loop=my_loop:Once", "agent.tools=[my_tools:look]", "environment.options={table: table.json}"),
    *("environment.tasks=tasks.jsonl", "environment.split=train"),
)


@pytest.fixture
def project(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an environment of its own and everything that it reads."""
    (workplace / "levels").mkdir()
    for name, text in FILES.items():
        (workplace / name).write_text(text)
    monkeypatch.syspath_prepend(workplace)
    forget()
    yield workplace
    forget()


def forget() -> None:
    """Let the next command import the project's modules anew, as a new process does."""
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]
    gymnasium.registry.pop("Lottery-v0", None)


def evaluated(agentrl: Cli, *words: str) -> dict[str, Any]:
    forget()
    ended = agentrl(*words, "--json", "found.json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(Path("found.json").read_text())
    return found


@pytest.mark.parametrize("changed", sorted(FILES))
def test_a_changed_file_is_played_anew(changed: str, agentrl: Cli, project: Path) -> None:
    first = evaluated(agentrl, *WORDS)
    assert (first["reward"]["mean"], first["reused"]) == (2.0, 0)
    assert evaluated(agentrl, *WORDS)["reused"] == 2
    file = project / changed
    text = file.read_text()
    file.write_text(text.replace("1.0", "2.0") if "1.0" in text else text + "# changed\n")
    again = evaluated(agentrl, *WORDS)
    assert again["reused"] == 0
    if changed in {"my_constants.py", "levels/prize.txt", "my_scale.py"}:
        assert again["reward"]["mean"] == 3.0
    file.write_text(FILES[changed])
    assert evaluated(agentrl, *WORDS)["reused"] == 2  # those of the first version


@pytest.mark.parametrize(
    "more",
    [
        ("--seed", "1"),
        ("agent.reward=[my_rewards:scaled]",),
        ("agent.max_turns=3",),
        ("agent.system_prompt=Play.",),
        ("environment.options={table: other.json}",),
    ],
)
def test_a_changed_setting_is_played_anew(more: tuple[str, ...], agentrl: Cli, project: Path) -> None:
    evaluated(agentrl, *WORDS)
    assert evaluated(agentrl, *WORDS, *more)["reused"] == 0


def test_another_split_or_policy_is_another_evaluation(agentrl: Cli, project: Path) -> None:
    words = ("eval", "--env", "guess_number/valid", "--policy", "random", "--tasks", "1")
    evaluated(agentrl, *words)
    assert evaluated(agentrl, *words)["reused"] == 1
    assert evaluated(agentrl, "eval", "--env", "guess_number/test", *words[3:])["reused"] == 0
    assert evaluated(agentrl, *words, "--policy", "expert")["reused"] == 0


def test_a_changed_file_of_prompts_is_played_anew(agentrl: Cli, workplace: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(workplace)
    (workplace / "my_truth.py").write_text("def truth(trajectory, task):\n    return float(task.ground_truth)\n")
    words = ("eval", "--prompts", "prompts.jsonl", "--policy", "random", "--reward", "my_truth:truth")
    for number in (1.0, 5.0):
        (workplace / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "ground_truth": str(number)}))
        assert evaluated(agentrl, *words)["reward"]["mean"] == number


def test_an_environment_registered_by_a_module_is_followed(agentrl: Cli, project: Path) -> None:
    words = ("eval", "--env", "my_env:Lottery-v0", "--policy", "random", "--tasks", "1", "agent.loop=my_loop:Once")
    assert evaluated(agentrl, *words)["reward"]["mean"] == 1.0
    (project / "my_constants.py").write_text("FACTOR = 4.0\n")
    assert evaluated(agentrl, *words)["reward"]["mean"] == 4.0


def test_reused_episodes_are_named_and_fresh_ones_replace_them(agentrl: Cli, workplace: Path) -> None:
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "2")
    assert "reused" not in agentrl(*words).err
    larger = agentrl(*words, "--samples", "2")
    assert "2 of 4 reused, played since 20" in larger.out
    assert "some changes cannot be detected: --fresh plays all episodes again" in " ".join(larger.out.split())
    assert "--fresh plays them again" in larger.err
    (folder,) = (workplace / "runs" / "evaluations").iterdir()
    before = (folder / "episodes.jsonl").read_bytes()
    fresh = agentrl(*words, "--samples", "2", "--fresh")
    assert "reused" not in fresh.out + fresh.err
    assert (folder / "episodes-1.jsonl").read_bytes() == before
    assert (folder / "episodes.jsonl").read_bytes().count(b"\n") == 4
    assert json.loads((folder / "evaluation.json").read_text())["reused_since"] is None


@pytest.mark.slow
def test_changed_weights_are_played_anew_whatever_their_size_and_time(
    agentrl: Cli, trained_run: Path, workplace: Path
) -> None:

    shutil.copytree(trained_run / "model", workplace / "model")
    words = ("eval", "--env", "guess_number", "--model", "model", "--tasks", "1", "agent.loop=react_text")
    words += ("agent.max_answer_tokens=4", "agent.max_turns=1", "agent.max_tokens=512")
    evaluated(agentrl, *words)
    assert evaluated(agentrl, *words)["reused"] == 1
    file = workplace / "model" / "model.safetensors"
    status, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert evaluated(agentrl, *words)["reused"] == 0
    template = workplace / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# changed #}")
    assert evaluated(agentrl, *words)["reused"] == 0
    assert evaluated(agentrl, *words, "--temperature", "0.5")["reused"] == 0
    assert evaluated(agentrl, *words, "model.dtype=bfloat16")["reused"] == 0
    assert evaluated(agentrl, *words, "engine.max_num_seqs=2")["reused"] == 0
