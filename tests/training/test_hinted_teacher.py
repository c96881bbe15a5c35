"""A policy that teaches itself with a hint (OPSD, SDFT): what the teacher reads, and what each episode's hint is."""

import copy

import pytest
import torch
from support.tokenizers import build_tokenizer

from agentrl.builders.group_extras import _render_hint
from agentrl.config.algorithm import TeacherConfig
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import TrainingError, UsageError
from agentrl.render.renderer import Renderer
from agentrl.task import Task
from agentrl.training.batch import StepExtras
from agentrl.training.trainer import Trainer

ALGORITHM = AlgorithmConfig(loss="distill", teacher={"path": "policy", "hint": "Say {ground_truth}."})


def trained(model, trajectories, hints):
    trainer = Trainer(model, ALGORITHM, TrainerConfig(learning_rate=1e-2), seed=0, max_tokens=100)
    signal, seen = trainer.signals["teacher"], []
    annotate = signal.annotate
    signal.annotate = lambda batch: seen.append(annotate(batch)) or seen[-1]
    report = trainer.step(trajectories, temperature=0.8, extras=StepExtras(hints=hints))
    return report, seen[0]


def test_the_teacher_is_the_policy_that_reads_the_hint_first(model, trajectories):
    start = copy.deepcopy(model)
    hints = {trajectory.id: [7, 9, 3 + number] for number, trajectory in enumerate(trajectories)}
    report, batch = trained(model, trajectories, hints)
    expected = []
    for trajectory in batch.trajectories:
        prefix = hints[trajectory.id]
        for sequence in trajectory.sequences:
            if not sequence.loss_mask.any():
                continue
            ids = torch.tensor([*prefix, *sequence.token_ids.tolist()])
            logp = (start(ids[None]).logits[0].detach() / 0.8).log_softmax(-1)
            where = torch.from_numpy(sequence.loss_mask.nonzero()[0]) + len(prefix)
            expected += logp[where - 1, ids[where]].tolist()
    assert batch.teacher.logp.tolist() == pytest.approx(expected, abs=1e-4)
    assert report.metrics["train/kl_teacher"] != 0
    assert report.metrics["train/grad_norm"] > 0


def test_an_episode_without_a_hint_is_an_error(model, trajectories):
    with pytest.raises(TrainingError, match="no hint for every episode"):
        trained(model, trajectories, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "policy"}, "needs algorithm.teacher.hint"),
        ({"path": "policy", "hint": "x", "servers": ["http://example.com:8000"]}, "support neither a hint"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        TeacherConfig(**settings)


def test_a_hint_has_fields_of_the_task():
    renderer = Renderer(build_tokenizer("qwen3"))
    task = Task(id="t", environment="e", ground_truth=4, columns={"solution": "2 + 2"})
    ids = _render_hint("It is {ground_truth}, by {solution}.", renderer, task)
    assert "It is 4, by 2 + 2." in renderer.encoder.decode(ids)
    with pytest.raises(UsageError, match=r"does not fit task t: .*ground_truth, solution"):
        _render_hint("{answer}", renderer, task)
    assert "<b>" in renderer.encoder.decode(_render_hint("<b>{solution}", renderer, task))
