"""Loading a model: each failure has one clear message."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import FAMILIES, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    FalconH1Config,
    GraniteConfig,
    OPTConfig,
    RecurrentGemmaConfig,
)
from transformers.utils import logging as transformers_logging

from agentrl.errors import UsageError
from agentrl.models.load import check_logits, load_model

QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_loads_what_was_saved(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    assert not loaded.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name].cpu()), name


def test_loading_draws_no_bars(model, tmp_path, capfd):
    model.save_pretrained(tmp_path)
    transformers_logging.enable_progress_bar()
    load_model(tmp_path, dtype="float32")
    assert capfd.readouterr().err == ""


def test_dtype(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path, dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_dropout_is_off(model, tmp_path):
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path, dtype="float32").model.layers[0].self_attn.attention_dropout == 0.0


def test_missing_folder(tmp_path):
    with pytest.raises(UsageError, match=r"model folder not found: got .*nowhere"):
        load_model(tmp_path / "nowhere", dtype="float32")


def test_folder_without_a_model(tmp_path):
    with pytest.raises(UsageError, match=r"no model found.*config\.json"):
        load_model(tmp_path, dtype="float32")


def test_folder_with_something_else(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UsageError, match="cannot load the model"):
        load_model(tmp_path, dtype="float32")


def test_missing_weights(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot load the model"):
        load_model(tmp_path, dtype="float32")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop(QUERY), f"got no {QUERY}, expected all weights of the architecture"),
        (
            lambda weights: weights.update({QUERY: weights[QUERY][:-1].clone()}),
            f"got {QUERY} of shape [15, 16], not [16, 16]",
        ),
    ],
)
def test_weights_that_the_files_lack_are_never_random(model, tmp_path, change, words, capfd):
    model.save_pretrained(tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(UsageError, match="do not contain all of its weights") as caught:
        load_model(tmp_path, dtype="float32")
    assert words in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_head_that_the_config_ties_to_another_embedding(tmp_path, is_copy):
    tied = tiny_model("qwen2", tied=True)
    tied.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone() if is_copy else embedding + 1}, path, {"format": "pt"})
    if is_copy:
        loaded = load_model(tmp_path, dtype="float32")
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        return
    with pytest.raises(UsageError, match=r"two different matrices.*tie_word_embeddings: false"):
        load_model(tmp_path, dtype="float32")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    head = load_model(tmp_path, dtype="float32", device="cpu").lm_head.weight
    assert torch.equal(head, embedding + 1)


@pytest.mark.parametrize("left", [0, 7, 1000])
def test_a_file_of_weights_that_is_cut_short(model, tmp_path, left):
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(UsageError, match="cannot load the model"):
        load_model(tmp_path, dtype="float32")


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
STATE = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
RECURRENT = {"num_hidden_layers": 3, "lru_width": 32, "logits_soft_cap": 3.0}


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        (CohereConfig(**SMALL, logit_scale=0.5), "logits after"),
        (GraniteConfig(**SMALL, logits_scaling=8.0), "logits after"),
        (FalconH1Config(**SMALL, **STATE, lm_head_multiplier=0.04), "logits after"),
        (RecurrentGemmaConfig(**SMALL | RECURRENT), "logits after"),
        (BertConfig(**SMALL, is_decoder=True), "hidden states before"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_logits_that_are_not_the_product_of_hidden_states_and_head(config, changed, tmp_path):
    """Log-probabilities of these models would be wrong by up to several nats; no two scale under the same key."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"changes its {changed}"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_known_families(family):
    model = tiny_model(family)
    for dtype in (torch.float32, torch.bfloat16):
        check_logits("model", model.to(dtype))
        check_logits("model", model.to(dtype).to("meta"))
        model = tiny_model(family)


@pytest.mark.parametrize(
    "config", [GraniteConfig(**SMALL, logits_scaling=1.0), FalconH1Config(**SMALL, **STATE), OPTConfig(**SMALL)]
)
def test_logits_of_models_that_could_change_them(config):
    check_logits("model", AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(("device", "message"), [("gpu7", "unknown device"), ("cuda:99", "device not found")])
def test_device(model, tmp_path, device, message):
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=message):
        load_model(tmp_path, dtype="float32", device=device)
