"""Memories and summaries written by the policy: later prompts, trained tokens, and empty ones."""

import itertools

import gymnasium
import pytest
from agentrl.envs.puzzles.long_qa import SPEC
from support.runs import numbers

import agentrl
from agentrl.config.derived import make_agent_loop
from agentrl.errors import ConfigError, Outcome
from agentrl.evaluation.token_view import conversations
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run
from agentrl.tool import tool

STORY = {"parts": 2, "sentences": 2, "people": 2}
PLAIN = {"format": "plain"}


def story(**options):
    env = SPEC.make(**STORY, **options)
    env.reset(seed=0)
    return env


def answer_of(env):
    return env.game.answer


async def test_the_policy_sees_its_memory_and_what_is_new_and_nothing_else(play):
    env = story()
    first, second = env.game.story
    played = await play(
        story, "memory", "One.", "next", "Two.", "next", "Three.", answer_of(env), options=PLAIN, max_tokens=4000
    )
    assert (played.trajectory.outcome, played.trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert len(played.texts) == 6
    writes, acts = played.texts[0::2], played.texts[1::2]
    assert ["Your memory:\n(empty)" in text for text in writes] == [True, False, False]
    assert "Your memory:\nOne.\n\nNew:\nYour last action: next\nPart 2 of 2:" in writes[1]
    assert "Your memory:\nTwo.\n\nNew:\nYour last action: next\nThe story is over." in writes[2]
    assert first in acts[0]
    assert first not in writes[1]
    assert second in acts[1]
    assert "Your memory:\nThree.\n\nThe story is over." in acts[2]
    assert first not in acts[2]
    assert second not in acts[2]


async def test_an_empty_memory_leaves_the_old_one_and_counts_as_unusable(play):
    played = await play(story, "memory", "One.", "next", "", "next", "", "next", options=PLAIN, max_parse_failures=2)
    assert "Your memory:\nOne.\n\nPart 2" in played.texts[3]
    assert played.trajectory.outcome is Outcome.POLICY_ERROR
    assert played.trajectory.metrics["invalid_answers"] == 2
    assert played.trajectory.reward == 0.0


async def test_a_memory_ends_with_its_tokens(play):
    long = "word " * 60
    options = {**PLAIN, "memory_tokens": 12}
    played = await play(story, "memory", long, "next", "One.", "next", "Two.", "rome", options=options, max_tokens=4000)
    first = played.trajectory.turns[0]
    assert (first.end - first.start, first.stop_reason) == (12, "length")
    assert "word word" in played.texts[1]
    assert len(played.texts[1]) < len(played.texts[0]) + len(long)


async def test_a_long_observation_is_read_in_parts(play):
    def whole():
        return SPEC.make(parts=8, sentences=6, whole=True)

    env = whole()
    env.reset(seed=0)
    options = {**PLAIN, "part_tokens": 200}
    played = await play(whole, "memory", answer_of(env), options=options, max_tokens=4000, max_observation_tokens=9000)
    assert played.trajectory.reward == 1.0
    assert len(played.texts) > 4
    assert all(len(sequence.turns) == 1 for sequence in played.trajectory.sequences)
    told = "".join(text.partition("New:\n")[2].partition("\n\nWrite your new memory:")[0] for text in played.texts[:-1])
    assert told.startswith("Part 1 of 8")
    assert told.endswith("Answer with the name of a place.")
    for part in env.game.story:
        assert part in told
    assert max(len(sequence) for sequence in played.trajectory.sequences) < 1500


@pytest.mark.slow
def test_memories_that_do_not_train_are_forced_tokens(tiny_run):
    tokens = {}
    for trained in (True, False):
        run = tiny_run(
            *RUN, f"agent.options.trained={str(trained).lower()}", "trainer.steps=1", name=f"trained_{trained}"
        )
        train(run)
        (line,) = numbers(run.folder.path)
        tokens[trained] = line["train/tokens"]
    assert 0 < tokens[False] < tokens[True]


@pytest.mark.parametrize("loop", ["memory", "react_text"])
def test_the_expert_answers_with_every_loop(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = agentrl.evaluate("long_qa/valid", policy="expert", tasks=8, samples=1, overrides=[f"agent.loop={loop}"])
    assert result.success.mean == 1.0


@tool
def look(where: str) -> str:
    """Look somewhere.

    Args:
        where: The place.
    """
    return f"Nothing in {where}."


async def test_a_long_conversation_goes_on_from_the_policy_s_summary(play):
    env = story()
    first, second = env.game.story
    options = {**PLAIN, "compact": {"above": 60, "tokens": 40}}
    said = ["next", "They moved.", "next", "They moved again.", answer_of(env)]
    played = await play(story, "react_text", *said, options=options, max_tokens=4000)
    assert (played.trajectory.outcome, played.trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert [len(sequence.turns) for sequence in played.trajectory.sequences] == [2, 2, 1]
    assert all(sequence.shared > 0 for sequence in played.trajectory.sequences[1:])
    begun = played.texts[2].rpartition("<|im_start|>user")[2]
    assert "Your summary of what happened since then:\nThey moved again.\n\nThe story is over." in begun
    assert first in begun
    assert second not in begun
    assert played.texts[0].count("This conversation has become too long") == 1


@pytest.mark.parametrize("room", [0, -1])
async def test_the_latest_answer_counts_for_the_length_of_a_conversation(play, room):
    """A summary is due above the limit, not at it."""
    said = ["next", "All is quiet.", "rome"]
    free = await play(story, "react_text", *said, options=PLAIN, max_tokens=4000)
    options = {**PLAIN, "compact": {"above": free.trajectory.turns[0].end + room}}
    played = await play(story, "react_text", *said, options=options, max_tokens=4000)
    before, _, _ = played.texts[0].partition("All is quiet.")
    assert ("This conversation has become too long" in before) == (room < 0)
    assert "This conversation has become too long" in played.texts[0]


async def test_a_summary_ends_with_its_tokens(play):
    options = {**PLAIN, "compact": {"above": 60, "tokens": 7}}
    played = await play(story, "react_text", "next", "word " * 60, "rome", options=options, max_tokens=4000)
    sizes = [(turn.end - turn.start, turn.stop_reason) for turn in played.trajectory.turns]
    assert sizes[1] == (7, "length")
    assert sizes[0][0] != 7


def test_the_experts_memory_keeps_what_it_knew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["agent.loop=memory", "agent.options={memory_tokens: 4000}", "environment.options={parts: 3}"]
    result = agentrl.evaluate("long_qa/valid", policy="expert", tasks=1, samples=1, overrides=overrides)
    (episode,) = result.episodes
    said = itertools.chain(*conversations(episode.trajectory))
    written = [text for who, text in said if who.startswith("assistant")][:6:2]
    for part in (1, 2, 3):
        assert [f"Part {part} of 3" in text for text in written] == [number >= part for number in (1, 2, 3)]


async def test_an_empty_summary_remembers_nothing_and_is_counted(play):
    options = {**PLAIN, "compact": {"above": 60}}
    played = await play(story, "react_text", "next", "", "next", "", "rome", options=options, max_tokens=4000)
    assert "Your summary of what happened since then:\n(nothing)" in played.texts[1]
    assert played.trajectory.metrics["invalid_answers"] == 2
    assert [turn.valid for turn in played.trajectory.turns] == [True, False, True, False, True]


async def test_results_of_tools_are_told_before_a_summary_and_again_after_it(play):
    calls = [
        f'<tool_call>\n{{"name": "look", "arguments": {{"where": "{place}"}}}}\n</tool_call>'
        for place in ("hall", "attic", "cellar")
    ]
    act = '<tool_call>\n{"name": "act", "arguments": {"action": "next"}}\n</tool_call>'
    options = {"compact": {"above": 60}}
    said = ["\n".join(calls), "I looked.", act]
    played = await play(story, "tool_calling", *said, options=options, tools=[look], max_tokens=4000, max_turns=3)
    asked, _, begun = played.texts[0].partition("This conversation has become too long")
    shown = [asked.index(f"<tool_response>\nNothing in {place}.") for place in ("hall", "attic", "cellar")]
    assert shown == sorted(shown)
    assert begun.partition("<|im_start|>assistant\n")[2] == "I looked.<|im_end|>"
    assert "I looked.\n\nNothing in hall.\nNothing in attic.\nNothing in cellar." in played.texts[1]
    assert '"name": "look"' in played.texts[1]


async def test_results_before_the_remark_about_a_broken_call_are_told_before_a_summary_too(play):
    calls = ['{"name": "look", "arguments": {"where": "hall"}}', '{"name": "look", "arguments": ']
    said = ["".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in calls), "I looked.", "done"]
    options = {"compact": {"above": 60}, "calls": "as_served"}
    played = await play(story, "tool_calling", *said, options=options, tools=[look], max_tokens=4000, max_turns=3)
    asked, _, begun = played.texts[0].partition("This conversation has become too long")
    assert begun.partition("<|im_start|>assistant\n")[2] == "I looked.<|im_end|>"
    result, remark = asked.rpartition("<|im_start|>assistant\n")[2].split("Nothing in hall.")
    assert "<tool_response>" in result
    assert "not valid JSON" in remark


@pytest.mark.parametrize("trained", [True, False])
async def test_summaries_train_unless_they_are_not_to(play, trained):
    options = {**PLAIN, "compact": {"above": 60, "tokens": 40, "trained": trained}}
    said = ["next", "They moved.", "next", "They moved again.", "rome"]
    untrained = () if trained else (1, 3)
    played = await play(story, "react_text", *said, options=options, max_tokens=4000, untrained=untrained)
    assert [len(sequence.turns) for sequence in played.trajectory.sequences] == [2, 2, 1]


@pytest.mark.parametrize("trained", [True, False])
async def test_calls_that_write_the_memory_train_unless_they_are_not_to(play, trained):
    options = {**PLAIN, "trained": trained}
    untrained = () if trained else (0, 2, 4)
    said = ["One.", "next", "Two.", "next", "Three.", "rome"]
    played = await play(story, "memory", *said, options=options, max_tokens=4000, untrained=untrained)
    assert len(played.trajectory.turns) == 6


class Errand(gymnasium.Env):
    """Says its goal once, in an observation of several lines, and never again."""

    observation_space = action_space = gymnasium.spaces.Text(2000)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return "You stand in a hall.\nYour task is to: bring the lamp.\nA door is open.", {}

    def step(self, action):
        self.count += 1
        return f"Room {self.count}.", float(self.count == 3), self.count == 3, False, {}


async def test_the_task_is_told_in_every_call_after_the_first_observation(play):
    said = ["One.", "go", "Two.", "go on", "Three.", "take"]
    played = await play(Errand, "memory", *said, options=PLAIN, max_tokens=4000)
    assert played.trajectory.reward == 1.0
    told = ["Task: Your task is to: bring the lamp.\n\nYour memory:" in text for text in played.texts]
    assert told == [False, False, True, True, True, True]
    assert [text.count("bring the lamp") for text in played.texts] == [1] * 6
    assert [text.count("Your last action: ") for text in played.texts] == [0, 0, 1, 0, 1, 0]
    assert "Your last action: go\nRoom 1." in played.texts[2]
    assert "Your last action: go on\nRoom 2." in played.texts[4]


class Letter(Errand):
    """Shows a long observation, in which each line says its number, at the start and after an action."""

    letter = "\n".join(f"Line {number} says nothing new at all." for number in range(1, 41))

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.letter, {}

    def step(self, action):
        self.count += 1
        return self.letter, 1.0, self.count == 2, False, {}


async def test_the_last_part_of_a_long_observation_is_in_sight_when_the_policy_acts(play):
    options = {**PLAIN, "part_tokens": 200}
    played = await play(Letter, "memory", "seen", options=options, max_tokens=4000, max_observation_tokens=9000)
    half = len(played.texts) // 2
    *again, _ = played.texts[half:]
    assert [text.count("Your last action: seen") for text in again] == [1] + [0] * (len(again) - 1)
    *writes, acts = played.texts[:half]
    assert len(writes) > 3
    assert "Line 1 says" in writes[0]
    assert ("Line 1 says" in acts, "Line 40 says" in acts, "Line 20 says" in acts) == (False, True, False)
    assert [text.count("Line 40 says") for text in writes] == [0] * (len(writes) - 1) + [1]
    assert [text.count("Line 1 says") for text in writes] == [1] + [0] * (len(writes) - 1)


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("memory", {"memory_tokens": 0}),
        ("memory", {"part_tokens": True}),
        ("memory", {"trained": "no"}),
        ("react_text", {"compact": {"tokens": 10}}),
        ("react_text", {"compact": {"above": 0}}),
        ("react_text", {"compact": {"above": 10, "token": 5}}),
        ("tool_calling", {"compact": 100}),
        ("tool_calling", {"compact": {"above": 10, "trained": "no"}}),
    ],
)
def test_options_that_do_not_fit_are_refused(loop, options):
    with pytest.raises(ConfigError):
        make_agent_loop(loop, options)


RUN = (
    "agent={loop: memory, options: {format: plain, explain: false, memory_tokens: 6}, max_answer_tokens: 8}",
    "agent.max_tokens=256",
)
COMPACT = (
    "agent={loop: react_text, options: {format: plain, explain: false, compact: {above: 40, tokens: 6}}}",
    "agent.max_answer_tokens=8",
    "agent.max_tokens=256",
)


@pytest.mark.parametrize("words", [RUN, COMPACT])
@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(tiny_run, words):
    whole = tiny_run(*words, "trainer.steps=2", "checkpoint.every=1", name="whole")
    train(whole)
    lines = numbers(whole.folder.path)
    assert all(line["train/updates"] == 2 for line in lines)
    cut = tiny_run(*words, "trainer.steps=1", "checkpoint.every=1", name="cut")
    train(cut)
    train(resume_run(cut.folder.path, ["trainer.steps=2"]))
    assert numbers(cut.folder.path) == lines
