"""Whole runs with a judge: rubrics, rankings, budgets and resuming."""

import json
import shutil

import pytest
from support.judge_service import agents_words, attempts_in, judge_service, mark_of

from agentrl.builders.checks import check_training
from agentrl.config import load_config
from agentrl.errors import BudgetSpent, ConfigError, Outcome, ResumableError, TrainingError
from agentrl.evaluation.report import markdown
from agentrl.evaluation.run_report import ReportedRun, run_report
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run

ALL_MEMBERS = "algorithm={advantage: grpo, dynamic_sampling: false}"


def judge(service, **settings):
    return f"agent.judge={json.dumps({'engine': {'url': service.url, 'model': 'm'}, **settings})}"


def lines_of(run):
    return read_metrics(run.folder.metrics_file)


def episodes_of(run):
    return [found.trajectory for found in read_trajectories(run.folder.trajectories)]


def vowels(question):
    """The share of vowels that each attempt's agent wrote."""
    words = [agents_words(attempt, mark_of(question)) for attempt in attempts_in(question)]
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in words]


def more_vowels(question, body):
    first, second = vowels(question)
    return {"better": "tie" if first == second else "1" if first > second else "2"}


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_learns_from_comparisons_and_each_episode_is_written_with_its_rank(tiny_run, staleness):
    with judge_service(more_vowels) as service:
        settings = judge(service, compare="pairwise", reasons=False)
        run = tiny_run(settings, ALL_MEMBERS, "trainer.steps=3", f"rollout.max_staleness={staleness}")
        train(run)
    groups = {}
    for trajectory in episodes_of(run):
        if trajectory.outcome is not Outcome.CANCELLED:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
    assert len(groups) >= 6
    for group in groups.values():
        ranks = [trajectory.reward_components["judge"] for trajectory in group]
        assert sum(ranks) == pytest.approx(len(group) / 2)
        assert [trajectory.reward for trajectory in group] == ranks
        assert all(0 <= rank <= 1 for rank in ranks)
    assert any(t.reward > 0.5 for group in groups.values() for t in group)
    for line in lines_of(run):
        assert line["reward/mean"] == line["reward/component/judge"] == pytest.approx(0.5)
        assert line.get("judge/order_agreement", 1.0) == 1.0
        assert line.get("judge/unreadable", 0.0) == 0.0
    assert sum(line["judge/requests"] for line in lines_of(run)) <= len(service.bodies)


def test_a_member_that_infrastructure_failed_is_left_out_and_a_group_of_one_fails(tiny_run):
    """Every third episode of this world fails; groups are ranked without it, and groups of one never train."""
    with judge_service(more_vowels) as service:
        settings = judge(service, compare="pairwise", reasons=False)
        world = "environment={name: 'letters:Raising', isolation: inline}"
        run = tiny_run(settings, ALL_MEMBERS, world, "trainer.steps=2", "rollout.retries=0", "agent.max_turns=1")
        train(run)
    outcomes = [(t.group_id, t.outcome, t.reward) for t in episodes_of(run)]
    assert any(outcome is Outcome.ENVIRONMENT_ERROR for _, outcome, _ in outcomes)
    for group_id in {group_id for group_id, _, _ in outcomes}:
        rewards = [reward for name, _, reward in outcomes if name == group_id]
        ranked = [reward for reward in rewards if reward is not None]
        assert len(ranked) != 1
        assert sum(ranked) == pytest.approx(len(ranked) / 2)


def test_groups_that_cannot_be_ranked_end_the_run_and_are_never_rewarded(tiny_run):
    def grows_tired(question, body):
        return {"ranking": [2, 1, 3]} if len(service.bodies) <= 6 else "Attempt 1 is better."

    with judge_service(grows_tired) as service:
        run = tiny_run(judge(service, compare="listwise", attempts=1, reasons=False), ALL_MEMBERS)
        with pytest.raises(TrainingError, match=r"groups in a row have (no|fewer).*no score for"):
            train(run)
    failed = [t for t in episodes_of(run) if t.outcome is Outcome.ENGINE_ERROR]
    assert len(failed) == 4 * 3
    assert all(t.reward is None and "no score for" in t.error for t in failed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.group_size=1", "algorithm.advantage=reinforce"], "group_size 1"),
        (["algorithm.advantage=remax"], "greedy rollout would have no rank"),
        (["algorithm={loss: luffy, expert: {members: 1}, group_size: 3}"], "whose episodes would have no rank"),
        (["evaluation={every: 1, tasks: 2}"], "evaluations of 1 sample per task"),
    ],
)
def test_where_there_is_no_group_a_comparison_is_refused(words, message):
    compare = "agent.judge={engine: {url: http://127.0.0.1:1/v1, model: m}, compare: pairwise}"
    with pytest.raises(ConfigError, match=message):
        check_training(load_config("quickstart", [compare, *words]))


@pytest.mark.slow
def test_an_evaluation_compares_the_samples_of_a_task(tiny_run):
    with judge_service(more_vowels) as service:
        run = tiny_run(
            judge(service, compare="pairwise", reasons=False),
            ALL_MEMBERS,
            "trainer.steps=1",
            "evaluation={every: 1, tasks: 2, samples: 3, split: valid}",
        )
        train(run)
    (line,) = lines_of(run)
    assert line["eval/reward"] == pytest.approx(0.5)
    assert line["eval/failed"] == 0


RUBRIC = {
    "items": [{"name": "vowels", "criterion": "Are there?"}, {"name": "short", "criterion": "Is it?", "weight": 2}]
}


def fills_in(question, body):
    (share,) = vowels(question)
    return {"vowels": share > 0.3, "short": len(question) % 2 == 0}


@pytest.mark.slow
def test_items_of_a_rubric_are_metrics_and_a_resumed_run_pays_for_nothing_twice(tiny_run):
    with judge_service(fills_in) as service:
        settings = judge(service, rubric=RUBRIC, reasons=False)
        run = tiny_run(settings, "trainer.steps=2")
        train(run)
        asked, lines = len(service.bodies), lines_of(run)
        shutil.rmtree(run.folder.checkpoints)
        train(resume_run(run.folder.path, ["trainer.steps=2"]))
        assert len(service.bodies) == asked
    for line in lines:
        parts = [line["reward/component/judge/vowels"], line["reward/component/judge/short"]]
        assert line["reward/mean"] == pytest.approx((parts[0] + 2 * parts[1]) / 3)
    again = lines_of(run)
    assert [line["reward/mean"] for line in again] == [line["reward/mean"] for line in lines]
    assert [line["judge/requests"] for line in again] == [0.0, 0.0]
    assert sum(line["judge/cached"] for line in again) == sum(
        line["judge/cached"] + line["judge/requests"] for line in lines
    )
    assert len((run.folder.path / "judge.jsonl").read_text().splitlines()) == asked


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.slow
def test_training_evaluations_and_extra_rollouts_count_their_own_requests(tiny_run, beside):
    """All of them share the judge, its cache and its budget."""
    engine = ", engine: {type: local}" if beside else ""
    with judge_service(fills_in) as service:
        settings = judge(service, rubric=RUBRIC, reasons=False, budget={"prompt_price": 10_000})
        words = ["trainer.steps=3", "algorithm={advantage: remax, group_size: 2, dynamic_sampling: false}"]
        evaluation = f"evaluation={{every: 1, tasks: 2, samples: 2, split: valid{engine}}}"
        run = tiny_run(settings, *words, evaluation, f"rollout.max_staleness={int(beside)}")
        train(run)
    lines = lines_of(run)

    def total(name, prefix):
        return sum(line.get(f"{prefix}judge/{name}", 0.0) for line in lines)

    judged = {prefix: total("requests", prefix) + total("cached", prefix) for prefix in ("", "extras/", "eval/")}
    groups = len({trajectory.group_id for trajectory in episodes_of(run)})
    requests = sum(total("requests", prefix) for prefix in judged)
    assert judged["eval/"] == 3 * 2 * 2
    if beside:  # some episodes are judged after the last step
        assert judged[""] <= 2 * groups
        assert requests <= len(service.bodies)
    else:
        assert (judged[""], judged["extras/"], requests) == (2 * groups, groups, len(service.bodies))
    assert all(total("cost", prefix) == total("requests", prefix) for prefix in judged)  # 100 tokens at 0.01
    report = markdown(run_report([ReportedRun(folder=run.folder, config=run.config, lines=lines, state="done")]))
    assert f"{requests:.2f} (agent.judge.budget)" in report


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_spent_budget_ends_a_run_with_a_checkpoint_and_a_larger_one_goes_on(tiny_run, staleness):
    with judge_service(more_vowels) as service:
        settings = judge(service, compare="pairwise", reasons=False, budget={"max_requests": 20})
        run = tiny_run(settings, ALL_MEMBERS, "trainer.steps=3", f"rollout.max_staleness={staleness}")
        with pytest.raises(BudgetSpent, match=r"got 20 requests of 20.*agentrl train --resume"):
            train(run)
        sent = len(service.bodies)
        assert 0 < sent <= 20  # one that is counted may be withdrawn before it is sent, when another finds nothing left
        assert list(run.folder.checkpoints.iterdir())
        with pytest.raises(BudgetSpent):
            train(resume_run(run.folder.path))
        assert sent <= len(service.bodies) <= 20
        result = train(resume_run(run.folder.path, ["agent.judge.budget.max_requests=1000"]))
    assert result.step == 3
    assert len(lines_of(run)) == 3
    assert all(line["reward/mean"] == pytest.approx(0.5) for line in lines_of(run))
    scored = [t for t in episodes_of(run) if t.reward is not None]
    assert len({t.id for t in scored}) == len(scored)


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 402])
def test_a_service_that_ends_its_answers_ends_the_run_with_a_checkpoint(tiny_run, status):
    """A key expires, or an account runs out of credit: the steps so far are kept."""
    left = iter(range(12))

    def says(question, body):
        return "Score: 5" if is_open or next(left, None) is not None else status

    is_open = False
    with judge_service(says) as service:
        run = tiny_run(judge(service), "trainer.steps=3", "checkpoint.every=100")
        with pytest.raises(ResumableError, match=r"refuses the key|no credit left"):
            train(run)
        assert list(run.folder.checkpoints.iterdir())
        is_open = True
        assert train(resume_run(run.folder.path)).step == 3


@pytest.mark.slow
def test_a_run_that_goes_on_without_a_judge_says_so_in_its_metrics(tiny_run):
    with judge_service(lambda question, body: "Score: 5") as service:
        budget = {"max_requests": 6, "when_spent": "environment"}
        settings = judge(service, environment_weight=1.0, budget=budget, cache="memory")
        run = tiny_run(settings, "trainer.steps=4")
        train(run)
    assert len(service.bodies) == 6
    lines = lines_of(run)
    assert lines[0]["judge/without"] == 0
    assert lines[-1]["judge/without"] >= 6
    last = lines[-1]
    assert last["reward/mean"] == pytest.approx(last["reward/component/environment"])
