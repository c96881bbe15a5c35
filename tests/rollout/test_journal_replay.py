"""Episodes that were in flight when their run was killed: they go on from their last turn, or start again."""

import asyncio
import itertools
import json
import os

import pytest
from support.journaled_process import (
    LENGTH,
    Breaking,
    Changing,
    Forgetful,
    Hiding,
    Kept,
    KeptStairs,
    Paying,
    Process,
    Slippery,
    Stairs,
    Still,
    Stuck,
    Walk,
)

import agentrl
from agentrl.engine import GenerateRequest, Generation, SamplingParams, StopReason
from agentrl.errors import Outcome
from agentrl.message import user
from agentrl.rollout import journal_file, journal_replay
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.journal import REPLAY_S, JournalFolder
from agentrl.rollout.journal_file import read_journal
from agentrl.rollout.recorded_turns import EpisodeRecords, continue_from
from agentrl.rollout.simulation import VirtualTimeLoop


@pytest.fixture
def parts(renderer, make_spec):
    return renderer, make_spec


@pytest.fixture
def play_twice(parts, tmp_path):
    """Play an episode that is killed before a request, and again what its journal has, with newer weights."""

    async def play(world, kill_at, *, checkpoint=0, stamps=None, change=lambda path: None, **options):
        first = Process(tmp_path / "inflight", world, parts, kill_at=kill_at, version=9 if stamps else 0, **options)
        first.stamps = stamps
        before = await first.play()
        assert not list(first.path.iterdir()), "the journal of a stored episode is removed"
        change(first.copy)
        second = Process(first.copy, world, parts, version=max(3, checkpoint), **options)
        second.journals.read(checkpoint)
        with second.journals:
            after = await second.play()
        assert not second.path.exists()
        return first, before, second, after

    return play


def sampled(trajectory):
    """Tokens, log-probabilities and versions of each turn."""
    (sequence,) = trajectory.sequences
    arrays = sequence.token_ids, sequence.logprobs, sequence.versions
    return [[array[turn.start : turn.end].tolist() for array in arrays] for turn in sequence.turns]


def versions(trajectory):
    return [set(turn[2]) for turn in sampled(trajectory)]


OTHER = "the environment returned a different observation or state"
CONTINUED = "continued 1 episodes in flight after their last turn ({} turns)"
RESTARTED = "restarted 1 episodes in flight: 1 because {}"


@pytest.mark.parametrize("kill_at", [1, 2, 4])
async def test_actions_are_replayed_and_the_ledger_is_rebuilt(play_twice, kill_at):
    first, before, second, after = await play_twice(Walk, kill_at)
    assert second.told == [CONTINUED.format(kill_at)]
    assert first.requests == list(range(LENGTH))
    assert second.requests == list(range(kill_at, LENGTH)), "recorded answers are not sampled again"
    assert second.taken == ["forward"] * LENGTH
    assert sampled(after)[:kill_at] == sampled(before)[:kill_at]
    assert versions(after) == [{0}] * kill_at + [{3}] * (LENGTH - kill_at)
    assert after.sequences[0].token_ids.tolist() == before.sequences[0].token_ids.tolist()
    assert after.sequences[0].sources.tolist() == before.sequences[0].sources.tolist()
    assert [turn.reward for turn in after.turns] == [0.25] * LENGTH
    assert (after.id, after.outcome, after.success) == (before.id, before.outcome, before.success)
    assert after.metrics["seconds"] > 0
    assert second.ended == [("4-t/1.0", Outcome.FINISHED)]
    counts = [1.0, 0.0, float(kill_at)], [0.0, 0.0, 0.0]
    assert [list(second.journals.metrics().values()) for _ in range(2)] == list(counts), "counts since the last call"


async def test_an_episode_without_an_answer_lost_nothing(play_twice):
    _, _, second, after = await play_twice(Walk, 0)
    assert (second.told, second.requests) == ([], list(range(LENGTH)))
    assert after.outcome is Outcome.FINISHED


@pytest.mark.parametrize(("world", "taken"), [(Walk, LENGTH), (Kept, 0)])
async def test_an_episode_whose_group_was_not_scored_yet_is_not_sampled_again(play_twice, world, taken):
    _, before, second, after = await play_twice(world, "end")
    assert second.told == [CONTINUED.format(LENGTH)]
    assert (second.requests, len(second.taken)) == ([], taken)
    assert sampled(after) == sampled(before)
    assert (after.outcome, after.reward) == (before.outcome, before.reward)


async def test_a_snapshot_is_restored_instead(play_twice):
    _, before, second, after = await play_twice(Kept, 3)
    assert second.told == [CONTINUED.format(3)]
    assert second.requests == [3, 4]
    assert second.taken == ["forward"] * 2, "only the actions after the snapshot are taken"
    assert versions(after) == [{0}] * 3 + [{3}] * 2
    start = after.sequences[0].turns[3].start
    assert after.sequences[0].token_ids.tolist()[:start] == before.sequences[0].token_ids.tolist()[:start]
    assert [turn.state_key for turn in after.turns] == [turn.state_key for turn in before.turns]
    assert after.outcome is Outcome.FINISHED
    assert sum(turn.reward for turn in after.turns) == 0.25 * LENGTH


@pytest.fixture
def make_process(parts, tmp_path):
    """Make a process that plays an episode with the first turns of another one; it reads journals that it is given."""

    def make(name, *continued, kill_at=None, killed=None, **records):
        folder = tmp_path / name if killed is None else killed.copy
        process = Process(folder, Kept, parts, kill_at=kill_at, version=0 if killed is None else 3)
        process.runner = continue_from(process.runner, *continued, **records)
        if killed is not None:
            process.journals.read(0)
        return process

    return make


async def play_root(make_process, **options):
    """Play a root of branches, whose records are kept."""
    record = EpisodeRecords()
    process = make_process("root", None, 0, records=record, **options)
    return process, await process.play(), record


async def test_a_branch_in_flight_goes_on_from_its_last_turn(make_process):
    _, root, record = await play_root(make_process)
    first = make_process("branch", root, 2, restores=record, kill_at=4)
    before = await first.play()
    assert (first.requests, first.taken) == ([2, 3, 4], ["forward"] * 3)
    second = make_process("", root, 2, killed=first)  # the root's states are lost
    after = await second.play()
    assert second.told == [CONTINUED.format(2)]
    assert (second.requests, second.taken) == ([4], ["forward"])
    assert versions(after) == [{0}] * 4 + [{3}]
    assert [turn.state_key for turn in after.turns] == [turn.state_key for turn in before.turns]
    assert (after.outcome, after.branches_from) == (Outcome.FINISHED, before.branches_from)


async def test_a_root_in_flight_continues_and_its_branches_get_its_states(make_process):
    first, _, _ = await play_root(make_process, kill_at=4)
    second, root, record = await play_root(make_process, killed=first)
    assert second.told == [CONTINUED.format(4)]
    assert second.taken == ["forward"], "it is restored although it took a snapshot itself"
    branch = await make_process("branch", root, 2, restores=record).play()
    assert branch.outcome is Outcome.FINISHED
    assert [turn.state_key for turn in branch.turns] == [turn.state_key for turn in root.turns]


@pytest.mark.parametrize("world", [Walk, Kept])
async def test_loops_that_list_actions_read_them_again(play_twice, world):
    _, _, second, after = await play_twice(world, 3, loop_options={"format": "plain", "list_actions": True})
    assert second.told == [CONTINUED.format(3)]
    assert after.outcome is Outcome.FINISHED


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (Changing, OTHER),
        (Hiding, OTHER),
        (Paying, OTHER),
        (Forgetful, "the restored environment had a different state"),
        (Stuck, "their environment could not be restored"),
    ],
)
async def test_an_episode_restarts_if_its_environment_differs(play_twice, world, reason):
    _, before, second, after = await play_twice(world, 3)
    assert second.told == [RESTARTED.format(reason)]
    assert second.requests == list(range(LENGTH)), "everything is sampled again"
    assert versions(after) == [{3}] * LENGTH
    assert (after.id, after.seed, after.task_id, after.outcome) == (before.id, before.seed, "t", Outcome.FINISHED)
    assert second.ended == [("4-t/1.0", Outcome.CANCELLED), ("4-t/1.0", Outcome.FINISHED)]


async def test_a_replay_that_fails_makes_the_episode_start_again(play_twice, monkeypatch):
    monkeypatch.setattr(Breaking, "fails", iter([False] * (LENGTH + 1) + [True]))
    _, _, second, after = await play_twice(Breaking, 3)
    assert second.told == [RESTARTED.format("the environment failed during the replay")]
    assert versions(after) == [{3}] * LENGTH


@pytest.mark.parametrize("retries", [1, 2])
async def test_a_continued_attempt_that_fails_counts_as_that_attempt(play_twice, monkeypatch, retries):
    """The first attempt fails before the kill, and the second one after it has continued at its third step."""
    steps = [True, *[False] * LENGTH, False, False, True]
    monkeypatch.setattr(Breaking, "fails", iter(steps))
    first, _, second, after = await play_twice(Breaking, 2, retries=retries)
    assert first.ended == [("4-t/1.0", Outcome.ENVIRONMENT_ERROR), ("4-t/1.1", Outcome.FINISHED)]
    third = [("4-t/1.2", Outcome.FINISHED)] if retries == 2 else []
    assert second.ended == [("4-t/1.1", Outcome.ENVIRONMENT_ERROR), *third]
    assert after.attempt == retries


@pytest.mark.parametrize(("world", "again"), [(Stairs, 4), (KeptStairs, 1)])
async def test_the_environments_own_tools(play_twice, world, again):
    call = f"<tool_call>\n{json.dumps({'name': 'climb', 'arguments': {}})}\n</tool_call>"
    options = {"answers": [call], "loop": "tool_calling", "loop_options": {}, "limits": EpisodeLimits(max_turns=4)}
    _, before, second, after = await play_twice(world, 3, **options)
    assert second.told == [CONTINUED.format(3)]
    assert second.taken == ["climb"] * again, "a restored environment's tools are not called again"
    start = after.sequences[0].turns[3].start
    assert after.sequences[0].token_ids.tolist()[:start] == before.sequences[0].token_ids.tolist()[:start]
    assert after.outcome is Outcome.TRUNCATED_TURNS


async def test_a_tool_that_failed_has_failed_in_the_replay_too(play_twice):
    call = f"<tool_call>\n{json.dumps({'name': 'climb', 'arguments': {}})}\n</tool_call>"
    options = {"answers": [call], "loop": "tool_calling", "loop_options": {}, "limits": EpisodeLimits(max_turns=4)}
    _, before, second, after = await play_twice(Slippery, 3, **options)
    assert second.told == [CONTINUED.format(3)]
    assert after.metrics["tool/climb/errors"] == before.metrics["tool/climb/errors"] == 1.0
    assert after.metrics["tool/climb/calls"] == 4.0


@agentrl.tool
class Tally:
    """Count the calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self) -> str:
        """Count one more call."""
        self.calls += 1
        return f"{self.calls} calls"


@agentrl.tool
def draw() -> str:
    """Draw a number."""
    return f"{os.urandom(8).hex()}"


@agentrl.tool
def pay() -> agentrl.ToolResult:
    """Pay something else each time."""
    return agentrl.ToolResult("Paid.", reward=float(next(Changing.count)))


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (Tally, CONTINUED.format(2)),
        (draw, RESTARTED.format("the tool draw returned a different result")),
        (pay, RESTARTED.format("the tool pay returned a different result")),
    ],
)
async def test_configured_tools_are_called_again(play_twice, tool, told):
    calls = [{"name": tool.name, "arguments": {}}, {"name": "act", "arguments": {"action": "forward"}}]
    answer = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    options = {"answers": [answer], "loop": "tool_calling", "loop_options": {}, "tools": [tool]}
    _, _, second, after = await play_twice(Walk, 2, **options)
    assert second.told == [told]
    assert after.outcome is Outcome.FINISHED


@agentrl.tool(parallel=True)
async def rest(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"Waited {seconds} s."


@pytest.mark.slow
async def test_parallel_calls_of_a_tool_are_told_apart_by_their_arguments(play_twice):
    """The first call ends last."""
    calls = [{"name": "rest", "arguments": {"seconds": seconds}} for seconds in (0.2, 0.0)]
    calls.append({"name": "act", "arguments": {"action": "forward"}})
    answer = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    _, _, second, _ = await play_twice(Walk, 2, answers=[answer], loop="tool_calling", loop_options={}, tools=[rest])
    assert second.told == [CONTINUED.format(2)]


@pytest.mark.parametrize(("checkpoint", "kept"), [(9, 4), (2, 2), (1, 1)])
async def test_turns_of_newer_weights_than_the_checkpoints_are_sampled_again(play_twice, checkpoint, kept):
    _, _, second, after = await play_twice(Walk, 4, checkpoint=checkpoint, stamps=[1, 2, 3, 4, 5])
    assert second.told == [CONTINUED.format(kept)]
    newest = max(3, checkpoint)
    assert versions(after) == [{1}, {2}, {3}, {4}][:kept] + [{newest}] * (LENGTH - kept)


async def test_an_episode_of_newer_weights_is_named(play_twice):
    _, _, second, _ = await play_twice(Walk, 3, checkpoint=-1)
    assert second.told == [RESTARTED.format("all their turns were sampled by weights that the checkpoint lacks")]


def cut(path):
    """Leave half of the last line, as a killed writer does."""
    (file,) = path.iterdir()
    file.write_bytes(file.read_bytes()[:-20])


def damage(path):
    (file,) = path.iterdir()
    file.write_bytes(b"x" + file.read_bytes())


async def test_a_torn_record_is_left_out(play_twice):
    _, _, second, after = await play_twice(Walk, 3, change=cut)
    assert second.told == [CONTINUED.format(3)], "the step after the third answer was lost, not the answer"
    assert after.outcome is Outcome.FINISHED


async def test_a_damaged_journal_is_named(play_twice):
    _, _, second, _ = await play_twice(Walk, 3, change=damage)
    assert second.told == [RESTARTED.format("their journals are damaged")]


async def test_a_large_journal_is_given_up(play_twice, monkeypatch):
    monkeypatch.setattr(journal_file, "MAX_JOURNAL_BYTES", 100)
    _, _, second, after = await play_twice(Walk, 3)
    assert second.told == [RESTARTED.format("their journals became too large")]
    assert after.outcome is Outcome.FINISHED


async def test_large_states_are_not_recorded_but_replayed(play_twice, monkeypatch):
    monkeypatch.setattr(journal_replay, "MAX_STATE_CHARS", 10)
    monkeypatch.setattr(Kept, "look", Walk.look)
    _, _, second, _ = await play_twice(Kept, 3)
    assert second.told == [CONTINUED.format(3)]
    assert second.taken == ["forward"] * LENGTH


class Chatty(agentrl.AgentLoop):
    """Greets differently each time."""

    is_deterministic = True
    count = itertools.count()

    async def run(self, episode):
        await episode.reset()
        conversation = episode.open([user(f"Hello {next(Chatty.count)}.")])
        while True:
            result = await episode.step((await conversation.generate()).text)
            if result.done:
                return
            conversation.add(user(str(result.observation)))


class Careless(Chatty):
    """Goes on after an error that loops must not catch."""

    async def run(self, episode):
        try:
            await super().run(episode)
        except Exception:
            return


class OtherActions(Chatty):
    async def run(self, episode):
        await episode.reset()
        conversation = episode.open([user("Hello.")])
        while True:
            await conversation.generate()
            result = await episode.step(f"{next(Chatty.count)}")
            if result.done:
                return
            conversation.add(user("Go on."))


class Hasty(Chatty):
    """Takes one action for each answer, and in a replay all that are recorded and one more."""

    runs = itertools.count()

    async def run(self, episode):
        await episode.reset()
        conversation = episode.open([user("Hello.")])
        is_replay = next(Hasty.runs) % 3 == 1
        while True:
            await conversation.generate()
            for _ in range(4 if is_replay else 1):
                result = await episode.step("forward")
            if result.done:
                return
            conversation.add(user("Go on."))


class Trying(Chatty):
    """Tries each action before it takes it."""

    async def run(self, episode):
        await episode.reset()
        conversation = episode.open([user("Hello.")])
        while True:
            action = (await conversation.generate()).text
            await episode.try_action(action)
            if (await episode.step(action)).done:
                return
            conversation.add(user("Go on."))


async def test_trial_actions_are_replayed_and_not_restored(play_twice):
    _, _, second, after = await play_twice(Still, 3, loop=Trying())
    assert second.told == [CONTINUED.format(3)]
    assert second.taken == ["forward"] * 2 * LENGTH
    assert after.outcome is Outcome.FINISHED


class External(Chatty):
    is_deterministic = False


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (Chatty, "the agent loop made a different request"),
        (Careless, "the agent loop made a different request"),
        (Hasty, "the agent loop made a different request"),
        (OtherActions, "the agent loop took a different action"),
        (External, "the agent loop External cannot be replayed"),
    ],
)
async def test_a_loop_that_differs_makes_the_episode_start_again(play_twice, loop, reason):
    _, _, second, after = await play_twice(Walk, 3, loop=loop())
    assert second.told == [RESTARTED.format(reason)]
    assert versions(after) == [{3}] * LENGTH
    assert after.outcome is Outcome.FINISHED


class Slow(agentrl.AsyncEnv):
    """A step takes a minute at first, and an hour each in a replay."""

    taken = None
    seconds = 60.0

    async def reset(self, *, seed=None, options=None):
        self.place = 0
        return "You are at 0.", {}

    async def step(self, action):
        await asyncio.sleep(Slow.seconds)
        self.place += 1
        return f"You are at {self.place}.", 0.0, self.place == LENGTH, False, {}


@pytest.mark.parametrize(
    ("seconds", "told"), [(70.0, CONTINUED.format(3)), (100.0, RESTARTED.format("their replay took too long"))]
)
def test_a_replay_takes_hardly_longer_than_the_episode(parts, tmp_path, monkeypatch, seconds, told):
    """In virtual time: three steps of a minute, which may take a minute longer when they are replayed."""
    limits = EpisodeLimits(max_seconds=270.0)

    async def play():
        clock = asyncio.get_running_loop().time
        first = Process(tmp_path / "inflight", Slow, parts, kill_at=3, clock=clock, limits=limits)
        await first.play()
        monkeypatch.setattr(Slow, "seconds", seconds)
        second = Process(first.copy, Slow, parts, kill_at=4, clock=clock, limits=limits)
        second.journals.read(0)
        began = clock()
        trajectory = await second.play()
        took = clock() - began
        return took, trajectory, second.told, [read_journal(file, version=9) for file in second.copy.glob("*")]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        took, trajectory, messages, again = runner.run(play())
    assert messages == [told]
    if seconds == 70.0:  # the budget counts three steps before the kill and two after it, but not the replay
        assert (took, trajectory.metrics["seconds"]) == (pytest.approx(5 * 70), pytest.approx(180 + 140))
        assert trajectory.outcome is Outcome.FINISHED
        assert [journal.seconds for journal in again] == [pytest.approx(180 + 70)], "if it is killed once more"
    else:
        assert (took, trajectory.metrics["seconds"]) == (pytest.approx(180 + REPLAY_S + 300), pytest.approx(300))
        assert trajectory.outcome is Outcome.TRUNCATED_TIME


def test_a_cancelled_episode_keeps_its_journal(parts, tmp_path):
    async def replay_for(seconds):
        process = Process(tmp_path / "inflight", Slow, parts, clock=asyncio.get_running_loop().time)
        process.journals.read(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.play()
        with process.journals:
            await process.runner.close()
        return process

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        process = runner.run(replay_for(130.0))
    assert len(list(process.path.iterdir())) == 1
    assert not process.told
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        process = runner.run(replay_for(30.0))
    assert process.told == ["did not reach 1 episodes that were in flight"]
    again = JournalFolder(process.path, lambda: 0.0, process.told.append)
    again.read(0)
    for position, groups in ((4, []), (5, ["4-t"])):
        again.keep_groups_from(position, groups)
        again.writer.flush()
        assert len(list(process.path.iterdir())) == 1
    again.keep_groups_from(5, [])
    again.writer.flush()
    assert not list(process.path.iterdir()), "its group is not played again"


async def test_a_journal_that_cannot_be_written_does_not_stop_the_run(parts, tmp_path, caplog):
    path = tmp_path / "inflight"
    path.write_text("a file in its place")
    process = Process(path, Walk, parts)
    assert (await process.play()).outcome is Outcome.FINISHED
    process.journals.writer.flush()
    assert caplog.text.count("cannot be written") == 1


async def test_turns_of_named_adapters_are_not_recorded(parts, tmp_path):
    process = Process(tmp_path / "inflight", Walk, parts)
    process.journals.begin("4-t/1.0")
    params = SamplingParams()
    request = GenerateRequest(
        prompt_ids=[1], params=params, session_id="4-t/1.0/0", request_id="4-t/1.0/turn-0", adapter="planner"
    )
    answer = Generation(token_ids=[2], logprobs=[-1.0], versions=[0], stop_reason=StopReason.STOP)
    process.journals.active["4-t/1.0"].add_answer(request, answer)
    process.journals.writer.flush()
    again = JournalFolder(process.path, lambda: 0.0, process.told.append)
    again.read(0)
    assert again.claim("4-t/1") == 0
    assert process.told == [RESTARTED.format("named adapters sampled their turns")]


async def test_a_disk_that_is_too_slow_ends_the_journals(parts, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal_file, "MAX_QUEUED", 3)
    monkeypatch.setattr(journal_file, "FLUSH_S", 1000)
    process = Process(tmp_path / "inflight", Walk, parts)
    assert (await process.play()).outcome is Outcome.FINISHED
    assert caplog.text.count("the disk does not keep up") == 1
    assert not process.path.exists()


async def test_the_newest_attempt_counts(parts, tmp_path):
    process = Process(tmp_path / "inflight", Walk, parts)
    answer = {"kind": "answer", "token_ids": [1], "logprobs": [-1.0], "versions": [0]}
    for number in (0, 1):
        name = journal_file.file_name(f"4-t/1.{number}")
        process.journals.writer.begin(name, {"kind": "start", "id": f"4-t/1.{number}"})
        process.journals.writer.append(name, answer)
    process.journals.writer.flush()
    process.journals.read(0)
    assert [file.name for file in process.path.iterdir()] == [name]
    assert process.journals.claim("4-t/1") == 1
