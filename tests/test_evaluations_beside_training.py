"""Runs whose evaluations run beside training, on an engine of their own."""

import pytest
from support.fixtures import TINY_RUN

import agentrl
from agentrl.builders.checks import check_evaluation_engine
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.evaluation.periodic import AT_STEP
from agentrl.evaluation.report import curves, draw_learning_curve
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run

BESIDE = (
    "rollout.max_staleness=1",
    "evaluation={every: 2, tasks: 8, samples: 4, split: test, engine: {type: local, max_num_seqs: 8}}",
    "checkpoint={every: 1, keep: 100}",
)


SERVERS = "engine={type: vllm, servers: ['http://a:1', 'http://b:1']}"


def lines_of(run):
    return read_metrics(run.folder.metrics_file)


class Crash(Exception):
    """End of a run right after a checkpoint."""


class Evaluations(RunWatcher):
    def __init__(self, *, crash_at=None):
        self.seen, self.messages, self.crash_at = [], [], crash_at

    def on_evaluation(self, step, metrics):
        self.seen.append(step)

    def on_message(self, text):
        self.messages.append(text)

    def on_checkpoint(self, step, path):
        if step == self.crash_at:
            raise Crash


@pytest.mark.slow
def test_an_evaluation_measures_the_weights_of_its_step_while_later_steps_train(tiny_run, tmp_path):
    run, watcher = tiny_run(*BESIDE, "trainer.steps=6"), Evaluations()
    train(run, watcher=watcher)
    measured = {int(line[AT_STEP]): line for line in lines_of(run) if AT_STEP in line}
    assert list(measured) == [2, 4, 6] == watcher.seen
    assert [line["step"] for line in measured.values()][:2] == [3, 5], "the next step did not wait for it"
    assert measured[6]["step"] == 6, "the run waits for the last one"
    for step, line in measured.items():
        again = agentrl.evaluate(
            model=str(run.folder.checkpoints / f"step-{step:06d}"),
            config=run.folder.path / "config.yaml",
            tasks=8,
            samples=4,
            overrides=[
                "evaluation.engine=null",
                "rollout.max_staleness=0",
                f"run.directory={tmp_path / 'evaluations'}",
            ],
            progress=False,
        )
        assert again.reward is not None
        assert line["eval/reward"] == pytest.approx(again.reward.mean, abs=1e-6), f"weights of step {step}"
    assert len({line["eval/reward"] for line in measured.values()}) == 3, "the weights differ"


@pytest.mark.slow
def test_evaluations_of_every_step_are_awaited(tiny_run):
    run = tiny_run(*BESIDE, "evaluation.every=1", "trainer.steps=3")
    train(run)
    assert [line[AT_STEP] for line in lines_of(run)] == [1, 2, 3]


LOST = "the evaluation of step {} did not finish, and is not repeated: {}"


@pytest.mark.parametrize(
    ("every", "crash_at", "change", "measured", "lost"),
    [
        (2, 2, [], [2, 4, 6, 7], []),
        (3, 4, [], [6, 7], [LOST.format(3, "its weights are not stored")]),
        (2, 2, ["evaluation.engine=null"], [], [LOST.format(2, "evaluation.engine is no longer set")]),
    ],
)
@pytest.mark.slow
def test_a_stopped_evaluation_is_repeated_if_its_weights_are_stored(tiny_run, every, crash_at, change, measured, lost):
    slow = (
        f"evaluation={{every: {every}, tasks: 100, samples: 4, split: test, engine: {{type: local, max_num_seqs: 2}}}}"
    )
    run = tiny_run(*BESIDE, slow, "trainer.steps=7")
    with pytest.raises(Crash):
        train(run, watcher=Evaluations(crash_at=crash_at))
    watcher, short = Evaluations(), ["evaluation.tasks=2", "evaluation.samples=1", *change]
    train(resume_run(run.folder.path, short), watcher=watcher)
    assert [text for text in watcher.messages if "is not repeated" in text] == lost
    assert [int(line[AT_STEP]) for line in lines_of(run) if AT_STEP in line] == measured


def test_curves_show_an_evaluation_at_the_step_that_it_measured(tmp_path):
    lines = [{"step": 1, "success/mean": 0.5}, {"step": 2, "eval/success": 0.25, AT_STEP: 1.0}]
    draw_learning_curve(lines, tmp_path / "curve.png")
    assert [name for name, _ in curves(lines)] == ["success/mean", "eval/success"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.max_staleness=0"], "Set rollout.max_staleness=1"),
        (["evaluation.every=0"], "evaluation.every=N"),
        (["evaluation.engine={type: vllm}"], "expected local, or vllm or sglang with the addresses"),
        (
            [SERVERS, "evaluation.engine={type: vllm, servers: ['http://b:1']}"],
            "got http://b:1",
        ),
        (["evaluation.engine={type: openai, url: 'http://127.0.0.1:1/v1', model: m}"], "expected local"),
        (["adapters={one: {}, two: {}}", "model.lora={rank: 2}"], "several adapters"),
    ],
)
def test_settings_that_cannot_run_beside_training_are_refused(overrides, words):
    shared = [override for override in TINY_RUN if not override.startswith("engine=")]
    config = load_config(None, [*shared, *BESIDE, *overrides])
    with pytest.raises(ConfigError, match="evaluation") as refused:
        check_evaluation_engine(config)
    assert words in str(refused.value)
