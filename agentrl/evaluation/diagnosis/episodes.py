"""Rules about episodes: answers that are cut or cannot be used, and budgets that run out.

rule               condition
-----------------  -------------------------------------------------------------------------------------------------
answers_cut        at least `MANY` of the answers were cut off at ``agent.max_answer_tokens``
unusable_answers   at least `MANY` of the answers could not be used as actions
truncated_turns    at least `MANY` of the episodes ended because their turns ran out
truncated_tokens   … their tokens, or the model's context
truncated_time     … their time
"""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.errors import Outcome
from agentrl.evaluation.diagnosis.finding import ConfigChange, Finding
from agentrl.evaluation.diagnosis.policy import has_risen
from agentrl.evaluation.diagnosis.summary import LEAST, RunSummary

MANY = 0.2
"""Minimum share of episodes or answers for reporting a problem."""
SINGLE_TURN = "single_turn"
"""Loop that ends an episode after one answer."""
MOST = 0.5
"""Share of unusable answers among the whole ones, up to which the cut explains those that were cut."""


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
        advice="if the answers are long without need, reward short ones (algorithm.shaping={length: {factor: 0.1}})",
        evidence=(f"stop reason length in {share:.0%} of the turns",),
        example=run.example("cut"),
        count=episodes.cut,
        of=episodes.turns,
        weight=0.2 + 0.4 * share + (0.3 if is_harmful else 0.0),
        causes=frozenset({"length_growth", "learning_rate_high"}),
    )


def unusable_answers(run: RunSummary) -> Iterator[Finding]:
    """Find a policy that does not keep to the form of answers."""
    episodes = run.episodes
    if not episodes.turns or (share := min(1.0, episodes.unusable / episodes.turns)) < MANY:
        return
    remark = f", most often: {episodes.remarks.most_common(1)[0][0]}" if episodes.remarks else ""
    answers = [f"{text!r} ({times} times in a sample)" for text, times in run.frequent_answers()]
    whole, whole_unusable = episodes.turns - episodes.cut, episodes.unusable - episodes.cut_unusable
    is_of_the_cut = (episodes.cut_unusable > 0 and whole_unusable < MOST * whole) or whole < LEAST <= episodes.cut
    yield Finding(
        kind="unusable_answers",
        sentence=f"{episodes.unusable} of {episodes.turns} answers could not be used as actions{remark}",
        advice="see what the policy is told: agentrl env prompt "
        f"{run.setting('environment.name') or 'NAME'}; check agent.loop and agent.options, show examples "
        "(agent.few_shot_turns), try a warm start (agentrl sft), or a model that follows the form",
        evidence=tuple(f"frequent answer: {answer}" for answer in answers),
        example=run.example("unusable"),
        count=episodes.unusable,
        of=episodes.turns,
        weight=0.3 + 0.62 * share,
        causes=frozenset({"learning_rate_high"}) | ({"answers_cut"} if is_of_the_cut else frozenset()),
    )


_BUDGETS = {
    Outcome.TRUNCATED_TURNS: ("their turns", "agent.max_turns"),
    Outcome.TRUNCATED_TOKENS: ("their tokens", "agent.max_tokens"),
    Outcome.TRUNCATED_TIME: ("their time", "agent.max_seconds"),
}
"""Outcomes, the budget that ran out, and its key."""


def _is_cut_by_environment(run: RunSummary) -> bool:
    """Return True if the longest episodes have fewer turns than the run allows."""
    longest, limit = (
        max((line.get("turns/max", 0.0) for line in run.lines), default=0.0),
        run.setting("agent.max_turns"),
    )
    return limit is not None and 0 < longest < limit


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
        if outcome is Outcome.TRUNCATED_TURNS and run.setting("agent.loop") == SINGLE_TURN:
            what, key, changes = "their turns", "agent.loop=single_turn plays one", ()
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
            causes=frozenset(
                {"length_growth", "unusable_answers", "tool_failed"} if is_tokens else {"unusable_answers"}
            ),
        )
