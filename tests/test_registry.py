from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentrl import registry
from agentrl.errors import UnknownNameError, UsageError
from agentrl.registry import Kind


@pytest.fixture
def registered() -> Iterator[object]:
    target = object()
    registry.register(Kind.REWARD, "mine", target)
    yield target
    registry.unregister(Kind.REWARD, "mine")


def test_a_registered_object_is_found(registered: object) -> None:
    assert registry.lookup(Kind.REWARD, "mine") is registered
    assert "mine" in registry.names(Kind.REWARD)


def test_a_name_belongs_to_one_target(registered: object) -> None:
    registry.register(Kind.REWARD, "mine", registered)
    with pytest.raises(UsageError, match="taken"):
        registry.register(Kind.REWARD, "mine", object())


def test_an_unknown_name_gets_the_nearest_one(registered: object) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown reward: got 'mien'.*Did you mean 'mine'"):
        registry.lookup(Kind.REWARD, "mien")


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (Kind.ADVANTAGE, "ppo", "A loss has this name"),
        (Kind.LOSS, "grpo", "An advantage has this name"),
    ],
)
def test_a_name_of_another_part_of_an_algorithm_is_told(kind: Kind, name: str, words: str) -> None:
    with pytest.raises(UnknownNameError, match=words):
        registry.lookup(kind, name)


@pytest.mark.parametrize("kind", Kind)
def test_every_name_in_every_table_can_be_imported(kind: Kind) -> None:
    for name in registry.names(kind):
        assert registry.lookup(kind, name) is not None


def test_module_attr_is_imported() -> None:
    assert registry.lookup(Kind.REWARD, "agentrl.reward:EnvironmentReward").__name__ == "EnvironmentReward"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("agentrl.rewrad:X", "no module agentrl.rewrad"),
        ("nowhere:X", "no module nowhere"),
        ("agentrl.reward:EnvironmentRewrad", "did you mean 'EnvironmentReward'"),
    ],
)
def test_a_wrong_reference_says_what_is_missing(reference: str, words: str) -> None:
    with pytest.raises(UsageError, match="(?i)" + words):
        registry.load(reference)
