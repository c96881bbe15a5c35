"""What tells a model from an earlier one of the same name: digests of its files, a revision, a seed."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from agentrl.builders.models import SCRATCH
from agentrl.config.config import Config
from agentrl.models.lora import ADAPTERS
from agentrl.observe.file_identity import file_digest

MODEL_FILES = {".safetensors", ".bin", ".gguf", ".json", ".jinja", ".txt", ".model", ".py"}
"""Endings of the files that make a model: weights, sizes, tokenizer, chat template."""


def weights(path: str, config: Config) -> list[str]:
    """Return the files of a model with their digests; of a name on the hub its revision; of a new model its seed."""
    if path == SCRATCH:
        return [path, f"seed {config.run.seed}"]
    if not Path(path).is_dir():
        cached = try_to_load_from_cache(path, "config.json")
        return [path, f"revision {Path(cached).parent.name}" if isinstance(cached, str) else "not in the cache"]
    return model_files(path)


def model_files(model: str) -> list[str]:
    """Return the files in a model's folder with their digests; none of a folder that is not on this machine."""
    folder = Path(model)
    if not folder.is_dir():
        return []
    found = [*folder.iterdir(), *(folder / ADAPTERS).rglob("*")]
    files = sorted(file for file in found if file.suffix in MODEL_FILES and file.is_file())
    return [f"{file.relative_to(folder)} {file_digest(file)}" for file in files]
