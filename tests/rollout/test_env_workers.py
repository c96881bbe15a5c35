"""Environments behind Gymnasium wrappers, and code whose success depends on where it runs."""

import asyncio

import gymnasium
import numpy as np
import pytest
from agentrl.envs.puzzles.sokoban import SPEC as SOKOBAN

from agentrl.env import Isolation
from agentrl.errors import EnvironmentFailure, UsageError, failure_of
from agentrl.rollout.env_returns import WrongReturn
from agentrl.rollout.env_workers import EnvAdapter
from agentrl.task import Task


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


class Plain(Odd):
    """Environment to which each test gives one wrong part."""

    def __init__(self, **parts):
        super().__init__(("", 1.0, True, False, {}))
        vars(self).update(parts)


WRONG_PARTS = [
    ({"admissible_actions": lambda: "go"}, "admissible_actions is invalid: got str 'go', expected a list of texts"),
    ({"admissible_actions": lambda: [1]}, "an action of admissible_actions is invalid: got int 1, expected text"),
    ({"admissible_actions": list}, "admissible_actions is invalid: got list .., expected at least one action"),
    ({"admissible_actions": ["go"]}, "admissible_actions is invalid: got list .'go'., expected a method"),
    ({"action_hint": lambda: "go"}, "action_hint of the environment is invalid: .* expected text"),
    ({"tools": [len]}, r"a tool of the environment is invalid: .*, such as \[agentrl.tool\(self.look\)\]"),
    ({"tools": list}, "tools of the environment is invalid: .* expected a list of tools"),
    ({"tools": ["calculator"]}, "a tool of the environment is invalid: got str 'calculator'"),
    ({"state_key": "a"}, "state_key is invalid: got str 'a', expected a method"),
    ({"state_key": object}, "state_key is invalid: got object .*, expected text that is equal for equal states"),
    ({"expert": lambda: None}, "expert is invalid: got NoneType None, expected an object with a method act"),
    ({"expert": lambda: lambda observation: "go"}, "expert is invalid: got function .*expected an object"),
    ({"reset": lambda: ("", {})}, r"reset does not take its arguments: got reset\(\), expected reset\(self, \*, seed"),
]


@pytest.mark.parametrize(("parts", "words"), WRONG_PARTS)
async def test_a_part_of_the_wrong_kind_is_named(parts, words):
    async def play():
        adapter = EnvAdapter(lambda: Plain(**parts), {})
        await adapter.reset(0, {})
        await adapter.random_action(1)
        await adapter.expert_action("")

    with pytest.raises(WrongReturn, match=words):
        await play()


async def test_an_expert_without_an_action_is_reported():
    class Expert:
        def act(self, observation):
            return None

    adapter = EnvAdapter(lambda: Plain(expert=Expert), {})
    await adapter.reset(0, {})
    with pytest.raises(WrongReturn, match="act of the expert is invalid: got NoneType None, expected an action"):
        await adapter.expert_action("")


async def test_an_error_within_reset_stays_what_it_is():
    def reset(*, seed=None, options=None):
        return len(seed)

    with pytest.raises(TypeError, match="has no len"):
        await EnvAdapter(lambda: Plain(reset=reset), {}).reset(0, {})


async def test_admissible_actions_become_plain_texts():
    adapter = EnvAdapter(lambda: Plain(admissible_actions=lambda: np.array(["go", "stop"])), {})
    assert [type(action) for action in await adapter.admissible_actions()] == [str, str]


@pytest.mark.parametrize("made", [Odd, "text", None])
def test_what_is_not_an_environment_is_refused_when_it_is_made(made):
    with pytest.raises(WrongReturn, match="expected an object with reset, step and close"):
        EnvAdapter(lambda: made, {})


async def test_a_world_without_random_actions_says_what_needs_them():
    adapter = EnvAdapter(lambda: Plain(action_space=None), {})
    await adapter.reset(0, {})
    with pytest.raises(
        UsageError, match=r"no action_space, expected one of them, .* new model .* Add to the class: action_"
    ):
        await adapter.random_action(1)


async def test_random_actions_do_not_depend_on_other_episodes_with_the_same_space():
    """A class attribute is one space for all episodes, which run concurrently."""

    async def play(between):
        adapter = EnvAdapter(lambda: Plain(), {})
        await adapter.reset(0, {})
        found = []
        for _ in range(3):
            found.append(await adapter.random_action(1))
            between()
        return found

    assert await play(Plain.action_space.sample) == await play(lambda: None)


async def play_one_step(pool, fault="none"):
    async with pool.borrow("e") as world:
        await world.reset(Task(id="t", environment="world", options={"fault": fault}))
        return await world.step("x")


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", r"failed: got ValueError: boom\. It was raised in \S*rollout_worlds\.py line \d+: raise ValueError"),
        (
            "four",
            r"failed: step returned 4 values, expected 5: [\w, ]+\. Check the environment with: "
            r"agentrl env check world$",
        ),
    ],
)
async def test_error_names_the_line_or_the_next_step(make_pool, worlds, isolation, fault, words):
    with pytest.raises(EnvironmentFailure, match=words):
        await play_one_step(make_pool(worlds.Faulty, isolation, workers=1), fault)


async def test_isolation_decides_which_code_of_asyncio_and_signals_works(make_pool, worlds):
    for isolation in (Isolation.THREAD, Isolation.PROCESS):
        assert (await play_one_step(make_pool(worlds.Faulty, isolation, workers=1), "run")).result.done
    with pytest.raises(EnvironmentFailure, match=r"running event loop \(.*environment.isolation=thread\)"):
        await play_one_step(make_pool(worlds.Faulty), "run")
    stepped = await play_one_step(make_pool(worlds.Faulty, Isolation.PROCESS, workers=1), "signal")
    assert stepped.result.done
    with pytest.raises(EnvironmentFailure, match=r"main thread.* \(this code .*environment.isolation=process\)"):
        await play_one_step(make_pool(worlds.Faulty, Isolation.THREAD, workers=1), "signal")


class Awaiting(gymnasium.Env):
    """A `gymnasium.Env` whose step is a coroutine."""

    observation_space = action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        return "Hello.", {}

    async def step(self, action):
        await asyncio.sleep(0)
        return "Bye.", 1.0, True, False, {}


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_coroutines_of_any_environment_are_awaited(make_pool, isolation):
    stepped = await play_one_step(make_pool(Awaiting, isolation, workers=1))
    assert stepped.result.observation == "Bye."
