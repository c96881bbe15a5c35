"""Groups whose episodes branch from others of the group."""

import asyncio
from types import SimpleNamespace

import pytest
from groups_here import make
from rollout_worlds import Corridor

from agentrl.config.environment import BranchConfig
from agentrl.errors import Outcome
from agentrl.reward import Score, Scorer
from agentrl.rollout.branches import BranchRunner, branch_metrics, branch_turn, least_certain_turns, root_of
from agentrl.serving.scripted import ScriptedEngine
from agentrl.trajectory import BranchPoint, Source, TokenSequence, Trajectory, Turn

__all__ = ["make"]


def episode(*logprobs):
    """An episode of turns with these log-probabilities."""
    sequence = TokenSequence()
    for index, own in enumerate(logprobs):
        sequence.extend_sampled([1] * len(own), logprobs=list(own), versions=[0] * len(own))
        sequence.turns.append(Turn(index=index, start=len(sequence) - len(own), end=len(sequence)))
    return Trajectory(id="g/0.0", task_id="t", environment="e", seed=0, group_id="g", sequences=[sequence])


def test_members_are_roots_or_branch_from_them_in_turn():
    config = BranchConfig(roots=2, turns=[1])
    assert [root_of(config, member) for member in range(7)] == [None, None, 0, 1, 0, 1, 0]


LONG = episode(*[[-1.0]] * 6)


@pytest.mark.parametrize(
    ("settings", "points"),
    [
        ({"turns": [1, 3]}, [1, 3, 1, 3, 1]),
        ({"turns": [1, 3], "children": 2}, [1, 1, 3, 3, 1]),
        ({"turns": [2, 9]}, [2, 6, 2, 6, 2]),
        ({"every": 2}, [2, 4, 6, 6, 6]),
    ],
)
def test_points_follow_the_config_and_a_short_episode_is_repeated_whole(settings, points):
    config = BranchConfig(roots=2, **settings)
    assert [branch_turn(config, member, LONG) for member in range(2, 12, 2)] == points


def test_the_least_certain_turns_come_first_but_never_the_first_turn():
    root = episode([-9.0], [-1.0, -1.0], [-3.0, -0.5], [-2.0])
    assert least_certain_turns(root) == [3, 2, 1]
    written = root.sequences[0]
    written.extend([7, 7, 7], Source.FORCED)  # belong to a turn, and were not chosen
    written.extend_sampled([1], logprobs=[-1.5], versions=[0])
    written.turns.append(Turn(index=4, start=len(written) - 4, end=len(written)))
    assert least_certain_turns(root) == [3, 2, 4, 1]
    root = episode([-9.0], [-1.0, -1.0], [-3.0, -0.5], [-2.0])
    config = BranchConfig(roots=2, by_entropy=True)
    assert [branch_turn(config, member, root) for member in (2, 4, 6, 8)] == [3, 2, 1, 3]
    assert branch_turn(config, 2, episode([-1.0])) == 1


def test_metrics_of_branches_count_only_what_they_share():
    """One branch repeats its whole root, another shares a turn of three tokens."""
    episodes = [episode([-1.0] * 3, [-1.0]), episode([-1.0] * 3, [-1.0]), episode([-1.0] * 3, [-1.0] * 2, [-1.0] * 4)]
    for number, one in enumerate(episodes):
        one.outcome, one.reward = Outcome.FINISHED, float(number)
    episodes[1].branches_from = BranchPoint(parent="g/0.0", turn=2)
    episodes[2].branches_from = BranchPoint(parent="g/0.0", turn=1)
    group = SimpleNamespace(trainable=episodes)
    assert branch_metrics([group]) == {
        "branch/share": 2 / 3,
        "branch/turn": 1.5,
        "branch/repeated": 0.5,
        "branch/shared_tokens": (4 + 3) / (4 + 4 + 9),
    }
    assert branch_metrics([SimpleNamespace(trainable=episodes[:1])]) == {}


@pytest.fixture
def branching(make, make_runner, make_engine):
    """A scheduler of one group at a time, of six members that branch from two."""

    def build(*answers, engine=None, factory=Corridor, branch=None, **options):
        runner = make_runner(factory, engine=engine or make_engine(*(answers or ["forward"])))
        branches = BranchRunner(runner, branch or BranchConfig(roots=2, turns=[1, 2]))
        scheduler = make(branches, group_size=6, batch=1, wait_to_start=branches.wait_to_start, **options)
        return scheduler, branches

    return build


@pytest.mark.parametrize("concurrent", [1, 2, 100])
async def test_a_group_has_its_size_and_each_branch_its_root(branching, concurrent):
    scheduler, branches = branching("forward", "back", "forward", "forward", "forward", max_concurrent=concurrent)
    (group,) = await scheduler.next_batch()
    assert [t.branches_from and (t.branches_from.parent[-3:], t.branches_from.turn) for t in group.trajectories] == [
        None,
        None,
        ("0.0", 1),
        ("1.0", 1),
        ("0.0", 2),
        ("1.0", 2),
    ]
    assert all(t.outcome is Outcome.FINISHED and t.reward == 1.0 for t in group.trajectories)
    metrics = branch_metrics([group])
    assert metrics["branch/share"] == pytest.approx(4 / 6)
    assert metrics["branch/turn"] == 1.5
    assert metrics["branch/repeated"] == 0
    tokens = [t.sampled_tokens for t in group.trajectories]
    own = {t.id: [turn.end - turn.start for turn in t.turns] for t in group.trajectories}
    shared = sum(sum(own[t.id][: t.branches_from.turn]) for t in group.trajectories if t.branches_from)
    assert metrics["branch/shared_tokens"] == pytest.approx(shared / sum(tokens))
    assert not branches._groups, "a finished group is forgotten"


@pytest.mark.parametrize("settings", [{"by_entropy": True}, {"every": 1, "children": 2}])
async def test_other_rules_play_whole_groups(branching, settings):
    scheduler, _ = branching("back", "forward", "forward", branch=BranchConfig(roots=2, **settings))
    (group,) = await scheduler.next_batch()
    assert [t.outcome for t in group.trajectories] == [Outcome.FINISHED] * 6
    assert [1 <= t.branches_from.turn <= 3 for t in group.trajectories[2:]] == [True] * 4


async def test_shared_turns_are_sampled_once(branching, renderer):
    requests = []

    class Spy(ScriptedEngine):
        async def generate(self, request):
            requests.append(request.request_id)
            return await super().generate(request)

    answer = renderer.encoder.encode("forward")
    scheduler, _ = branching(engine=Spy(script=lambda request: answer, vocab_size=400))
    (group,) = await scheduler.next_batch()
    own = [name.rpartition("/turn-") for name in requests]
    turns = {member: sorted(int(n) for name, _, n in own if name.endswith(f"/{member}.0")) for member in range(6)}
    assert turns == {0: [0, 1, 2], 1: [0, 1, 2], 2: [1, 2], 3: [1, 2], 4: [2], 5: [2]}
    assert [len(t.turns) for t in group.trajectories] == [3] * 6


async def test_branches_that_wait_for_their_roots_take_no_places(branching, renderer):
    """Six places are enough for the two roots of three groups."""
    answer, go_on = renderer.encoder.encode("forward"), asyncio.Event()

    class Blocked(ScriptedEngine):
        async def generate(self, request):
            await go_on.wait()
            return await super().generate(request)

    engine = Blocked(script=lambda request: answer, vocab_size=400)
    scheduler, _ = branching(engine=engine, max_concurrent=6, max_staleness=3)
    scheduler.start_episodes()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(scheduler.state_dict()["unfinished"]) == 3
    go_on.set()
    (group,) = await scheduler.next_batch()
    assert group.position == 0


async def test_branches_of_a_failed_root_are_played_from_the_start(branching, renderer):
    answer = renderer.encoder.encode("forward")

    class Failing(ScriptedEngine):
        async def generate(self, request):
            if "/0.0/turn-1" in request.request_id:
                raise RuntimeError("lost")
            return await super().generate(request)

    scheduler, _ = branching(engine=Failing(script=lambda request: answer, vocab_size=400))
    (group,) = await scheduler.next_batch()
    assert group.members[0].outcome is Outcome.ENGINE_ERROR
    assert [t.branches_from is None for t in group.trajectories] == [True, True, True, False, True, False]
    assert len(group.trainable) == 5


async def test_branches_of_a_root_without_a_reward_are_played_from_the_start(branching):
    """A run that is killed plays such a root again, with other tokens under the same id."""
    scheduler, branches = branching("forward")
    scored = branches._runner.scorer

    class Partial(Scorer):
        async def score(self, trajectory, task):
            return Score(reward=None) if "/0.0" in trajectory.id else await scored.score(trajectory, task)

    branches._runner.scorer = Partial()
    (group,) = await scheduler.next_batch()
    assert group.members[0].reward is None
    assert [t.branches_from is None for t in group.trajectories] == [True, True, True, False, True, False]


async def test_a_saved_group_goes_on_with_the_roots_that_it_has(branching, renderer):
    answer, held, waiting = renderer.encoder.encode("forward"), asyncio.Event(), asyncio.Event()

    class Holding(ScriptedEngine):
        async def generate(self, request):
            if not request.request_id.split("/")[1].startswith(("0.", "1.")):
                waiting.set()
                await held.wait()
            return await super().generate(request)

    scheduler, _ = branching(engine=Holding(script=lambda request: answer, vocab_size=400))
    scheduler.start_episodes()
    await waiting.wait()
    for _ in range(100):  # the other root ends
        await asyncio.sleep(0)
    state = scheduler.state_dict()
    await scheduler.close()
    restored, branches = branching()
    restored.load_state_dict(state)
    (group,) = await restored.next_batch()
    points = [t.branches_from and (t.branches_from.parent, t.branches_from.turn) for t in group.trajectories]
    roots = [group.members[0].id, group.members[1].id]
    assert points == [None, None, (roots[0], 1), (roots[1], 1), (roots[0], 2), (roots[1], 2)]
    assert not branches._groups


async def test_branches_use_the_snapshots_of_their_root(branching):
    class Saved(Corridor):
        steps = 0

        def step(self, action):
            Saved.steps += 1
            return super().step(action)

        def snapshot(self):
            return self.place

        def restore(self, data):
            self.place = data

    scheduler, _ = branching(factory=Saved)
    (group,) = await scheduler.next_batch()
    assert Saved.steps == 2 * 3 + 2 * 2 + 2 * 1
    assert [t.success for t in group.trajectories] == [True] * 6
