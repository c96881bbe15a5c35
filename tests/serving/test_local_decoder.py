"""Decoders with weights laid out for inference give what the model gives."""

import copy

import pytest
import torch
from support.models import tiny_model

from agentrl.config.trainer import LoraConfig
from agentrl.models import matrix_products
from agentrl.models.lora import adapted_layers, add_adapters
from agentrl.serving.local.cache import RowStore
from agentrl.serving.local.forward import ForwardStep, SequenceChunk
from agentrl.serving.local.runner import LocalModelRunner, PackedDecoder, can_pack

PACKED = ("llama", "mistral", "qwen2", "qwen3")
ANSWER = 3


@pytest.fixture(params=["laid out", "as they are"])
def layout(request, monkeypatch):
    if request.param == "laid out":
        monkeypatch.setattr(matrix_products, "SMALLEST", 1)
        monkeypatch.setattr(matrix_products, "packing_is_faster", lambda: True)


@pytest.fixture
def play():
    """Feed sequences to `logits` chunk by chunk; the logits after each of the last `ANSWER` tokens of each."""

    def played(logits, sequences):
        rows = []
        store = RowStore(max_tokens=4096, max_context=512)
        for ids in sequences:
            row = store.take(len(ids))
            row.ids, row.computed = ids, 0
            rows.append(row)
        found = []
        for left in range(ANSWER - 1, -1, -1):
            chunks = [SequenceChunk(row, len(row.ids) - left - row.computed) for row in rows]
            step = ForwardStep(chunks, torch.device("cpu"))
            by_row = dict(zip((chunk.row for chunk in step.chunks), logits(step), strict=True))
            found.append(torch.stack([by_row[row] for row in rows]))
            for chunk in chunks:
                chunk.row.computed += chunk.count
        return torch.stack(found, 1).float()

    with torch.inference_mode():
        yield played


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (length,), generator=generator).tolist() for length in (300, 5, 129, 128, 20)]


def _exact(model, sequences):
    model = model.double()
    return torch.stack([model(torch.tensor([ids])).logits[0, -ANSWER:].float() for ids in sequences])


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.usefixtures("layout")
def test_logits_are_the_models(family, play, sequences):
    model = tiny_model(family)
    for name, parameter in model.named_parameters():  # norms and biases begin as ones and zeros
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    assert can_pack(model)
    found = play(PackedDecoder(model).logits, sequences)
    torch.testing.assert_close(found, _exact(model, sequences), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.usefixtures("layout")
def test_bfloat16_costs_no_more_than_in_the_models_own_layers(family, play, sequences):
    model = tiny_model(family).bfloat16()
    runner = LocalModelRunner(model)  # not prepared: it computes with the model's layers
    own, packed = (play(logits, sequences) for logits in (runner.logits, PackedDecoder(model).logits))
    exact = _exact(model, sequences).log_softmax(-1)
    of_own, of_packed = ((found.log_softmax(-1) - exact).abs().mean() for found in (own, packed))
    assert 0 < of_packed < 1.25 * of_own


@pytest.mark.usefixtures("layout")
def test_every_layer_may_have_a_bias(play, sequences):
    own = tiny_model("llama")
    config = copy.deepcopy(own.config)
    config.attention_bias = config.mlp_bias = True
    torch.manual_seed(0)
    model = type(own)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    found = play(PackedDecoder(model).logits, sequences)
    torch.testing.assert_close(found, _exact(model, sequences), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.usefixtures("layout")
def test_adapters_are_merged_in_float32_only(family, play, sequences):
    model = tiny_model(family)
    add_adapters(model, LoraConfig(rank=4), base="tiny", seed=0)
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    assert can_pack(model)
    found = play(PackedDecoder(model).logits, sequences)
    torch.testing.assert_close(found, _exact(model, sequences), atol=1e-3, rtol=1e-3)
    assert not can_pack(model.bfloat16())


def test_weights_are_laid_out_anew_only_when_they_have_changed(play, sequences):
    model = tiny_model()
    runner = LocalModelRunner(model)

    def now():
        runner.prepare()
        return play(runner.logits, sequences)

    before = now()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
        model.model.layers[0].mlp.down_proj.weight.zero_()
    runner.weights_changed()
    after = now()
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, _exact(model, sequences), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {}])
def test_other_models_keep_their_own_layers(change):
    model = tiny_model("llama" if change else "gemma")
    model.config.update(change)
    assert not can_pack(model)


def test_a_model_too_large_for_a_second_copy_keeps_its_own_layers(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr("agentrl.serving.local.runner.MAX_COPY_SHARE", 1e-12)
    assert not can_pack(model)
