"""Numeric alarms of training: skipped and repeated updates, and gradient norms by group."""

import copy
import json
import math

import pytest
import torch

from agentrl.cli import main
from agentrl.config import load_config
from agentrl.config.trainer import NumericsConfig
from agentrl.errors import TrainingError, UsageError
from agentrl.training.diagnostics.repeated_update import repeat_update
from agentrl.training.diagnostics.watch import (
    CALM,
    FIRST_STEPS,
    MIN_HISTORY,
    Alarms,
    read_dump,
)
from agentrl.training.optimizer import group_of
from agentrl.training.trainer import Trainer

PLAIN = ("environment=letters", "trainer.learning_rate=1e-3", "agent.max_tokens=100", "agent.max_answer_tokens=10")


@pytest.fixture
def overflowing(model):
    """A model whose second layer's feed-forward part gives what is not finite for any input."""
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(3e38)
        model.model.layers[1].mlp.up_proj.weight.mul_(1e4)
    return model


def trainer_of(model, config):
    return Trainer(model, config.algorithm, config.trainer, seed=0, max_tokens=config.agent.max_tokens)


def run_step(trainer, trajectories):
    return trainer.step(trajectories, temperature=1.0)


def failing_trainer(model, folder, *overrides):
    config = load_config(None, [*PLAIN, *overrides])
    trainer = trainer_of(model, config)
    trainer.watch.write_dumps(folder / "numerics", config.model_dump(mode="json"))
    return trainer


SETTINGS = [
    [],
    ["trainer={tokens_per_micro_batch: 40, mini_batches: 2}", "algorithm.kl_coef=0.1"],
    ["trainer={tokens_per_micro_batch: 40, lanes: 2, deterministic: true, gradient_checkpointing: true}"],
]


@pytest.mark.parametrize("overrides", SETTINGS, ids=["plain", "mini-batches", "lanes"])
def test_an_update_that_is_not_finite_is_repeated_by_its_dump(overflowing, trajectories, tmp_path, overrides):
    before = {name: p.detach().clone() for name, p in overflowing.named_parameters()}
    report = run_step(failing_trainer(overflowing, tmp_path, *overrides), trajectories)
    assert report.metrics["train/updates"] == 0
    assert all(torch.equal(p, before[name]) for name, p in overflowing.named_parameters())
    files = sorted((tmp_path / "numerics").iterdir())
    assert f"agentrl repeat-update {files[0].parent}" in report.warnings[0]
    for file in files:
        found = repeat_update(read_dump(file))
        assert found.repeats
        assert found.first_forward.startswith("model.layers.1.mlp.down_proj (Linear): input finite")
        assert found.now.non_finite[0] == "the loss"
        assert all("log-probabilities" in each.not_finite for each in found.micro_batches)


def test_an_update_with_a_critic_on_the_same_trunk_is_not_repeated(overflowing, trajectories, tmp_path):
    run_step(failing_trainer(overflowing, tmp_path), trajectories)
    (file,) = (tmp_path / "numerics").iterdir()
    state = read_dump(file)
    names = "advantage episode_return behaviour_logp trainer_logp version step_version reference_logp teacher_logp"
    names += " teacher_top_ids teacher_top_logp expert entropy sample_counts seed"
    assert state["values"].keys() == set(names.split())  # as in dumps of earlier versions
    assert state["joins_critic"] is False
    with pytest.raises(UsageError, match=r"cannot be repeated: got trainer\.critic\.kind shared"):
        repeat_update({**state, "joins_critic": True})


def test_an_update_that_fails_in_one_trajectory_names_it(model, trajectories, tmp_path):
    """Finite everywhere but in one micro-batch, whose advantage is beyond what a gradient can hold."""
    trainer = failing_trainer(model, tmp_path, "trainer.tokens_per_micro_batch=1")
    estimate = trainer._objective.estimate

    def broken(episodes):
        found = estimate(episodes)
        found.advantage[-1] = 1e38
        return found

    trainer._objective.estimate = broken
    report = run_step(trainer, trajectories)
    (file,) = (tmp_path / "numerics").iterdir()
    found = repeat_update(read_dump(file))
    assert found.repeats
    assert report.metrics["train/updates_skipped"] == 1
    assert found.first_forward is None
    largest = max(found.micro_batches, key=lambda each: abs(each.loss))
    assert largest.trajectories == ("c-1",)


def test_the_command_shows_what_was_found(overflowing, trajectories, tmp_path, capsys):
    run_step(failing_trainer(overflowing, tmp_path), trajectories)
    (file,) = (tmp_path / "numerics").iterdir()
    with pytest.raises(SystemExit) as end:
        main(["repeat-update", str(file)])
    told = capsys.readouterr()
    assert not end.value.code
    assert "first output that is not finite: model.layers.1.mlp.down_proj" in told.out.replace("\n", " ")
    assert "bitwise equal" in told.err
    with pytest.raises(SystemExit):
        main(["repeat-update", str(file), "--json"])
    assert json.loads(capsys.readouterr().out)["repeats"] is True
    with pytest.raises(SystemExit) as end:
        main(["repeat-update", str(file), "--device", "nowhere"])
    assert end.value.code
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [(None, "not found"), ("nothing", "cannot be read")])
def test_what_is_no_dump_is_refused(tmp_path, text, message):
    file = tmp_path / "step.pt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_dump(file)
    torch.save({"weights": {}}, file)
    with pytest.raises(UsageError, match="is not a dump of an update: got format None"):
        read_dump(file)


def test_too_many_skips_in_a_row_end_the_run(overflowing, trajectories, tmp_path):
    trainer = failing_trainer(overflowing, tmp_path, "trainer.numerics={max_skipped: 3, dumps: 1}")
    for _ in range(2):
        run_step(trainer, trajectories)
    with pytest.raises(
        TrainingError, match=r"3 updates in a row were skipped: got gradients are not finite in the loss"
    ):
        run_step(trainer, trajectories)
    assert len(list((tmp_path / "numerics").iterdir())) == 1


def test_a_good_update_starts_the_count_anew(model, trajectories):
    trainer = trainer_of(model, load_config(None, [*PLAIN, "trainer.numerics={max_skipped: 2}"]))
    norm = model.model.norm.weight
    for value in (math.nan, None, math.nan):
        good = norm.detach().clone()
        with torch.no_grad():
            if value is not None:
                norm.fill_(value)
        report = run_step(trainer, trajectories)
        assert report.metrics["train/updates_skipped_in_a_row"] == (value is not None)
        if value is not None:
            with torch.no_grad():
                norm.copy_(good)


def test_without_a_run_nothing_is_written(overflowing, trajectories, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = run_step(trainer_of(overflowing, load_config(None, PLAIN)), trajectories)
    assert "repeat-update" not in report.warnings[0]
    assert list(tmp_path.iterdir()) == []


def test_norms_of_groups_make_up_the_norm(model, trajectories):
    metrics = run_step(trainer_of(model, load_config(None, PLAIN)), trajectories).metrics
    groups = {name: value for name, value in metrics.items() if name.startswith("train/grad_norm/")}
    assert set(groups) == {f"train/grad_norm/{each}" for each in ("embeddings", "attention", "mlp", "norms")}
    assert math.hypot(*groups.values()) == pytest.approx(metrics["train/grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("lm_head.weight", "head"),
        ("transformer.wte.weight", "embeddings"),
        ("model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("base.model.layers.0.self_attn.q_proj.lora_A.default.weight", "adapters"),
        ("model.layers.0.post_attention_layernorm.weight", "norms"),
        ("model.layers.0.mlp.gate.weight", "mlp"),
        ("anything", "other"),
    ],
)
def test_parameters_are_grouped_by_their_names(name, group):
    assert group_of(name) == group


def test_mismatch_is_told_by_the_turn_in_the_episode(model, trajectories):
    metrics = run_step(trainer_of(model, load_config(None, PLAIN)), trajectories).metrics
    by_turn = {name: value for name, value in metrics.items() if name.startswith("mismatch/turn_")}
    turns = max(len(trajectory.turns) for trajectory in trajectories)
    assert {"mismatch/turn_0", "mismatch/turn_1", "mismatch/turn_2_to_3"} <= set(by_turn)
    assert ("mismatch/turn_4_to_7" in by_turn) == (turns > 4)
    assert min(by_turn.values()) <= metrics["mismatch/prob_abs_mean"] <= max(by_turn.values())


QUIET = {"train/updates": 1.0, "train/updates_skipped": 0.0, "train/entropy": 1.0, "train/grad_norm": 0.5}
LOUD = {
    "mismatch": ({"mismatch/prob_abs_mean": 0.02}, "got 0.02, expected at most 0.01. Check that both"),
    "kl": ({"train/kl_old": 0.7}, "expected at most 0.5. Lower trainer.learning_rate"),
    "kl_reference": ({"train/kl_reference": 11.0}, "got 11, expected at most 10. Raise algorithm.kl_coef"),
    "entropy": ({"train/entropy": 0.01}, "got train/entropy 0.01, expected at least 0.05"),
    "grad_norm": ({"train/grad_norm": 50.0}, "expected at most 20 times 0.5"),
    "skipped": ({"train/updates_skipped": 1.0, "train/updates": 0.0}, "1 of 1 updates skipped"),
}


@pytest.mark.parametrize("cause", LOUD)
def test_a_cause_is_said_once_and_counted_at_every_step(cause):
    change, words = LOUD[cause]
    alarms = Alarms(NumericsConfig())
    for _ in range(max(FIRST_STEPS, MIN_HISTORY)):
        assert alarms.judge(QUIET).warnings == ()
    twin = Alarms(NumericsConfig())
    twin.restore(alarms.state())
    for each in (alarms, twin):
        first = each.judge({**QUIET, **change}, skipped="gradients are not finite in x")
        assert [words in message for message in first.warnings] == [True]
        assert [name for name, value in first.metrics.items() if value] == [f"alarms/{cause}"]
        again = each.judge({**QUIET, **change})
        assert (again.warnings, again.metrics) == ((), first.metrics)
    for _ in range(CALM):
        assert not any(alarms.judge(QUIET).metrics.values())
    assert len(alarms.judge({**QUIET, **change}).warnings) == 1


def test_limits_are_the_users(model, trajectories):
    quiet = trainer_of(model, load_config(None, [*PLAIN, "trainer.numerics.mismatch=1"]))
    assert run_step(quiet, trajectories).warnings == ()


@pytest.mark.parametrize("lanes", [1, 2])
def test_deterministic_steps_are_equal_bit_for_bit(model, trajectories, lanes):
    overrides = [f"trainer={{deterministic: true, tokens_per_micro_batch: 40, mini_batches: 2, lanes: {lanes}}}"]
    runs = []
    for _ in range(2):
        own = copy.deepcopy(model)
        trainer = trainer_of(own, load_config(None, [*PLAIN, *overrides]))
        lines = [run_step(trainer, trajectories).metrics for _ in range(3)]
        timeless = [{k: v for k, v in line.items() if not k.endswith(("seconds", "_per_s"))} for line in lines]
        runs.append((timeless, own.state_dict()))
    (first, weights), (second, others) = runs
    assert first == second
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert not torch.are_deterministic_algorithms_enabled()
