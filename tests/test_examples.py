"""Every example runs."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from agentrl.registry import Kind, unregister

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = (
    "trainer.tasks_per_step=1",
    "algorithm.group_size=2",
    "agent.max_turns=2",
    "agent.max_answer_tokens=8",
    "model.scratch.hidden_size=32",
    "model.scratch.layers=1",
    "trackers=[]",
)
ARGUMENTS = {
    "guess_number": ("--steps", "1", *SMALL),
    "custom_tool": (),
    "custom_agent_loop": (),
    "reward_function": ("--steps", "1", *SMALL),
}
ELSEWHERE = {"tinker_loop"}
"""They need a server: tests/training_service runs them."""
EXPECTED = {
    "guess_number": "on GuessNumber-v0/valid: success 0.0 %",
    "custom_tool": '["not 50", "not 75"]',
    "reward_function": "'reward/component/exact': 0.0",
    "custom_agent_loop": "expert on household/valid_unseen: success 100.0 %",
}


@pytest.fixture(autouse=True)
def _own_environment_ids() -> Iterator[None]:
    """Gymnasium warns when an id is registered twice; what is registered here is forgotten."""
    before = dict(gymnasium.registry)
    gymnasium.registry.pop("GuessNumber-v0", None)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def test_every_example_is_listed_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS) | ELSEWHERE


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("sys.argv", [f"{name}.py", *ARGUMENTS[name]])
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        for tool in ("midpoint", "notebook"):
            unregister(Kind.TOOL, tool)
    assert EXPECTED[name] in capsys.readouterr().out
