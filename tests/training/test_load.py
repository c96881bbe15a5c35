"""Loading a model: each failure has one clear message."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from agentrl.errors import UsageError
from agentrl.models.load import load_model

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


@pytest.mark.parametrize("left", [0, 7, 1000])
def test_a_file_of_weights_that_is_cut_short(model, tmp_path, left):
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(UsageError, match="cannot load the model"):
        load_model(tmp_path, dtype="float32")


def test_logits_that_are_not_the_heads(model, tmp_path):
    model.config.logit_scale = 0.5
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"logit_scale=0\.5"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(("device", "message"), [("gpu7", "unknown device"), ("cuda:99", "device not found")])
def test_device(model, tmp_path, device, message):
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=message):
        load_model(tmp_path, dtype="float32", device=device)
