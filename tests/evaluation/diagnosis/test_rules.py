"""The worst problems of a run or an evaluation, with counts, file and line."""

import re
from pathlib import Path

import pytest
from agentrl.agent_loops.single_turn import SingleTurn
from support.episodes import episode

from agentrl.config import load_config
from agentrl.config.keys import all_keys
from agentrl.errors import EnvironmentFailure, Outcome, RewardFailure, SourceLocation
from agentrl.evaluation import diagnosis
from agentrl.evaluation.diagnosis.episodes import (
    answers_cut,
    constant_reward,
    never_rewarded,
    reward_against_success,
    truncated_episodes,
    unusable_answers,
)
from agentrl.evaluation.diagnosis.finding import Finding, finding_lines, rank, top
from agentrl.evaluation.diagnosis.parts import code_failures
from agentrl.evaluation.diagnosis.summary import EpisodeCounts, RunSummary
from agentrl.evaluation.diagnosis.watch import Reminder, RunDiagnosis
from agentrl.observe.incidents import MAX_DISTINCT, Incidents
from agentrl.registry import Kind, register, unregister

RULE = {"reward function rule": SourceLocation("/home/me/rewards.py", 7)}
ENVIRONMENT: dict[str, SourceLocation | None] = {}


def evidence_of(*episodes):
    evidence = EpisodeCounts()
    evidence.add_step(episodes, 1)
    return evidence


def failures(incidents):
    return list(code_failures(RunSummary(incidents=incidents)))


def reward_problems(evidence, definitions):
    run = RunSummary(episodes=evidence, definitions=definitions)
    return [*reward_against_success(run), *constant_reward(run)]


def episode_problems(evidence):
    run = RunSummary(episodes=evidence)
    return [*unusable_answers(run), *answers_cut(run), *truncated_episodes(run)]


def failed(subject, cause, line, file="/home/me/rewards.py"):
    error = RewardFailure(f"{subject} on task 7 failed", got=cause)
    error.subject, error.location = subject, None if line is None else SourceLocation(file, line)
    return error


def test_a_reward_function_that_fails_for_half_of_the_answers():
    incidents = Incidents(attempts=96)
    for number in range(48):
        incidents.count_failure(
            Outcome.REWARD_ERROR, "?", failed("reward function rule", f"ValueError: no number in '{number}'", 9)
        )
    (problem,) = failures(incidents)
    assert (problem.count, problem.of, problem.file, problem.line) == (48, 96, "/home/me/rewards.py", 9)
    assert "reward function rule failed in 48 of 96 attempts: ValueError: no number in '0'" in problem.text
    assert "/home/me/rewards.py line 9" in problem.text
    assert problem.kind == "reward_error"


def test_failures_of_different_lines_are_different_and_the_most_frequent_comes_first():
    incidents = Incidents(attempts=100)
    for line, count in ((9, 3), (21, 12)):
        for _ in range(count):
            incidents.count_failure(Outcome.REWARD_ERROR, "?", failed("reward function rule", "KeyError: 'a'", line))
    assert [(problem.line, problem.count) for problem in failures(incidents)] == [(21, 12), (9, 3)]


def test_a_wrong_result_is_shown_with_what_was_expected():
    incidents = Incidents(attempts=1)
    error = failed("reward function rule", "str 'good'", 3)
    incidents.count_failure(Outcome.REWARD_ERROR, "?", RewardFailure(error.what, got=error.got, expected="a number"))
    (problem,) = failures(incidents)
    assert "failed in 1 of 1 attempts: got str 'good', expected a number;" in problem.text


def test_an_error_that_names_nobody_is_the_environments():
    incidents = Incidents(attempts=10)
    incidents.count_failure(
        Outcome.ENVIRONMENT_ERROR, "environment maze", EnvironmentFailure("step of maze", got="KeyError: 1")
    )
    (problem,) = failures(incidents)
    assert problem.text.startswith("environment maze failed in 1 of 10 attempts: KeyError: 1;")
    assert (problem.file, problem.line) == (None, None)


def test_rare_failures_are_no_problem():
    incidents = Incidents(attempts=201)
    incidents.count_failure(Outcome.REWARD_ERROR, "?", failed("reward function rule", "KeyError", 9))
    incidents.count_failure(Outcome.REWARD_ERROR, "?", failed("reward function rule", "KeyError", 9))
    assert failures(incidents) == []
    incidents.count_failure(Outcome.REWARD_ERROR, "?", failed("reward function rule", "KeyError", 9))
    assert [problem.count for problem in failures(incidents)] == [3]


def test_a_tool_that_always_raises():
    incidents = Incidents(attempts=4)
    for number in range(6):
        incidents.count_call("lookup", f"TypeError: {number}", SourceLocation("/home/me/tools.py", 31))
        incidents.count_call("search")
    (problem,) = failures(incidents)
    assert problem.kind == "tool_failed"
    assert (problem.count, problem.of, problem.file, problem.line) == (6, 6, "/home/me/tools.py", 31)
    assert "the tool lookup failed in 6 of 6 calls: TypeError: 0 (/home/me/tools.py line 31)" in problem.text
    assert "reads only that it failed" in problem.text


def test_a_tool_that_sometimes_raises_counts_all_its_calls():
    incidents = Incidents()
    for number in range(10):
        incidents.count_call("lookup", "OSError: disk" if number < 2 else None)
    (problem,) = failures(incidents)
    assert (problem.count, problem.of) == (2, 10)


def test_equal_errors_of_two_tools_are_two_problems():
    incidents = Incidents()
    for _ in range(4):
        incidents.count_call("lookup", "OSError: disk")
        incidents.count_call("search", "OSError: disk")
        incidents.count_call("search")
    assert [(one.count, one.of) for one in failures(incidents)] == [(4, 4), (4, 8)]
    assert [one.text.split()[2] for one in failures(incidents)] == ["lookup", "search"]


def test_few_episodes_of_one_kind_prove_nothing_against_a_reward():
    def problems(solved, failed):
        rows = [episode(0.0, True, answer=i) for i in range(solved)] + [
            episode(1.0 + i / 100, False, answer=-i - 1) for i in range(failed)
        ]
        return [one.kind for one in reward_problems(evidence_of(*rows), RULE)]

    assert problems(8, 8) == ["reward_against_success"]
    assert problems(7, 30) == problems(30, 7) == []


def test_messages_that_differ_every_time_do_not_fill_the_memory():
    incidents = Incidents(attempts=1)
    for number in range(2 * MAX_DISTINCT):
        incidents.count_call("lookup", f"Error{number}: x")
    assert len(incidents.found) == MAX_DISTINCT
    assert incidents.calls["lookup"] == 2 * MAX_DISTINCT


def test_counts_of_two_parts_of_the_same_work_add_up():
    first, second = Incidents(attempts=5), Incidents(attempts=7)
    for incidents, count in ((first, 2), (second, 3)):
        for _ in range(count):
            incidents.count_call("lookup", "TypeError: x", SourceLocation("t.py", 3))
        incidents.count_call("other", "ValueError: y")
    first.add_record(second.to_record())
    assert first.attempts == 12
    assert first.calls == {"lookup": 5, "other": 2}
    assert [(one.subject, one.count, one.line) for one in first.worst()] == [("lookup", 5, 3), ("other", 2, 0)]


def test_a_reward_against_success_is_named_with_the_function():
    evidence = evidence_of(
        *(episode(-1.0 + 0.01 * n, True) for n in range(9)), *(episode(0.02 * n, False) for n in range(20))
    )
    (problem,) = reward_problems(evidence, RULE)
    assert problem.kind == "reward_against_success"
    assert (problem.count, problem.of, problem.file, problem.line) == (9, 29, "/home/me/rewards.py", 7)
    assert "a mean of -0.96 in 9 solved ones, 0.19 in 20 others" in problem.text
    assert "check the sign in reward function rule (/home/me/rewards.py line 7)" in problem.text


@pytest.mark.parametrize(
    ("solved", "others"),
    [
        ([1.0] * 9, [0.0] * 9),
        ([0.0] * 7, [1.0] * 20),  # too few to be sure
        ([0.0, 1.0] * 5, [1.0, 0.0, 1.0] * 4),  # within chance
    ],
)
def test_other_rewards_are_not_against_success(solved, others):
    evidence = evidence_of(*(episode(value, True) for value in solved), *(episode(value, False) for value in others))
    assert reward_problems(evidence, RULE) == []


def differing(reward, successes):
    return evidence_of(*(episode(reward, success, answer=n) for n, success in enumerate(successes)))


def test_a_constant_reward_function_is_named():
    (problem,) = reward_problems(differing(1.0, [False] * 12), RULE)
    assert problem.kind == "constant_reward"
    assert (problem.count, problem.of, problem.line) == (12, 12, 7)
    assert (
        "reward function rule (/home/me/rewards.py line 7) gave the same reward, 1, to all 12 episodes" in problem.text
    )


@pytest.mark.parametrize(("invalid", "first"), [(0, "constant_reward"), (1, "unusable_answers")])
def test_answers_that_were_no_actions_explain_a_reward_of_zero(invalid, first):
    evidence = evidence_of(*(episode(0.0, False, answer=n, turns=4, invalid=3 * invalid) for n in range(9)))
    found = rank([*reward_problems(evidence, RULE), *episode_problems(evidence)])
    assert found[0].kind == first
    assert [one.because_of for one in found[1:]] == ["unusable_answers"] * invalid
    paid = evidence_of(*(episode(0.5, False, answer=n, turns=4, invalid=3 * invalid) for n in range(9)))
    assert rank([*reward_problems(paid, RULE), *episode_problems(paid)])[0].kind == "constant_reward"


@pytest.mark.parametrize(
    ("reward", "successes", "expected"),
    [
        (0.0, [False] * 9, False),  # all failed
        (1.0, [True] * 9, False),  # all solved
        (0.5, [True, False] * 5, True),
        (1.0, [False] * 9, True),
        (0.0, [None] * 9, False),
    ],
)
def test_a_constant_reward_of_the_environment_is_one_that_success_does_not_change(reward, successes, expected):
    found = reward_problems(differing(reward, successes), ENVIRONMENT)
    assert bool(found) is expected
    assert all("the environment gave the same reward" in problem.text for problem in found)


@pytest.mark.parametrize(
    ("reward", "cut", "kinds"),
    [
        (-0.1, 2, ["answers_cut", "constant_reward"]),
        (0.0, 2, ["answers_cut", "never_rewarded"]),
        (0.0, 1, ["never_rewarded", "answers_cut"]),
    ],
)
def test_answers_that_are_mostly_cut_explain_that_nothing_is_paid(reward, cut, kinds):
    episodes = [episode(reward, False, answer=n, turns=4, invalid=cut) for n in range(9)]
    for one in episodes:
        for turn in one.turns[:cut]:
            turn.stop_reason, turn.valid = "length", False
    run = RunSummary(episodes=evidence_of(*episodes))
    found = rank([*constant_reward(run), *never_rewarded(run), *answers_cut(run)])
    assert [one.kind for one in found] == kinds
    assert found[1].because_of == ("answers_cut" if cut == 2 else None)


def test_cut_answers_of_a_policy_that_solves_its_tasks_are_no_problem():
    episodes = [episode(1.0, n > 0, turns=2) for n in range(20)]
    for one in episodes:
        one.turns[1].stop_reason = "length"
    assert episode_problems(evidence_of(*episodes)) == []


def test_a_reward_function_that_pays_all_solved_episodes_alike_is_no_problem():
    assert reward_problems(differing(1.0, [True] * 12), RULE) == []
    (unpaid,) = reward_problems(differing(0.0, [True] * 12), RULE)
    assert "12 of 12 solved" in unpaid.text
    (unknown,) = reward_problems(differing(1.0, [None] * 12), RULE)
    assert "if all answers are right, the tasks are too easy" in unknown.text


def test_rewards_that_differ_by_rounding_are_constant():
    two = evidence_of(*(episode(0.1 + 0.2 if n % 2 else 0.3, False, answer=n) for n in range(20)))
    assert [problem.kind for problem in reward_problems(two, RULE)] == ["constant_reward"]


def test_few_episodes_and_equal_answers_prove_no_constant():
    assert reward_problems(differing(1.0, [False] * 7), RULE) == []
    assert reward_problems(evidence_of(*(episode(1.0, False, answer=4) for _ in range(20))), RULE) == []
    two = evidence_of(*(episode(1.0 if n else 0.5, False, answer=n) for n in range(20)))
    assert reward_problems(two, RULE) == []


def test_answers_that_are_no_actions_and_budgets():
    evidence = evidence_of(
        episode(turns=4, invalid=3),
        episode(outcome=Outcome.POLICY_ERROR, error="10 unusable answers", turns=2, invalid=2),
        episode(outcome=Outcome.TRUNCATED_TOKENS, turns=4),
        episode(outcome=Outcome.ENVIRONMENT_ERROR, turns=50, invalid=50),
    )
    unusable, tokens = episode_problems(evidence)
    assert (unusable.count, unusable.of) == (5, 10)
    assert "5 of 10 answers could not be used as actions, most often: 10 unusable answers" in unusable.text
    assert (tokens.kind, tokens.count, tokens.of) == ("truncated_tokens", 1, 3)
    assert "agent.max_tokens" in tokens.text


def test_answers_that_are_cut_off_are_reported_although_the_episodes_finish():
    episodes = [episode(turns=2) for _ in range(5)]
    episodes[0].turns[1].stop_reason = "length"
    assert episode_problems(evidence_of(*episodes)) == []
    for one in episodes:
        one.turns[1].stop_reason = "length"
    (problem,) = episode_problems(evidence_of(*episodes))
    assert (problem.kind, problem.count, problem.of) == ("answers_cut", 5, 10)
    assert "5 of 10 answers were cut off before their end; raise agent.max_answer_tokens" in problem.text


def test_ordinary_episodes_have_no_problem():
    assert episode_problems(evidence_of(*(episode(turns=5, invalid=int(n == 0)) for n in range(9)))) == []
    assert episode_problems(EpisodeCounts()) == []


def test_the_worst_three_come_first():
    weights = [0.2, 0.9, 0.5, 1.0, 0.4]
    found = top(rank(Finding(kind=f"k{weight}", sentence=f"t{weight}", weight=weight) for weight in weights))
    assert [problem.weight for problem in found] == [1.0, 0.9, 0.5]
    assert finding_lines(found) == ["problem 1: t1.0", "problem 2: t0.9", "problem 3: t0.5"]
    assert found[0].to_json().items() >= {"kind": "k1.0", "text": "t1.0", "count": 0, "file": None}.items()


def test_a_lasting_problem_is_told_once_until_it_was_away():
    reminder = Reminder()
    assert [step for step in range(1, 30) if reminder.is_due("a", step)] == [1]
    assert not reminder.is_due("a", 39), "ten steps later"
    assert reminder.is_due("b", 39), "another problem"
    assert reminder.is_due("a", 50), "eleven steps later it is new"


def test_a_warning_of_the_trainer_is_told_once_whatever_its_numbers_are():
    diagnosis = RunDiagnosis(RunSummary())
    told = [diagnosis.add_step(step, {}, [], [f"{step} of 8 episodes ran out", "bad 1e-06"]) for step in (1, 2, 3)]
    assert told == [["1 of 8 episodes ran out", "bad 1e-06"], [], []]


def test_a_warning_names_the_root_cause_and_not_what_it_explains():
    diagnosis = RunDiagnosis(RunSummary(config=load_config(None, ["environment=guess_number", "agent.max_tokens=300"])))
    idle = {"groups/trained": 4.0, "groups/zero_variance": 4.0, "train/advantage_abs_mean": 0.0, "episodes": 16.0}
    full = [episode(outcome=Outcome.TRUNCATED_TOKENS) for _ in range(16)]
    told = [text for step in (1, 2, 3) for text in diagnosis.add_step(step, idle, full)]
    (warning,) = [text for text in told if "nothing is being learned" in text]
    assert "48 of 48 episodes ended because their tokens ran out" in warning
    assert "gave no reward" not in warning


def test_episodes_without_room_for_an_answer_explain_their_unusable_answers():
    """Otherwise the advice is about the format of answers that had no place."""
    full = evidence_of(*(episode(outcome=Outcome.TRUNCATED_TOKENS, turns=1, invalid=1) for _ in range(4)))
    config = load_config(None, ["environment.name=guess_number", "agent.max_tokens=300"])
    run = RunSummary(episodes=full, config=config)
    first, *_ = rank([*unusable_answers(run), *truncated_episodes(run)])
    assert first.kind == "truncated_tokens"
    assert "the prompt alone fills it" in first.text


def test_episodes_that_the_environment_ends_need_no_more_turns():
    cut = evidence_of(*(episode(outcome=Outcome.TRUNCATED_TURNS) for _ in range(4)))
    config = load_config(None, ["environment.name=guess_number", "agent.max_turns=50"])
    (own,) = truncated_episodes(RunSummary(episodes=cut, config=config, lines=[{"turns/max": 5.0}]))
    assert own.changes == ()
    assert "the environment's own steps" in own.text
    learning = [{"step": n, "episodes": 64.0, "turns/max": 5.0, "success/mean": n / 20} for n in range(20)]
    assert not list(truncated_episodes(RunSummary(episodes=cut, config=config, lines=learning)))
    (budget,) = truncated_episodes(RunSummary(episodes=cut, config=config, lines=[{"turns/max": 50.0}]))
    assert [(change.key, change.value) for change in budget.changes] == [("agent.max_turns", 100)]


@pytest.fixture
def once():
    """A user's loop, registered under a name."""
    register(Kind.AGENT_LOOP, "once", type("Once", (SingleTurn,), {}))
    yield
    unregister(Kind.AGENT_LOOP, "once")


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("loop", ["single_turn", "caption_reasoner", "self_described", "once"])
def test_a_loop_of_one_turn_needs_another_loop(loop):
    config = load_config(None, ["environment=guess_number", f"agent.loop={loop}"])
    counts = evidence_of(*(episode(0.0, outcome=Outcome.TRUNCATED_TURNS, answer=n) for n in range(20)))
    run = RunSummary(episodes=counts, config=config, lines=[{"step": 1, "turns/max": 1.0}])
    (problem,) = truncated_episodes(run)
    assert f"their turns ran out (agent.loop={loop} plays one)" in problem.sentence
    assert problem.changes == ()
    assert "react_text" in problem.advice


def test_a_loop_that_is_not_here_plays_several_turns():
    config = load_config(None, ["environment=guess_number", "agent.loop=no_such_module:Loop"])
    cut = evidence_of(*(episode(outcome=Outcome.TRUNCATED_TURNS) for _ in range(4)))
    (problem,) = truncated_episodes(RunSummary(episodes=cut, config=config))
    assert "plays one" not in problem.sentence


def test_failures_of_code_explain_a_constant_reward():
    paid = evidence_of(*(episode(1.0, answer=number) for number in range(40)))
    (problem,) = constant_reward(RunSummary(episodes=paid, definitions=RULE))
    assert {"environment_error", "reward_error"} <= problem.causes


@pytest.mark.parametrize("file", sorted(Path(diagnosis.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_keys_that_advice_names_exist(file):
    sections = {key[0] for key in all_keys() if len(key) > 1} - {"run"}
    known = {".".join(key[:size]) for key in all_keys() for size in range(1, len(key) + 1)}
    named = re.findall(rf"(?<![\w./])(?:{'|'.join(sections)})\.[a-z_]+(?:\.[a-z_]+)*", file.read_text())
    free = ("algorithm.loss_options.", "environment.options.", "agent.options.")
    assert not {key for key in named if key not in known and not key.startswith(free)}
