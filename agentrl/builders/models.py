"""Model of a run: lookup or creation, tokenizer, renderer, and compatibility checks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerFast
from transformers.utils.hub import CHAT_TEMPLATE_FILE

from agentrl.builders.live import is_live
from agentrl.builders.scratch import write_scratch_model
from agentrl.config.algorithm import POLICY
from agentrl.config.config import SCRATCH, Config
from agentrl.config.section import Section
from agentrl.errors import ConfigError, UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.models.load import load_model
from agentrl.models.lora import check_one_model, find_adapter, is_adapter_folder
from agentrl.models.matrix_products import FLOAT32_HEAD
from agentrl.models.vision import MODEL_TYPES
from agentrl.observe.files import writing
from agentrl.observe.model_folder import check_fetchable, find_model
from agentrl.render.chat_template import find_chat_template, read_chat_template
from agentrl.render.images import ImageProcessor
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import check_same_tokens, load_tokenizer, token_difference
from agentrl.render.translation import Translator
from agentrl.rollout.loop_choice import check_rendering
from agentrl.rollout.waits import WaitTracker
from agentrl.training.checkpoint import save_model_folder, system_errors

SHARD_SIZE = "5GB"
"""Maximum size of a file of an exported model."""


def resolve_model(config: Config, *, several: bool = False) -> Config:
    """Return the config with absolute paths of its models, so that a later change of ``runs/latest`` has no effect.

    These are ``model.path``, ``model.chat_template``, ``algorithm.teacher.path``, ``algorithm.expert.trajectories``,
    ``agent.reward_model.path``, ``trainer.critic.path``, ``trainer.process_reward.path``, ``trainer.episodes`` and the
    adapters' paths.

    Args:
        config: Config of a run.
        several: Allow several adapters in ``model.path``.

    Raises:
        UsageError: a path contains no model, or a model cannot be downloaded.
    """
    changes: dict[str, Section] = {}
    if config.model.path != SCRATCH:
        template = config.model.chat_template
        found = {
            "path": _resolve_path(config.model.path, several=several),
            "chat_template": template and find_chat_template(template),
        }
        changes["model"] = config.model.model_copy(update=found)
    resolved: dict[str, Section] = {}
    if (teacher := config.algorithm.teacher) is not None and teacher.path != POLICY:
        resolved["teacher"] = teacher.model_copy(update={"path": _resolve_path(teacher.path)})
    if (expert := config.algorithm.expert) is not None and expert.trajectories is not None:
        resolved["expert"] = expert.model_copy(update={"trajectories": str(Path(expert.trajectories).resolve())})
    changes["algorithm"] = config.algorithm.model_copy(update=resolved)
    if (reader := config.agent.reward_model) is not None:
        read = reader.model_copy(update={"path": _resolve_path(reader.path)})
        changes["agent"] = config.agent.model_copy(update={"reward_model": read})
    models: dict[str, Section | str] = {}
    if config.trainer.episodes is not None:
        models["episodes"] = str(Path(config.trainer.episodes).resolve())
    if (critic := config.trainer.critic) is not None and critic.path is not None:
        models["critic"] = critic.model_copy(update={"path": _resolve_path(critic.path)})
    if (judge := config.trainer.process_reward) is not None and judge.path is not None:
        models["process_reward"] = judge.model_copy(update={"path": _resolve_path(judge.path)})
    changes["trainer"] = config.trainer.model_copy(update=models)
    adapters = {
        name: section
        if section.path is None
        else section.model_copy(update={"path": str(find_adapter(section.path, section.source or name))})
        for name, section in config.named_adapters.items()
    }
    return config.model_copy(update={**changes, "adapters": adapters or None})


def _resolve_path(path: str, *, several: bool = False) -> str:
    found = find_model(path)
    check_fetchable(found)
    if not several:
        check_one_model(found)
    return found


async def prepare_model(
    config: Config, made: Path, *, say: Callable[[str], None] = lambda _: None, waits: WaitTracker | None = None
) -> str:
    """Return the folder of the model that a run starts from; write it if necessary.

    It is written for a model from scratch, for an adapter (merged with its base), and for a model with another chat
    template or head format.

    Args:
        config: Config of the run.
        made: Folder to write the model to.
        say: Called with a message for the user if the creation of a model has problems.
        waits: Table of the run's waits, for the episodes that the tokenizer of a new model is trained on.

    Raises:
        UsageError: the model cannot be created, the chat template does not exist, or the disk is full.
    """
    path = config.model.path
    is_changed = config.model.chat_template is not None or config.model.head_dtype != "model"
    if path != SCRATCH and not is_adapter_folder(path) and not is_changed:
        return path
    if not await run_in_own_thread(made.is_dir):
        partial = made.with_name(f"{made.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with writing(made), system_errors():
            if path == SCRATCH:
                await write_scratch_model(config, partial, say=say, waits=waits)
            else:
                _write_changed(config, partial)
            if config.model.head_dtype == "float32":
                _add_to_config(partial, FLOAT32_HEAD)
            partial.rename(made)
    return str(made)


def _add_to_config(folder: Path, keys: Mapping[str, Any]) -> None:
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()  # it may be a link to the original model's file
    file.write_text(json.dumps({**settings, **keys}, indent=2) + "\n", encoding="utf-8")


_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
"""Files of a model repository on the hub, without copies of the weights in other formats."""


def _write_changed(config: Config, folder: Path) -> None:
    """Write the config's model with its adapter merged, with another chat template, or both."""
    path, template = config.model.path, config.model.chat_template
    if is_adapter_folder(path):
        write_merged(path, folder, dtype=config.model.dtype)
    else:
        _link_files(Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns=_FILES)), folder)
    if template is not None:
        (folder / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)  # it may be a link to the original model's file
        (folder / CHAT_TEMPLATE_FILE).write_text(read_chat_template(template), encoding="utf-8")


def _link_files(source: Path, folder: Path) -> None:
    """Make a folder with links to the files of another one."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file():
            try:
                os.link(file.resolve(), folder / file.name)
            except OSError:  # another file system
                (folder / file.name).symlink_to(file.resolve())


def write_merged(
    adapter: str, folder: Path, *, dtype: Literal["float32", "bfloat16"], shard_size: str = SHARD_SIZE
) -> None:
    """Write an adapter merged with its base, or a whole model, as a Hugging Face folder.

    Raises:
        OSError: the folder cannot be written.
        UsageError: the base does not exist, or does not match the adapter.
    """
    model = load_model(adapter, dtype=dtype, device="cpu")
    save_model_folder(model, load_tokenizer(adapter), folder, load_images(adapter), shard_size=shard_size)


def load_images(path: str) -> ImageProcessor | None:
    """Load the image processor of a vision-language model; ``None`` for other models.

    Raises:
        UsageError: the image processor is missing.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in MODEL_TYPES:
            return None
        return ImageProcessor(AutoImageProcessor.from_pretrained(path), pad_id=config.image_token_id)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(
            f"cannot load the image processor of {path}",
            got=str(error).strip().splitlines()[0],
            expected="a folder with a preprocessor_config.json, or a name on the Hugging Face hub",
        ) from error


def build_renderer(config: Config, path: str, tokenizer: PreTrainedTokenizerFast) -> Renderer:
    """Build the renderer of the model at `path`, with its image processor if it has one.

    Raises:
        TemplateError: the chat template has no known turn boundary.
        UsageError: the image processor is missing.
    """
    agent = config.agent
    return Renderer(
        tokenizer, enable_thinking=agent.enable_thinking, tool_parser=agent.tool_parser, images=load_images(path)
    )


def check_tokens(config: Config, model_path: str) -> Renderer | None:
    """Check that a process reward model has the policy's tokenizer, and that a teacher has it or is compared by text.

    Returns:
        The renderer of a teacher with another tokenizer; ``None`` for other teachers, or without one.

    Raises:
        ConfigError: a model that reads the policy's tokens does not have its tokenizer.
        UsageError: see `check_rendering`.
        TemplateError: the chat template of a teacher with another tokenizer does not support the agent loop.
    """
    section, teacher = config.trainer.process_reward, config.algorithm.teacher
    if section is not None and section.path is not None:
        check_same_tokens("the process reward model", section.path, model_path)
    if teacher is None or teacher.path == POLICY:
        return None
    if (difference := token_difference(teacher.path, model_path)) is None:
        return None
    expert = config.algorithm.expert
    needs = {
        "algorithm.teacher.top_k": teacher.top_k is not None,
        "algorithm.expert.trajectories": expert is not None and expert.trajectories is not None,
        "trainer.episodes": config.trainer.episodes is not None,
        "live traffic": is_live(config),
    }
    for what, is_needed in needs.items():
        if is_needed:
            raise ConfigError(
                f"{what} needs a teacher with the policy's tokenizer",
                got=difference,
                expected="the same pieces under the same ids",
                hint=f"use a model of the policy's family as the teacher, or train without {what}",
            )
    renderer = build_renderer(config, teacher.path, load_tokenizer(teacher.path))
    check_rendering(config, renderer)
    return renderer


def check_model(config: Config) -> None:
    """Check that the chat template of a model supports the agent loop.

    Raises:
        UsageError: the model has no tokenizer, or does not accept the environment's images.
        TemplateError: the chat template does not support the agent loop.
    """
    renderer = start_renderer(config)
    if renderer is not None:
        check_rendering(config, renderer)


def start_renderer(config: Config, *, fetch: bool = True) -> Renderer | None:
    """Return the renderer of a run's initial model; ``None`` if the model does not exist on this machine yet."""
    path = config.model.path
    if path == SCRATCH:
        return None
    path = find_model(path)
    if not fetch and not Path(path).is_dir():
        return None
    tokenizer = load_tokenizer(path)
    if config.model.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.model.chat_template)
    return build_renderer(config, path, tokenizer)


def check_policy(
    config: Config, renderer: Renderer, model_path: str, *, say: Callable[[str], None]
) -> Translator | None:
    """Check that the policy's chat template fits the loop, and that the models which score its tokens can read them.

    Returns:
        The translator to the tokens of a teacher with another tokenizer; ``None`` for other teachers, or without one.

    Raises:
        TemplateError: see `check_rendering`.
        UsageError: see `check_rendering`.
        ConfigError: see `check_tokens`.
    """
    check_rendering(config, renderer, say=say)
    teacher = check_tokens(config, model_path)
    if teacher is None:
        return None
    renderer.keeps_contexts = True
    translator = Translator(renderer, teacher)
    say(
        "the teacher has another tokenizer, so texts are compared instead of tokens: in a sample of prose, numbers and "
        f"code, {translator.equal_share():.0%} of the policy's tokens are also tokens of the teacher"
    )
    return translator
