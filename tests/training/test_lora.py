"""Adapters: the base computes as before, few tensors train, merged weights compute the same, files can be read back."""

import copy
import functools
import json
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import tiny_model
from support.trainers import learn_all, state_of
from transformers import AutoModelForCausalLM

from agentrl.builders.trainers import load_policy
from agentrl.config.config import (
    AlgorithmConfig,
    Config,
    TrainerConfig,
)
from agentrl.config.model_size import ModelSize
from agentrl.config.trainer import LoraConfig, SFTConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.models.load import load_model
from agentrl.models.lora import (
    adapter_dropout,
    add_adapters,
    disable_adapters,
    has_adapters,
    load_adapter,
    read_lora_config,
)
from agentrl.training.checkpoint import save_adapter_folder
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.sft import SupervisedLearner
from agentrl.training.trainer import Trainer
from agentrl.training.weights import ModelWeights

IDS = torch.arange(3, 30)
SEQUENCE = ScoredSequence(input_ids=IDS[:-1], positions=torch.arange(26), targets=IDS[1:])
LORA = LoraConfig(rank=4)
SAVED = {
    "adapters alone": LORA,
    "with a tied embedding": LoraConfig(rank=2, alpha=3.0, modules_to_save=["embed_tokens"]),
}


class NoTokenizer:
    def save_pretrained(self, folder):
        """There is nothing to save."""


@torch.no_grad()
def scores(model):
    return score(model, [SEQUENCE], temperature=1.0).logp


def moved(model, seed=1):
    """As if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator))
    return model


def adapted(lora=LORA, base="base", family="qwen3"):
    model = tiny_model(family)
    add_adapters(model, lora, base=str(base), seed=3)
    return model


def trainer_of(model, reference=None, **algorithm):
    config = TrainerConfig(learning_rate=1e-2, mini_batches=2, tokens_per_micro_batch=60)
    return Trainer(
        model,
        AlgorithmConfig(kl_coef=0.1, **algorithm),
        config,
        seed=0,
        max_tokens=100,
        signal_models={"reference": reference},
    )


def step(trainer, trajectories):
    return trainer.step(trajectories, temperature=1.0)


def test_adapters_change_nothing_until_they_are_trained():
    plain = scores(tiny_model())
    model = adapted()
    assert torch.equal(scores(model), plain)
    changed = scores(moved(model))
    assert not torch.allclose(changed, plain, atol=1e-2)
    with disable_adapters(model):
        assert torch.equal(scores(model), plain)
    assert torch.equal(scores(model), changed)


@pytest.mark.parametrize(
    ("weights", "autocast", "tolerance"),
    [(torch.float32, False, 1e-5), (torch.float32, True, 2e-2), (torch.bfloat16, False, 2e-2)],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_layer_computes_what_peft_computes(weights, autocast, tolerance, dropout):
    model = moved(adapted(LoraConfig(rank=4, alpha=12.0, dropout=dropout)))
    layer = model.model.layers[0].mlp.up_proj
    assert type(layer) is not peft.tuners.lora.Linear
    layer.base_layer.to(weights)
    inputs = torch.linspace(-1, 1, 2 * 3 * layer.in_features).reshape(2, 3, -1).to(weights).requires_grad_()
    products = []
    layer.base_layer.register_forward_hook(lambda *_: products.append(1))
    results = []
    with adapter_dropout(model, seed=0):
        for forward in (layer.forward, functools.partial(peft.tuners.lora.Linear.forward, layer)):
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = forward(inputs)
            found.float().square().sum().backward()
            tensors = (inputs, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            results.append([found, *(tensor.grad for tensor in tensors)])
            for tensor in tensors:
                tensor.grad = None
    assert len(products) == 2
    for own, wanted in zip(*results, strict=True):
        assert own.dtype is wanted.dtype
        assert (own - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]])
def test_their_size_is_known_before(targets):
    lora = LoraConfig(rank=3, target_modules=targets)
    sizes = {"layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab_size": 64, "tied": True}
    model = adapted(lora)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert ModelSize(feed_forward_size=64, **sizes).adapter_parameters(lora) == trained


def test_the_seed_decides_the_adapters():
    one, same = adapted(), adapted()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), same.parameters(), strict=True))
    other = tiny_model()
    add_adapters(other, LORA, base="base", seed=4)
    assert any(not torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("lora", SAVED.values(), ids=SAVED)
def test_a_step_trains_what_is_asked_and_nothing_else(trajectories, lora):
    model = adapted(lora)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trainer_of(model)
    report = step(trainer, trajectories)
    assert report.metrics["train/grad_norm"] > 0
    for name, parameter in model.named_parameters():
        is_trained = ".lora_" in name or (bool(lora.modules_to_save) and "embed_tokens" in name)
        assert parameter.requires_grad == is_trained
        assert torch.equal(parameter, before[name]) != is_trained, name
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = state_of(trainer)["optimizer"]["adamw"]["state"].values()
    assert sum(state["exp_avg"].numel() for state in moments) == trained


def test_the_base_is_the_reference_without_a_second_model(trajectories):
    model = moved(adapted())
    reference = tiny_model()
    with_copy = copy.deepcopy(model)
    free, dear = trainer_of(model), trainer_of(with_copy, reference)
    for _ in range(2):
        found, expected = (step(trainer, trajectories).metrics for trainer in (free, dear))
        assert found["train/kl_reference"] == pytest.approx(expected["train/kl_reference"], rel=1e-5)
        assert found["train/kl_reference"] > 1e-4
    for one, other in zip(model.parameters(), with_copy.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lora", SAVED.values(), ids=SAVED)
def test_merged_weights_have_the_names_of_the_base_and_compute_the_same(lora):
    model = moved(adapted(lora))
    merged = ModelWeights(model).weights()
    plain = tiny_model()
    assert list(merged) == list(plain.state_dict())
    plain.load_state_dict({name: merged[name] for name in merged})
    torch.testing.assert_close(scores(plain), scores(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lora", SAVED.values(), ids=SAVED)
def test_saved_adapters_are_small_and_load_in_agentrl_and_peft(tmp_path, lora):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_model().save_pretrained(base)
    model = moved(adapted(lora, base))
    save_adapter_folder(model, NoTokenizer(), folder, trained=ModelWeights(model).trained_tensors())
    expected = scores(model)

    again = adapted(lora, base)
    load_adapter(again, folder)
    assert torch.equal(scores(again), expected)
    loaded = load_model(folder, dtype="float32", device="cpu")
    assert not has_adapters(loaded)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    torch.testing.assert_close(scores(loaded), expected, atol=1e-5, rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_peft = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    torch.testing.assert_close(scores(by_peft.base_model.model), expected, atol=1e-5, rtol=1e-5)
    if not lora.modules_to_save:
        sizes = [(path / name).stat().st_size for path, name in
                 ((folder, "adapter_model.safetensors"), (base, "model.safetensors"))]  # fmt: skip
        assert sizes[0] < sizes[1]


def test_a_step_after_a_resume_is_the_step_without_one(tmp_path, trajectories):
    base, folder = tmp_path / "base", tmp_path / "step"
    tiny_model().save_pretrained(base)
    config = Config(environment={"name": "maze"}, model={"path": str(base), "device": "cpu", "lora": {"rank": 4}})
    first = trainer_of(load_policy(config, str(base)))
    step(first, trajectories)
    folder.mkdir()
    first.checkpoint.save(folder)
    save_adapter_folder(
        first.model, NoTokenizer(), folder / "model", trained=ModelWeights(first.model).trained_tensors()
    )
    second = trainer_of(load_policy(config, str(folder / "model"), base_path=str(base)))
    second.checkpoint.load(folder)
    for trainer in (first, second):
        step(trainer, trajectories)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_warm_start_trains_adapters_and_drops_out(trajectories):
    losses = []
    for dropout in (0.0, 0.5):
        model = adapted(LoraConfig(rank=4, dropout=dropout))
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        settings = SFTConfig(tokens_per_update=100, learning_rate=1e-2, epochs=3)
        torch.manual_seed(0)
        learner = SupervisedLearner(model, trajectories, settings, TrainerConfig(), seed=0)
        losses.append(learn_all(learner).loss)
        assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
        assert torch.equal(scores(model), scores(model))
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["nonsense"]}, r"target_modules matches no layer.*\['nonsense'\]"),
        (
            {"target_modules": ["lm_head"]},
            r"output head \(lm_head\) cannot have an adapter.*model.lora.modules_to_save",
        ),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens is not a linear layer"),
        ({"target_modules": ["input_layernorm"]}, "a layer that cannot have an adapter"),
        ({"modules_to_save": ["nonsense"]}, "modules_to_save matches no module: got nonsense"),
    ],
)
def test_layers_that_cannot_be_adapted(lora, message):
    with pytest.raises(ConfigError, match=message):
        adapted(LoraConfig(**lora))


def test_another_rank_than_the_file_has(tmp_path):
    model = adapted()
    save_adapter_folder(model, NoTokenizer(), tmp_path, trained=ModelWeights(model).trained_tensors())
    with pytest.raises(UsageError, match=r"does not fit the model and model.lora.*rank 2"):
        load_adapter(adapted(LoraConfig(rank=2)), tmp_path)


@pytest.mark.parametrize(
    ("renamed", "found"),
    [
        ((".model.layers.", ".model.language_model.layers."), r"[1-9]\d* tensors are missing, and [1-9]\d* are not of"),
        (("base_model.model.", ""), r"[1-9]\d* tensors are missing, and [1-9]\d* are not of"),
        ((".layers.1.", ".layers.7."), r"[1-9]\d* tensors are missing, and [1-9]\d* are not of .*layers\.7"),
        ((".layers.1.", None), r"[1-9]\d* tensors are missing, and 0 are not of"),
        (None, r"0 tensors are missing, and 1 are not of .*layers\.9"),
    ],
    ids=["prefix", "no-prefix", "layer", "fewer", "more"],
)
def test_an_adapter_whose_tensors_are_not_the_bases_is_refused(tmp_path, renamed, found):
    # vllm#34186: nothing fits, or only a part, and the base answers as if there were no adapter
    base, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_model().save_pretrained(base)
    model = moved(adapted(base=base))
    save_adapter_folder(model, NoTokenizer(), folder, trained=ModelWeights(model).trained_tensors())
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    if renamed is None:
        name = next(name for name in tensors if ".layers.1." in name)
        tensors[name.replace(".layers.1.", ".layers.9.")] = tensors[name].clone()
    elif renamed[1] is None:
        tensors = {name: tensor for name, tensor in tensors.items() if renamed[0] not in name}
    else:
        tensors = {name.replace(*renamed): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)
    with pytest.raises(UsageError, match=f"does not fit its base.*{found}"):
        load_model(folder, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha_pattern": {"q_proj": 64}},
        {"rank_pattern": {"q_proj": 4}},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"alora_invocation_tokens": [1, 2]},
        {"use_rslora": True},
    ],
    ids=str,
)
def test_an_adapter_with_other_scales_or_another_base_is_refused(tmp_path, settings):
    """Their tensors have the names and shapes of plain adapters, but would compute another policy."""
    plain = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    peft.LoraConfig(**plain).save_pretrained(tmp_path)
    assert read_lora_config(tmp_path).scale == 2
    peft.LoraConfig(**plain, **settings).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"a kind of adapter .* {next(iter(settings))}"):
        read_lora_config(tmp_path)


def test_a_base_that_is_gone(tmp_path):
    model = adapted(base=tmp_path / "gone")
    save_adapter_folder(model, NoTokenizer(), tmp_path, trained=ModelWeights(model).trained_tensors())
    with pytest.raises(UsageError, match=r"base of an adapter was not found.*gone.*base_model_name_or_path"):
        load_model(tmp_path, dtype="float32")
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(UsageError, match="base of an adapter was not found: got none"):
        load_model(tmp_path, dtype="float32")


def test_four_bits_need_a_gpu(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    lora = {"quantize": "nf4"}
    config = Config(environment={"name": "maze"}, model={"path": str(tmp_path), "device": "cpu", "lora": lora})
    with pytest.raises(ConfigError, match=r"quantize needs a GPU: got model.device cpu.*Remove model"):
        load_policy(config, str(tmp_path))
