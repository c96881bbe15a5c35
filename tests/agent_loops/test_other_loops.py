import gymnasium
import pytest
from agentrl.agent_loops.step_independent import RecentSteps

from agentrl import AgentLoop, agent_loops
from agentrl.config.derived import make_agent_loop
from agentrl.errors import ConfigError, Outcome, UnknownNameError, UsageError
from agentrl.registry import Kind, names


class Steps(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return "Start. Your task is to: count.", {}

    def step(self, action):
        self.count += 1
        return f"Seen {self.count}.", 1.0, self.count == 4, False, {}


class Question(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self, ends=True):
        self.ends = ends

    def reset(self, *, seed=None, options=None):
        return "What is 2 + 2?", {}

    def step(self, action):
        return "", float(action == "4"), self.ends, False, {}


async def test_each_step_has_a_sequence_of_its_own_with_the_last_steps_in_it(play):
    options = {"history": 2, "format": "plain"}
    played = await play(Steps, "step_independent", "one", "two", "three", "four", options=options)
    assert played.trajectory.outcome is Outcome.FINISHED
    assert len(played.texts) == 4
    assert [len(s.turns) for s in played.trajectory.sequences] == [1, 1, 1, 1]
    assert [turn.reward for turn in played.trajectory.turns] == [1.0] * 4
    last = played.texts[3]
    assert "Steps taken so far: 3. The most recent ones:\n[2] Observation: Seen 1.\n[2] Action: two\n[3] Obs" in last
    assert "[1]" not in last
    assert last.count("Your task is to: count.") == 1
    shared = [s.shared for s in played.trajectory.sequences]
    assert shared[0] == 0
    assert min(shared[1:]) > 0


async def test_an_unusable_answer_is_told_in_the_next_prompt_only(play):
    answers = ["hm", "<action>one</action>", "<action>two</action>"]
    played = await play(Steps, "step_independent", *answers)
    assert "had no <action> </action>" not in played.texts[0]
    assert "had no <action> </action>" in played.texts[1]
    assert "had no <action> </action>" not in played.texts[2]
    assert played.trajectory.metrics["invalid_answers"] == 1


class Shout:
    """A memory that keeps the last action only."""

    def __init__(self):
        self.last = ""

    def add(self, observation, action):
        self.last = action.upper()

    def text(self):
        return self.last and f"BEFORE: {self.last}"


async def test_a_memory_of_ones_own(play, monkeypatch):
    import sys
    import types

    module = types.ModuleType("my_memory")
    module.Shout = Shout
    module.Wrong = dict
    monkeypatch.setitem(sys.modules, "my_memory", module)
    options = {"memory": "my_memory:Shout", "format": "plain"}
    played = await play(Steps, "step_independent", "one", "two", "three", "four", options=options)
    assert "BEFORE: ONE" in played.texts[1]
    assert "BEFORE: ONE" not in played.texts[2]
    with pytest.raises(ConfigError, match="not a memory class"):
        make_agent_loop("step_independent", {"memory": "my_memory:Wrong"})


def test_recent_steps_can_remember_nothing():
    memory = RecentSteps(0)
    memory.add("seen", "done")
    assert memory.text() == ""
    with pytest.raises(ConfigError, match="history of step_independent is negative"):
        make_agent_loop("step_independent", {"history": -1})


@pytest.mark.parametrize(
    ("options", "answer", "ends", "outcome", "reward"),
    [
        ({}, "4", True, Outcome.FINISHED, 1.0),
        ({"tag": "answer"}, "It is <answer>5</answer>, no: <answer> 4 </answer>", True, Outcome.FINISHED, 1.0),
        ({"tag": "answer"}, "4", True, Outcome.POLICY_ERROR, 0.0),
        ({}, "4", False, Outcome.TRUNCATED_TURNS, 1.0),
    ],
)
async def test_single_turn(play, options, answer, ends, outcome, reward):
    played = await play(lambda: Question(ends), "single_turn", answer, options=options)
    assert (played.trajectory.outcome, played.trajectory.reward) == (outcome, reward)
    assert len(played.trajectory.turns) == 1
    shown = make_agent_loop("single_turn", options).demonstrate("4").text
    assert shown == (f"<{options['tag']}>4</{options['tag']}>" if "tag" in options else "4")
    assert played.trajectory.metrics.get("invalid_answers", 0) == (outcome is Outcome.POLICY_ERROR)


@pytest.mark.parametrize("name", sorted({*agent_loops.PLUGINS["agent_loop"]} - {"external"}))
def test_every_shipped_loop_is_found_by_name_and_can_be_demonstrated(name):
    loop = make_agent_loop(name, {})
    assert isinstance(loop, AgentLoop)
    assert loop.demonstrate("look").role == "assistant"
    assert name in names(Kind.AGENT_LOOP)


def test_wrong_options_and_names_are_errors_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"no option 'restate_gaol'.*'restate_goal'"):
        make_agent_loop("react_text", {"restate_gaol": True})
    with pytest.raises(UnknownNameError, match="react_text"):
        make_agent_loop("react_txt", {})
    with pytest.raises(ConfigError, match="not an agent loop"):
        make_agent_loop("agentrl.message:user", {})


def test_a_loop_without_demonstrate_says_so():
    class Mute(AgentLoop):
        async def run(self, episode):
            raise NotImplementedError

    with pytest.raises(UsageError, match="Mute cannot play"):
        Mute().demonstrate("look")


async def test_an_answer_is_given_again_from_the_policys_own_description(play):
    first = "<description>four dots</description><think>4</think>\\boxed{4}"
    played = await play(lambda: Question(), "self_described", first, "\\boxed{5}", max_turns=2, untrained=(1,))
    assert played.trajectory.outcome is Outcome.FINISHED
    seeing, reading = played.trajectory.sequences
    assert (len(seeing.turns), len(reading.turns)) == (1, 1)
    assert seeing.loss_mask.any()
    assert not reading.loss_mask.any()
    assert "What is 2 + 2?" in played.texts[1]
    assert "this description of it:\nfour dots" in played.texts[1]
    assert "<description>" not in played.texts[1]


async def test_there_is_no_second_answer_without_a_description(play):
    played = await play(lambda: Question(ends=False), "self_described", "4", max_turns=2)
    assert (len(played.trajectory.turns), played.trajectory.reward) == (1, 1.0)
    assert played.trajectory.outcome is Outcome.TRUNCATED_TURNS


async def test_a_reasoner_answers_from_the_captioners_description(play):
    played = await play(lambda: Question(), "caption_reasoner", "Two and two dots.", "4", instructions="Be brief.")
    assert [turn.role for turn in played.trajectory.turns] == ["captioner", "reasoner"]
    assert played.trajectory.role_returns == {"captioner": 1.0, "reasoner": 1.0}
    captioner, reasoner = played.texts
    assert ("Do not answer the question." in captioner, "Be brief." in captioner) == (True, False)
    assert "which you cannot see yourself:\nTwo and two dots.\n\nThe task: What is 2 + 2?" in reasoner
    assert ("Be brief." in reasoner, "Do not answer" in reasoner) == (True, False)


async def test_an_empty_description_ends_the_episode(play):
    played = await play(lambda: Question(), "caption_reasoner", "", "4")
    assert (played.trajectory.outcome, played.trajectory.reward) == (Outcome.POLICY_ERROR, 0.0)
    assert [turn.valid for turn in played.trajectory.turns] == [False]
