"""Images that tools return: parts of the tool's message, in the ledger, stored and trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from support.vision import FAMILIES, save_vision_model

import agentrl
from agentrl.agent_loop import AgentLoop, Episode
from agentrl.config import load_config
from agentrl.message import ImagePart, TextPart, ToolCall, user
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import Run, start_run
from agentrl.trajectory import Trajectory

from .conftest import noise

SETTINGS = (
    *("environment.name=vision.test_tool_images:Meadow", "agent.loop=vision.test_tool_images:PhotographingLoop"),
    *("agent.max_answer_tokens=5", "agent.max_tokens=600"),
    *("engine.max_num_seqs=4", "engine.cache_tokens=8192", "engine.max_context=600"),
    *("algorithm.group_size=2", "trainer.steps=1", "trainer.tasks_per_step=2"),
)


@agentrl.tool
def photograph(number: int) -> list[str | ImagePart]:
    """Shows a picture.

    Args:
        number: Which one.
    """
    return [f"Picture {number}:", noise(40, 60, number)]


class Meadow(gymnasium.Env[str, str]):
    """Brings a tool of its own, and ends with the first action."""

    observation_space = action_space = gymnasium.spaces.Text(50)
    tools = (photograph,)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "a meadow", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {"success": True}


class PhotographingLoop(AgentLoop):
    """Two answers, each followed by the call of a tool, whatever they are."""

    follow_ups = ("tool",)

    async def run(self, episode: Episode) -> None:
        await episode.reset()
        conversation = episode.open([user("Look.")], tools=())
        for number in range(2):
            await conversation.generate()
            call = ToolCall(name="photograph", arguments={"number": number})
            conversation.add(await episode.call_tool(call))
        await conversation.generate()
        await episode.step("1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def get(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        save_vision_model(family, folder)
        return folder

    return get


def played(run: Run) -> list[Trajectory]:
    return [stored.trajectory for stored in read_trajectories(run.folder.trajectories, messages=True)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_tools_are_stored_and_trained(
    family: str, models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    settings = [*SETTINGS, f"model.path={models(family)}", f"run.directory={tmp_path}"]
    run = start_run(load_config(None, settings), kind="test")
    train(run)
    (line,) = read_metrics(run.folder.metrics_file)
    assert line["mismatch/prob_abs_mean"] < 1e-4
    for trajectory in played(run):
        (sequence,) = trajectory.sequences
        assert [placed.image for placed in sequence.images] == [noise(40, 60, 0), noise(40, 60, 1)]
        shown = [message.content for message in trajectory.episode_messages.conversations[0] if message.role == "tool"]
        assert shown == [(TextPart(text=f"Picture {n}:"), noise(40, 60, n)) for n in range(2)]
        for placed in sequence.images:
            assert not sequence.loss_mask[placed.start : placed.end].any()
