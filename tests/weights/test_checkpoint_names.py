"""What servers are sent of a mixture of experts: names, shapes and values of what transformers saves."""

import pytest
import torch
from safetensors.torch import load_file
from support.models import EXPERTS, tiny_model
from support.tokenizers import build_tokenizer

from agentrl.config.trainer import LoraConfig
from agentrl.errors import UsageError
from agentrl.models.lora import add_adapters
from agentrl.training.weights import ModelWeights
from agentrl.weights import CheckpointSource, write_served_model
from agentrl.weights import tensors as checkpoint_names

HEAD = "lm_head.weight"


def saved(model, folder):
    """As transformers writes it."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", EXPERTS)
def test_sent_tensors_equal_those_saved_by_transformers(family, tmp_path):
    model = tiny_model(family, tied=False)
    sent, expected = CheckpointSource(ModelWeights(model), model).weights(), saved(model, tmp_path)
    assert sorted(sent) == sorted(expected)
    assert len(sent) == len(expected) > len(model.state_dict())
    assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())


def test_a_loaded_model_is_sent_as_it_was_saved(tmp_path):
    first = tiny_model("qwen3_moe", tied=False)
    expected = saved(first, tmp_path)
    model = type(first).from_pretrained(tmp_path)
    sent = CheckpointSource(ModelWeights(model), model).weights()
    assert {name: tensor.shape for name, tensor in sent.items()} == {n: t.shape for n, t in expected.items()}
    assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())


def test_served_folder_has_split_experts_and_an_untied_head(tmp_path):
    model = tiny_model("qwen3_moe")
    write_served_model(model, build_tokenizer("qwen3"), tmp_path / "served")
    written = load_file(tmp_path / "served" / "model.safetensors")
    assert sorted(written) == sorted([*saved(model, tmp_path / "saved"), HEAD])
    assert torch.equal(written[HEAD], model.get_input_embeddings().weight)


def test_every_tensor_of_the_model_is_gathered_once():
    model = tiny_model("qwen3_moe")
    source, gathered = ModelWeights(model), []

    class Watched(dict):
        def __getitem__(self, name):
            gathered.append(name)
            return super().__getitem__(name)

    watched = Watched(source.weights())
    names = checkpoint_names.CheckpointNames(model)
    assert len(dict(names.apply(watched).items())) == len(names.apply(watched))
    assert gathered == list(model.state_dict())


def test_merged_adapters_leave_experts_apart():
    model = tiny_model("qwen3_moe", tied=False)
    add_adapters(model, LoraConfig(rank=2, target_modules=["q_proj"]), base="tiny", seed=0)
    sent = CheckpointSource(ModelWeights(model), model).weights()
    plain = tiny_model("qwen3_moe", tied=False)
    assert sorted(sent) == sorted(CheckpointSource(ModelWeights(plain), plain).weights())


def test_checkpoint_format_that_merges_tensors_is_rejected(monkeypatch):
    revert = checkpoint_names.revert_weight_conversion

    def joined(model, tensors):
        return revert(model, tensors) if len(tensors) == 1 else {"joined": next(iter(tensors.values()))}

    monkeypatch.setattr(checkpoint_names, "revert_weight_conversion", joined)
    with pytest.raises(UsageError, match="join tensors"):
        checkpoint_names.CheckpointNames(tiny_model("qwen3_moe"))
