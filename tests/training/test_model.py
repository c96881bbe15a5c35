"""Loading a model: what goes wrong has one clear message."""

import json

import pytest
import torch
from transformers.utils import logging as transformers_logging

from agentrl.errors import UsageError
from agentrl.training.models.loading import load_model


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
    with pytest.raises(UsageError, match=r"no such model folder: got .*nowhere"):
        load_model(tmp_path / "nowhere", dtype="float32")


def test_folder_without_a_model(tmp_path):
    with pytest.raises(UsageError, match=r"holds no model.*config\.json"):
        load_model(tmp_path, dtype="float32")


def test_folder_with_something_else(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UsageError, match="cannot load the model"):
        load_model(tmp_path, dtype="float32")


def test_missing_weights(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot load the model"):
        load_model(tmp_path, dtype="float32")


def test_logits_that_are_not_the_heads(model, tmp_path):
    model.config.logit_scale = 0.5
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"logit_scale=0\.5"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(("device", "message"), [("gpu7", "unknown device"), ("cuda:99", "not there")])
def test_device(model, tmp_path, device, message):
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=message):
        load_model(tmp_path, dtype="float32", device=device)
