"""States of environments behind Gymnasium wrappers."""

import gymnasium
import pytest
from agentrl.envs.puzzles.sokoban import SPEC as SOKOBAN

from agentrl.errors import EnvironmentFailure, failure_of
from agentrl.rollout.env_returns import WrongReturn
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


class Odd(gymnasium.Env):
    """Environment whose step returns what it is given."""

    observation_space = action_space = gymnasium.spaces.Text(9)

    def __init__(self, returned):
        self.returned = returned

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned


@pytest.mark.parametrize(
    ("returned", "got"), [(None, "cannot unpack non-iterable NoneType"), (("", 1.0, True, {}), "expected 5, got 4")]
)
async def test_a_wrong_return_that_a_wrapper_unpacks_first_is_reported_as_one_of_step(returned, got):
    adapter = EnvAdapter(lambda: gymnasium.wrappers.TimeLimit(Odd(returned), max_episode_steps=3), {})
    await adapter.reset(0, {})
    with pytest.raises(WrongReturn) as caught:
        await adapter.step("up")
    told = str(failure_of(EnvironmentFailure, "step of environment odd", caught.value))
    assert "step did not return (observation, reward, terminated, truncated, info): " in told
    assert got in told
    assert "raised in" not in told, "the line is Gymnasium's"


async def test_an_environment_s_own_errors_stay_what_they_are():
    adapter = EnvAdapter(
        lambda: gymnasium.wrappers.TimeLimit(Odd(ValueError("cannot unpack")), max_episode_steps=3), {}
    )
    await adapter.reset(0, {})
    with pytest.raises(ValueError, match="cannot unpack") as caught:
        await adapter.step("up")
    assert type(caught.value) is ValueError
