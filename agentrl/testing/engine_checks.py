"""The checks of a policy engine, one function each: it raises `CheckFailed`, or returns a remark."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from agentrl.errors import EngineError, UsageError
from agentrl.policy import StopReason
from agentrl.testing.engine_probe import CheckSkipped, EngineProbe, expect, refusal


async def length(probe: EngineProbe) -> str:
    """`max_tokens` ends an answer."""
    for most in (1, 5, 17):
        answer = await probe.generate(probe.prompt(6), max_tokens=most)
        expect(answer.stop_reason is StopReason.LENGTH, f"stop reason {answer.stop_reason}")
        expect(len(answer.token_ids) == most, f"{len(answer.token_ids)} tokens for max_tokens {most}")
    return ""


async def context(probe: EngineProbe) -> str:
    """A full context ends an answer."""
    limit = probe.engine.capabilities.max_context
    answer = await probe.generate(probe.prompt(limit - 3), max_tokens=50)
    expect(answer.stop_reason is StopReason.LENGTH, f"stop reason {answer.stop_reason}")
    expect(len(answer.token_ids) == 3, f"{len(answer.token_ids)} tokens where 3 fit")
    return f"at {limit} tokens"


async def stop(probe: EngineProbe) -> str:
    """A stop token ends an answer and is its last token."""
    size = probe.engine.capabilities.vocab_size
    stops = frozenset(range(0, size, 2))
    for seed in range(8):
        answer = await probe.generate(probe.prompt(5, seed), max_tokens=200, stop_token_ids=stops, seed=seed)
        expect(answer.stop_reason is StopReason.STOP, f"stop reason {answer.stop_reason} with half of the ids as stops")
    return ""


async def greedy(probe: EngineProbe) -> str:
    """Temperature 0 repeats itself."""
    first = await probe.generate(probe.prompt(9), max_tokens=12, temperature=0.0)
    second = await probe.generate(probe.prompt(9), max_tokens=12, temperature=0.0)
    expect(first.token_ids == second.token_ids, f"{first.token_ids} and {second.token_ids}")
    return ""


async def seeds(probe: EngineProbe) -> str:
    """Equal seeds give equal tokens, alone and under load; another seed gives others."""
    if not probe.engine.capabilities.seeded:
        raise CheckSkipped("the engine does not promise it")
    prompt = probe.prompt(10)
    alone = await probe.generate(prompt, max_tokens=24, seed=5)
    load = [probe.generate(probe.prompt(3 + i), max_tokens=30, seed=i) for i in range(10)]
    crowded, other, *_ = await asyncio.gather(
        probe.generate(prompt, max_tokens=24, seed=5), probe.generate(prompt, max_tokens=24, seed=6), *load
    )
    expect(alone.token_ids == crowded.token_ids, "the same seed gave other tokens under load")
    expect(alone.token_ids != other.token_ids, "another seed gave the same tokens")
    return ""


async def logprobs(probe: EngineProbe) -> str:
    """Log-probabilities equal the reference's: before any cut, at the request's temperature."""
    worst = 0.0
    for cuts in ({}, {"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.2}):
        for temperature in (1.0, 0.6, 1.5, 0.0):
            prompt = probe.prompt(12)
            answer = await probe.generate(prompt, max_tokens=8, temperature=temperature, seed=3, **cuts)
            worst = max(worst, probe.check_logprobs(prompt, answer, temperature))
    return f"largest difference {worst:.1e}"


async def abort(probe: EngineProbe) -> str:
    """An abort ends a request with what it has sampled."""
    request = probe.long_request()
    task = await probe.submit(request)
    expect(await probe.engine.abort(request.request_id), "abort did not find the request")
    answer = await task
    probe.check_form(request, answer)
    expect(answer.stop_reason is StopReason.ABORT, f"stop reason {answer.stop_reason}")
    expect(0 < len(answer.token_ids) < request.params.max_tokens, f"{len(answer.token_ids)} tokens")
    expect(not await probe.engine.abort(request.request_id), "abort found a request that is over")
    return f"after {len(answer.token_ids)} tokens"


async def pause(probe: EngineProbe) -> str:
    """A pause holds what runs, an abort reaches it, and resume lets the rest go on."""
    held, aborted = probe.long_request(), probe.long_request()
    tasks = [await probe.submit(held), await probe.submit(aborted)]
    await probe.engine.pause()
    expect(not any(task.done() for task in tasks), "a request ended before the pause took effect")
    late = asyncio.ensure_future(probe.engine.generate(probe.request(probe.prompt(4), max_tokens=3)))
    expect(await probe.stands_still(), "tokens were sampled during a pause")
    expect(not any(task.done() for task in (*tasks, late)), "a request ended during a pause")
    await probe.engine.abort(aborted.request_id)
    partial = await tasks[1]
    expect(partial.stop_reason is StopReason.ABORT, f"stop reason {partial.stop_reason} of an abort during a pause")
    await probe.engine.resume()
    answer, _ = await asyncio.gather(tasks[0], late)
    probe.check_form(held, answer)
    expect(len(answer.token_ids) == held.params.max_tokens, "the held request did not run to its end")
    return ""


async def update_in_flight(probe: EngineProbe) -> str:
    """An answer that meets an update has two spans of versions, and the second is computed from the new weights."""
    request = probe.long_request(seed=1)
    old = probe.engine.version
    task = await probe.submit(request)
    await probe.engine.pause()
    new = await probe.update()
    await probe.engine.resume()
    answer = await task
    probe.check_form(request, answer)
    first = answer.versions.count(old)
    expect(answer.versions == [old] * first + [new] * (len(answer.versions) - first), f"versions {answer.versions}")
    expect(0 < first < len(answer.versions), f"{first} of {len(answer.versions)} tokens before the update")
    if probe.reference is None:
        return f"{first} tokens before the update; no reference was given"
    worst = probe.check_logprobs(request.prompt_ids, answer, 1.0, first)
    return f"{first} tokens before the update; after it, largest difference {worst:.1e}"


async def versions(probe: EngineProbe) -> str:
    """After an update all tokens carry the new version."""
    new = await probe.update()
    answer = await probe.generate(probe.prompt(5), max_tokens=6)
    expect(probe.engine.version == new, f"the engine says version {probe.engine.version}, expected {new}")
    expect(set(answer.versions) == {new}, f"versions {answer.versions}, expected {new}")
    return ""


async def sessions(probe: EngineProbe) -> str:
    """Turns of a session continue it exactly, whatever the cache holds, and forget what an update made stale."""
    history = probe.prompt(40, 3)
    cached = []
    for turn in range(4):
        if turn == 2:
            await probe.update()
        answer = await probe.generate(history, session="check-session", max_tokens=6, seed=turn)
        if probe.reference is not None:
            probe.check_logprobs(history, answer, 1.0)
        cached.append(answer.cached_tokens)
        history = [*history, *answer.token_ids, *probe.prompt(5, turn)]
    expect(cached[0] == 0, f"a new session had {cached[0]} cached tokens")
    expect(cached[2] == 0, f"{cached[2]} cached tokens were used after an update of the weights")
    rewritten = [*history[:20], *probe.prompt(15, 3)]
    answer = await probe.generate(rewritten, session="check-session", max_tokens=6, seed=9)
    if probe.reference is not None:
        probe.check_logprobs(rewritten, answer, 1.0)
    await probe.engine.end_session("check-session")
    await probe.engine.end_session("check-unknown")
    return f"cached tokens by turn: {cached}"


async def shared_session(probe: EngineProbe) -> str:
    """Two requests of one session at once are both served."""
    prompts = [probe.prompt(12), probe.prompt(20, 5)]
    answers = await asyncio.gather(*(probe.generate(p, session="check-both", max_tokens=10) for p in prompts))
    if probe.reference is not None:
        for prompt, answer in zip(prompts, answers, strict=True):
            probe.check_logprobs(prompt, answer, 1.0)
    await probe.engine.end_session("check-both")
    return ""


async def load(probe: EngineProbe) -> str:
    """Many requests of different lengths at once each get their own answer."""
    prompts = [probe.prompt(2 + (i * 13) % 60, i) for i in range(64)]
    answers = await asyncio.gather(*(probe.generate(p, max_tokens=1 + i % 20) for i, p in enumerate(prompts)))
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expect(len(answer.token_ids) == 1 + i % 20, f"request {i} got {len(answer.token_ids)} tokens")
        if probe.reference is not None:
            probe.check_logprobs(prompt, answer, 1.0)
    return "64 requests"


async def malformed(probe: EngineProbe) -> str:
    """What cannot be served is refused, and hurts nobody else."""
    capabilities = probe.engine.capabilities
    neighbour = await probe.submit(probe.long_request())
    bad = {
        "an empty prompt": [],
        "an id above the vocabulary": [1, capabilities.vocab_size],
        "a negative id": [-1, 2],
        "a prompt longer than the context": probe.prompt(capabilities.max_context + 1),
    }
    for what, prompt in bad.items():
        with refusal(UsageError, what):
            await probe.engine.generate(probe.request(prompt, max_tokens=4))
    with refusal(UsageError, "max_tokens of 0"):
        await probe.engine.generate(probe.request([1], max_tokens=0))
    answer = await neighbour
    expect(answer.stop_reason is StopReason.LENGTH, f"the request beside them ended as {answer.stop_reason}")
    return ""


async def cancellation(probe: EngineProbe) -> str:
    """Cancelling the caller ends its request and frees its place."""
    task = await probe.submit(probe.long_request())
    task.cancel()
    await asyncio.wait([task])
    expect(task.cancelled(), "the cancelled caller got an answer")
    await probe.until_idle()
    await probe.generate(probe.prompt(3), max_tokens=2)
    return ""


async def close(probe: EngineProbe) -> str:
    """Closing ends what runs as `EngineError`; later requests too; closing again does nothing."""
    task = await probe.submit(probe.long_request())
    await probe.engine.close()
    with refusal(EngineError, "a request that ran at close"):
        await task
    with refusal(EngineError, "a request after close"):
        await probe.engine.generate(probe.request([1, 2], max_tokens=2))
    await probe.engine.close()
    return ""


async def killed(probe: EngineProbe) -> str:
    """When the process that samples is killed, what runs ends as `EngineError`; later requests too."""
    if probe.kill is None:
        raise CheckSkipped("no way to kill it was given")
    await probe.start()
    task = await probe.submit(probe.long_request())
    probe.kill()
    with refusal(EngineError, "a request that ran at the kill"):
        await task
    with refusal(EngineError, "a request after the kill"):
        await probe.engine.generate(probe.request([1, 2], max_tokens=2))
    await probe.engine.close()
    return ""


CHECKS: tuple[Callable[[EngineProbe], Awaitable[str]], ...] = (
    length,
    context,
    stop,
    greedy,
    seeds,
    logprobs,
    abort,
    pause,
    update_in_flight,
    versions,
    sessions,
    shared_session,
    load,
    malformed,
    cancellation,
    close,
    killed,
)
"""In the order in which they run: on one engine up to its `close`; `killed` makes another one."""
