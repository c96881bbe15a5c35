"""The retail desk with a customer whom the runtime plays: what it is told, who hears what, who ends it, snapshots."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agentrl.envs.desks.calls import call_text
from agentrl.envs.retail.briefing import GREETING, brief
from agentrl.envs.retail.customer import Customer
from agentrl.envs.retail.database import Database
from agentrl.envs.retail.environment import RetailDesk
from agentrl.envs.retail.expert import RetailExpert
from agentrl.envs.retail.phrases import HANDED_OVER, OUT_OF_TIME, STOP
from agentrl.envs.retail.requests import Persona, RequestKind
from agentrl.envs.retail.role_customer import AGAIN, MAX_UTTERANCE_CHARS, NOT_YET, agent_words, customer_words
from agentrl.envs.retail.spec import SPEC
from agentrl.envs.retail.tasks import Case, case_of

from agentrl.errors import EnvironmentFailure, UsageError

ROLE = {"customer": "role"}
CASES = [case_of(f"valid-{number}") for number in range(60)]


def begun(task_id: str = "valid-3") -> tuple[RetailDesk, dict[str, Any]]:
    env = RetailDesk(**ROLE)
    observation, info = env.reset(seed=1, options={"task_id": task_id})
    opening = case_of(task_id).scenario.requests[0].opening
    assert observation == f'{GREETING}\n\n(You begin with: "{opening}")'
    return env, info


def test_customer_gets_its_instructions_and_starts() -> None:
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
    env = RetailDesk(**ROLE, max_steps=100)
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
    other = RetailDesk(**ROLE)
    other.restore(kept)
    assert other.state_key() == key
    assert env.step("That one.") == other.step("That one.")
    assert other.state_key() == env.state_key() != key


class Believer(Customer):
    """The scripted customer, who cannot look into the database: it believes what it is told."""

    def _is_met(self, heard: Any, text: str, database: Database) -> bool:
        return "It is done" in text or super()._is_met(heard, text, database)


@pytest.mark.parametrize("number", range(27))
def test_a_customer_that_knows_only_the_briefing_and_the_conversation_can_be_served(number: int) -> None:
    env, info = begun(f"valid-{number}")
    case = next(case for case in CASES if brief(case.scenario) == info["instructions"]["user"])
    believer, agent = Believer(case.scenario, case.expected), RetailExpert()
    observation, done, reward = believer.open(), False, 0.0
    observation = env.step(observation)[0]
    while not done:
        observation, reward, done, _, info = env.step(agent.act(observation))
        if info["player"] == "user":
            observation, reward, done, _, info = env.step(believer.answer(observation, Database(case.store)))
    assert reward == 1.0


def one_of(persona: Persona | None = None, kind: RequestKind | None = None) -> Case:
    scenarios = ((case, case.scenario) for case in CASES)
    return next(c for c, it in scenarios if persona in (None, it.persona) and kind in (None, it.requests[0].kind))


def test_briefing_contains_only_the_customers_knowledge() -> None:
    for case in CASES:
        told, scenario = brief(case.scenario), case.scenario
        assert all(request.opening in told for request in scenario.requests)
        assert all(fact.text in told for request in scenario.requests for fact in request.facts)
        assert (scenario.by_email in told) == (scenario.persona is not Persona.FORGETFUL)
        assert scenario.by_name in told
        assert STOP in told
        assert not any(output in told for output in case.outputs if "." in output)
        secrets = [value for request in scenario.requests for action in request.actions for value in _ids(action)]
        assert not any(value in told for value in [scenario.user_id, *secrets])


def _ids(action: Any) -> list[str]:
    """What the agent has to look up."""
    listed = [*action.arguments.get("item_ids", ()), *action.arguments.get("new_item_ids", ())]
    return [*listed, *([action.arguments["payment_method_id"]] if "payment_method_id" in action.arguments else [])]


def test_only_wavering_customers_are_instructed_to_waver() -> None:
    for persona in Persona:
        case = one_of(persona, RequestKind.EXCHANGE if persona is Persona.WAVERING else None)
        fact = case.scenario.wavers_about(case.scenario.requests[0])
        assert (fact is not None) == (persona is Persona.WAVERING)
        assert (fact is not None) == ("At first: " in brief(case.scenario))
        assert fact is None or f'At first: "{fact.at_first}"' in brief(case.scenario)


def test_words_of_both_sides_are_cleaned() -> None:
    for said, heard in (
        (f"Bye. {STOP} I am a model.", f"Bye. {STOP}"),
        ("<think>Who am I?</think>\n\nYes.", "Yes."),
        (f"I must not say {STOP} yet.</think> Yes.", "Yes."),
        (f"  {STOP}", STOP),
        ("<think>Well, let me see", ""),
    ):
        assert customer_words(said) == heard
    assert agent_words(" ") == "(says nothing)"
    assert agent_words("x" * 9999) == f"{'x' * MAX_UTTERANCE_CHARS} […]"


def test_options() -> None:
    assert SPEC.roles_under(ROLE) == ("user",)
    assert SPEC.roles_under({}) == ()
    for use in (SPEC.make, lambda **options: SPEC.tasks("valid", **options)):
        for customer in ("rule", {"url": "http://127.0.0.1:1/v1", "model": "m"}, 1):
            with pytest.raises(
                UsageError, match=r"customer of retail is not valid.*expected role.*agent\.roles\.user\.engine"
            ):
                use(customer=customer)
    for use in (RetailDesk(**ROLE).state_key, RetailDesk().snapshot):
        with pytest.raises(UsageError, match="no episode yet"):
            use()
