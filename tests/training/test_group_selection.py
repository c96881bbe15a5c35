"""``algorithm.selection`` in the trainer: which groups and episodes of a step train, and what is replaced."""

import pytest
from test_dynamic_sampling import episode

from agentrl.config import load_config
from agentrl.config.config import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.training.batch import StepExtras
from agentrl.training.dynamic_sampling import EpisodeSelection, check_selection, is_in_band


def group_of(name, *rewards, successes=None, components=None):
    found = []
    for number, own in enumerate(rewards):
        one = episode(number, own, components=None if components is None else components[number])
        one.id, one.group_id = f"{name}/{number}", name
        one.success = None if successes is None else successes[number]
        found.append(one)
    return found


def selected(groups, advantage="grpo", **selection):
    select = EpisodeSelection.of(AlgorithmConfig(advantage=advantage, selection=selection))
    return select([one for group in groups for one in group], StepExtras())


def test_without_a_selection_everything_trains():
    assert EpisodeSelection.of(AlgorithmConfig()) is None
    group = group_of("a", [1.0], [0.0])
    assert selected([group], min_accuracy=0.1) == (group, {})


def test_top_p_keeps_the_groups_that_differ_most():
    groups = [group_of("a", [4.0], [0.0]), group_of("b", [1.0], [0.0]), group_of("c", [1.0], [1.0])]
    found, metrics = selected(groups, top_p=0.75)
    assert {one.group_id for one in found} == {"a"}
    assert metrics == {"groups/left_out": 2}
    assert {one.group_id for one in selected(groups, top_p=1.0)[0]} == {"a", "b"}


def test_top_p_of_equal_groups_keeps_all_of_them():
    groups = [group_of("a", [1.0], [1.0]), group_of("b", [0.0], [0.0])]
    assert len(selected(groups, top_p=0.5)[0]) == 4


def test_top_p_looks_at_what_the_estimator_compares():
    """Equal returns: only the turns of one group differ, and the components of the other."""
    turns = group_of("turns", [1.0, 0.0], [0.0, 1.0], components=[{"a": 0.5}, {"a": 0.5}])
    components = group_of("components", [1.0], [1.0], components=[{"a": 1.0}, {"a": 0.0}])
    for advantage, kept in (("gigpo", "turns"), ("gdpo", "components")):
        found, _ = selected([turns, components], advantage, top_p=0.9)
        assert {one.group_id for one in found} == {kept}, advantage


def test_resampling_keeps_right_episodes_with_the_smallest_penalties():
    errors = [{"errors": error, "form": form} for error, form in [(0.5, 0.0), (0.0, 0.1), (0.0, 1.0), (0.2, 0.0)]]
    group = group_of("a", [1.0], [1.0], [1.0], [1.0], [0.0], [0.0], components=[*errors, {}, {}])
    settings = {"keep": 3, "least_right": 1, "least_wrong": 1, "penalties": ["errors", "form"]}
    select = EpisodeSelection.of(AlgorithmConfig(group_size=6, selection={"resample": settings}))
    found, metrics = select(group, StepExtras())
    assert [one.id for one in found] == ["a/1", "a/3", "a/4"]
    assert metrics == {"trajectories/left_out": 3}


def test_episodes_of_groups_that_are_left_out_are_counted_as_groups_only():
    groups = [group_of("a", [4.0], [1.0], [0.0], [0.0]), group_of("b", [1.0], [1.0], [1.0], [1.0])]
    settings = {"keep": 2, "least_right": 1, "least_wrong": 1}
    select = EpisodeSelection.of(AlgorithmConfig(group_size=4, selection={"resample": settings, "top_p": 0.9}))
    found, metrics = select([one for group in groups for one in group], StepExtras())
    assert [one.group_id for one in found] == ["a", "a"]
    assert metrics == {"groups/left_out": 1, "trajectories/left_out": 2}


@pytest.mark.parametrize(
    ("successes", "rewards", "kept"),
    [([True, False], [0.9, 0.9], True), ([True, True], [0.1, 0.1], False), (None, [0.5, 0.1], True)],
)
def test_the_band_counts_successes_or_rewards(successes, rewards, kept):
    selection = AlgorithmConfig(selection={"min_accuracy": 0.2, "max_accuracy": 0.8}).selection
    assert is_in_band(selection, group_of("a", *([reward] for reward in rewards), successes=successes)) is kept


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.selection={}"], "algorithm.selection has no effect"),
        (["algorithm.selection={min_accuracy: 0.8, max_accuracy: 0.2}"], "must be below algorithm.selection.max_acc"),
        (["algorithm.selection={top_p_scale: softmax}"], "is ignored without top_p"),
        (["algorithm.selection={resample: {keep: 8}}"], "must be below algorithm.group_size (8)"),
        (["algorithm.selection={resample: {keep: 3, least_right: 2}}"], "exceed keep (3)"),
        (["algorithm.selection={resample: {keep: 4, penalties: [environmnt]}}"], "Did you mean 'environment'?"),
    ],
)
def test_selections_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        check_selection(load_config(None, ["environment=a", *overrides]))
    assert message in str(caught.value)
