"""Verification of tensors by checksum."""

import asyncio
import hashlib
from types import SimpleNamespace

import pytest
import torch

from agentrl.errors import EngineError, TrainingError, UsageError
from agentrl.weights.verify import compare_checksums, name_tensors


def checksum(*tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (70, 4), "l.q_proj.weight": (8, 4), "l.k_proj.weight": (4, 4), "l.v_proj.weight": (4, 4)}
    shapes |= {"norm.weight": (4,), "head.weight": (70, 4)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def told(weights):
    """A server that stacks projections, fills its embedding up, and hides its head."""
    stacked = [weights[f"l.{part}_proj.weight"] for part in "qkv"]
    return {
        "embed.weight": checksum(weights["embed.weight"], torch.zeros(58, 4).bfloat16()),
        "l.qkv_proj.weight": checksum(*stacked),
        "norm.weight": checksum(weights["norm.weight"]),
        "something.else": "0" * 16,
    }


def test_equal_weights_agree_and_tensors_without_checksums_are_listed(weights, told):
    found = compare_checksums(told, weights)
    assert (found.differing, found.unknown) == ([], ["head.weight"])
    assert str(found) == "all checksums agree; the server reports none for head.weight"


@pytest.mark.parametrize("name", ["embed.weight", "norm.weight"])
def test_error_names_the_differing_tensor(weights, told, name):
    weights[name][0] += 1
    found = compare_checksums(told, weights)
    assert found.differing == [name]
    assert str(found) == f"tensors that differ by checksum: {name}"


def test_all_parts_of_a_stacked_tensor_are_listed(weights, told):
    weights["l.k_proj.weight"][0] += 1
    assert compare_checksums(told, weights).differing == [f"l.{part}_proj.weight" for part in "qkv"]


def test_incomplete_stacked_tensor_is_unknown(weights, told):
    del weights["l.v_proj.weight"]
    found = compare_checksums(told, weights)
    assert (found.differing, found.unknown) == ([], ["l.q_proj.weight", "l.k_proj.weight", "head.weight"])


def test_checksums_of_another_kind_tell_nothing(weights, told):
    assert compare_checksums(dict.fromkeys(told, "0" * 16), weights) is None
    assert compare_checksums({}, weights) is None


def test_a_long_list_is_cut():
    weights = {str(number): torch.full((2,), float(number)) for number in range(12)}
    told = {name: checksum(tensor) for name, tensor in weights.items() if name == "0"}
    assert str(compare_checksums(told, weights)).endswith("none for 1, 2, 3, 4, 5, 6, 7, 8 and 3 more")
    assert str(compare_checksums(told, {"0": weights["0"]})).startswith("all checksums agree: engine and trainer")


def server_that(answers):
    return SimpleNamespace(url="local://0", checksums=answers)


async def test_names_are_added_to_the_failure_of_the_probe(weights, told):
    async def checksums():
        return told

    weights["norm.weight"][0] += 1
    error = TrainingError("it differs", got=1, expected=2, hint="look")
    named = await name_tensors(error, server_that(checksums), lambda: weights)
    assert str(named) == "it differs: got 1, expected 2. Tensors that differ by checksum: norm.weight"


@pytest.mark.parametrize("failure", [EngineError("none"), UsageError("no key"), ValueError("odd"), None])
async def test_a_failure_to_name_tensors_leaves_the_failure_of_the_probe(failure, weights, monkeypatch):
    monkeypatch.setattr("agentrl.weights.verify.NAMING_S", 0.05)

    async def checksums():
        if failure is None:
            await asyncio.Event().wait()
        raise failure

    error = TrainingError("it differs")
    assert await name_tensors(error, server_that(checksums), lambda: weights) is error


async def test_weights_that_cannot_be_read_leave_the_failure_of_the_probe(told):
    async def checksums():
        return told

    def unreadable():
        raise OSError("no such folder")

    error = TrainingError("it differs")
    assert await name_tensors(error, server_that(checksums), unreadable) is error
