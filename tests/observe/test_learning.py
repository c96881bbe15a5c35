"""Steps whose rewards teach nothing."""

import pytest

from agentrl.observe.idle_steps import learns_nothing, share_that_differs

IDLE = {"groups/trained": 4.0, "groups/zero_variance": 4.0, "train/advantage_abs_mean": 0.0}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (IDLE, True),
        ({**IDLE, "groups/zero_variance": 3.0}, False),
        ({**IDLE, "train/advantage_abs_mean": 0.4}, False),  # gigpo, or single episodes that differ
        ({**IDLE, "train/advantage_abs_mean": 0.4, "critic/loss": 1.0, "reward/min": 0.0, "reward/max": 0.0}, True),
        ({**IDLE, "train/advantage_abs_mean": 0.4, "critic/loss": 1.0, "reward/min": 0.0, "reward/max": 1.0}, False),
        ({"sft/loss": 1.0}, False),
    ],
)
def test_a_step_learns_nothing_where_no_episode_is_better_than_another(metrics, expected):
    assert learns_nothing(metrics) is expected


def test_the_share_of_groups_that_differ():
    assert share_that_differs({"groups/trained": 4.0, "groups/zero_variance": 1.0}) == 0.75
    assert share_that_differs({}) is None
