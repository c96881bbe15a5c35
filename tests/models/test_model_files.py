from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
)

from agentrl.models.model_files import save_config, save_tokenizer
from agentrl.models.scratch import build_scratch_tokenizer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def written(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(file.read_text())
    return read


@pytest.mark.parametrize(
    ("config", "old"),
    [
        (Qwen2Config(rope_theta=1e6), {"rope_theta": 1e6, "rope_scaling": None}),
        (LlamaConfig(rope_theta=5e5, rope_scaling=dict(YARN)), {"rope_theta": 5e5, "rope_scaling": YARN}),
    ],
)
def test_a_config_has_the_keys_that_older_versions_read(
    config: PretrainedConfig, old: dict[str, Any], tmp_path: Path
) -> None:
    """vllm-project/vllm#42624: version 4 took the default base frequency, without a warning."""
    config.dtype = "bfloat16"
    save_config(config, tmp_path)
    found = written(tmp_path / "config.json")
    assert {name: found.get(name) for name in old} == old
    assert found["torch_dtype"] == found["dtype"] == "bfloat16"
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA_3 = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}


def test_rotary_settings_per_layer_type_are_written_for_version_4(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        rope_parameters={
            "full_attention": {"rope_theta": 2e6, **LINEAR},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        }
    )
    save_config(config, tmp_path)
    found = written(tmp_path / "config.json")
    assert {name: found.get(name) for name in GEMMA_3} == GEMMA_3
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters == config.rope_parameters
    del found["rope_parameters"]  # as version 4 reads it, and wrote it
    assert Gemma3TextConfig(**found).rope_parameters == config.rope_parameters


def test_configs_inside_a_config_have_them_too(tmp_path: Path) -> None:
    sections = {"type": "mrope", "mrope_section": [16, 24, 24]}
    config = Qwen2VLConfig(text_config={"rope_theta": 1e6, "rope_scaling": sections})
    save_config(config, tmp_path)
    text = written(tmp_path / "config.json")["text_config"]
    assert text["rope_theta"] == 1e6
    assert text["rope_scaling"]["mrope_section"] == [16, 24, 24]
    assert AutoConfig.from_pretrained(tmp_path).text_config.rope_parameters == config.text_config.rope_parameters


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_scratch_tokenizer(["hello world, hello there"], vocab_size=300, max_context=64, numbered_names=False)


def test_a_tokenizer_is_written_for_both_versions(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """modelscope/ms-swift#8098 and #8352: servers could not load what version 5 wrote."""
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|one|>", "<|two|>"]})
    save_tokenizer(tokenizer, tmp_path)
    found = written(tmp_path / "tokenizer_config.json")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in found
    assert found["additional_special_tokens"][-2:] == ["<|one|>", "<|two|>"]
    assert not found.keys() & {"backend", "is_local", "local_files_only"}


def test_a_written_tokenizer_is_the_same_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|one|>"]})
    save_config(Qwen3Config(), tmp_path)  # whose own tokenizer class splits texts at other places
    save_tokenizer(tokenizer, tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    text = "hello<|one|> world <|im_end|>\n\n12345 don't Ünï"
    assert read.encode(text) == tokenizer.encode(text)
    assert type(read) is type(tokenizer)
    assert (read.eos_token, read.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    assert read.extra_special_tokens == tokenizer.extra_special_tokens
    assert read.get_chat_template() == tokenizer.get_chat_template()
    assert read.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
