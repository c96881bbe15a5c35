"""A reward model: its output, the Bradley-Terry loss, and invalid models."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainers import learn_all

from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import ScratchModelConfig, TrainerConfig
from agentrl.errors import UsageError
from agentrl.models.scratch import build_scratch_model
from agentrl.training.optimizer import PolicyOptimizer
from agentrl.training.preferences import RewardLearner, RewardModel, TextPair, bradley_terry

PAIRS = [TextPair(better=f"up {i} " * (i + 1), worse=f"down {i} " * (3 - i)) for i in range(3)]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A folder with a language model of a few thousand weights."""
    folder = tmp_path_factory.mktemp("model")
    sizes = ScratchModelConfig(layers=1, hidden_size=16, heads=2, kv_heads=1, vocab_size=300, max_context=64)
    build_scratch_model(folder, ["up down up down 0 1 2"] * 20, sizes, seed=0)
    return folder


@pytest.fixture
def model(language_model):
    return RewardModel(language_model, dtype="float32", device="cpu", new_head=True, seed=1)


def test_a_text_has_the_same_reward_alone_and_among_others(model, tmp_path):
    texts = [text for pair in PAIRS for text in (pair.better, pair.worse)]
    together = model.rewards(texts).tolist()
    assert together == pytest.approx([model.score(text) for text in texts], abs=1e-6)
    assert len(set(together)) == len(texts)
    model.source.save(tmp_path, model.tokenizer)
    again = RewardModel(tmp_path, dtype="float32", device="cpu")
    assert again.score(texts[0]) == pytest.approx(together[0], abs=1e-6)


def test_of_a_long_text_the_end_is_read(language_model):
    short = RewardModel(language_model, dtype="float32", device="cpu", new_head=True, seed=1, max_tokens=4)
    assert short.score("down down down up up up up up up") == short.score("up up up up up up up up up up")
    assert math.isfinite(short.score(""))


def test_special_tokens_that_a_policy_spells_are_text(model):
    special = model.tokenizer.all_special_ids
    assert special
    for token in map(model.tokenizer.convert_ids_to_tokens, special):
        assert not set(model._encode(f"up {token} down")) & set(special)


def test_the_loss_is_that_of_bradley_and_terry():
    better, worse = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([0.0, 1.0, 0.5]).double()
    expected = [math.log1p(math.exp(-1.0)), math.log1p(math.exp(3.0)), math.log(2)]
    assert bradley_terry(better, worse).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("budget", [8192, 1])
def test_the_gradient_does_not_depend_on_micro_batches(model, monkeypatch, budget):
    found, update = [], PolicyOptimizer.update

    def spy(self):
        found.append({name: p.grad.clone() for name, p in self._parameters.items() if p.grad is not None})
        return update(self)

    monkeypatch.setattr(PolicyOptimizer, "update", spy)
    exact = copy.deepcopy(model.model)
    trainer = TrainerConfig(tokens_per_micro_batch=budget)
    settings = PreferencesConfig(learning_rate=1e-3)
    told = learn_all(RewardLearner(model, PAIRS, settings, trainer, seed=0))
    model.model = exact
    rewards = model.rewards([text for pair in PAIRS for text in (pair.better, pair.worse)]).view(-1, 2)
    loss = bradley_terry(rewards[:, 0], rewards[:, 1]).mean()
    loss.backward()
    assert told.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    assert told.extra["margin"] == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).detach().mean()), abs=1e-6)
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(found[0][name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_reward_model_learns_which_is_better(model):
    settings = PreferencesConfig(learning_rate=5e-3, epochs=15)
    last = learn_all(RewardLearner(model, PAIRS, settings, TrainerConfig(), seed=0))
    assert last.update == last.updates == 15
    assert (last.extra["accuracy"], last.non_finite) == (1.0, ())
    assert last.loss < 0.3


def rewritten(folder, config=lambda config: config, tensors=lambda tensors: tensors):
    """Change the config and the tensors of a model's folder."""
    (folder / "config.json").write_text(json.dumps(config(json.loads((folder / "config.json").read_text()))))
    file = folder / "model.safetensors"
    save_file(tensors(load_file(file)), file, {"format": "pt"})
    return folder


def without_labels(config):
    return {key: value for key, value in config.items() if key not in ("num_labels", "id2label", "label2id")}


def test_a_config_that_does_not_name_its_labels_has_one(model, tmp_path):
    # OpenRLHF#1039: transformers takes two for granted, and OpenRLHF's models have one
    model.source.save(tmp_path, model.tokenizer)
    again = RewardModel(rewritten(tmp_path, without_labels), dtype="float32", device="cpu")
    assert again.score("up") == pytest.approx(model.score("up"), abs=1e-6)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"bias": torch.ones(1)}, "output that its architecture would ignore.*score.bias"),
        ({"weight": torch.ones(2, 16)}, r"score.weight of shape \[2, 16\]"),
        ({"weight": None}, "no score.weight"),  # RLHFlow/Online-RLHF#4: transformers would make a new one
    ],
    ids=["bias", "two", "none"],
)
def test_an_output_that_cannot_be_read_is_refused(model, tmp_path, output, message):
    def changed(tensors):
        new = tensors | {f"score.{name}": tensor for name, tensor in output.items()}
        return {name: tensor for name, tensor in new.items() if tensor is not None}

    model.source.save(tmp_path, model.tokenizer)
    with pytest.raises(UsageError, match=message):
        RewardModel(rewritten(tmp_path, without_labels, changed), dtype="float32", device="cpu")


def test_a_language_model_is_no_reward_model(language_model, tmp_path):
    with pytest.raises(UsageError, match=r"is not a reward model: got \w+ForCausalLM.*agentrl reward-model --from RUN"):
        RewardModel(language_model, dtype="float32", device="cpu")
    with pytest.raises(UsageError, match="cannot load the reward model"):
        RewardModel(tmp_path, dtype="float32", device="cpu")
    with pytest.raises(UsageError, match=r"cannot be moved to cudo.*Check model\.device"):
        RewardModel(language_model, dtype="float32", device="cudo", new_head=True)
