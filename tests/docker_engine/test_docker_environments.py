"""Environments with containers as sandboxes, and their commands."""

import subprocess
import sys

import pytest
from agentrl.envs.code.environment import CodeEnv
from agentrl.envs.repo_fix.environment import RepoFix
from agentrl.envs.terminal.environment import Terminal

AGENTRL = (sys.executable, "-c", "from agentrl.cli import main; main()")


async def play(world, **reset):
    """The reward of an episode that the expert plays."""
    observation, _ = await world.reset(**reset)
    expert = world.expert()
    try:
        while True:
            observation, reward, ended, truncated, _ = await world.step(expert.act(observation))
            if ended or truncated:
                return reward
    finally:
        await world.close()


@pytest.mark.parametrize("make", [CodeEnv, RepoFix, Terminal])
async def test_environments_run_in_containers(make, spec):
    assert await play(make(sandbox=spec), seed=3) == 1.0


async def test_a_task_folder_runs_in_the_image_that_it_names(spec, tmp_path):
    task = tmp_path / "tasks" / "one"
    for folder in ("tests", "solution", "environment"):
        (task / folder).mkdir(parents=True)
    (task / "task.toml").write_text(f'[environment]\ndocker_image = "{spec.pop("image")}"\n')
    (task / "instruction.md").write_text("Copy what the image holds, and what the task adds, to all.txt.")
    (task / "environment" / "more").write_text("-task")
    (task / "tests" / "test.sh").write_text(
        'test "$(cat all.txt)" = image-task && pwd > /logs/where && echo 1 > $LOGS_DIR/verifier/reward.txt\n'
        'test "$TEST_DIR" = /tests || exit 1\n'
    )
    (task / "solution" / "solve.sh").write_text("cat kept/file more > all.txt\n")
    world = Terminal(folders={"test": str(tmp_path / "tasks")}, sandbox=spec)
    assert await play(world, options={"task_id": "test-0"}) == 1.0


def test_a_command_runs_in_a_container_from_the_command_line(spec):
    words = ["sandbox", "run", "--type", "docker", "--set", f"image={spec['image']}", "--set", f"url={spec['url']}"]
    words += ["--set", f"options.python={spec['options']['python']}"]
    words += ["--set", "options.readable=" + str(spec["options"]["readable"]).replace("'", '"')]
    result = subprocess.run([*AGENTRL, *words, "--", "sh", "-c", "pwd; exit 3"], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("/app\n", 3), result.stderr
