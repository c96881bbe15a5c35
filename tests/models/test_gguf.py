"""GGUF files: embedding and output head that are copies of one matrix are tied again; low-bit files become bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from support.models import tiny_model
from support.tokenizers import build_tokenizer
from torch import Tensor

from agentrl.cli import main
from agentrl.models.gguf import load_gguf

Q5, Q8, F32 = GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of a layer's parts in a GGUF file."""


def write_gguf(
    file: Path, *, weights: GGMLQuantizationType, head: tuple[Tensor, GGMLQuantizationType] | None
) -> Tensor:
    """Write a small Qwen2 model; return its embedding."""
    tokenizer = build_tokenizer("qwen2.5")
    model = tiny_model("qwen2", vocab_size=len(tokenizer), hidden_size=64, heads=2, kv_heads=1, layers=1)
    writer = GGUFWriter(file, "qwen2")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    _add_tokenizer(writer, tokenizer)

    def add(name: str, tensor: Tensor, kind: GGMLQuantizationType) -> None:
        writer.add_tensor(name, quantize(tensor.detach().float().numpy(), kind), raw_dtype=kind)

    embedding = model.get_input_embeddings().weight.detach()
    add("token_embd.weight", embedding, weights)
    add("output_norm.weight", model.model.norm.weight, F32)
    for name, tensor in model.model.layers[0].named_parameters():
        part, _, kind = name.rpartition(".")
        add(f"blk.0.{LAYER[part]}.{kind}", tensor, weights if tensor.dim() == 2 else F32)
    if head is not None:
        add("output.weight", *head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


def _add_tokenizer(writer: GGUFWriter, tokenizer: Any) -> None:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokenizer.convert_ids_to_tokens(token) for token in range(len(tokenizer))])
    writer.add_token_types([3 if token in tokenizer.added_tokens_decoder else 1 for token in range(len(tokenizer))])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def embedding_of_file() -> Tensor:
    """The embedding that `write_gguf` writes."""
    vocabulary = len(build_tokenizer("qwen2.5"))
    model = tiny_model("qwen2", vocab_size=vocabulary, hidden_size=64, heads=2, kv_heads=1, layers=1)
    return model.get_input_embeddings().weight.detach()


@pytest.mark.parametrize(("embedding_bits", "head_bits"), [(Q5, Q8), (Q8, Q5)])
def test_copies_are_tied_to_the_one_with_more_bits(
    tmp_path: Path, embedding_bits: GGMLQuantizationType, head_bits: GGMLQuantizationType
) -> None:
    original = write_gguf(tmp_path / "m.gguf", weights=embedding_bits, head=(embedding_of_file(), head_bits))
    loaded = load_gguf(tmp_path / "m.gguf", dtype="float32")
    assert loaded.retied == pytest.approx(0.043, abs=0.005)
    assert loaded.model.config.tie_word_embeddings is True
    embedding, head = loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()
    assert embedding.weight.data_ptr() == head.weight.data_ptr()
    error = (embedding.weight - original).norm() / original.norm()
    assert error < 0.01  # 8 bits; with 5 it is 0.04


def test_untied_head_stays_untied(tmp_path: Path) -> None:
    embedding = embedding_of_file()
    head = embedding + 0.2 * torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)) * embedding.std()
    write_gguf(tmp_path / "m.gguf", weights=Q8, head=(head, Q8))
    loaded = load_gguf(tmp_path / "m.gguf")
    assert loaded.retied is None
    assert loaded.model.config.tie_word_embeddings is False
    assert not torch.equal(loaded.model.get_input_embeddings().weight, loaded.model.get_output_embeddings().weight)


@pytest.mark.parametrize(
    ("weights", "asked", "expected"),
    [
        (Q5, "auto", torch.bfloat16),
        (Q8, "auto", torch.float32),
        (F32, "auto", torch.float32),
        (Q5, "float32", torch.float32),
        (F32, "bfloat16", torch.bfloat16),
    ],
)
def test_the_format_follows_the_bits_unless_it_is_chosen(
    tmp_path: Path, weights: GGMLQuantizationType, asked: Any, expected: torch.dtype
) -> None:
    write_gguf(tmp_path / "m.gguf", weights=weights, head=None)
    assert load_gguf(tmp_path / "m.gguf", dtype=asked).model.dtype is expected


def test_model_add_reports_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("AGENTRL_MODELS", str(tmp_path / "models"))
    write_gguf(tmp_path / "m.gguf", weights=Q5, head=(embedding_of_file(), Q8))
    with pytest.raises(SystemExit) as ended:
        main(["model", "add", str(tmp_path / "m.gguf"), "small"])
    assert not ended.value.code
    said = capsys.readouterr().err
    assert "tied the output head to the embedding again" in said
    assert "stored in bfloat16 (the file has 6." in said
    assert json.loads((tmp_path / "models" / "small" / "config.json").read_text())["tie_word_embeddings"] is True


def test_model_add_stores_the_format_that_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_MODELS", str(tmp_path / "models"))
    write_gguf(tmp_path / "m.gguf", weights=Q5, head=None)
    with pytest.raises(SystemExit) as ended:
        main(["model", "add", str(tmp_path / "m.gguf"), "wide", "--dtype", "float32"])
    assert not ended.value.code
    assert json.loads((tmp_path / "models" / "wide" / "config.json").read_text())["dtype"] == "float32"
