"""Config and tokenizer files of a model folder that versions 4 and 5 of transformers read identically.

Version 5 renamed keys and does not write the old ones. Version 4, and servers built on it, then silently use a wrong
base frequency of the rotary embedding, or cannot load the tokenizer. Both versions can read files with both names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

CONFIG_FILE, TOKENIZER_CONFIG_FILE = "config.json", "tokenizer_config.json"
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
"""Rotary settings that version 4 has at the top level of a config; the others are in its ``rope_scaling``."""
_LAYERS = ("full_attention", "sliding_attention")
"""Layer types with their own rotary settings. In version 4, ``rope_scaling`` belongs to the first type."""
_GENERAL_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Tokenizer class of version 5, and its name in version 4, which version 5 accepts as well."""
_INTERNAL = ("backend", "is_local", "local_files_only")
"""Keys of a tokenizer's config that depend only on how this process loaded it."""


def save_config(config: PretrainedConfig, folder: Path) -> None:
    """Write a model's config."""
    config.save_pretrained(folder)
    complete_config(folder)


def complete_config(folder: Path) -> None:
    """Add the old names of renamed keys to the config that version 5 of transformers wrote to a folder."""
    path = folder / CONFIG_FILE
    _write(path, _with_old_keys(json.loads(path.read_text(encoding="utf-8"))))


def _with_old_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, or one of the configs in it, with the keys of both versions."""
    found = {name: _with_old_keys(value) if _is_config(value) else value for name, value in config.items()}
    if isinstance(found.get("dtype"), str):
        found.setdefault("torch_dtype", found["dtype"])
    rope = found.get("rope_parameters")
    if isinstance(rope, dict) and all("rope_theta" in (rope.get(kind) or {}) for kind in _LAYERS):
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]  # of Gemma 3; Olmo 3 has one base
        rope = rope["full_attention"]
    if isinstance(rope, dict) and "rope_theta" in rope:
        found |= {name: rope[name] for name in _ROPE_KEYS if name in rope}
        scaling = {name: value for name, value in rope.items() if name not in _ROPE_KEYS}
        if scaling.keys() - {"rope_type"} or scaling.get("rope_type", "default") != "default":
            found["rope_scaling"] = scaling
    return found


def _is_config(value: object) -> bool:
    return isinstance(value, dict) and "model_type" in value


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer with its chat template."""
    tokenizer.save_pretrained(folder)
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():  # a mistral-common tokenizer has only its own file
        return
    written = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in written.items() if name not in _INTERNAL}
    kept["tokenizer_class"] = _GENERAL_CLASS.get(kept.get("tokenizer_class", ""), kept.get("tokenizer_class"))
    if isinstance(kept.get("extra_special_tokens"), list):
        kept["additional_special_tokens"] = kept.pop("extra_special_tokens")
    _write(path, kept)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
