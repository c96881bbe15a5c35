"""What a summary counts, and rules at the edges of their conditions, on hand-made summaries."""

import pytest
from support.episodes import episode

from agentrl.config import load_config
from agentrl.errors import Outcome
from agentrl.evaluation.diagnosis.episodes import judge_always_agrees, never_rewarded, nothing_varies
from agentrl.evaluation.diagnosis.finding import ConfigChange, ExampleEpisode, Finding, Severity, rank, top
from agentrl.evaluation.diagnosis.parts import (
    engine_disagrees,
    groups_stale,
    tool_reports_errors,
    tool_slow,
)
from agentrl.evaluation.diagnosis.policy import (
    has_risen,
    learning_rate_high,
    learning_rate_low,
    length_growth,
    overfitting,
)
from agentrl.evaluation.diagnosis.summary import Covariance, EpisodeCounts, RunSummary
from agentrl.trajectory import TurnTimings


def lines(count, **columns):
    """Metrics of steps: each column is a number or a function of the step."""
    return [
        {"step": step, "episodes": 64.0}
        | {name.replace("__", "/"): value(step) if callable(value) else value for name, value in columns.items()}
        for step in range(1, count + 1)
    ]


def kinds(rule, run):
    return [finding.kind for finding in rule(run)]


def test_unusable_answers_are_counted_by_their_tokens():
    first, second = episode(turns=3, answer=5), episode(turns=1, answer=6)
    for one in (first, second):
        for turn in one.turns:
            turn.valid = False
        one.metrics["invalid_answers"] = len(one.turns)
    first.turns[0].stop_reason = "length"
    summary = EpisodeCounts()
    summary.add_step([first, second, episode(outcome=Outcome.ENGINE_ERROR)], 7)
    assert (summary.episodes, summary.turns, summary.unusable, summary.cut, summary.cut_unusable) == (2, 4, 4, 1, 1)
    run = RunSummary(episodes=summary, decode=lambda ids: "".join(map(str, ids)))
    assert run.frequent_answers(1) == [("5", 3)]
    assert RunSummary(episodes=summary).frequent_answers() == [], "without a tokenizer"
    assert summary.examples["unusable"] == ExampleEpisode(id="a", task_id="a", step=7)


def test_cut_episodes_have_failed_if_others_report_success():
    counts = EpisodeCounts()
    cut = episode(outcome=Outcome.TRUNCATED_TOKENS)
    cut.success = None
    counts.add_step([cut, episode(outcome=Outcome.ENGINE_ERROR)], 1)
    assert counts.judged == 0
    solved = episode()
    solved.success = True
    counts.add_step([solved, solved], 2)
    assert (counts.solved, counts.judged) == (2, 3)


def test_calls_of_tools_and_the_time_of_turns():
    one = episode(turns=2)
    one.metrics |= {"tool/look/up/calls": 2.0, "tool/look/up/errors": 1.0, "tool/look/up/seconds": 0.5, "tool/x/cut": 1}
    one.turns[0].timings = TurnTimings(queue=0.1, prefill=0.2, decode=0.3, tool=0.5, env=0.4)
    summary = EpisodeCounts()
    summary.add_step([one], 1)
    assert list(summary.tools) == ["look/up"]
    use = summary.tools["look/up"]
    assert (use.calls, use.errors, use.seconds) == (2, 1, 0.5)
    assert summary.turn_seconds == pytest.approx(1.5)
    assert {"tool errors look/up", "tool calls look/up"} <= summary.examples.keys()


def test_the_correlation_is_that_within_groups():
    pairs = Covariance()
    pairs.add_group([(1.0, 10.0), (2.0, 20.0)])
    pairs.add_group([(100.0, 0.0), (101.0, 10.0)])
    assert pairs.correlation == pytest.approx(1.0)
    assert Covariance().correlation == 0.0


def test_settings_are_read_from_the_config():
    run = RunSummary(config=load_config(None, ["environment=guess_number", "agent.max_turns=7"]))
    assert str(run.double_limit("agent.max_turns")) == "set agent.max_turns=14 (now 7)"
    assert run.setting("agent.away.key") is None
    assert str(RunSummary().double_limit("agent.max_turns")) == "raise agent.max_turns"
    assert str(ConfigChange(key="algorithm.dynamic_sampling", value=True, now=False)).endswith("=true (now false)")


def test_findings_that_are_explained_come_last():
    found = rank(
        [
            Finding(kind="symptom", sentence="", weight=0.9, causes=frozenset({"small", "large"})),
            Finding(kind="small", sentence="", weight=0.1),
            Finding(kind="large", sentence="", weight=0.6),
        ]
    )
    assert [one.kind for one in found] == ["large", "small", "symptom"]
    assert found[2].because_of == "large"
    assert [one.kind for one in top(found)] == ["large", "small"]
    severities = [Finding(kind="", sentence="", weight=weight).severity for weight in (0.8, 0.5, 0.49)]
    assert severities == [Severity.CRITICAL, Severity.SERIOUS, Severity.MINOR]
    circle = [Finding(kind=a, sentence="", causes=frozenset({b})) for a, b in ("ab", "ba")]
    assert len(top(rank(circle))) == 2


def used(calls, errors, seconds, engine_seconds=1.0):
    summary = EpisodeCounts(turn_seconds=10.0, engine_seconds=engine_seconds)
    use = summary.tools["look"]
    use.calls, use.errors, use.seconds = calls, errors, seconds
    return RunSummary(episodes=summary)


@pytest.mark.parametrize(
    ("calls", "errors", "found"),
    [
        (8, 8, [Severity.CRITICAL]),
        (20, 18, [Severity.CRITICAL]),
        (20, 17, [Severity.SERIOUS]),
        (20, 8, [Severity.MINOR]),
        (20, 7, []),
        (7, 7, []),
    ],
)
def test_a_tool_that_mostly_reports_an_error(calls, errors, found):
    assert [finding.severity for finding in tool_reports_errors(used(calls, errors, 0.0))] == found


@pytest.mark.parametrize(
    ("calls", "seconds", "slow"), [(10, 4.0, True), (10, 3.9, False), (7, 9.0, False), (900, 8.0, False)]
)
def test_a_tool_that_takes_much_of_the_time(calls, seconds, slow):
    assert bool(kinds(tool_slow, used(calls, 0, seconds))) is slow
    assert not kinds(tool_slow, used(calls, 0, seconds, engine_seconds=0.0)), "a scripted policy takes no time itself"


def test_stale_groups_are_a_tenth():
    run = RunSummary(lines=lines(10, rollout__groups_stale=1.0, groups__trained=9.0))
    (found,) = groups_stale(run)
    assert (found.count, found.of) == (10, 100)
    assert [change.key for change in found.changes] == ["rollout.batch_order", "rollout.max_staleness"]
    run.lines[0]["groups/trained"] = 10.0
    assert kinds(groups_stale, run) == []


def test_trainer_and_engine_are_compared_on_fresh_tokens_only():
    apart = {"mismatch__prob_abs_mean": 0.02}
    assert kinds(engine_disagrees, RunSummary(lines=lines(4, **apart))) == ["engine_disagrees"]
    assert kinds(engine_disagrees, RunSummary(lines=lines(4, staleness__mean=1.0, **apart))) == []
    assert kinds(engine_disagrees, RunSummary(lines=lines(4, mismatch__prob_abs_mean=0.01))) == []
    stored = load_config(None, ["environment=guess_number", "trainer.episodes=runs/x"])
    assert kinds(engine_disagrees, RunSummary(lines=lines(4, **apart), config=stored)) == []


@pytest.mark.parametrize(
    ("kl", "high"),
    [
        (lambda step: 0.4 if step in (3, 9) else 0.01, True),
        (lambda step: 0.4 if step == 3 else 0.01, False),
        (lambda step: 1.1 if step == 3 else 0.01, True),
        (0.3, False),
    ],
)
def test_a_rate_is_too_high_by_the_kl_of_several_steps(kl, high):
    assert bool(kinds(learning_rate_high, RunSummary(lines=lines(12, train__kl_old=kl)))) is high


@pytest.mark.parametrize(
    ("columns", "low"),
    [
        ({"train__kl_old": 5e-8}, True),
        ({"train__kl_old": 2e-7}, False),
        ({"train__kl_old": 5e-8, "train__advantage_abs_mean": 0.0}, False),
        ({"train__kl_old": 5e-8, "success__mean": lambda step: step / 10}, False),
        ({"train__kl_old": 0.0, "train__updates": 1.0}, False),  # a single update starts at the policy itself
    ],
)
def test_a_rate_is_too_low_by_the_kl_of_all_steps(columns, low):
    given = {"train__advantage_abs_mean": 0.5, "train__updates": 2.0, **columns}
    assert bool(kinds(learning_rate_low, RunSummary(lines=lines(6, **given)))) is low


def growing(success, pays):
    run = RunSummary(lines=lines(8, tokens__sampled_per_episode=lambda step: 10 * step, success__mean=success))
    run.episodes.length_and_reward = Covariance(both=pays, first=1.0, second=1.0)
    return kinds(length_growth, run)


def test_episodes_that_grow_because_length_is_paid():
    assert growing(0.3, 0.5) == ["length_growth"]
    assert growing(0.3, 0.3) == []
    assert growing(lambda step: step / 10, 0.5) == []


def test_training_success_that_evaluations_do_not_follow():
    rising = {"success__mean": lambda step: step / 10}
    flat = RunSummary(lines=lines(8, **rising, eval__success=0.1, eval__success_low=0.05, eval__success_high=0.15))
    assert kinds(overfitting, flat) == ["overfitting"]
    following = RunSummary(lines=lines(8, **rising, eval__success=lambda step: step / 10))
    assert kinds(overfitting, following) == []
    assert kinds(overfitting, RunSummary(lines=lines(8, **rising))) == []


def test_a_rise_is_one_beyond_chance():
    assert has_risen(lines(10, success__mean=lambda step: step / 10), "success/mean")
    assert not has_risen(lines(10, success__mean=lambda step: 0.5 + step / 1000), "success/mean")
    assert not has_risen(lines(3, success__mean=lambda step: step / 3), "success/mean")


def test_an_environment_that_never_pays_and_a_judge_that_always_agrees():
    summary = EpisodeCounts()
    summary.add_step([episode(0.0, False, answer=n) for n in range(8)], 1)
    assert kinds(never_rewarded, RunSummary(episodes=summary)) == ["never_rewarded"]
    summary.add_step([episode(0.1, False, answer=n) for n in range(8)], 1)
    assert kinds(never_rewarded, RunSummary(episodes=summary)) == []
    url = "agent.judge={engine: {url: http://127.0.0.1:1/v1, model: m}"
    for words, expected in (("}", "gave the same score, 7"), (", compare: pairwise}", "equally good")):
        judged = EpisodeCounts()
        for n in range(8):
            one = episode(7.0, None, answer=n)
            one.reward_components["judge"] = 7.0
            judged.add_step([one], 1)
        run = RunSummary(config=load_config(None, ["environment=guess_number", url + words]), episodes=judged)
        (found,) = judge_always_agrees(run)
        assert expected in found.sentence
        assert kinds(judge_always_agrees, RunSummary(episodes=judged)) == [], "without a judge"


def test_most_groups_without_a_difference():
    run = RunSummary(lines=lines(5, groups__trained=10.0, groups__zero_variance=8.0, train__advantage_abs_mean=0.1))
    (found,) = nothing_varies(run)
    assert "in 40 of 50 groups" in found.sentence
    assert not found.is_current
    run.lines[0]["groups/zero_variance"] = 7.0
    assert kinds(nothing_varies, run) == []
