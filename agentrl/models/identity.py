"""Identity of a model, which distinguishes models of the same name: file digests, a hub revision, or a seed."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from agentrl.config.config import SCRATCH, Config
from agentrl.models.lora import ADAPTERS
from agentrl.observe.file_identity import file_digest

NOT_CACHED = "not in the cache"
"""Identity of a model of the hub that is not on this machine."""
MODEL_FILES = {".safetensors", ".bin", ".gguf", ".json", ".jinja", ".txt", ".model", ".py"}
"""Suffixes of the files of a model: weights, config, tokenizer, chat template."""


def weights(path: str, config: Config) -> list[str]:
    """Return the file digests of a local model, the revision of a model on the hub, or the seed of a new model."""
    if path == SCRATCH:
        return [path, f"seed {config.run.seed}"]
    if not Path(path).is_dir():
        cached = try_to_load_from_cache(path, "config.json")
        return [path, f"revision {Path(cached).parent.name}" if isinstance(cached, str) else NOT_CACHED]
    return model_files(path)


def model_files(model: str) -> list[str]:
    """Return the files in a model's folder with their digests; empty if the folder is not on this machine."""
    folder = Path(model)
    if not folder.is_dir():
        return []
    found = [*folder.iterdir(), *(folder / ADAPTERS).rglob("*")]
    files = sorted(file for file in found if file.suffix in MODEL_FILES and file.is_file())
    return [f"{file.relative_to(folder)} {file_digest(file)}" for file in files]
