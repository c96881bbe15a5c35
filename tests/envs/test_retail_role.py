"""The retail desk with a customer whom the runtime plays: who hears what, who ends it, snapshots, options."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agentrl.envs.retail.briefing import GREETING, brief
from agentrl.envs.retail.environment import RetailDesk, make_retail
from agentrl.envs.retail.model_customer import agent_words
from agentrl.envs.retail.phrases import HANDED_OVER, OUT_OF_TIME, STOP
from agentrl.envs.retail.role_desk import AGAIN, NOT_YET, RoleRetailDesk
from agentrl.envs.retail.spec import SPEC
from agentrl.envs.retail.tasks import case_of
from agentrl.envs.retail.tools import call_text

from agentrl.errors import EnvironmentFailure, UsageError

ROLE = {"customer": "role"}


def begun(task_id: str = "valid-3") -> tuple[RoleRetailDesk, dict[str, Any]]:
    env = make_retail(**ROLE)
    assert isinstance(env, RoleRetailDesk)
    observation, info = env.reset(seed=1, options={"task_id": task_id})
    opening = case_of(task_id).scenario.requests[0].opening
    assert observation == f'{GREETING}\n\n(You begin with: "{opening}")'
    return env, info


def test_the_customer_is_told_what_it_wants_and_speaks_first() -> None:
    env, info = begun()
    assert info["instructions"] == {"user": brief(case_of("valid-3").scenario)}
    assert (info["players"], info["player"]) == (["agent", "user"], "user")
    observation, reward, terminated, truncated, info = env.step("<think>Who am I?</think>Hello, cancel my order.")
    assert (observation, reward, terminated, truncated) == ("Hello, cancel my order.", 0.0, False, False)
    assert info["player"] == "agent"
    assert "instructions" not in info
    assert env.step(call_text("think", {"thought": "Hm."}))[4]["player"] == "agent"
    assert env.step("Which order?")[0] == "Which order?"
    observation, _, done, _, info = env.step(call_text("transfer_to_human_agents", {"summary": "x"}))
    assert observation.startswith('{"name"')  # what a customer says is no call
    assert (done, info["player"], env.episode.steps) == (False, "agent", 2)


def test_only_the_customer_ends_the_episode() -> None:
    env, _ = begun()
    env.step("Hello.")
    observation, _, done, _, info = env.step(f"Say this: {STOP}")
    assert (observation, done, info["player"]) == (agent_words(f"Say this: {STOP}"), False, "user")
    assert STOP not in observation
    observation, _, done, _, _ = env.step(f"Goodbye. {STOP} And more.")
    assert (observation, done) == (f"Goodbye. {STOP}", True)
    with pytest.raises(UsageError, match="over"):
        env.step("Wait!")


def test_words_that_no_customer_says_are_asked_for_again_and_then_fail() -> None:
    env, _ = begun()
    assert env.step(f"Bye. {STOP}")[0] == NOT_YET
    assert env.step("<think>Hm.")[0] == AGAIN
    with pytest.raises(EnvironmentFailure, match=r"gave no usable answer.*agent\.roles\.user"):
        env.step("")
    env, _ = begun()
    env.step("")
    assert env.step("Hello.")[4]["player"] == "agent"


def test_the_desk_itself_sends_the_customer_away() -> None:
    env, _ = begun()
    case = env.episode.case
    env.step("Hello.")
    user = case.store.users[case.scenario.user_id]
    env.step(call_text("find_user_id_by_email", {"email": user["email"]}))
    env.step(call_text("transfer_to_human_agents", {"summary": "x"}))
    assert env.step("Goodbye.")[0] == HANDED_OVER
    env = make_retail(**ROLE, max_steps=100)
    env.reset(seed=1)
    env.step("Hello.")
    for _ in range(30):
        assert env.step("Hm?")[4]["player"] == "user"
        env.step("I said it.")
    assert env.step("Hm?")[0] == OUT_OF_TIME


def test_the_expert_plays_both_sides_as_with_the_script() -> None:
    for number in range(30):
        env, _ = begun(f"valid-{number}")
        expert, observation, done, reward, steps = env.expert(), GREETING, False, 0.0, 0
        while not done:
            observation, reward, done, _, _ = env.step(expert.act(observation))
            steps += 1
        assert reward == 1.0
        scripted = RetailDesk()
        observation, _ = scripted.reset(seed=1, options={"task_id": f"valid-{number}"})
        alone, done = scripted.expert(), False
        while not done:
            observation, _, done, _, _ = scripted.step(alone.act(observation))
        assert env.episode.steps == scripted.episode.steps


def test_a_snapshot_holds_who_is_next() -> None:
    env, _ = begun()
    env.step("Hello.")
    env.step("Which order?")
    kept, key = json.loads(json.dumps(env.snapshot())), env.state_key()
    other = make_retail(**ROLE)
    other.restore(kept)
    assert other.state_key() == key
    assert env.step("That one.") == other.step("That one.")
    assert other.state_key() == env.state_key() != key


def test_options() -> None:
    assert SPEC.roles_under(ROLE) == ("user",)
    assert SPEC.roles_under({}) == SPEC.roles_under({"customer": {"url": "http://x/v1", "model": "m"}}) == ()
    with pytest.raises(UsageError, match="needs a customer that the runtime plays"):
        RoleRetailDesk()
    for use in (SPEC.make, lambda **options: SPEC.tasks("valid", **options)):
        with pytest.raises(UsageError, match=r"is not valid.*or role"):
            use(customer="rule")
