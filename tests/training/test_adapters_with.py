"""Adapters with critics, copied checkpoints, pairs and repeated updates; refused combinations."""

import copy
import json

import pytest
import torch
from support.trainers import learn_all

from agentrl.builders.adapter_checks import check_adapters
from agentrl.builders.trainers import build_trainer
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import Config, TrainerConfig
from agentrl.errors import ConfigError
from agentrl.models.lora import add_adapters, is_adapter
from agentrl.runs.preferences import check_reward_training
from agentrl.training.diagnostics.repeated_update import repeat_update
from agentrl.training.diagnostics.watch import read_dump
from agentrl.training.distributed import Ranks
from agentrl.training.preferences import PreferenceLearner, make_pairs
from agentrl.training.trainer import Trainer
from agentrl.training.weights import ModelWeights

CRITICS = {
    "own": {"kind": "own", "learning_rate": 1e-2},
    "shared": {"kind": "shared", "learning_rate": 1e-2},
}


class NoTokenizer:
    def save_pretrained(self, folder):
        """There is nothing to save."""


def config_of(path, *, lora=None, **sections):
    return Config(
        environment={"name": "maze"},
        model={"path": str(path), "device": "cpu", "lora": {"rank": 3, **(lora or {})}},
        **sections,
    )


def built(config, path, reference=None):
    return build_trainer(config, str(path), reference, ranks=Ranks())


def step(trainer, trajectories):
    metrics = trainer.step(trajectories, temperature=1.0).metrics
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "seconds"))}


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", CRITICS)
def test_a_critic_goes_on_from_a_copied_checkpoint_of_adapters(model, trajectories, tmp_path, kind):
    base, folder = tmp_path / "base", tmp_path / "step"
    model.save_pretrained(base)
    trainer = {"learning_rate": 1e-2, "critic": CRITICS[kind]}
    config = config_of(base, trainer=trainer, algorithm={"advantage": "gae", "kl_coef": 0.1})
    first = built(config, base)
    head = first.trainer.signals["critic"].head.weight.detach().clone()
    step(first.trainer, trajectories)
    assert not torch.equal(first.trainer.signals["critic"].head.weight, head)
    write_model, write_state = first.source.copy(NoTokenizer()), first.trainer.checkpoint.copy()
    first.source.save(tmp_path / "at once", NoTokenizer())
    expected = step(first.trainer, trajectories)
    folder.mkdir()
    write_model(folder / "model")
    write_state(folder)
    name = "adapter_model.safetensors"
    assert (folder / "model" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()
    again = built(config, folder / "model", reference=str(base))
    again.trainer.checkpoint.load(folder)
    assert step(again.trainer, trajectories) == pytest.approx(expected, rel=1e-12, nan_ok=True)
    for one, other in zip(first.trainer.model.parameters(), again.trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_critic_of_its_own_has_adapters_of_its_own(model, trajectories, tmp_path):
    model.save_pretrained(tmp_path)
    critic = {"trainer": {"critic": CRITICS["own"]}, "algorithm": {"advantage": "gae"}}
    trainer = built(config_of(tmp_path, **critic), tmp_path).trainer
    trunk = trainer.signals["critic"].trunk
    before, policy = trained(trunk), trained(trainer.model)
    assert before.keys() == policy.keys()
    assert all(is_adapter(name) for name in before)
    for _ in range(2):  # the head begins with 0, and B does
        step(trainer, trajectories)
    after = trained(trunk)
    assert all(not torch.equal(after[name], before[name]) for name in after if ".lora_B." in name)
    assert all(not torch.equal(after[name], trained(trainer.model)[name]) for name in after if ".lora_B." in name)


def test_pairs_teach_adapters(model, trajectories):
    plain = copy.deepcopy(model)
    add_adapters(model, config_of("base").model.lora, base="base", seed=0)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    seen, pairs = [], make_pairs(trajectories, by="rewards", per_task=1)
    settings = PreferencesConfig(learning_rate=0.02, epochs=4, pairs_per_update=len(pairs), schedule="constant")
    learn_all(PreferenceLearner(model, pairs, settings, TrainerConfig(), seed=0), seen.append)
    assert seen[-1].loss < seen[0].loss
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    merged = ModelWeights(model).weights()
    assert list(merged) == list(plain.state_dict())
    assert any(not torch.equal(merged[name], value) for name, value in plain.state_dict().items())


def test_an_update_of_adapters_is_repeated_by_its_dump(model, trajectories, tmp_path):
    config = config_of("base", lora={"target_modules": ["q_proj"]}, algorithm={"kl_coef": 0.1})
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(3e38)
        model.model.layers[1].mlp.up_proj.weight.mul_(1e4)
    add_adapters(model, config.model.lora, base="base", seed=7)
    trainer = Trainer(model, config.algorithm, config.trainer, seed=0, max_tokens=config.agent.max_tokens)
    trainer.watch.write_dumps(tmp_path, json.loads(config.model_dump_json()))
    assert step(trainer, trajectories)["train/updates"] == 0
    (file,) = tmp_path.iterdir()
    found = repeat_update(read_dump(file))
    assert found.repeats
    assert found.first_forward.startswith("model.layers.1.mlp.down_proj (Linear)")


@pytest.mark.parametrize(
    ("lora", "trainer", "message"),
    [
        ({"rank": 3}, {"processes": 2, "tensor_parallel": 2}, r"split the adapters evenly: got .*rank 3, 2 ranks"),
        (
            {"dropout": 0.1},
            {"processes": 2, "tensor_parallel": 2},
            r"different numbers in ranks: got|different numbers in ranks",
        ),
        ({"dropout": 0.1}, {"lanes": 2}, "which threads cannot share reproducibly: got .*0.1 with trainer.lanes 2"),
        ({"quantize": "nf4"}, {"processes": 2}, "4-bit weights cannot be sharded: got .* with 2 processes"),
    ],
)
def test_what_adapters_are_not_made_for_is_refused(lora, trainer, message):
    with pytest.raises(ConfigError, match=message):
        check_adapters(config_of("base", lora=lora, trainer=trainer), allows_dropout=True)


def test_a_reward_model_has_none():
    with pytest.raises(ConfigError, match=r"reward-model trains all weights: got model.lora.*Set model.lora=null"):
        check_reward_training(config_of("base"))
