"""Sequences with a common prefix attend to its keys and values together, and to nothing else of one another."""

import asyncio

import pytest
from support.models import FAMILIES, tiny_model

from agentrl.config.engines import LocalEngineConfig
from agentrl.serving.local import LocalEngine
from agentrl.serving.local.forward import _BatchedAttention

PREFIX = [(7 * n) % 64 for n in range(50)]
WINDOWED = {"mistral"}
"""Families all of whose layers have sliding windows, where nothing is shared."""


@pytest.fixture
def shared(monkeypatch):
    """The lengths of the prefixes that were attended to together."""
    lengths = []
    attend = _BatchedAttention._attend_shared

    def attend_and_note(self, *arguments):
        lengths.append(self.shared)
        return attend(self, *arguments)

    monkeypatch.setattr(_BatchedAttention, "_attend_shared", attend_and_note)
    return lengths


async def play(engine, request_of, prompts, *, turn=0):
    names = [f"{number}.{turn}" for number in range(len(prompts))]
    requests = [
        request_of(prompt, name, name.partition(".")[0], max_tokens=6, seed=number)
        for number, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    return await asyncio.gather(*map(engine.generate, requests))


def check(reference, prompts, answers):
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference([*prompt, *answer.token_ids], 1.0)[len(prompt) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_group_has_the_log_probabilities_of_a_full_forward(family, request_of, reference_of, shared):
    model = tiny_model(family)
    engine = LocalEngine(model, LocalEngineConfig())
    prompts = [PREFIX] * 4
    for turn in range(3):
        answers = await play(engine, request_of, prompts, turn=turn)
        check(reference_of(model), prompts, answers)
        prompts = [[*p, *a.token_ids, 9, 5 + n] for n, (p, a) in enumerate(zip(prompts, answers, strict=True))]
    await engine.close()
    assert bool(shared) == (family not in WINDOWED)
    assert set(shared) <= {len(PREFIX) - 1}, "the last token of a prompt is computed for each"


async def test_groups_share_what_their_prompts_have_in_common(request_of, reference_of, shared):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig())
    prompts = [[*PREFIX[:40], task, *PREFIX[40:]] for task in (1, 1, 2, 2, 3)]
    answers = await play(engine, request_of, prompts)
    check(reference_of(model), prompts, answers)
    assert 40 in shared
    assert set(shared) <= {40, len(PREFIX)}, "a group alone shares its whole prompt but the last token"
    shared.clear()
    later = [[*prompts[n], *answers[n].token_ids, 7] for n in (1, 3)]
    answers = await asyncio.gather(
        *(engine.generate(request_of(p, f"{n}.1", str(n), max_tokens=6)) for n, p in zip((1, 3), later, strict=True))
    )
    check(reference_of(model), later, answers)
    assert set(shared) == {40}, "one of each group"
    await engine.close()


async def test_prompts_without_a_common_prefix_share_nothing(request_of, reference_of, shared):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig())
    prompts = [PREFIX, PREFIX, PREFIX[::-1], PREFIX[::-1]]
    check(reference_of(model), prompts, await play(engine, request_of, prompts))
    await engine.close()
    assert shared == []


async def test_a_session_that_changes_its_history_leaves_the_prefix(request_of, reference_of, shared):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig())
    prompts = [PREFIX] * 4
    answers = await play(engine, request_of, prompts)
    shared.clear()
    prompts = [[*p, *a.token_ids, 3] for p, a in zip(prompts, answers, strict=True)]
    prompts[2] = [*PREFIX[:36], 1, 2, 3, *PREFIX[36:]]
    check(reference_of(model), prompts, await play(engine, request_of, prompts, turn=1))
    assert set(shared) == {36}, "as far as the changed history agrees"
    prompts[2] = [5, *PREFIX[1:]]
    shared.clear()
    check(reference_of(model), prompts, await play(engine, request_of, prompts, turn=2))
    assert set(shared) <= {len(PREFIX) - 1}, "in steps of the others alone"
    await engine.close()
