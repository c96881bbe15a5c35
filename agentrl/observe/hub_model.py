"""Whether a model that is no folder can be fetched, asked once and briefly: the libraries that load it ask for long."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

from agentrl.errors import UsageError

CHECK_S = 10.0
"""Most seconds until the hub answers."""
_CONFIG = "config.json"


def check_fetchable(model: str) -> None:
    """Check that a model is a folder, in the cache of the Hugging Face hub, or on the hub.

    Args:
        model: A folder, or a name on the hub.

    Raises:
        UsageError: none of them.
    """
    if Path(model).is_dir():
        return
    try:
        if not isinstance(try_to_load_from_cache(model, _CONFIG), str):
            get_hf_file_metadata(hf_hub_url(model, _CONFIG), timeout=CHECK_S)
    except Exception as error:  # the library has many, and those of its network library
        raise UsageError(
            f"there is no model {model}",
            got=f"no such folder, and not from the Hugging Face hub: {_first_line(error)}",
            expected="a model folder, a run such as runs/latest, or a name on the hub that can be reached",
            hint="with servers, too, --model is the folder or name of the weights that they serve; only engine openai "
            "takes a service's own name of a model",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
