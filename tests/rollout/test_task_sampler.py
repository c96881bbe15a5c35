"""The order of tasks: shares, complete passes, and the same order after a restart."""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.environment import CurriculumConfig
from agentrl.errors import UsageError
from agentrl.rollout.curriculum import GroupOutcome
from agentrl.rollout.groups import Group
from agentrl.rollout.task_order import TaskSampler
from agentrl.task import SeedTasks, Task, TaskCursor

weights = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 20), min_size=1)


def sources(labels, size=50):
    return {label: SeedTasks(label, size=size) for label in labels}


@settings(deadline=None, max_examples=50)
@given(weights=weights, draws=st.integers(1, 300))
def test_shares_are_kept(weights, draws):
    sampler = TaskSampler(sources(weights), seed=0, weights=weights)
    counts = Counter()
    for number in range(1, draws + 1):
        counts[sampler.next().environment] += 1
        for label, weight in weights.items():
            share = number * weight / sum(weights.values())
            assert counts[label] - share < 1 + 1e-9, "nobody is ahead by a turn"
            assert share - counts[label] < len(weights) - 1 + 1e-9


@settings(deadline=None, max_examples=20)
@given(weights=weights)
def test_every_environment_walks_its_own_tasks_in_its_own_order(weights):
    sampler = TaskSampler(sources(weights, size=7), seed=3, weights=weights)
    alone = {label: TaskCursor(source, seed=3) for label, source in sources(weights, size=7).items()}
    for _ in range(30):
        draw = sampler.next()
        assert draw.task == alone[draw.environment].next()
        assert draw.task.environment == draw.environment


def test_whole_weights_give_whole_steps():
    sampler = TaskSampler(sources("ab"), seed=0, weights={"a": 2, "b": 1})
    for _ in range(20):
        assert Counter(sampler.next().environment for _ in range(6)) == {"a": 4, "b": 2}


def test_one_environment_is_its_cursor():
    sampler, cursor = TaskSampler({"": SeedTasks("w", size=9)}, seed=5), TaskCursor(SeedTasks("w", size=9), seed=5)
    assert [sampler.next().task for _ in range(30)] == [cursor.next() for _ in range(30)]


def order_of(tasks):
    cursor = TaskCursor(tasks, seed=0)
    return [cursor.next().id for _ in tasks]


def draws_in_stages(rows):
    """Draw eight tasks in each of five steps; each set of rows begins a stage of two steps."""
    stages = {"" if number == 0 else f"~{number}": tasks for number, tasks in enumerate(rows)}
    starts = {"": range(2, 2 * len(rows), 2)}
    sampler = TaskSampler(stages, seed=0, stages=starts)
    drawn = []
    for _ in range(5):
        for _ in range(8):
            saved, sampler = sampler.state_dict(), TaskSampler(stages, seed=0, stages=starts)
            sampler.load_state_dict(json.loads(json.dumps(saved)))
            drawn.append(sampler.next().task.id)
        sampler.learn([])
    return drawn


def test_a_stage_with_the_same_tasks_continues_their_order():
    """A stage that only changed options repeated the tasks of the stage before, and left others out."""
    tasks, others = ([Task(id=f"{name}{number}", environment="w") for number in range(40)] for name in "ab")
    assert len(set(draws_in_stages([tasks, list(tasks)]))) == 40
    assert len(set(draws_in_stages([SeedTasks("w", size=40)] * 3))) == 40
    returning = draws_in_stages([tasks, others, tasks])
    assert returning == order_of(tasks)[:16] + order_of(others)[:16] + order_of(tasks)[16:24]


@pytest.mark.parametrize("keeps_tasks", [True, False])
def test_success_at_the_tasks_of_one_file_says_nothing_about_those_of_another(keeps_tasks):
    """Rows are numbered by default, so that the files of two stages have the same ids."""
    files = {"": "first", "~1": "first" if keeps_tasks else "second"}
    tasks = {
        label: [Task(id=str(number), environment="w", prompt=f"{name} {number}") for number in range(20)]
        for label, name in files.items()
    }
    pools = CurriculumConfig(pools={"by": "task", "revisit": 0.1, "half_life": 100})
    sampler = TaskSampler(tasks, seed=0, stages={"": [1]}, curriculum=pools)
    groups = [Group(position=number, draw=sampler.next(), size=1) for number in range(20)]
    solved = [replace(group.outcome(), episodes=64, tries=64, successes=64) for group in groups]
    sampler.learn([GroupOutcome(**json.loads(json.dumps(asdict(outcome)))) for outcome in solved])
    again = [sampler.next() for _ in range(20)]
    assert all(draw.stage == 1 for draw in again)
    passed_over = again[-1].place - again[0].place - 19
    assert passed_over > 100 if keeps_tasks else passed_over == 0


CURRICULA = [
    {},
    {"horizon": {"turns": [3, 5, 9], "at_steps": [0, 2, 4]}},
    {"horizon": {"turns": [3, 5, 9], "success_above": 0.5, "over_steps": 2}},
    {"pools": {"by": "task", "easy_above": 0.7, "hard_below": 0.3, "revisit": 0.2, "half_life": 5}},
    {"pools": {"by": "environment", "revisit": 0.5, "half_life": 3}},
]


def make(curriculum, seed=1):
    weights = {"a": 2.0, "b": 1.0, "c": 0.5}
    return TaskSampler(sources("abc", size=5), seed=seed, weights=weights, curriculum=CurriculumConfig(**curriculum))


def step(sampler, rates, size=4):
    """Draw and learn as a training step does; what is solved follows from the task alone."""
    draws = [sampler.next() for _ in range(size)]
    sampler.learn([outcome(draw, round(8 * rates[draw.environment])) for draw in draws])
    return [(draw.environment, draw.task.id, draw.task.max_turns) for draw in draws]


def outcome(draw, successes, tries=8, finished=0):
    return GroupOutcome(
        position=0,
        environment=draw.environment,
        task_id=draw.task.id,
        task_type=draw.task.type,
        horizon=draw.horizon,
        episodes=8,
        tries=tries,
        successes=successes,
        finished=finished,
    )


@settings(deadline=None, max_examples=40)
@given(
    curriculum=st.sampled_from(CURRICULA),
    rates=st.fixed_dictionaries({label: st.floats(0, 1) for label in "abc"}),
    before=st.integers(0, 25),
)
def test_what_was_saved_goes_on_as_if_it_had_not_been(curriculum, rates, before):
    sampler = make(curriculum)
    for _ in range(before):
        step(sampler, rates)
    sampler.next()
    restored = make(curriculum)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert restored.position == sampler.position == 4 * before + 1
    assert [step(restored, rates) for _ in range(10)] == [step(sampler, rates) for _ in range(10)]
    assert restored.metrics() == sampler.metrics()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 5), curriculum=st.sampled_from(CURRICULA))
def test_a_draw_is_found_again(seed, curriculum):
    sampler = make(curriculum, seed)
    draws = [sampler.next() for _ in range(20)]
    fresh = make(curriculum, seed)
    for draw in reversed(draws):
        assert fresh.redraw(draw.environment, draw.place, draw.horizon) == draw


def test_the_state_of_other_environments_is_refused():
    state = make({}).state_dict()
    with pytest.raises(UsageError, match="other environments"):
        TaskSampler(sources("ab"), seed=1).load_state_dict(state)


@pytest.mark.parametrize("curriculum", [CURRICULA[2], CURRICULA[3]])
def test_success_must_be_told_where_it_decides(curriculum):
    sampler = make(curriculum)
    assert sampler.wants_outcomes
    with pytest.raises(UsageError, match=r"does not report success.*[Rr]emove curriculum"):
        sampler.learn([outcome(sampler.next(), 0, tries=0, finished=8)])


@pytest.mark.parametrize("curriculum", CURRICULA[:2])
def test_where_success_decides_nothing_it_need_not_be_told(curriculum):
    sampler = make(curriculum)
    assert not sampler.wants_outcomes
    sampler.learn([])
    assert sampler.metrics() == {}


def test_a_task_of_fewer_turns_keeps_them():
    tasks = [Task(id="short", environment="a", max_turns=2), Task(id="free", environment="a")]
    sampler = TaskSampler({"a": tasks}, seed=0, curriculum=CurriculumConfig(**CURRICULA[1]), shuffle=False)
    draws = [sampler.next(), sampler.next()]
    assert [(draw.task.max_turns, draw.horizon) for draw in draws] == [(2, 3), (3, 3)]
