"""Whole runs of two environments: shares, metrics, groups, evaluations, and resuming after a kill."""

import signal

import pytest
from support.runs import Snapshots, numbers
from support.token_tables import check_token_tables

from agentrl.builders.models import build_renderer, prepare_model
from agentrl.config import load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.evaluation.report import curves
from agentrl.evaluation.settings import evaluation_config
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.terminal import step_words
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.render.tokenizers import load_tokenizer
from agentrl.runs.rl import train
from agentrl.runs.sft import collect_demonstrations
from agentrl.runs.start import Run, resume_run

TWO = (
    "environments={vowels: {name: 'letters:Letters', isolation: inline, weight: 2}, "
    "digits: {name: 'letters:Digits', isolation: inline, agent: {max_answer_tokens: 4}}}"
)


@pytest.fixture
def mixed_run(tiny_run):
    def start(*overrides, **options):
        return tiny_run(TWO, "trainer.tasks_per_step=3", *overrides, **options)

    return start


def stored(folder):
    return [found.trajectory for found in read_trajectories(RunDirectory(folder).trajectories)]


def test_two_environments_in_one_run(mixed_run):
    run = mixed_run("evaluation={every: 2, tasks: 3, split: test}", "trainer.steps=2", "observe.tokens=all")
    train(run)
    check_token_tables(run.folder.path)
    lines = numbers(run.folder.path)
    assert len(lines) == 2
    for line in lines:
        assert (line["env/vowels/groups"], line["env/digits/groups"]) == (2, 1), "every step keeps the shares"
        assert line["env/vowels/token_share"] + line["env/digits/token_share"] == pytest.approx(1)
        assert line["success/mean"] == pytest.approx((2 * line["env/vowels/success"] + line["env/digits/success"]) / 3)
        assert line["reward/mean"] == pytest.approx((2 * line["env/vowels/reward"] + line["env/digits/reward"]) / 3)
        assert "curriculum/turns" not in line
    assert lines[1]["eval/success"] == (lines[1]["eval/vowels/success"] + lines[1]["eval/digits/success"]) / 2
    assert "eval/digits/success/digits" in lines[1]
    drawn = {name for name, _ in curves(lines)}
    assert {"env/vowels/success", "eval/digits/success", "success/mean", "eval/success"} <= drawn
    assert "vowels" in step_words(1, 2, lines[0])
    check_groups(stored(run.folder.path))


def check_groups(trajectories):
    """No group has two environments, and each environment has its own agent."""
    groups = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    assert len(groups) == 6
    for name, members in groups.items():
        (environment,) = {member.environment for member in members}
        assert name.split("-")[1] == {"letters:Letters": "vowels", "letters:Digits": "digits"}[environment]
        assert len({member.task_id for member in members}) == 1
        longest = max(turn.end - turn.start for member in members for turn in member.turns)
        assert longest <= (8 if environment == "letters:Letters" else 4)


CURRICULA = (
    "curriculum.horizon={turns: [1, 2, 3], at_steps: [0, 1, 3]}",
    "curriculum={horizon: {turns: [1, 2, 3], success_above: 0.05, over_steps: 1}, pools: {by: environment, "
    "easy_above: 0.55, hard_below: 0.2, revisit: 0.3, half_life: 4}}",
)


@pytest.mark.parametrize("curriculum", CURRICULA)
@pytest.mark.slow
def test_a_run_with_a_curriculum_that_was_cut_off_ends_as_if_it_had_not_been(mixed_run, tmp_path, curriculum):
    run = mixed_run(curriculum, "agent.max_turns=3", "trainer.steps=4", "algorithm.dynamic_sampling=true")
    train(run, watcher=Snapshots(tmp_path / "cut", [20, 45]))
    cut = sorted((tmp_path / "cut").iterdir())
    assert len(cut) == 2
    for folder in cut:
        assert len(numbers(folder)) < 4
        train(Run(RunDirectory(folder), run.config))
        assert numbers(folder) == numbers(run.folder.path)
        assert {t.id: t.reward for t in stored(folder)} == {t.id: t.reward for t in stored(run.folder.path)}


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_what_it_had_begun(mixed_run):
    class Interrupting(RunWatcher):
        asked = False

        def on_status(self, status):
            if not self.asked and status.step == 1 and status.episodes_done >= 4:
                self.asked = True
                signal.raise_signal(signal.SIGINT)

    settings = (*CURRICULA[1:], "agent.max_turns=3", "trainer.steps=3", "rollout.max_concurrent=3")
    expected = mixed_run(*settings, name="expected")
    train(expected)
    run = mixed_run(*settings)
    assert train(run, watcher=Interrupting()).interrupted
    assert train(resume_run(run.folder.path)).step == 3
    assert groups_of(run) == groups_of(expected)


def groups_of(run):
    """Environments and tasks by group, of what was trained on."""
    return {t.group_id: (t.environment, t.task_id) for t in stored(run.folder.path) if t.reward is not None}


@pytest.mark.slow
def test_the_horizon_of_every_step_is_told_and_evaluations_have_the_whole(mixed_run):
    run = mixed_run(CURRICULA[0], "agent.max_turns=3", "evaluation={every: 2, tasks: 2, split: test}")
    train(run)
    lines = numbers(run.folder.path)
    assert [line["curriculum/turns"] for line in lines] == [1, 2, 2, 3]
    assert [line["env/vowels/turns"] for line in lines] == [1, 2, 2, 3]
    assert all(line["env/digits/turns"] <= line["curriculum/turns"] for line in lines)
    assert lines[1]["eval/vowels/turns"] == 3


async def test_demonstrations_are_of_all_environments(mixed_run):
    run = mixed_run("sft.episodes=6")
    path = await prepare_model(run.config, run.folder.model)
    renderer = build_renderer(run.config, path, load_tokenizer(path))
    with pytest.raises(UsageError, match="no demonstration of letters:Digits can be trained on"):
        await collect_demonstrations(run.config, renderer)
    same = load_config(run.folder.config_file, ["environments.digits.name=letters:Letters"])
    found = await collect_demonstrations(same, renderer)
    assert [t.group_id for t in found] == [f"demonstration-{number}" for number in range(6)]


def test_one_environment_of_a_run_is_evaluated_with_its_own_agent(mixed_run):
    run = mixed_run("environments.digits.evaluation_split=test")
    path = str(run.folder.path)
    config = evaluation_config(env="digits", model=path)
    assert (config.sole_environment.name, config.sole_environment.split) == ("letters:Digits", "test")
    assert config.agent.max_answer_tokens == 4
    config = evaluation_config(env="letters:Digits", model=path)
    assert (config.sole_environment.name, config.agent.max_answer_tokens) == ("letters:Digits", 4)
    config = evaluation_config(env="vowels/train", model=path)
    assert (config.sole_environment.split, config.agent.max_answer_tokens) == ("train", 8)
    assert evaluation_config(env="guess_number", model=path).sole_environment.name == "guess_number"
    with pytest.raises(UsageError, match=r"several environments.*--env vowels or --env digits"):
        evaluation_config(model=path)


def test_a_resumed_run_keeps_its_mixture_but_not_its_deadlines(mixed_run):
    run = mixed_run()
    with pytest.raises(ConfigError, match=r"got environments\.digits\.weight"):
        resume_run(run.folder.path, ["environments.digits.weight=3"])
    changed = resume_run(run.folder.path, ["environments.digits.step_timeout_s=3"])
    assert changed.config.environments["digits"].step_timeout_s == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["curriculum.horizon={turns: [2, 60], at_steps: [0, 1]}"], "the longest episode: got 60.*at most 50"),
        (
            ["trainer.steps=5", "curriculum.horizon={turns: [2, 3], at_steps: [0, 5]}"],
            "grows after the end of the run: got step 5.*before trainer.steps, 5",
        ),
        (
            ["trainer.steps=3", "curriculum.horizon={turns: [2, 3], success_above: 0.5, over_steps: 3}"],
            "grows after the end of the run: got step 3",
        ),
        (["curriculum.pools.by=type"], "tasks of vowels without a type"),
        (["curriculum.pools.by=task"], "no task repeats in this run.*100,000 tasks of vowels"),
        (["environment={name: 'letters:Letters'}", "curriculum.pools.by=environment"], "needs several environments"),
        (["environments.digits.evaluation_split=tst", "evaluation.every=1", "evaluation.split=test"], "tst"),
        (["environments.digits.agent.loop=tool_calling", "environments.digits.agent.options={a: 1}"], "no option 'a'"),
    ],
)
def test_what_cannot_work_is_said_before_the_run_has_a_folder(mixed_run, tmp_path, overrides, message):
    with pytest.raises(UsageError, match=message):
        mixed_run(*overrides)
    assert not (tmp_path / "runs").exists()
