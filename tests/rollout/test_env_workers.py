"""States of environments behind Gymnasium wrappers."""

import gymnasium
from agentrl.envs.puzzles.sokoban import SPEC as SOKOBAN

from agentrl.rollout.env_workers import EnvAdapter


async def test_a_state_holds_the_steps_that_a_wrapper_has_counted():
    """Otherwise each action that is tried would bring an episode nearer to its end."""
    make = SOKOBAN.make
    adapter = EnvAdapter(lambda: gymnasium.wrappers.TimeLimit(make(), max_episode_steps=3), {})
    await adapter.reset(0, {})
    for _ in range(5):
        before = await adapter.snapshot()
        assert not (await adapter.step("up")).result.truncated
        await adapter.restore(before)
    flags = [(await adapter.step("up")).result.truncated for _ in range(3)]
    assert flags == [False, False, True]
