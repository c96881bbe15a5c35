"""Rules about episodes: answers that are cut or cannot be used, budgets that run out, and rewards that teach nothing.

rule                    condition
----------------------  --------------------------------------------------------------------------------------------
answers_cut             at least `MANY` of the answers were cut off at ``agent.max_answer_tokens``
unusable_answers        at least `MANY` of the answers could not be used as actions
truncated_turns         at least `MANY` of the episodes ended because their turns ran out
truncated_tokens        … their tokens, or the model's context
truncated_time          … their time
reward_against_success  solved episodes get lower rewards than others, by `CERTAIN` standard errors
judge_always_agrees     the judge gave the same score to all episodes, although their answers differ
constant_reward         all episodes have the same reward, although their answers and successes differ
never_rewarded          the environment gave no reward in any episode
nothing_varies          all returns of each group are equal: in the last steps, or in most groups of the run
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from agentrl.config.derived import agent_loop_class
from agentrl.errors import Outcome, SourceLocation, UsageError, with_location
from agentrl.evaluation.diagnosis.finding import ConfigChange, Finding
from agentrl.evaluation.diagnosis.policy import has_risen
from agentrl.evaluation.diagnosis.summary import MIN_EVENTS, WHOLE, EpisodeCounts, RunSummary
from agentrl.observe.idle_steps import learns_nothing, share_that_differs

MANY = 0.2
"""Minimum share of episodes, of answers, or of steps without learning for reporting a problem."""
MAJORITY = 0.5
"""Share of unusable answers among the whole ones, up to which the cut explains those that were cut."""
CERTAIN = 4.0
"""Minimum difference of two means, in standard errors, that counts as significant."""
ALIKE_SHARE = 0.8
"""Minimum share of groups without a difference."""
IDLE_STEPS = 3
"""Number of consecutive steps without learning before a running run warns."""
JUDGE = "judge"
"""Reward component of a judge."""
UNPLAYED = frozenset({"unusable_answers", "answers_cut"})
"""Findings that explain why no episode is rewarded, if they hold for half of the answers."""
OF_THE_POLICY = frozenset({"members_alike", "groups_alike", "learning_rate_high", "entropy_falls"})
"""Findings that explain why episodes do not differ."""
TRUNCATED = frozenset({"truncated_turns", "truncated_tokens", "truncated_time"})


def answers_cut(run: RunSummary) -> Iterator[Finding]:
    """Find answers that ended because their tokens ran out."""
    episodes = run.episodes
    if not episodes.turns or (share := episodes.cut / episodes.turns) < MANY:
        return
    if run.is_solved:  # the rest of the answers is not needed
        return
    full = episodes.outcomes[Outcome.TRUNCATED_TOKENS.value]
    if full and episodes.cut <= full:  # the last answers of episodes whose context is full
        return
    is_harmful = 2 * episodes.cut_unusable >= episodes.cut or (episodes.judged and not episodes.solved)
    yield Finding(
        kind="answers_cut",
        sentence=f"{episodes.cut} of {episodes.turns} answers were cut off before their end",
        changes=(run.double_limit("agent.max_answer_tokens"),),
        advice="if the answers are needlessly long, reward short ones (algorithm.shaping={length: {factor: 0.1}})",
        evidence=(f"stop reason length in {share:.0%} of the turns",),
        example=run.example("cut"),
        count=episodes.cut,
        of=episodes.turns,
        weight=0.2 + 0.4 * share + (0.3 if is_harmful else 0.0),
        causes=frozenset({"length_growth", "learning_rate_high"}),
    )


def unusable_answers(run: RunSummary) -> Iterator[Finding]:
    """Find a policy that does not keep to the answer format."""
    episodes = run.episodes
    if not episodes.turns or (share := min(1.0, episodes.unusable / episodes.turns)) < MANY:
        return
    remark = f", most often: {episodes.remarks.most_common(1)[0][0]}" if episodes.remarks else ""
    answers = [f"{text!r} ({times} times in a sample)" for text, times in run.frequent_answers()]
    whole, whole_unusable = episodes.turns - episodes.cut, episodes.unusable - episodes.cut_unusable
    is_of_the_cut = (
        episodes.cut_unusable > 0 and whole_unusable < MAJORITY * whole
    ) or whole < MIN_EVENTS <= episodes.cut
    yield Finding(
        kind="unusable_answers",
        sentence=f"{episodes.unusable} of {episodes.turns} answers could not be used as actions{remark}",
        advice="check what the policy reads: agentrl env prompt "
        f"{run.setting('environment.name') or 'NAME'}; check agent.loop and agent.options, show examples "
        "(agent.few_shot_turns), try a warm start (agentrl sft), or a model that follows the format",
        evidence=tuple(f"frequent answer: {answer}" for answer in answers),
        example=run.example("unusable"),
        count=episodes.unusable,
        of=episodes.turns,
        weight=0.3 + 0.62 * share,
        causes=frozenset({"learning_rate_high"})
        | ({"answers_cut"} if is_of_the_cut else frozenset())
        | ({Outcome.TRUNCATED_TOKENS.value} if _has_no_room(run) else frozenset()),
    )


def _has_no_room(run: RunSummary) -> bool:
    """Return True if the tokens of most episodes end in their first turn, so that no answer has room."""
    return MAJORITY * run.episodes.episodes <= run.episodes.first_turn_cuts > 0


_BUDGETS = {
    Outcome.TRUNCATED_TURNS: ("their turns", "agent.max_turns"),
    Outcome.TRUNCATED_TOKENS: ("their tokens", "agent.max_tokens"),
    Outcome.TRUNCATED_TIME: ("their time", "agent.max_seconds"),
}
"""Outcomes, the budget that ran out, and its key."""


def _is_cut_by_environment(run: RunSummary) -> bool:
    """Return True if the longest episodes have fewer turns than the run allows."""
    longest = max((line.get("turns/max", 0.0) for line in run.lines), default=float(run.episodes.longest))
    limit = run.setting("agent.max_turns")
    return limit is not None and 0 < longest < limit


def _plays_one_step(run: RunSummary) -> bool:
    """Return True if the run's loop ends episodes after one step; False if the loop does not exist here."""
    name = run.setting("agent.loop")
    try:
        return name is not None and agent_loop_class(name).plays_one_step
    except UsageError:  # the code of the run is elsewhere, or has changed
        return False


def truncated_episodes(run: RunSummary) -> Iterator[Finding]:
    """Find episodes that ended because a budget ran out."""
    episodes = run.episodes
    for outcome, (what, key) in _BUDGETS.items():
        count = episodes.outcomes[outcome.value]
        if not episodes.episodes or (share := count / episodes.episodes) < MANY:
            continue
        is_tokens = outcome is Outcome.TRUNCATED_TOKENS
        advice = "and the context of the engine and the model, if it is shorter" if is_tokens else ""
        changes: tuple[ConfigChange, ...] = (run.double_limit(key),)
        if outcome is Outcome.TRUNCATED_TURNS and _plays_one_step(run):
            what, key, changes = "their turns", f"agent.loop={run.setting('agent.loop')} plays one", ()
            advice = "choose a loop that plays several turns (agent.loop=tool_calling or react_text)"
        elif outcome is Outcome.TRUNCATED_TURNS and _is_cut_by_environment(run):
            if has_risen(run.lines, "success/mean"):  # a limit that belongs to the task, within which the policy learns
                continue
            what, key, changes = "the environment's own steps", "not agent.max_turns, which is larger", ()
            advice = "raise the environment's limit, such as max_episode_steps, if its tasks need more steps"
        if is_tokens and 2 * episodes.first_turn_cuts >= count:
            advice = "the prompt alone fills it: shorten the instructions or observations, too"
        yield Finding(
            kind=outcome.value,
            sentence=f"{count} of {episodes.episodes} episodes ended because {what} ran out ({key})",
            changes=changes,
            advice=advice,
            evidence=(f"outcome {outcome.value} in {share:.0%} of the episodes",),
            example=run.example(outcome.value),
            count=count,
            of=episodes.episodes,
            weight=0.2 + 0.5 * share,
            causes=frozenset()
            if is_tokens and _has_no_room(run)
            else frozenset({"length_growth", "unusable_answers", "tool_failed"} if is_tokens else {"unusable_answers"}),
        )


def names_of(definitions: Mapping[str, SourceLocation | None]) -> str:
    """Return the names of reward functions, each with its file and line; empty if there are none."""
    return " and ".join(with_location(name, location) for name, location in definitions.items())


def _at_function(run: RunSummary, finding: Finding) -> Finding:
    """Add the file and line of the reward function to a finding, if there is exactly one."""
    location = next(iter(run.definitions.values())) if len(run.definitions) == 1 else None
    return finding if location is None else replace(finding, file=location.file, line=location.line)


def _unplayed_findings(run: RunSummary) -> frozenset[str]:
    """Return the findings about answers and tools that explain why no episode is rewarded."""
    episodes = run.episodes
    is_unplayed = 2 * max(episodes.cut, episodes.unusable) >= episodes.turns
    return UNPLAYED | {"tool_failed"} if is_unplayed else frozenset({"tool_failed"})


def reward_against_success(run: RunSummary) -> Iterator[Finding]:
    """Compare the rewards of solved episodes with those of others."""
    solved, failed = run.episodes.by_success[True], run.episodes.by_success[False]
    if min(solved.count, failed.count) < MIN_EVENTS or solved.mean >= failed.mean:
        return
    if failed.mean - solved.mean < CERTAIN * math.sqrt(solved.error + failed.error):
        return
    finding = Finding(
        kind="reward_against_success",
        sentence=f"solved episodes get lower rewards than others: a mean of {solved.mean:.3g} in {solved.count} "
        f"solved ones, {failed.mean:.3g} in {failed.count} others, so training lowers success",
        advice=f"check the sign in {names_of(run.definitions) or 'the environment'}",
        example=run.example(),
        count=solved.count,
        of=solved.count + failed.count,
        weight=1.0,
    )
    yield _at_function(run, finding)


def judge_always_agrees(run: RunSummary) -> Iterator[Finding]:
    """Find a judge whose score never differs."""
    scores, episodes = run.episodes.rewards.get(JUDGE), run.episodes
    if run.setting("agent.judge") is None or scores is None or not scores.is_constant:
        return
    if episodes.episodes < MIN_EVENTS or len(episodes.different) < 2:
        return
    compares = run.setting("agent.judge.compare") is not None
    what = "found all episodes of each group equally good" if compares else f"gave the same score, {scores.high:g}"
    yield Finding(
        kind="judge_always_agrees",
        sentence=f"the judge {what}, in all {episodes.episodes} episodes, although their answers differ: nothing can "
        "be learned from it",
        advice="read what it is asked and what it answers (judge.jsonl in the run's folder); make agent.judge.prompt "
        "more specific, or use agent.judge.rubric with several items, agent.judge.compare=pairwise, or a "
        "stronger model",
        evidence=(f"reward/component/judge is {scores.high:g} in {episodes.episodes} of {episodes.episodes} episodes",),
        example=run.example(),
        count=episodes.episodes,
        of=episodes.episodes,
        weight=0.97,
    )


def constant_reward(run: RunSummary) -> Iterator[Finding]:
    """Find a reward that does not depend on what the policy does."""
    episodes, whole = run.episodes, run.episodes.rewards.get(WHOLE)
    if whole is None or not whole.is_constant or episodes.episodes < MIN_EVENTS or len(episodes.different) < 2:
        return
    if not run.definitions and not (0 < episodes.solved < episodes.judged) and (episodes.solved or whole.high == 0):
        return  # all tasks of an environment are solved, or all failed: see `never_rewarded`
    if episodes.solved == episodes.judged > 0 and whole.high > 0:
        return  # all episodes are solved and rewarded
    solved = f", {episodes.solved} of {episodes.judged} solved" if episodes.judged else ""
    hint = "check which arguments it receives" if run.definitions else "check what the environment rewards"
    if whole.high == 0:
        hint = f"if they all deserve it, try easier tasks or a warm start; otherwise, {hint}"
    elif not episodes.judged:
        hint = f"if all answers are right, the tasks are too easy; otherwise, {hint}"
    finding = Finding(
        kind="constant_reward",
        sentence=f"{names_of(run.definitions) or 'the environment'} gave the same reward, {whole.high:g}, to all "
        f"{episodes.episodes} episodes{solved}, although their answers differ: nothing can be learned from it",
        advice=hint,
        evidence=(f"reward/min and reward/max are {whole.high:g} in every step",) if run.lines else (),
        example=run.example(),
        count=episodes.episodes,
        of=episodes.episodes,
        weight=0.95,
        causes=frozenset({"judge_always_agrees", "environment_error", "reward_error"})
        | (_unplayed_findings(run) if whole.high <= 0 else frozenset()),
    )
    yield _at_function(run, finding)


def never_rewarded(run: RunSummary) -> Iterator[Finding]:
    """Find an environment that has given no reward yet."""
    episodes, whole = run.episodes, run.episodes.rewards.get(WHOLE)
    if run.definitions or whole is None or not whole.is_constant or whole.high != 0 or episodes.solved:
        return
    if episodes.episodes < MIN_EVENTS or run.setting("agent.judge") is not None:
        return
    name = run.setting("environment.name") or "NAME"
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in episodes.outcomes.most_common())
    yield Finding(
        kind="never_rewarded",
        sentence=f"the environment gave no reward in any of {episodes.episodes} episodes ({outcomes}), so that nothing "
        "can be learned",
        advice=f"check that it ever gives one: agentrl eval --env {name} --policy expert; if it does, the tasks are "
        "too hard for this policy: warm-start it (agentrl sft), or choose easier tasks (environment.options)",
        evidence=(f"all {episodes.episodes} returns are 0, and no episode is solved",),
        example=run.example(),
        count=episodes.episodes,
        of=episodes.episodes,
        weight=0.94,
        causes=_unplayed_findings(run) | TRUNCATED,
    )


def nothing_varies(run: RunSummary) -> Iterator[Finding]:
    """Find steps and groups in which no episode was better than another."""
    if not run.learns_from_rewards or not run.lines:
        return
    steps, idle = len(run.lines), sum(map(learns_nothing, run.lines))
    in_a_row = next((i for i, line in enumerate(reversed(run.lines)) if not learns_nothing(line)), steps)
    trained, equal = (
        sum(line.get(name) or 0.0 for line in run.lines) for name in ("groups/trained", "groups/zero_variance")
    )
    is_current = in_a_row >= IDLE_STEPS
    if run.is_solved and (2 * idle < steps or has_risen(run.lines, "success/mean")):
        return  # the policy has learned to solve its tasks
    compares_otherwise = any(share_that_differs(line) == 0 and not learns_nothing(line) for line in run.lines)
    if is_current or idle >= MANY * steps:
        what = f"in the last {in_a_row} steps" if in_a_row >= max(IDLE_STEPS, idle) else f"in {idle} of {steps} steps"
        sentence = f"nothing is being learned: {what} all episodes of a task had the same return, so no episode was "
    elif trained >= MIN_EVENTS and equal >= ALIKE_SHARE * trained and not (run.is_solved or compares_otherwise):
        sentence = (
            f"little is learned: in {equal:.0f} of {trained:.0f} groups all episodes had the same return, so none was "
        )
    else:
        return
    reason, remedy = explain_equal_returns(run.newest)
    if run.setting("sampling.temperature") == 0:
        remedy = "raise sampling.temperature above 0: at 0 all episodes of a group are the same"
    yield Finding(
        kind="nothing_varies",
        sentence=f"{sentence}better than another",
        advice=f"{reason}: {remedy}",
        evidence=(f"groups/zero_variance is {equal:.0f} of {trained:.0f} groups over {steps} steps",),
        example=run.example(),
        count=idle,
        of=steps,
        weight=0.5 + 0.4 * max(idle / steps, equal / max(1.0, trained)),
        causes=_unplayed_findings(run) | {"constant_reward", "never_rewarded", "judge_always_agrees", *OF_THE_POLICY},
        is_current=is_current,
    )


def explain_equal_returns(episodes: EpisodeCounts) -> tuple[str, str]:
    """Explain why a step learned nothing; return the reason and the remedy."""
    ended = episodes.episodes
    if ended and episodes.solved == ended:
        return (
            f"all {ended} episodes of the newest step succeeded, so the tasks are too easy for this agent",
            "try harder tasks (environment.options, another environment.split), or stop the run",
        )
    whole = episodes.rewards.get(WHOLE)
    if ended and episodes.judged == ended and not episodes.solved:
        what = f"all {ended} episodes of the newest step failed"
    elif whole is None:
        what = "the returns of the newest step are unknown"
    elif whole.is_constant:
        what = f"all returns of the newest step are {whole.high:g}"
    else:
        what = f"the returns of the newest step are from {whole.low:g} to {whole.high:g}, but equal within each group"
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in episodes.outcomes.most_common())
    remark = f"; most often: {episodes.remarks.most_common(1)[0][0]}" if episodes.remarks else ""
    result = f"{what} ({outcomes or 'no episode ended'}{remark})"
    if (share := episodes.unusable_share) >= 0.5:
        return (
            f"{result}, and {share:.0%} of the answers could not be used as actions",
            "try a warm start (agentrl sft) or a model that follows the format, and check agent.loop and "
            "agent.max_answer_tokens",
        )
    if whole is not None and not whole.is_constant:
        return result, (
            "check that the reward depends on what the policy does, and not only on the task; "
            "set algorithm.dynamic_sampling=true to replace such groups, or raise algorithm.group_size"
        )
    return result, (
        "try a warm start (agentrl sft), easier tasks (environment.options), a stronger model, "
        "or more episodes per task (algorithm.group_size)"
    )
