import json

import gymnasium
import pytest

import agentrl
from agentrl.config.derived import make_agent_loop
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.message import Message, ToolCall
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.task import SeedTasks, Task


class Guess(gymnasium.Env):
    action_hint = "a whole number, for example: 6"
    observation_space = action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        return "Guess my number.", {}

    def step(self, action):
        right = agentrl.parse_int(action) == 7
        return "Wrong.", float(right), right, False, {}

    def admissible_actions(self):
        return ["6", "7"]


@agentrl.tool
def midpoint(low: int, high: int) -> int:
    """The middle of a range.

    Args:
        low: Smallest candidate.
        high: Largest candidate.
    """
    return (low + high) // 2


@agentrl.tool
def broken() -> str:
    """Always fails."""
    raise ZeroDivisionError("secret detail")


@agentrl.tool
async def slow() -> str:
    """Never answers."""
    import asyncio

    await asyncio.Event().wait()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_actions_are_a_tool(play):
    played = await play(Guess, "tool_calling", call("act", action="6"), call("act", action="7"))
    assert played.trajectory.outcome is Outcome.FINISHED
    assert played.trajectory.reward == 1.0
    assert '"description": "The action, as text: a whole number."' in played.text
    assert (
        "How to act: call the tool act with one action. An action is: a whole number. For example:\n"
        '<tool_call>\n{"name": "act", "arguments": {"action": "6"}}\n</tool_call>\nYou will then see'
    ) in played.text
    assert "<tool_response>\nWrong.\n</tool_response>" in played.text


async def test_several_calls_in_one_turn_are_answered_in_order(play):
    turn = call("midpoint", low=1, high=9) + "\n" + call("act", action="5") + "\n" + call("midpoint", low=6, high=9)
    played = await play(Guess, "tool_calling", turn, call("act", action="7"), tools=[midpoint])
    responses = [part.split("\n")[1] for part in played.text.split("<tool_response>")[1:]]
    assert responses == ["5", "Wrong.", "7"]
    assert played.trajectory.metrics["tool_calls"] == 2
    assert [turn.reward for turn in played.trajectory.turns] == [0.0, 1.0]


async def test_calls_after_the_end_are_not_carried_out(play):
    turn = call("act", action="7") + "\n" + call("midpoint", low=1, high=9)
    played = await play(Guess, "tool_calling", turn, tools=[midpoint])
    assert played.trajectory.outcome is Outcome.FINISHED
    assert "tool_calls" not in played.trajectory.metrics


BARE = '{"name": "act", "arguments": {"action": "%s"}}'


async def test_calls_out_of_form_are_carried_out_and_counted(play):
    answers = BARE % "5", f"```json\n{BARE % 6}\n```", "<tool_call>\n" + BARE % "7"
    played = await play(Guess, "tool_calling", *answers)
    trajectory = played.trajectory
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert [turn.repaired_calls for turn in trajectory.turns] == [1, 1, 1]
    assert all(turn.valid for turn in trajectory.turns)
    assert trajectory.metrics["calls/repaired"] == 3
    assert "invalid_answers" not in trajectory.metrics
    assert len(trajectory.sequences) == 1
    assert played.text.count("<tool_response>\nWrong.\n</tool_response>") == 2
    said = f"<|im_start|>assistant\n{BARE % 5}<|im_end|>\n<|im_start|>user\n<tool_response>"
    assert said in played.text  # as it was sampled, without tags


async def test_calls_as_served_need_their_tags(play):
    answers = BARE % "7", "<tool_call>\n" + BARE % "7"
    played = await play(Guess, "tool_calling", *answers, options={"calls": "as_served"})
    assert [(turn.valid, turn.repaired_calls) for turn in played.trajectory.turns] == [(False, 0), (True, 1)]
    assert "Your last answer called no tool" in played.text


async def test_right_calls_are_not_counted_as_repaired(play):
    played = await play(Guess, "tool_calling", call("act", action="7"))
    assert played.trajectory.metrics["calls/repaired"] == 0


async def test_a_begun_call_without_its_closing_tag_is_carried_out(play):
    played = await play(Guess, "tool_calling", '5"}}', '7"}}', options={"prefill": True})
    assert (played.trajectory.reward, len(played.trajectory.turns)) == (1.0, 2)
    assert played.trajectory.metrics["calls/repaired"] == 2


def test_ways_to_read_calls_are_checked():
    with pytest.raises(ConfigError, match=r"agent\.options\.calls is not known: got 'repair', expected as_served or"):
        make_agent_loop("tool_calling", {"calls": "repair"})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "Seven?",
            "Your last answer called no tool, so nothing happened. Answer again with a tool call, in this form:\n<to",
        ),
        ("<tool_call>\n{broken\n</tool_call>", "Your tool call could not be read, so it was not executed. "),
        (call("act", move="7"), "Error: wrong arguments for act"),
        (call("akt", action="7"), "'akt'"),
    ],
)
async def test_malformed_answers_are_told_and_counted(play, answer, message):
    played = await play(Guess, "tool_calling", answer, call("act", action="7"))
    assert message in played.text
    assert played.trajectory.metrics["invalid_answers"] == 1
    assert [turn.valid for turn in played.trajectory.turns] == [False, True]
    assert played.trajectory.outcome is Outcome.FINISHED


@pytest.mark.parametrize(
    ("answer", "message", "tool_timeout_s"),
    [
        (call("midpoint", low="x", high=2), "Error: wrong arguments for midpoint", 60.0),
        (call("broken"), "Error: broken failed (ZeroDivisionError)", 60.0),
        (call("slow"), "Error: slow did not answer in 0.02 s", 0.02),
    ],
)
async def test_what_goes_wrong_with_tools_is_told_to_the_policy(play, answer, message, tool_timeout_s):
    limits = {"tools": [midpoint, broken, slow], "tool_timeout_s": tool_timeout_s}
    played = await play(Guess, "tool_calling", answer, call("act", action="7"), **limits)
    assert message in played.text
    assert "secret detail" not in played.text
    assert played.trajectory.outcome is Outcome.FINISHED
    assert played.trajectory.metrics["tool_errors"] == 1


class Exam(gymnasium.Env):
    """Brings its tools, and judges the final answer."""

    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self):
        self.tools = (midpoint, broken)

    def reset(self, *, seed=None, options=None):
        return "What is the middle of 2 and 4?", {}

    def step(self, action):
        return "", float("3" in action), True, False, {}


async def test_an_environment_with_tools_of_its_own_judges_the_final_answer(play):
    played = await play(Exam, "tool_calling", call("midpoint", low=2, high=4), "It is 3.")
    assert '"name": "act"' not in played.text
    assert played.trajectory.reward == 1.0
    assert played.trajectory.outcome is Outcome.FINISHED


async def test_some_of_an_environments_tools_can_be_offered(play):
    answers = [call("broken"), call("midpoint", low=2, high=4), "It is 3."]
    played = await play(Exam, "tool_calling", *answers, options={"offer": ["midpoint"]}, tools=[slow])
    assert '"name": "midpoint"' in played.text
    assert '"name": "slow"' in played.text
    assert '"description": "Always fails."' not in played.text
    assert "names an unknown tool 'broken'" in played.text
    assert played.trajectory.reward == 1.0


async def test_a_tool_to_offer_must_be_there(play):
    with pytest.raises(UsageError, match="has no such tools to offer: got slow, expected some of midpoint, broken"):
        await play(Exam, "tool_calling", "It is 3.", options={"offer": ["slow"]}, tools=[slow])


async def test_the_goal_and_the_actions_follow_each_observation(play):
    options = {"restate_goal": True, "list_actions": True, "action_name": "guess"}
    played = await play(Guess, "tool_calling", call("guess", action="6"), call("guess", action="7"), options=options)
    assert "Guess my number.\nAdmissible actions: 6, 7.<|im_end|>" in played.text
    assert "Wrong.\nAdmissible actions: 6, 7.\nGuess my number.\n</tool_response>" in played.text


class Counter:
    """Counts its calls."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.count = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self.count = -1

    def __call__(self) -> int:
        """Count one more."""
        self.count += 1
        return self.count


async def test_a_stateful_tool_is_one_object_per_episode(play):
    counter = agentrl.tool(Counter)
    for _ in range(2):
        calls = [call("counter"), call("counter"), call("act", action="7")]
        played = await play(Guess, "tool_calling", *calls, tools=[counter])
        responses = [part.split("\n")[1] for part in played.text.split("<tool_response>")[1:]]
        assert responses == ["1", "2"]
    assert Counter.made == 2


class Clerk(gymnasium.Env):
    """Brings a tool, and talks until it is thanked."""

    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self):
        self.tools = (midpoint,)

    def reset(self, *, seed=None, options=None):
        return "Hello.", {}

    def step(self, action):
        thanked = "thank" in action
        return ("Bye." if thanked else "What is it?"), float(thanked), thanked, False, {}

    def tool_message(self, action):
        if action.startswith("{"):
            return Message(role="assistant", tool_calls=(ToolCall(name="midpoint", arguments=json.loads(action)),))
        return Message(role="assistant", content=action)

    def expert(self):
        return Thankful()


class Thankful:
    def act(self, observation):
        return {"Hello.": '{"low": 2, "high": 4}', "3": "It is 3.", "What is it?": "I thank you."}[observation]


async def test_an_environment_with_tools_of_its_own_may_reply(play):
    played = await play(Clerk, "tool_calling", "Good day.", call("midpoint", low=2, high=4), "I thank you.")
    assert "<|im_start|>user\nWhat is it?<|im_end|>" in played.text
    assert "<tool_response>\n3\n</tool_response>" in played.text
    assert (played.trajectory.reward, len(played.trajectory.turns)) == (1.0, 3)


async def test_a_script_acts_through_the_environment_s_own_tools():
    spec = EnvironmentSpec(name="w", make=Clerk, tasks=SeedTasks, isolation=Isolation.INLINE)
    pool = EnvPool(spec)
    runner = EpisodeRunner(
        pool=pool, loop=make_agent_loop("tool_calling", {}), policy=ScriptedEpisodePolicy(ScriptedPolicy.EXPERT)
    )
    trajectory = await runner.run(Task(id="t", environment="w"), group_id="g", member=0, seed=0)
    await pool.close()
    assert (trajectory.reward, trajectory.metrics["tool_calls"]) == (1.0, 1)


async def test_tools_may_have_instructions_of_their_own(play):
    told = {"instructions": "Write <search>.", "tool_instructions": "Call search."}
    assert "Call search." in (await play(Exam, "tool_calling", "3", **told)).text
    assert "Write <search>." in (await play(Exam, "tool_calling", "3", instructions="Write <search>.")).text
    assert "Write <search>." in (await play(Exam, "react_text", "<action>3</action>", **told)).text
