"""The model of a run: found, or made from nothing; its tokenizer and renderer."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.config.schema import Config
from agentrl.errors import UsageError
from agentrl.observe.model_folder import find_model
from agentrl.render.renderer import Renderer

SCRATCH = "scratch"
"""`model.path` of a model that is made from nothing."""


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a model folder, or of a name on the Hugging Face hub.

    Raises:
        UsageError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path, use_fast=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"cannot load the tokenizer of {path}",
            got=str(error).strip().splitlines()[0],
            expected="a folder with a Hugging Face tokenizer, or a name on the hub that can be reached",
        ) from error


def build_renderer(config: Config, path: str) -> Renderer:
    """The renderer of a model, checked against its chat template.

    Raises:
        TemplateError: the template rewrites history, or has no known turn boundary.
    """
    tokenizer = load_tokenizer(path)
    return Renderer(tokenizer, enable_thinking=config.agent.enable_thinking, tool_parser=config.agent.tool_parser)


def resolve_model(config: Config) -> Config:
    """The config with `model.path` as an absolute folder, so that ``runs/latest`` means today's latest for ever.

    Raises:
        UsageError: there is no model where the path points.
    """
    if config.model.path == SCRATCH:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": find_model(config.model.path)})})
