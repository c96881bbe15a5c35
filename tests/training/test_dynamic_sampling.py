"""What "differs" means in a group comes from the estimator: components, turns, states, roles, greedy rollouts."""

import pytest

from agentrl.config.config import AlgorithmConfig
from agentrl.errors import Outcome, TrainingError
from agentrl.registry import Kind, names
from agentrl.training.batch import StepExtras
from agentrl.training.dynamic_sampling import DynamicSampling, GroupLearner
from agentrl.trajectory import SOLE_ROLE, TokenSequence, Trajectory, Turn


def episode(member, rewards, *, states=None, components=None, role=SOLE_ROLE, outcome=Outcome.FINISHED, tokens=2):
    """An episode with the given rewards of turns; a turn without a state is in one that no other shares."""
    sequence = TokenSequence()
    for number, reward in enumerate(rewards):
        start = len(sequence)
        sequence.extend_sampled([5] * tokens, logprobs=[-1.0] * tokens, versions=[0] * tokens)
        state = f"{member}-{number}" if states is None else states[number]
        turn = Turn(index=number, start=start, end=start + tokens, reward=reward, state_key=state, role=role)
        sequence.turns.append(turn)
    return Trajectory(
        id=f"g/{member}",
        task_id="t",
        environment="e",
        seed=0,
        group_id="g",
        sequences=[sequence],
        reward=sum(rewards),
        reward_components=components or {},
        outcome=outcome,
    )


def has_signal(group, advantage="grpo", extras=None, **settings):
    return DynamicSampling([GroupLearner(algorithm=AlgorithmConfig(advantage=advantage, **settings))]).has_signal(
        group, extras
    )


def scored(*components):
    return [episode(i, [0.0, sum(own.values())], components=own) for i, own in enumerate(components)]


def test_gdpo_compares_components_whose_sums_are_equal():
    group = scored({"style": 1.0, "answer": 0.0}, {"style": 0.0, "answer": 1.0}, {"style": 0.5, "answer": 0.5})
    assert has_signal(group, "gdpo", advantage_options={"weights": {"style": 0.2}})
    assert not has_signal(group, "grpo")
    assert not has_signal(group, "rloo")


def test_gdpo_leaves_out_components_of_weight_0():
    group = scored({"style": 1.0, "answer": 0.5}, {"style": 0.0, "answer": 0.5})
    assert has_signal(group, "gdpo")
    assert not has_signal(group, "gdpo", advantage_options={"weights": {"style": 0.0}})
    assert has_signal(group, "gdpo", advantage_options={"weights": {"answer": 0.0}})


def test_gdpo_without_a_difference():
    assert not has_signal(scored(*[{"style": 0.3, "answer": 0.7}] * 3), "gdpo")


def test_gdpo_with_an_episode_that_lacks_a_component_is_an_error():
    with pytest.raises(TrainingError, match="episodes without 'answer'"):
        has_signal(scored({"style": 1.0, "answer": 0.0}, {"style": 1.0}), "gdpo")


EQUAL_SUMS = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def in_states(*states):
    return [episode(i, rewards, states=own) for i, (rewards, own) in enumerate(zip(EQUAL_SUMS, states, strict=True))]


@pytest.mark.parametrize(
    ("name", "expected"), [("gigpo", True), ("hgpo", True), ("turn_discounted", True), ("grpo", False)]
)
def test_estimators_by_turns_compare_returns_from_a_state_on(name, expected):
    assert has_signal(in_states("abc", "abd", "aef"), name) is expected


@pytest.mark.parametrize(("name", "expected"), [("gigpo", False), ("hgpo", False), ("turn_discounted", True)])
def test_states_that_no_other_member_was_in_tell_nothing(name, expected):
    assert has_signal(in_states("abc", "def", "ghi"), name) is expected


def test_gigpo_without_its_step_part_compares_whole_returns():
    assert not has_signal(in_states("abc", "abd", "aef"), "gigpo", advantage_options={"omega": 0.0})
    assert has_signal([episode(0, [0.0, 1.0]), episode(1, [0.0, 0.0])], "gigpo", advantage_options={"omega": 0.0})


@pytest.mark.parametrize("name", ["reinforce", "reinforce++"])
def test_estimators_that_compare_nothing_keep_groups_whose_rewards_differ(name):
    assert has_signal([episode(0, [1.0, 0.0]), episode(1, [0.0, 1.0])], name)
    assert has_signal([episode(0, [0.0, 1.0]), episode(1, [0.0, 0.5])], name)
    assert not has_signal([episode(0, [0.0, 1.0]), episode(1, [0.0, 1.0])], name)
    assert not has_signal([episode(0, [0.0, 1.0]), episode(1, [0.0, 0.0, 0.0, 1.0])], name), "both earn 1 at the end"


def test_remax_compares_with_the_greedy_rollout():
    group = [episode(0, [1.0]), episode(1, [1.0])]
    assert has_signal(group, "remax", StepExtras(greedy={"g": episode(9, [0.0])}))
    assert not has_signal(group, "remax", StepExtras(greedy={"g": episode(9, [1.0])}))


def test_an_expert_is_a_member():
    expert = episode(7, [1.0])
    expert.sequences[0]._sources = type(expert.sequences[0]._sources)("B", [3, 3])
    failed = [episode(0, [0.0]), episode(1, [0.0])]
    assert not has_signal(failed)
    assert has_signal(failed, extras=StepExtras(experts=[expert]))


def test_failed_episodes_and_lone_ones_tell_nothing():
    broken = episode(1, [1.0], outcome=Outcome.ENVIRONMENT_ERROR)
    assert not has_signal([episode(0, [0.0]), broken])
    assert not has_signal([episode(0, [0.0])])
    assert has_signal([episode(0, [0.0]), broken, episode(2, [1.0])])


def test_penalties_of_shaping_are_no_reason_to_keep_a_group():
    group = [episode(0, [0.0], tokens=2), episode(1, [0.0], tokens=90)]
    assert not has_signal(group, shaping={"length": {"factor": 1.0}})


@pytest.mark.parametrize("difference", [0.0, 1e-17])
def test_rounding_is_no_difference(difference):
    assert not has_signal([episode(0, [0.3]), episode(1, [0.1 + 0.2 + difference])])


def test_one_of_several_adapters_is_enough():
    def played(member, own):
        trajectory = episode(member, [0.0, 1.0], role="planner")
        other = episode(member, [0.0], role="worker").sequences[0]
        other.turns[0].index, other.turns[0].reward, other.turns[0].own_reward = 2, own, own
        trajectory.sequences.append(other)
        trajectory.reward += own
        return trajectory

    group = played(0, 1.0), played(1, 0.0)
    algorithm = AlgorithmConfig()
    planner = GroupLearner(algorithm=algorithm, roles=frozenset({"planner"}))
    worker = GroupLearner(algorithm=algorithm, roles=frozenset({"worker"}))
    assert not DynamicSampling([planner]).has_signal(group)
    assert DynamicSampling([worker]).has_signal(group)
    assert DynamicSampling([planner, worker]).has_signal(group)


@pytest.mark.parametrize("name", [name for name in names(Kind.ADVANTAGE) if ":" not in name])
def test_every_estimator_can_be_asked(name):
    greedy = StepExtras(greedy={"g": episode(9, [0.5])}) if name == "remax" else None
    different = [
        episode(i, [0.0, reward], states="ab", components={"a": reward}) for i, reward in enumerate((0.0, 1.0, 0.25))
    ]
    equal = [episode(i, [0.0, 0.5], states="ab", components={"a": 0.5}) for i in range(3)]
    assert has_signal(different, name, greedy)
    assert not has_signal(equal, name, greedy)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, *[0.95] * 7], True),  # leaving one out, seven members have equal peers: the group is kept as a whole
        ([0.95] * 8, False),  # whose mean is not 0.95 in float64
        ([1.0, 1.0, 1.0 + 1e-10], False),  # what a reward model rounds
        ([0.42, 0.42, 0.42], False),  # a mean within any range, and no difference
        ([0.42, 0.43, 0.42], True),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_groups_from_public_reports(name, rewards, expected):
    assert has_signal([episode(i, [reward]) for i, reward in enumerate(rewards)], name) is expected


def test_branches_of_an_episode_count_as_one_member():
    """A history that was rewritten gives an episode two sequences, and one reward."""
    forked = episode(0, [0.0, 1.0])
    branch = forked.sequences[0].fork(2)
    branch.extend_sampled([7, 7], logprobs=[-1.0, -1.0], versions=[0, 0])
    branch.turns.append(Turn(index=2, start=2, end=4))
    forked.sequences.append(branch)
    assert not has_signal([forked, episode(1, [0.0, 1.0])])
    assert not has_signal([forked])
    assert has_signal([forked, episode(1, [0.0, 0.5])])
