"""Sequences with a common prefix attend to its keys and values together, and to nothing else of one another."""

import asyncio

import pytest
from support.models import FAMILIES, tiny_model

from agentrl.config.engines import LocalEngineConfig
from agentrl.errors import EngineError
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


async def wait_for_steps(engine, steps):
    last = engine.metrics().details["steps"] + steps
    for _ in range(100 * steps):
        if engine.metrics().details["steps"] >= last:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("steps", [1, 3, 9], ids=["in its prompt", "before it ends", "while others decode"])
async def test_the_one_that_computes_a_prefix_may_be_aborted(steps, request_of, reference_of, shared):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig(prefill_tokens=17))
    prompts = [[*PREFIX, n] for n in range(4)]
    first = asyncio.create_task(engine.generate(request_of(prompts[0], "first", max_tokens=20)))
    others = asyncio.create_task(play(engine, request_of, prompts[1:]))
    await wait_for_steps(engine, steps)
    await engine.abort("first")
    await engine.end_session("first")
    stranger = engine.generate(request_of(PREFIX[::-1], "stranger", max_tokens=6, seed=1))
    answers = [*await others, await stranger]
    check(reference_of(model), [*prompts[1:], PREFIX[::-1]], answers)
    assert (await first).stop_reason == "abort"
    await engine.close()
    assert shared


async def test_the_first_to_end_leave_their_rows_to_others(request_of, reference_of, shared):
    """Rows of a group are freed while the group decodes, and filled by sequences that share another prefix."""
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig(max_num_seqs=5))

    async def ask(number):
        prompt = [*(PREFIX if number % 2 else PREFIX[::-1]), number // 2]
        request = request_of(prompt, str(number), max_tokens=2 + 7 * (number % 3), seed=number)
        answer = await engine.generate(request)
        await engine.end_session(str(number))
        return prompt, answer

    played = await asyncio.gather(*map(ask, range(14)))
    check(reference_of(model), *zip(*played, strict=True))
    await engine.close()
    assert shared


async def test_new_weights_in_the_middle_of_a_group(request_of, reference_of, shared):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig())
    answers = asyncio.create_task(play(engine, request_of, [PREFIX] * 4))
    await wait_for_steps(engine, 4)
    before = [reference_of(model)([*PREFIX, *ids], 1.0) for ids in _sampled(engine)]
    for parameter in model.parameters():
        parameter.data *= 1.1
    await engine.update_weights(None, 1)
    shared.clear()
    for answer, old in zip(await answers, before, strict=True):
        ids = [*PREFIX, *answer.token_ids]
        expected = [*old, *reference_of(model)(ids, 1.0)[len(old) :]][len(PREFIX) - 1 :]
        assert answer.versions == sorted(answer.versions)
        assert set(answer.versions) == {0, 1}
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)
    await engine.close()
    assert set(shared) <= {len(PREFIX) - 1, len(PREFIX), len(PREFIX) + 1, len(PREFIX) + 2}
    assert shared


def _sampled(engine):
    return [job.ids[len(PREFIX) :] for job in engine._scheduler.running]


async def test_a_small_cache_preempts_members_of_a_group(request_of, reference_of, shared):
    model = tiny_model(max_context=256)
    engine = LocalEngine(model, LocalEngineConfig(cache_tokens=768))
    prompts = [[*PREFIX, *PREFIX[:40], n] for n in range(6)]
    requests = [request_of(p, str(n), max_tokens=45, seed=n) for n, p in enumerate(prompts)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    check(reference_of(model), prompts, answers)
    details = engine.metrics().details
    await engine.close()
    assert details["preemptions"] > 0, "rows grow from 128 to 256 tokens"
    assert shared


async def test_members_sample_with_their_own_settings(request_of, reference_of, shared):
    model = tiny_model()
    settings = [{"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"seed": 9}, {"seed": 9}]
    requests = [request_of(PREFIX, str(n), **{"max_tokens": 8, "seed": n, **s}) for n, s in enumerate(settings)]
    engine = LocalEngine(model, LocalEngineConfig())
    together = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    assert shared
    for request, answer in zip(requests, together, strict=True):
        engine = LocalEngine(model, LocalEngineConfig())
        alone = await engine.generate(request)
        await engine.close()
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert together[4].token_ids == together[5].token_ids


async def test_after_an_error_nothing_of_a_prefix_is_left(request_of, reference_of, shared, monkeypatch):
    model = tiny_model()
    engine = LocalEngine(model, LocalEngineConfig(prefill_tokens=20))
    logits, calls = engine._runners[None].logits, []

    def failing(step):
        calls.append(step)
        if len(calls) == 2:
            for block in {chunk.row.block for chunk in step.chunks}:
                block.values[0].fill_(float("nan"))
            raise RuntimeError("out of memory")
        return logits(step)

    monkeypatch.setattr(engine._runners[None], "logits", failing)
    with pytest.raises(EngineError, match="out of memory"):
        await play(engine, request_of, [PREFIX] * 3)
    check(reference_of(model), [PREFIX] * 3, await play(engine, request_of, [PREFIX] * 3, turn=1))
    await engine.close()
    assert shared
