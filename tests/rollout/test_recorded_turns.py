"""Episodes that are continued from one of their turns."""

import numpy as np
import pytest
from rollout_worlds import Corridor

from agentrl.errors import Outcome, UsageError
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.rollout.few_shot import FewShotExamples
from agentrl.rollout.journal_replay import SnapshotSupport
from agentrl.rollout.recorded_turns import EpisodeRecords, continue_from, recorded_answers, repeatable_turns
from agentrl.task import SeedTasks
from agentrl.trajectory import BranchPoint


class Counted(Corridor):
    """Counts the steps that it takes; may say something else each time."""

    steps = 0
    word = "at"

    def step(self, action):
        type(self).steps += 1
        observation, *others = super().step(action)
        return observation.replace("at", self.word), *others


class Saved(Counted):
    """Has snapshots."""

    steps = snapshots = 0

    def snapshot(self):
        Saved.snapshots += 1
        return [self.place, self.length]

    def restore(self, data):
        self.place, self.length = data
        data.clear()  # the environment owns the state that it receives


@pytest.fixture(autouse=True)
def counts():
    Counted.steps = Saved.steps = Listing.steps = 0


def arrays(trajectory, turns):
    (sequence,) = trajectory.sequences
    end = sequence.turns[turns - 1].end
    logprobs = sequence.logprobs[:end]
    return (
        sequence.ids_list()[:end],
        sequence.sources[:end].tolist(),
        logprobs[logprobs == logprobs].tolist(),
        sequence.versions[:end].tolist(),
    )


CALL = '<tool_call>\n{{"name": "act", "arguments": {{"action": "{}"}}}}\n</tool_call>'
PLAIN = {"format": "plain"}
LOOPS = [
    ("react_text", PLAIN, "{}"),
    ("react_text", {**PLAIN, "compact": {"above": 60, "tokens": 7}}, "{}"),
    ("react_text", {**PLAIN, "compact": {"above": 60, "trained": False}}, "{}"),
    ("react_text", {"format": "action_tag", "prefill": "<action>"}, "{}</action>"),
    ("step_independent", PLAIN, "{}"),
    ("memory", {**PLAIN, "trained": False}, "{}"),
    ("memory", PLAIN, "{}"),
    ("tool_calling", {}, CALL),
]


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize(("loop", "options", "form"), LOOPS)
async def test_the_first_turns_are_the_recorded_ones_and_the_others_are_sampled(
    make_runner, make_engine, play, loop, options, form, turns
):
    actions = (
        ["forward"] * 3 + ["back"] + ["forward"] * 9 if loop == "memory" else ["forward", "back"] + ["forward"] * 9
    )
    answers = [form.format(action) for action in actions]
    runner = make_runner(Counted, *answers, loop=loop, options=options)
    first = await play(runner)
    assert first.outcome is Outcome.FINISHED
    assert len(first.turns) > 4
    forward = make_runner(engine=make_engine(form.format("forward")), loop=loop, options=options, pool=runner.pool)
    second = await play(continue_from(forward, first, turns), member=1)
    assert second.branches_from == BranchPoint(parent="g/0.0", turn=turns)
    assert second.outcome is Outcome.FINISHED
    assert [tokens(second, turn) for turn in range(turns)] == [tokens(first, turn) for turn in range(turns)]
    if len(second.sequences) == 1:
        assert arrays(second, turns) == arrays(first, turns)
    assert trajectory_from_record(trajectory_record(second)).branches_from == second.branches_from


def tokens(trajectory, index):
    (found,) = (
        (s.ids_list()[: t.end], s.sources[: t.end].tolist(), np.nan_to_num(s.logprobs[: t.end]).tolist())
        for s in trajectory.sequences
        for t in s.turns
        if t.index == index
    )
    return found


async def test_few_shot_examples_stay_in_the_prompts(make_runner, play):
    examples = FewShotExamples(2, SeedTasks("world", size=5))
    runner = make_runner(Counted, "forward", policy_wrapper=examples)
    first = await play(runner)
    second = await play(continue_from(runner, first, 2), member=1)
    assert second.outcome is Outcome.FINISHED
    assert first.turns[0].start > 100 + (await play(make_runner(Counted, "forward"))).turns[0].start
    assert [tokens(second, turn) for turn in (0, 1)] == [tokens(first, turn) for turn in (0, 1)]


async def test_all_turns_can_be_repeated_without_the_engine(make_runner, make_engine, play):
    runner = make_runner(Counted, "forward")
    first = await play(runner)

    class Silent(type(make_engine("x"))):
        async def generate(self, request):
            raise AssertionError("nothing is left to sample")

    engine = Silent(script=lambda request: [1], vocab_size=400)
    second = await play(continue_from(make_runner(engine=engine, pool=runner.pool), first, 3), member=1)
    assert (second.reward, second.success, len(second.turns)) == (first.reward, first.success, 3)
    assert second.sequences[0].ids_list() == first.sequences[0].ids_list()


async def test_an_error_names_the_environment_and_the_first_difference_of_the_prompts(make_runner, play, monkeypatch):
    runner = make_runner(Counted, "forward")
    first = await play(runner)
    monkeypatch.setattr(Counted, "word", "not at")
    second = await play(continue_from(runner, first, 2), member=1)
    assert second.outcome is Outcome.ENVIRONMENT_ERROR
    assert "episode g/0.0 cannot be repeated: the prompt after turn 1 differs from the recorded one" in second.error
    assert "You are not at 1" in second.error


async def test_a_snapshot_replaces_the_repeated_steps(make_runner, make_engine, play):
    runner = make_runner(Saved, "forward", "back", "forward", "forward", "forward")
    record = EpisodeRecords()
    first = await play(continue_from(runner, None, 0, records=record))
    assert first.branches_from is None
    for member in (1, 2):
        Saved.steps = Saved.snapshots = 0
        second = await play(continue_from(runner, first, 2, restores=record), member=member)
        assert Saved.steps == len(second.turns) - 2 == 3
        assert Saved.snapshots == 0, "nothing continues this episode"
        assert second.outcome is Outcome.FINISHED
        assert tokens(second, 1) == tokens(first, 1)
        assert [turn.state_key for turn in second.turns[:3]] == ["place 0", "place 1", "place 0"]
    Saved.steps = 0
    third = await play(continue_from(runner, first, 1), member=3)
    assert Saved.steps == len(third.turns), "without records, all actions are taken again"
    borrowed = runner.pool._idle
    assert {type(handle.backend).__name__ for handle in borrowed} == {"InlineBackend"}


class Unwritable(Counted):
    """Takes snapshots that are not JSON."""

    taken = 0

    def snapshot(self):
        Unwritable.taken += 1
        return self

    def restore(self, data):
        raise AssertionError("nothing was taken")


async def test_after_one_snapshot_that_is_not_json_actions_are_repeated_instead(make_runner, play, caplog):
    runner, snapshots = make_runner(Unwritable, "forward"), SnapshotSupport()
    for member in (0, 2):
        record = EpisodeRecords(snapshots)
        first = await play(continue_from(runner, None, 0, records=record), member=member)
        second = await play(continue_from(runner, first, 2, restores=record), member=member + 1)
        assert second.outcome is Outcome.FINISHED
    assert (Unwritable.taken, caplog.text.count("snapshots are disabled")) == (1, 1)


class Listing(Saved):
    """Says which actions it accepts."""

    steps = 0

    def admissible_actions(self):
        return ["forward", f"back to {self.place - 1}"]


async def test_only_the_first_continuation_of_a_stored_episode_repeats_its_steps(make_runner, play):
    options = {**PLAIN, "list_actions": True}
    runner = make_runner(Listing, "forward", "back", "forward", "forward", "forward", options=options)
    stored, record = await play(runner), EpisodeRecords()
    first = await play(continue_from(runner, stored, 2, records=record), member=1)
    Listing.steps = 0
    second = await play(continue_from(runner, stored, 2, restores=record), member=2)
    assert Listing.steps == len(second.turns) - 2
    assert first.outcome is second.outcome is Outcome.FINISHED
    assert [tokens(second, turn) for turn in range(3)] == [tokens(first, turn) for turn in range(3)]


async def test_missing_or_unsampled_turns_cannot_be_repeated(make_runner, play):
    first = await play(make_runner(Corridor, "forward"))
    assert repeatable_turns(first) == 3
    with pytest.raises(UsageError, match="cannot be continued from turn 4") as raised:
        recorded_answers(first, 4)
    assert "a turn from 0 to 3" in str(raised.value)
    first.turns[1].stop_reason = "abort"
    assert repeatable_turns(first) == 1
    first.turns[0].role = "planner"
    with pytest.raises(UsageError, match="several roles"):
        repeatable_turns(first)
