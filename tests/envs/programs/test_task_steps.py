"""Task folders of Harbor with several steps, with a verifier of their own, and with files where the verifier looks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentrl.envs.terminal.environment import Terminal
from agentrl.envs.terminal.folders import read_folder
from test_task_folders import REWARD, TASKS, played, written


@pytest.fixture(autouse=True)
def _unread() -> Iterator[None]:
    yield
    read_folder.cache_clear()


@pytest.mark.parametrize(
    ("commands", "reward", "components"),
    [
        (("echo 1 > one", "submit", "echo done >> two"), 1.0, {"step one": 1.0, "step two": 1.0}),
        (("echo 0.5 > one", "submit", "true"), 0.25, {"step one": 0.5, "step two": 0.0}),
        (("echo 0.25 > one",), 0.125, {"step one": 0.25}),
    ],
)
async def test_steps_follow_one_another_while_they_earn_enough(
    tmp_path: Path, plain: str, commands: tuple[str, ...], reward: float, components: dict[str, float]
) -> None:
    world = Terminal(folders=written(tmp_path, "steps"), sandbox=plain)
    first, info = await world.reset(options={"task_id": "test-0"})
    assert first == "Make one."
    assert info["step_timeout_s"] > 600
    texts = []
    for command in (*commands, "submit"):
        text, earned, ended, _, last = await world.step(command if command == "submit" else f"```bash\n{command}\n```")
        texts.append(text)
        assert ended == (len(texts) == len(commands) + 1)
    await world.close()
    assert (earned, last["success"]) == (reward, reward == 1)
    assert last["reward_components"] == {**components, "checks": reward}
    assert any("Step 1 of 2 is over. The next step:\n\nMake two." in text for text in texts) == (len(commands) > 1)


async def test_a_policy_that_blocks_the_next_steps_files_ends_the_episode(tmp_path: Path, plain: str) -> None:
    world = Terminal(folders=written(tmp_path, "steps"), sandbox=plain)
    await world.reset(options={"task_id": "test-0"})
    await world.step("```bash\necho 1 > one; mkdir given\n```")
    text, earned, ended, _, last = await world.step("submit")
    await world.close()
    assert text.startswith("The next step cannot begin: ")
    assert "given" in text
    assert (earned, ended, last["reward_components"]["step one"]) == (0.5, True, 1.0)


async def test_the_last_step_alone_may_be_paid_and_a_limit_ends_all_steps(tmp_path: Path) -> None:
    toml = f"multi_step_reward_strategy = 'final'\n{TASKS['steps']['task.toml']}"
    folders = written(tmp_path, "steps", **{"task.toml": toml})
    world = Terminal(folders=folders, sandbox="plain", max_steps=1)
    step = await played(world, "echo 0.5 > one")
    assert (step[1], step[2], step[3]) == (0.0, False, True)
    assert step[4]["reward_components"]["step one"] == 0.5
    read_folder.cache_clear()
    assert (await played(Terminal(folders=folders, sandbox="plain"), "true"))[1] == 0.0
    read_folder.cache_clear()
    assert (await played(Terminal(folders=folders, sandbox="plain")))[1] == 1.0


def test_a_separate_verifier_has_its_own_image_and_variables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toml = (
        "[environment]\ndocker_image = 'a'\nmcp_servers = [{name = 'x'}]\n[verifier.environment]\n"
        "docker_image = 'b'\nenv = {MODE = 'strict'}\n[verifier]\nenv = {A = '1'}\n"
    )
    (task,) = read_folder(written(tmp_path, "partial", **{"task.toml": toml})["test"])
    assert (task.image, task.verifier_image) == ("a", "b")
    assert task.verifier_variables == {"MODE": "strict", "A": "1"}
    assert "sets environment.mcp_servers, which sandboxes do not provide" in caplog.text
    read_folder.cache_clear()
    shared = {"task.toml": toml.replace("[verifier]\n", "[verifier]\nenvironment_mode = 'shared'\n")}
    (task,) = read_folder(written(tmp_path, "partial", **shared)["test"])
    assert task.verifier_image is None


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap here: apt-get install bubblewrap")
async def test_rewards_and_tests_that_the_policy_writes_do_not_count(tmp_path: Path) -> None:
    """Files of the task in /logs and /tests make these folders part of the work, which is copied to the verifier."""
    files = {
        "environment/Dockerfile": "FROM x\nCOPY seed.txt /logs/seed.txt\nCOPY seed.txt /tests/\nWORKDIR /app\n",
        "tests/test.sh": f"set -- $(cat /tests/planted || cmp -s /logs/out /tests/seed.txt && echo 1)\n{REWARD}",
        "solution/solve.sh": "cp /logs/seed.txt /logs/out\n",
    }
    world = Terminal(folders=written(tmp_path, "dockerfile", **files), sandbox="local")
    assert (await played(world))[1] == 1.0
    forged = (
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' | tee /logs/verifier/reward.json /logs/out > /tests/seed.txt"
    )
    assert (await played(world, f"{forged}; echo 1 > /tests/planted"))[1] == 0.0
