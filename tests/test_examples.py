"""Every example runs."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import nbformat
import pytest
from nbclient import NotebookClient

from agentrl.registry import Kind, unregister

EXAMPLES = Path(__file__).parent.parent / "examples"
PAGE = EXAMPLES.parent / "docs" / "examples.md"
SMALL = (
    "trainer.tasks_per_step=1",
    "algorithm.group_size=2",
    "agent.max_turns=2",
    "agent.max_answer_tokens=8",
    "model.scratch.hidden_size=32",
    "model.scratch.layers=1",
    "trackers=[]",
)
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "01_own_environment": ("--steps", "1", *SMALL),
    "02_own_tool": (),
    "03_reward_function": ("--steps", "1", *SMALL),
    "04_several_tools": (),
    "05_own_agent_loop": (),
    "06_sandbox": (),
    "07_evaluation": ("--tasks", "8"),
    "08_external_agent": ("--steps", "1", *SMALL),
    "09_custom_algorithm": ("--steps", "1", *SMALL),
    "10_mixture": ("--steps", "5", *SMALL, "trainer.tasks_per_step=3", "agent.max_turns=8"),
    "11_asynchronous": ("--steps", "3", *SMALL),
    "13_live_traffic": ("--steps", "1", "--port", "18713", "trainer.tasks_per_step=2", *SMALL[2:]),
    "14_proposer": ("--steps", "1", *SMALL, "trainer.tasks_per_step=4", "algorithm.group_size=1", "agent.max_turns=3"),
}
ELSEWHERE = {"12_own_training_loop"}
"""They need a server: tests/training_service runs them."""
EXPECTED = {
    "01_own_environment": "on GuessNumber-v0/valid: success 0.0 %",
    "02_own_tool": '["not 50", "not 75"]',
    "03_reward_function": "'reward/component/exact': 0.0",
    "04_several_tools": "price({'item': '",
    "05_own_agent_loop": "expert on household/valid_unseen: success 100.0 %",
    "06_sandbox": "expert on python:WriteProgram/valid: success 100.0 %",
    "07_evaluation": "expert minus random: +",
    "08_external_agent": "'tokens/sampled': ",
    "09_custom_algorithm": "'groups/trained': 1",
    "10_mixture": "horizon 8",
    "11_asynchronous": "step 3: at most ",
    "13_live_traffic": "sessions in the last step: ",
    "14_proposer": "'proposals/valid': ",
}
MAX_LINES = 90


@pytest.fixture(autouse=True)
def _own_environment_ids() -> Iterator[None]:
    """Gymnasium warns when an id is registered twice; what is registered here is forgotten."""
    before = dict(gymnasium.registry)
    gymnasium.registry.pop("GuessNumber-v0", None)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def test_every_example_is_listed_here() -> None:
    listed = sorted({*ARGUMENTS, *ELSEWHERE})
    assert [path.stem for path in sorted(EXAMPLES.glob("*.py"))] == listed
    assert [int(name[:2]) for name in listed] == list(range(1, 15))


@pytest.mark.parametrize("name", [*ARGUMENTS, *ELSEWHERE])
def test_example_is_short_and_explains_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert 20 <= len(text.splitlines()) <= MAX_LINES
    assert f"python examples/{name}.py" in docstring
    assert "Prints" in docstring
    assert f"[`{name}.py`]" in PAGE.read_text()


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.slow
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "06_sandbox" and shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here: apt-get install bubblewrap")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("sys.argv", [f"{name}.py", *ARGUMENTS[name]])
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        for tool in ("midpoint", "notebook"):
            unregister(Kind.TOOL, tool)
    assert EXPECTED[name] in capsys.readouterr().out


@pytest.mark.filterwarnings("default")  # of the kernel's libraries
@pytest.mark.slow
def test_the_notebook_runs_and_has_no_stored_outputs(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained, drawn, shown = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    assert "finished steps: 2" in trained[-1].text
    assert any("image/png" in output.get("data", {}) for output in drawn)
    assert re.search(r"sampled +'.*' +-\d+\.\d\d  weights 0", shown[-1].text)
