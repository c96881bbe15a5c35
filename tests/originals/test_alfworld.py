"""The household engine and the original ALFWorld say the same, step for step."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentrl.envs.household.alfworld.compare import compare_games
from agentrl.envs.household.alfworld.data import VARIABLE, Games
from agentrl.envs.household.alfworld.environment import AlfworldEnv
from agentrl.envs.household.alfworld.generate import write_games
from agentrl.envs.household.alfworld.original import OriginalAlfworldEnv, package_rules
from agentrl.envs.household.alfworld.spec import SPEC
from agentrl.envs.household.alfworld.tasks import AlfworldTasks

from agentrl.rollout.env_pool import EnvPool

pytestmark = [
    pytest.mark.originals,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the original leaves its game files open
]

GAMES = 8
"""Two of each size of house, one of them odd; docs/environments/alfworld.md has the command that compares 300."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("alfworld")
    write_games(folder, GAMES, odd=True, rules=package_rules())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        yield folder


def test_both_engines_say_the_same(data: Path) -> None:
    games = [row.game for row in Games().rows("train")]
    played = list(compare_games(data, games))
    assert [difference for parity in played for difference in parity.differences] == []
    assert len(played) == GAMES
    assert sum(parity.steps for parity in played) > GAMES * 50
    assert sum(parity.solved for parity in played) >= GAMES // 2


def test_the_original_keeps_the_contract(data: Path) -> None:
    game = Games().rows("train")[0].game
    with contextlib.closing(OriginalAlfworldEnv(max_steps=2)) as env:
        first, info = env.reset(options={"game": game})
        assert first.startswith("-= Welcome to TextWorld, ALFRED! =-")
        assert info == AlfworldEnv().reset(options={"game": game})[1]
        key = env.state_key()
        observation, reward, terminated, truncated, info = env.step("dance")
        assert (observation, reward, terminated, truncated) == ("Nothing happens.", 0.0, False, False)
        assert (info["valid"], env.state_key()) == (False, key)
        *_, truncated, info = env.step(next(name for name in env.admissible_actions() if name.startswith("go to")))
        assert (truncated, info["valid"]) == (True, True)
        assert env.state_key() != key
        assert env.reset(options={"game": game})[0] == first
        assert env.state_key() == key


def test_a_process_that_closed_several_ends_well(data: Path) -> None:
    script = f"""
from {OriginalAlfworldEnv.__module__} import OriginalAlfworldEnv
envs = [OriginalAlfworldEnv() for _ in range(3)]
for env in envs:
    env.close()
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


async def test_the_original_plays_in_worker_processes(data: Path) -> None:
    tasks = AlfworldTasks("train")
    pool = EnvPool(SPEC, options={"engine": "original"}, workers=2, reset_timeout_s=600, step_timeout_s=600)
    try:
        async with pool.borrow("one") as one, pool.borrow("other") as other:
            first, second = await asyncio.gather(one.reset(tasks[0]), other.reset(tasks[1]))
            assert first.observation != second.observation
            stepped = await one.step("look")
            assert "you see nothing" in str(stepped.result.observation)
    finally:
        await pool.close()
