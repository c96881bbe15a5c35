import gymnasium
import pytest
from agentrl.agent_loops.prompting import ActionHint, goal_line, with_lines
from agentrl.agent_loops.react_text import ReactText
from agentrl.agent_loops.tool_calling import ToolCalling
from support.sandboxes import needs_bubblewrap

from agentrl.agent_loop import Answer
from agentrl.config import load_config
from agentrl.engine import StopReason
from agentrl.errors import ConfigError, Outcome
from agentrl.evaluation.prompt_preview import preview_prompts
from agentrl.message import Message, TextPart


class Room(gymnasium.Env):
    action_hint = "look or leave, for example: look"
    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self):
        self.actions = []

    def reset(self, *, seed=None, options=None):
        self.actions.clear()
        return "You are in a room.\n\nYour task is to: leave the room.\nGood luck.", {}

    def step(self, action):
        self.actions.append(action)
        return f"You {action}.", 1.0, action == "leave", False, {}

    def admissible_actions(self):
        return ["look", "leave"]


ANSWERS = {
    "react": ("<think>Where am I?</think><action> look </action>", "<think>Out.</think>\n<action>leave</action>"),
    "action_tag": ("<action>look</action>", "<action>leave</action>"),
    "plain": (" look", "leave\n"),
    "free": ("look", "\nleave"),
}


@pytest.mark.parametrize("form", list(ANSWERS))
async def test_actions_are_read_and_taken(play, form):
    room = Room()
    played = await play(lambda: room, "react_text", *ANSWERS[form], options={"format": form})
    assert room.actions == ["look", "leave"]
    assert played.trajectory.outcome is Outcome.FINISHED
    assert [turn.reward for turn in played.trajectory.turns] == [1.0, 1.0]
    assert len(played.trajectory.sequences) == 1


async def test_the_prompt_explains_unless_told_not_to(play):
    explained = await play(Room, "react_text", ANSWERS["react"][1], instructions="You are at home.")
    assert (
        "You are at home.\n\nHow to answer: first think inside <think> </think>, then write one action inside <action> "
        "</action>. An action is: look or leave. For example:\n<think>My next action is look.</think>\n"
        "<action>look</action>\nYou will then see the result. Answer again in the same form.<|im_end|>"
    ) in explained.text
    bare = await play(Room, "react_text", "leave", options={"format": "plain", "explain": False})
    assert "How to answer" not in bare.text
    assert "An action is" not in bare.text


async def test_the_goal_and_the_actions_follow_each_observation(play):
    options = {"format": "plain", "restate_goal": True, "list_actions": True}
    played = await play(Room, "react_text", "look", "leave", options=options)
    assert "Good luck.\nAdmissible actions: look, leave.<|im_end|>" in played.text
    assert "You look.\nAdmissible actions: look, leave.\nYour task is to: leave the room.<|im_end|>" in played.text


async def test_unusable_answers_are_explained_counted_and_cost_no_step(play):
    room = Room()
    played = await play(
        lambda: room,
        "react_text",
        "I would rather not.",
        "<action>look</action><action>leave</action>",
        "<action> </action>",
        "<action>leave</action>",
    )
    assert room.actions == ["leave"]
    assert played.trajectory.metrics["invalid_answers"] == 3
    assert [turn.valid for turn in played.trajectory.turns] == [False, False, False, True]
    example = "<think>My next action is look.</think>\n<action>look</action>"
    for problem in ("no <action> </action>", "2 actions, but only one is allowed", "an empty <action> </action>"):
        remark = (
            f"Your last answer had {problem}, so nothing happened. Answer again, in this form:\n{example}<|im_end|>"
        )
        assert remark in played.text


def answer(text, stop_reason=StopReason.STOP):
    return Answer(message=Message(role="assistant", content=text), raw_text=text, stop_reason=stop_reason)


def test_a_cut_answer_is_told_apart():
    reading = ReactText().read(answer("<think>Let me see", StopReason.LENGTH))
    assert reading.problem.startswith("Your last answer was too long and was cut off before its action, so nothing")
    plain = ReactText(format="plain").read(answer(" "), "a number, for example: 7").problem
    assert plain == "Your last answer was empty, so nothing happened. Answer again, in this form:\n7"
    free = ReactText(format="free").read(answer(" ")).problem
    assert free == "Your last answer was empty, so nothing happened. Answer again."


@pytest.mark.parametrize(
    ("hint", "what", "example"),
    [
        ("a whole number, for example: 50", "a whole number", "50"),
        ("One command. For example: go to cabinet 1", "One command", "go to cabinet 1"),
        ("Actions: look, leave.", "Actions: look, leave", "(your action)"),
        ("", "", "(your action)"),
    ],
)
def test_hints_are_taken_apart(hint, what, example):
    assert (ActionHint.parse(hint).what, ActionHint.parse(hint).example) == (what, example)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>look</action>", "look"),
        ("<action> look", "look"),
        ("<action>look\nThen I leave.", "look"),
        ("<action>look</action> or <action>leave</action>", "look"),
        ("<action>\n<action>look</action>", ""),
    ],
)
def test_an_answer_that_was_begun_ends_its_action_with_its_line(text, action):
    assert ReactText(format="action_tag", prefill="<action>").read(answer(text)).action == action


async def test_a_prefill_begins_each_answer_and_is_not_sampled(play):
    options = {"format": "action_tag", "prefill": "<action>"}
    played = await play(Room, "react_text", "look</action>", "leave", options=options)
    assert played.trajectory.outcome is Outcome.FINISHED
    assert "assistant\n<action>look</action><|im_end|>" in played.text
    assert "assistant\n<action>leave<|im_end|>" in played.text


async def test_an_answer_ends_at_the_loop_s_stop_text(play):
    options = {"format": "action_tag", "stop": "</action>"}
    played = await play(
        Room, "react_text", "<action>look</action> and then?", "<action>leave</action>", options=options
    )
    assert played.trajectory.outcome is Outcome.FINISHED
    assert "<action>look</action><|im_end|>" in played.text
    assert "and then" not in played.text


@pytest.mark.parametrize("form", list(ANSWERS))
def test_demonstrations_are_read_back(form):
    loop = ReactText(format=form)
    assert loop.read(answer(loop.demonstrate("go to desk 1").text)).action == "go to desk 1"


def test_an_unknown_format_is_an_error():
    with pytest.raises(ConfigError, match="react, action_tag, plain, free"):
        ReactText(format="json")


@pytest.mark.parametrize(
    ("observation", "goal"),
    [
        ("Room.\n\nYour task is to: put a mug in desk.", "Your task is to: put a mug in desk."),
        ("Hints: your task is to win.\nGo.", "Hints: your task is to win."),
        ("I think of a number. Guess it.\n\n", "I think of a number. Guess it."),
        ("Your task is to wait.\nNow your task is to go.\nGo.", "Now your task is to go."),
        ("# # #\n# P #\n# # #", ""),
        ((TextPart(text="Look."),), "Look."),
        ("", ""),
    ],
)
def test_the_goal_is_found(observation, goal):
    assert goal_line(observation) == goal


def test_lines_are_added_to_any_content():
    assert with_lines("a", ["", "b"]) == "a\nb"
    assert with_lines((TextPart(text="a"),), ["b"]) == (TextPart(text="a"), TextPart(text="\nb"))
    assert with_lines("a", ["", ""]) == "a"


@pytest.mark.parametrize("prefill", [True, 3])
def test_a_prefill_is_text(prefill):
    with pytest.raises(ConfigError, match="prefill is not a string"):
        ReactText(prefill=prefill)
    with pytest.raises(ConfigError, match="stop is not a string"):
        ReactText(stop=prefill)
    with pytest.raises(ConfigError, match="prefill is not a boolean"):
        ToolCalling(prefill=str(prefill))


@pytest.mark.parametrize("name", ["search_qa", "retail", pytest.param("code", marks=needs_bubblewrap)])
@pytest.mark.slow
async def test_an_environment_that_says_how_to_answer_is_not_contradicted(name):
    """Its whole answers are read, unless the config names a format."""
    words = [f"environment={name}", "agent.loop=react_text", "agent.max_turns=1"]
    free, tagged = [
        (await preview_prompts(load_config(None, [*words, *more]))).parts
        for more in ([], ["agent.options.format=react"])
    ]
    assert "<action>" not in "".join(part.text for part in free)
    assert "<action>" in "".join(part.text for part in tagged)
