"""Rules about the parts of a run: code that raises, tools that always fail or are slow, the engine, slow groups.

rule               condition
-----------------  -------------------------------------------------------------------------------------------------
reward_error, …    a reward function or environment raises in at least `FEW` of the attempts
tool_failed        a tool raises in at least `FEW` of its calls, or reports an error in at least `MOST` of them
tool_slow          a tool takes at least `SLOW_SHARE` of the time of the episodes
engine_disagrees   trainer and engine give the same tokens different probabilities, though they have the same weights
groups_stale       at least `MANY` of the groups are dropped because they are too old
trains_selection   trained episodes differ from started ones by over `BIASED`, and by more than chance explains
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from agentrl.errors import Outcome
from agentrl.evaluation.diagnosis.finding import Finding
from agentrl.evaluation.diagnosis.summary import MAX_TEXT_CHARS, MIN_EVENTS, RunSummary, metric, series
from agentrl.observe.incidents import Incident
from agentrl.observe.metrics import BIAS_PREFIX, MARGIN_ERRORS, MARGIN_SUFFIX, TIMING_PREFIX

FEW = 0.01
"""Minimum share of failures for reporting them."""
OFTEN = 0.05
"""Minimum share of failures for listing them before problems of the episodes themselves."""
MOST, ALWAYS = 0.4, 0.9
"""Minimum share of a tool's calls that report an error to the policy, and the share from which it counts as useless."""
SLOW_SHARE, SLOW_CALL_S = 0.4, 0.01
"""Minimum share of the episodes' time, and seconds per call, of a slow tool."""
DISAGREEMENT = 0.01
"""Minimum mean difference of probabilities between trainer and engine; the default of ``trainer.numerics.mismatch``."""
MANY = 0.1
"""Minimum share of groups that are dropped because they are stale."""
BIASED = 0.03
"""Minimum relative difference between trained and started episodes."""
CERTAIN = 3.0
"""Minimum difference in standard errors that counts as significant."""


def code_failures(run: RunSummary) -> Iterator[Finding]:
    """Find reward functions, environments and tools that raise."""
    for one in run.incidents.worst():
        of = run.incidents.calls[one.subject] if one.kind == "tool" else run.incidents.attempts
        if of and one.count / of >= FEW:
            yield _failure(run, one, of)


def _failure(run: RunSummary, one: Incident, of: int) -> Finding:
    share, is_tool = one.count / of, one.kind == "tool"
    where = "" if one.file is None else f" ({one.file} line {one.line})"
    cause = " ".join(one.cause[:MAX_TEXT_CHARS].split())
    if is_tool:
        unit, effect = "calls", f"the policy reads only that it failed{'' if share == 1 else ' in these calls'}"
    elif one.kind == Outcome.REWARD_ERROR:
        unit, effect = "attempts", "these episodes are excluded from training and results: fix the function"
    else:
        unit, effect = "attempts", "the episodes are played again or dropped"
    return Finding(
        kind="tool_failed" if is_tool else one.kind,
        sentence=f"{'the tool ' if is_tool else ''}{one.subject} failed in {one.count} of {of} {unit}: {cause}{where}",
        advice=effect,
        example=run.episodes.examples.get(f"tool errors {one.subject}"),
        count=one.count,
        of=of,
        file=one.file,
        line=one.line if one.file is not None else None,
        weight=0.78 + 0.2 * share if share >= OFTEN else 0.3 + share,
    )


def tool_reports_errors(run: RunSummary) -> Iterator[Finding]:
    """Find tools that do not raise, but return an error to the policy in most calls."""
    raising = {one.subject for one in run.incidents.found.values() if one.kind == "tool"}
    for name, use in run.episodes.tools.items():
        if name in raising or use.calls < MIN_EVENTS or (share := use.errors / use.calls) < MOST:
            continue
        effect = "the policy reads only errors" if use.errors == use.calls else "the policy reads mostly errors"
        yield Finding(
            kind="tool_failed",
            sentence=f"the tool {name} failed in {use.errors} of {use.calls} calls: {effect}",
            advice=f"read an error in the example; call it by hand: agentrl tool call {name}; check its arguments' "
            "descriptions, and what it needs (a sandbox, a server, a key)",
            evidence=(f"episode/tool/{name}/errors is {share:.0%} of episode/tool/{name}/calls",),
            example=run.example(f"tool errors {name}"),
            count=use.errors,
            of=use.calls,
            weight=0.78 + 0.2 * share if share >= ALWAYS else 0.3 + 0.4 * share,
        )


def tool_slow(run: RunSummary) -> Iterator[Finding]:
    """Find the tool that takes most of the episodes' time, if an engine plays: a scripted policy takes none itself."""
    tools, whole = run.episodes.tools, run.episodes.turn_seconds
    if not tools or not run.episodes.engine_seconds:
        return
    name, use = max(tools.items(), key=lambda item: item[1].seconds)
    share = use.seconds / whole
    if use.calls < MIN_EVENTS or share < SLOW_SHARE or (each := use.seconds / use.calls) < SLOW_CALL_S:
        return
    yield Finding(
        kind="tool_slow",
        sentence=f"the tool {name} takes {each:.2g} s per call, and {share:.0%} of the time of the episodes",
        changes=(run.double_limit("rollout.max_concurrent"),),
        advice="more episodes at a time use the engine while others wait; or make the tool faster: cache its results "
        "(@agentrl.tool(pure=True)), or let it answer several calls at once; rollout.max_staleness=1 trains meanwhile",
        evidence=(f"{use.calls} calls of {name} took {use.seconds:.3g} s of {whole:.3g} s in all turns",),
        example=run.example(f"tool seconds {name}"),
        count=use.calls,
        of=use.calls,
        weight=0.4 + 0.1 * share,
    )


def engine_disagrees(run: RunSummary) -> Iterator[Finding]:
    """Compare the probabilities of trainer and engine in steps whose tokens are of the newest weights."""
    if run.setting("trainer.episodes") is not None or run.setting("algorithm.correction.proximal") == "behaviour":
        return
    limit = run.setting("trainer.numerics.mismatch") or DISAGREEMENT
    fresh = [line for line in run.lines if not metric(line, "staleness/mean")]
    apart = series(fresh, "mismatch/prob_abs_mean")
    beyond = [value for value in apart if value > limit]
    if not apart or 2 * len(beyond) < len(apart):
        return
    probe = max(series(run.lines, "sync/probe_difference"), default=0.0)
    yield Finding(
        kind="engine_disagrees",
        sentence=f"trainer and engine disagree: the same tokens have probabilities that differ by {fmean(apart):.2g} "
        f"on average in {len(beyond)} of {len(apart)} steps, though both have the same weights",
        advice="check that both use the same data type (model.dtype; model.head_dtype=float32), chat template and "
        "sampling options; restart servers that miss an update; algorithm.correction.mode=icepop drops such tokens",
        evidence=(
            f"mismatch/prob_abs_mean up to {max(apart):.2g} (limit {limit:g})",
            f"sync/probe_difference up to {probe:.2g}",
        ),
        count=len(beyond),
        of=len(apart),
        weight=0.93,
    )


def groups_stale(run: RunSummary) -> Iterator[Finding]:
    """Find groups that were dropped because they were too old when they were complete."""
    stale, trained = (
        sum(line.get(name) or 0.0 for line in run.lines) for name in ("rollout/groups_stale", "groups/trained")
    )
    if not stale or stale < MANY * (stale + trained):
        return
    now = run.setting("rollout.max_staleness")
    is_ready = run.setting("rollout.batch_order") == "windowed"
    yield Finding(
        kind="groups_stale",
        sentence=f"{stale:.0f} of {stale + trained:.0f} groups were dropped because they were too old when they ended",
        changes=(
            *(() if is_ready else (run.change("rollout.batch_order", "windowed"),)),
            run.change("rollout.max_staleness", 2 if now is None else now + 1),
        ),
        advice="or shorten the slowest episodes (agent.max_turns, agent.max_seconds): their groups are dropped most "
        "often",
        evidence=(f"rollout/groups_stale {stale:.0f}, groups/trained {trained:.0f} over {len(run.lines)} steps",),
        count=int(stale),
        of=int(stale + trained),
        weight=0.5 + 0.3 * stale / (stale + trained),
    )


def trains_selection(run: RunSummary) -> Iterator[Finding]:
    """Compare the trained episodes with those that were started, in the newest step."""
    if not run.lines:
        return
    now = run.lines[-1]
    found = []
    for name in sorted(now):
        quantity = name.removeprefix(TIMING_PREFIX)
        bias, margin = metric(now, name), metric(now, name + MARGIN_SUFFIX)
        if not quantity.startswith(BIAS_PREFIX) or bias is None or margin is None:
            continue
        if abs(bias) >= max(BIASED, CERTAIN / MARGIN_ERRORS * margin):
            found.append(f"{bias:+.0%} {quantity.removeprefix(BIAS_PREFIX)} (chance alone: ±{margin:.0%})")
    if not found:
        return
    stale = any(metric(line, "rollout/groups_stale") for line in run.lines)
    yield Finding(
        kind="trains_selection",
        sentence=f"the trained episodes are not representative of those that were started: {', '.join(found)}",
        advice="slow groups are too stale when they end: set rollout.batch_order=windowed, or raise "
        "rollout.max_staleness"
        if stale
        else "groups fail (rollout/groups_failed): look at the failed episodes with: agentrl view",
        weight=0.6,
        causes=frozenset({"groups_stale", "reward_error", "environment_error"}),
    )
