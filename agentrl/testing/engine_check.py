"""Conformance check of policy engines, including your own.

report = await check_engine(lambda: MyEngine(...), reference=logprobs_of_my_model)
print(report)
report.raise_on_failure()

Each rule is a function on an `EngineProbe`, which holds the engine under test.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from agentrl.engine import FirstToken, PolicyEngine, StopReason
from agentrl.errors import AgentRLError, EngineError, UsageError
from agentrl.testing.engine_subject import EngineProbe, NewWeights, Reference, Sampling, refusal
from agentrl.testing.report import CheckReport, CheckRow, CheckRule, CheckStatus, RuleFailed, RuleSkipped, require


async def length(probe: EngineProbe) -> str:
    """`max_tokens` ends an answer."""
    for most in (1, 5, 17):
        answer = await probe.generate(probe.prompt(6), max_tokens=most)
        require(answer.stop_reason is StopReason.LENGTH, f"stop reason {answer.stop_reason}")
        require(len(answer.token_ids) == most, f"{len(answer.token_ids)} tokens for max_tokens {most}")
    return ""


async def context(probe: EngineProbe) -> str:
    """A full context ends an answer."""
    limit = probe.engine.capabilities.max_context
    answer = await probe.generate(probe.prompt(limit - 3), max_tokens=50)
    require(answer.stop_reason is StopReason.LENGTH, f"stop reason {answer.stop_reason}")
    require(len(answer.token_ids) == 3, f"{len(answer.token_ids)} tokens where 3 fit")
    return f"at {limit} tokens"


async def stop(probe: EngineProbe) -> str:
    """A stop token ends an answer and is its last token."""
    size = probe.engine.capabilities.vocab_size
    stops = frozenset(range(0, size, 2))
    for seed in range(8):
        answer = await probe.generate(probe.prompt(5, seed), max_tokens=200, stop_token_ids=stops, seed=seed)
        require(
            answer.stop_reason is StopReason.STOP, f"stop reason {answer.stop_reason} with half of the ids as stops"
        )
    return ""


async def greedy(probe: EngineProbe) -> str:
    """Temperature 0 gives the same tokens again."""
    first = await probe.generate(probe.prompt(9), max_tokens=12, temperature=0.0)
    second = await probe.generate(probe.prompt(9), max_tokens=12, temperature=0.0)
    require(first.token_ids == second.token_ids, f"{first.token_ids} and {second.token_ids}")
    return ""


async def seeds(probe: EngineProbe) -> str:
    """Equal seeds give equal tokens, with and without load; another seed gives other tokens."""
    if not probe.engine.capabilities.seeded:
        raise RuleSkipped("the engine does not support seeds")
    prompt = probe.prompt(10)
    unloaded = await probe.generate(prompt, max_tokens=24, seed=5)
    load = [probe.generate(probe.prompt(3 + i), max_tokens=30, seed=i) for i in range(10)]
    crowded, other, *_ = await asyncio.gather(
        probe.generate(prompt, max_tokens=24, seed=5), probe.generate(prompt, max_tokens=24, seed=6), *load
    )
    require(unloaded.token_ids == crowded.token_ids, "the same seed gave other tokens under load")
    require(unloaded.token_ids != other.token_ids, "another seed gave the same tokens")
    return ""


async def logprobs(probe: EngineProbe) -> str:
    """Log-probabilities equal the reference's: before truncation (top_p, …), at the request's temperature."""
    if probe.reference is None:
        raise RuleSkipped("no reference was given")
    worst = 0.0
    for cuts in ({}, {"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.2}):
        for temperature in (1.0, 0.6, 1.5, 0.0):
            prompt = probe.prompt(12)
            answer = await probe.generate(prompt, max_tokens=8, temperature=temperature, seed=3, **cuts)
            worst = max(worst, probe.check_logprobs(prompt, answer, temperature))
    return f"largest difference {worst:.1e}"


async def first_token(probe: EngineProbe) -> str:
    """A first token with its own settings is one of the most probable, with the log-probability that sampled it."""
    if not probe.engine.capabilities.first_tokens:
        raise RuleSkipped("the engine does not support settings of the first token")
    prompt, hot = probe.prompt(9), FirstToken(temperature=1000.0, top_k=3)
    drawn = await asyncio.gather(
        *(probe.generate(prompt, max_tokens=2, seed=seed, temperature=0.5, first_token=hot) for seed in range(24))
    )
    known = {answer.token_ids[0]: answer.logprobs[0] for answer in drawn}
    require(1 < len(known) <= 3, f"{len(known)} different first tokens of 24, sampled from 3")
    worst = max(abs(value + math.log(3)) for value in known.values())
    require(worst < 0.1, f"log-probabilities of first tokens differ from -log 3 by {worst:.2f}")
    for answer in drawn[:1]:
        probe.check_logprobs(prompt, answer, 0.5, first=1)
    only = await probe.generate(prompt, max_tokens=1, seed=0, first_token=FirstToken(temperature=2.0, top_k=1))
    require(abs(only.logprobs[0]) < 1e-3, f"the only possible first token has {only.logprobs[0]}")
    return ""


async def abort(probe: EngineProbe) -> str:
    """An abort ends a request with the tokens sampled so far."""
    request = probe.long_request()
    task = await probe.submit(request)
    require(await probe.engine.abort(request.request_id), "abort did not find the request")
    answer = await task
    probe.check_form(request, answer)
    require(answer.stop_reason is StopReason.ABORT, f"stop reason {answer.stop_reason}")
    require(0 < len(answer.token_ids) < request.params.max_tokens, f"{len(answer.token_ids)} tokens")
    require(not await probe.engine.abort(request.request_id), "abort found a request that has ended")
    return f"after {len(answer.token_ids)} tokens"


async def stream(probe: EngineProbe) -> str:
    """`on_tokens` receives tokens during sampling, each once and in order."""
    parts: list[list[int]] = []
    prompt = probe.prompt(8)
    whole = replace(probe.request(prompt, max_tokens=24, seed=4), on_tokens=lambda ids: parts.append(list(ids)))
    answer = await probe.engine.generate(whole)
    probe.check_form(whole, answer)
    probe.check_logprobs(prompt, answer, 1.0)
    if not any(parts):
        raise RuleSkipped("no tokens are streamed before the end")
    streamed = list(itertools.chain(*parts))
    require(streamed == answer.token_ids, f"streamed tokens {streamed}, answer {answer.token_ids}")
    begun, has_begun = list[int](), asyncio.Event()

    def take(ids: Sequence[int]) -> None:
        begun.extend(ids)
        has_begun.set()

    request = replace(probe.long_request(), on_tokens=take)
    task = asyncio.create_task(probe.engine.generate(request))
    await has_begun.wait()
    require(await probe.engine.abort(request.request_id), "a request ended with its first streamed token")
    answer = await task
    probe.check_form(request, answer)
    require(answer.token_ids[: len(begun)] == begun, "the streamed tokens of an aborted answer are not its beginning")
    return f"in {len(parts)} parts"


async def pause(probe: EngineProbe) -> str:
    """A pause holds running requests, an abort ends a held one, and resume continues the others."""
    held, aborted = probe.long_request(), probe.long_request()
    tasks = [await probe.submit(held), await probe.submit(aborted)]
    await probe.engine.pause()
    require(not any(task.done() for task in tasks), "a request ended before the pause took effect")
    late = asyncio.ensure_future(probe.engine.generate(probe.request(probe.prompt(4), max_tokens=3)))
    require(await probe.makes_no_progress(), "tokens were sampled during a pause")
    require(not any(task.done() for task in (*tasks, late)), "a request ended during a pause")
    await probe.engine.abort(aborted.request_id)
    partial = await tasks[1]
    require(partial.stop_reason is StopReason.ABORT, f"stop reason {partial.stop_reason} of an abort during a pause")
    await probe.engine.resume()
    answer, _ = await asyncio.gather(tasks[0], late)
    probe.check_form(held, answer)
    require(len(answer.token_ids) == held.params.max_tokens, "the held request did not run to its end")
    return ""


async def update_in_flight(probe: EngineProbe) -> str:
    """An answer during a weight update has two version spans; the second one uses the new weights."""
    request = probe.long_request(seed=1)
    old = probe.engine.version
    task = await probe.submit(request)
    await probe.engine.pause()
    new = await probe.update()
    await probe.engine.resume()
    answer = await task
    probe.check_form(request, answer)
    first = answer.versions.count(old)
    require(answer.versions == [old] * first + [new] * (len(answer.versions) - first), f"versions {answer.versions}")
    require(0 < first < len(answer.versions), f"{first} of {len(answer.versions)} tokens before the update")
    if probe.reference is None:
        return f"{first} tokens before the update; no reference was given"
    worst = probe.check_logprobs(request.prompt_ids, answer, 1.0, first)
    return f"{first} tokens before the update; after it, largest difference {worst:.1e}"


async def versions(probe: EngineProbe) -> str:
    """After an update all tokens carry the new version."""
    new = await probe.update()
    answer = await probe.generate(probe.prompt(5), max_tokens=6)
    require(probe.engine.version == new, f"the engine reports version {probe.engine.version}, expected {new}")
    require(set(answer.versions) == {new}, f"versions {answer.versions}, expected {new}")
    return ""


async def sessions(probe: EngineProbe) -> str:
    """Turns of a session continue it exactly with any cache content, and do not use a cache from older weights."""
    history = probe.prompt(40, 3)
    cached = []
    for turn in range(4):
        if turn == 2:
            await probe.update()
        answer = await probe.generate(history, session="check-session", max_tokens=6, seed=turn)
        probe.check_logprobs(history, answer, 1.0)
        cached.append(answer.cached_tokens)
        history = [*history, *answer.token_ids, *probe.prompt(5, turn)]
    require(cached[0] == 0, f"a new session had {cached[0]} cached tokens")
    require(cached[2] == 0, f"{cached[2]} cached tokens were used after an update of the weights")
    rewritten = [*history[:20], *probe.prompt(15, 3)]
    answer = await probe.generate(rewritten, session="check-session", max_tokens=6, seed=9)
    probe.check_logprobs(rewritten, answer, 1.0)
    await probe.engine.end_session("check-session")
    await probe.engine.end_session("check-unknown")
    return f"cached tokens by turn: {cached}"


async def shared_session(probe: EngineProbe) -> str:
    """Two concurrent requests of one session are both served."""
    prompts = [probe.prompt(12), probe.prompt(20, 5)]
    answers = await asyncio.gather(*(probe.generate(p, session="check-both", max_tokens=10) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        probe.check_logprobs(prompt, answer, 1.0)
    await probe.engine.end_session("check-both")
    return ""


async def load(probe: EngineProbe) -> str:
    """Many concurrent requests of different lengths each get their own answer."""
    prompts = [probe.prompt(2 + (i * 13) % 60, i) for i in range(64)]
    answers = await asyncio.gather(*(probe.generate(p, max_tokens=1 + i % 20) for i, p in enumerate(prompts)))
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        require(len(answer.token_ids) == 1 + i % 20, f"request {i} got {len(answer.token_ids)} tokens")
        probe.check_logprobs(prompt, answer, 1.0)
    return "64 requests"


async def malformed_requests(probe: EngineProbe) -> str:
    """Invalid requests are refused and do not disturb other requests."""
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
    require(answer.stop_reason is StopReason.LENGTH, f"the request that ran meanwhile ended as {answer.stop_reason}")
    return ""


async def cancellation(probe: EngineProbe) -> str:
    """Cancelling the caller ends its request and frees its slot."""
    task = await probe.submit(probe.long_request())
    task.cancel()
    await asyncio.wait([task])
    require(task.cancelled(), "the cancelled caller got an answer")
    await probe.until_idle()
    await probe.generate(probe.prompt(3), max_tokens=2)
    return ""


async def close(probe: EngineProbe) -> str:
    """Running and later requests raise `EngineError` when the engine is closed; closing again does nothing."""
    task = await probe.submit(probe.long_request())
    await probe.engine.close()
    with refusal(EngineError, "a request that was running at close"):
        await task
    with refusal(EngineError, "a request after close"):
        await probe.engine.generate(probe.request([1, 2], max_tokens=2))
    await probe.engine.close()
    return ""


async def killed_engine(probe: EngineProbe) -> str:
    """Running and later requests raise `EngineError` when the sampling process is killed."""
    if probe.kill is None:
        raise RuleSkipped("no `kill` function was given")
    await probe.start()
    task = await probe.submit(probe.long_request())
    probe.kill()
    with refusal(EngineError, "a request that was running at the kill"):
        await task
    with refusal(EngineError, "a request after the kill"):
        await probe.engine.generate(probe.request([1, 2], max_tokens=2))
    await probe.engine.close()
    return ""


RULES = tuple(
    CheckRule(check)
    for check in (
        length,
        context,
        stop,
        greedy,
        seeds,
        logprobs,
        first_token,
        abort,
        stream,
        pause,
        update_in_flight,
        versions,
        sessions,
        shared_session,
        load,
        malformed_requests,
        cancellation,
        close,
        killed_engine,
    )
)
"""Rules in execution order: all up to `close` share one engine; `killed_engine` creates another."""


class EngineReport(CheckReport):
    """Report of `check_engine`."""

    def raise_on_failure(self) -> None:
        """Raise an `EngineError` that lists the broken rules, if there are any."""
        if not self.passed:
            failed = "; ".join(f"{row.check}: {row.detail}" for row in self.with_status(CheckStatus.FAILED))
            raise EngineError("the engine does not conform to its contract", got=failed)


async def check_engine(
    factory: Callable[[], PolicyEngine],
    *,
    reference: Reference | None = None,
    new_weights: NewWeights = lambda: None,
    tolerance: float = 1e-5,
    sampling: Sampling | None = None,
    kill: Callable[[], object] | None = None,
    deadline_s: float = 120.0,
) -> EngineReport:
    """Check that an engine conforms to the contract of `agentrl.engine`, from its start to its close.

    Args:
        factory: Makes the engine without sessions and requests. With `kill` it is called a second time.
        reference: Log-probabilities of the model with the engine's current weights: called with ids and a temperature,
            returns one value for each id but the first. Without it, log-probabilities are not compared.
        new_weights: Makes new weights and returns the argument of `update_weights`; ``None`` if the engine shares them.
        tolerance: Maximum difference from the reference.
        sampling: Returns how many requests of an engine in another process have their first token but not their last,
            like `ServerEngine.sampling`. By default the check reads `metrics`, whose `sampled_tokens` must then include
            the tokens of running requests.
        kill: Kills the sampling process, like SIGKILL; the engine is not used afterwards. By default this is not
            checked.
        deadline_s: Maximum number of seconds of one rule.
    """
    probe = EngineProbe(
        factory=factory, reference=reference, new_weights=new_weights, tolerance=tolerance, sampling=sampling, kill=kill
    )
    await probe.start()
    try:
        rows = [await _check(rule, probe, deadline_s) for rule in RULES]
        return EngineReport(kind="engine", name=type(probe.engine).__name__, rows=tuple(rows))
    finally:
        await probe.engine.close()


async def _check(rule: CheckRule, probe: EngineProbe, deadline_s: float) -> CheckRow:
    start = time.perf_counter()
    try:
        async with asyncio.timeout(deadline_s) as limit:
            found = await rule.check(probe)
    except RuleSkipped as missing:
        found = missing
    except Exception as error:
        with suppress(AgentRLError):
            await probe.engine.resume()
        found = RuleFailed(f"it did not end within {deadline_s:g} s") if limit.expired() else error
    return rule.row(found, time.perf_counter() - start)
