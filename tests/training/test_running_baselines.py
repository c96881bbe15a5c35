"""Running baselines of roles and tasks over several steps, and in checkpoints."""

import copy
import dataclasses

import pytest

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.trainer import Trainer


def trainer_for(model, advantage, **options):
    config = AlgorithmConfig(advantage=advantage, advantage_options=options, group_size=1)
    return Trainer(copy.deepcopy(model), config, TrainerConfig(), seed=0, max_tokens=100)


def expected(trajectories, start, baseline, updated, key):
    numbers, found = {}, []
    for trajectory in trajectories:
        own = numbers.get(key(trajectory), start)
        found.append(trajectory.reward - baseline(own))
        numbers[key(trajectory)] = updated(own, trajectory.reward)
    return found


@pytest.fixture
def scored(trajectories):
    return [t for t in trajectories if t.is_trainable and t.reward is not None and t.sampled_tokens]


def compared(trainer, trajectories, steps=3):
    """Returns minus baselines of every episode, over several steps of the same episodes."""
    signal, found = trainer.signals["running_baseline"], []
    annotate = signal.annotate

    def remember(batch):
        batch = annotate(batch)
        found.extend((batch.episodes.returns - batch.episodes.baseline).tolist())
        return batch

    signal.annotate = remember
    for _ in range(steps):
        trainer.step(trajectories, temperature=1.0)
    return found


def test_the_baseline_of_a_role_moves_with_its_returns(model, scored):
    """As in prime-rl's `rae`: an episode is compared before its own return moves the baseline."""
    found = compared(trainer_for(model, "rae", decay=0.5), scored)
    wanted = expected(scored * 3, 0.0, lambda b: b, lambda b, r: 0.5 * b + 0.5 * r, lambda t: t.environment)
    assert found == pytest.approx(wanted)


def test_every_type_of_task_has_its_own_baseline(model, scored):
    """The role EMA baseline of a proposer and a solver of several kinds of tasks."""
    typed = [dataclasses.replace(t, task_type="ab"[n % 2]) for n, t in enumerate(scored)]
    found = compared(trainer_for(model, "rae", decay=0.5, per="kind"), typed)
    wanted = expected(typed * 3, 0.0, lambda b: b, lambda b, r: 0.5 * b + 0.5 * r, lambda t: t.task_type)
    assert found == pytest.approx(wanted)
    assert found != pytest.approx(compared(trainer_for(model, "rae", decay=0.5), typed))


def test_the_baseline_of_a_task_is_its_success_rate(model, scored):
    """As in verl-recipe's `spo` with a constant rho and no values from before the run."""
    found = compared(trainer_for(model, "spo", rho=0.75), scored)
    wanted = expected(
        scored * 3,
        (0.5, 0.5),
        lambda n: n[0] / (n[0] + n[1]),
        lambda n, r: (0.75 * n[0] + r, 0.75 * n[1] + 1 - r),
        lambda t: t.task_id,
    )
    assert found == pytest.approx(wanted)


def test_other_environments_have_their_own_baselines(model, scored):
    other = [dataclasses.replace(t, environment="other", group_id=f"other {t.group_id}") for t in scored]
    trainer = trainer_for(model, "rae", decay=0.5)
    found = compared(trainer, [*scored, *other], steps=1)
    assert found[: len(scored)] == pytest.approx(found[len(scored) :])
    assert trainer.signals["running_baseline"].metrics() == {"train/running_baselines": 2.0}


@pytest.mark.parametrize(("advantage", "of_stages"), [("rae", False), ("spo", True)])
def test_environments_of_one_kind_have_their_own_baselines(model, scored, advantage, of_stages):
    """Two environments of a run may read files whose rows have the same ids, and so may two stages of one."""
    labels = ("easy", "hard", "hard~1")
    played = [
        dataclasses.replace(one, task_id="3", group_id=f"{number}{place}-{label}-3")
        for place, label in enumerate(labels)
        for number, one in enumerate(scored, 1)
    ]
    trainer = trainer_for(model, advantage)
    found = compared(trainer, played, steps=1)
    easy, hard, later = (found[start : start + len(scored)] for start in range(0, len(found), len(scored)))
    assert easy == pytest.approx(hard)
    assert (hard == pytest.approx(later)) is of_stages
    assert trainer.signals["running_baseline"].metrics() == {"train/running_baselines": 3.0 if of_stages else 2.0}


def test_a_checkpoint_contains_the_baselines(model, scored, tmp_path):
    wanted = compared(trainer_for(model, "spo"), scored, steps=2)[len(scored) :]
    first = trainer_for(model, "spo")
    compared(first, scored, steps=1)
    first.checkpoint.save(tmp_path)
    second = trainer_for(model, "spo")
    second.checkpoint.load(tmp_path)
    assert compared(second, scored, steps=1) == pytest.approx(wanted)
