"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) in a frozen model.

A layer computes W x + scale B (A x) with W frozen. peft adds A and B to the layer; this module does everything else.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import PreTrainedModel

from agentrl.config.trainer import LoraConfig
from agentrl.errors import ConfigError, UsageError, did_you_mean
from agentrl.observe.model_folder import find_model
from agentrl.registry import Extra

PEFT = Extra(name="lora", module="peft")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"
"""Name of the adapter in peft, which supports several per layer."""
_FILE_PREFIX = "base_model.model."
ADAPTERS = "adapters"
"""Subfolder of a model's folder with the folders of several adapters."""


def add_adapters(
    model: PreTrainedModel,
    config: LoraConfig,
    *,
    base: str,
    seed: int,
    device: torch.device | None = None,
    head: bool = False,
) -> None:
    """Freeze a model, and add adapters to its layers, which initially do not change its output.

    Args:
        model: Model, changed in place; its parameters may be on the meta device.
        config: Layers and sizes of the adapters.
        base: Folder or name of the frozen weights, which is written to the adapter's files.
        seed: Seed of the random A; B is 0.
        device: Device of the adapters; by default, the model's.
        head: True if `config.target_modules` may name the output head; only for training in one process.

    Raises:
        ConfigError: the layers do not exist, or cannot have an adapter.
        UsageError: the extra is not installed.
    """
    peft = PEFT.load()
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.scale * config.rank,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        with _quiet():
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:  # peft's message lists the whole model
        raise ConfigError(
            "model.lora.target_modules matches no layer, or a layer that cannot have an adapter",
            got=config.target_modules,
            expected="suffixes of names of linear layers such as q_proj, or all-linear",
        ) from error
    _check_layers(model, head=head)
    generator = torch.Generator().manual_seed(seed)
    plain, fused = peft.tuners.lora.Linear, _fused_layer()
    for layer in adapted_layers(model).values():
        _fill(layer, generator, device or model.device)
        layer.lora_dropout.eval()
        if type(layer) is plain:
            layer.__class__ = fused
    settings.modules_to_save = list(_train_whole(model, config.modules_to_save)) or None


@functools.cache
def _fused_layer() -> type[nn.Module]:
    """Make a subclass of peft's linear layer whose forward pass reads and writes the output [tokens, out] only once.

    peft computes W x + scale * (B (A x)) in three passes over the output, with the adapter's part in float32. Here the
    scale is applied to A x [tokens, rank], and B's product is fused with the addition, in the dtype of x.
    """
    peft_linear: Any = PEFT.load("peft.tuners.lora").Linear

    class FusedLoraLinear(peft_linear):  # type: ignore[misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            down, up = self.lora_A[_NAME].weight, self.lora_B[_NAME].weight
            is_plain = x.dtype is self.base_layer.weight.dtype and not isinstance(down, DTensor)
            if args or kwargs or self.disable_adapters or self.merged or not is_plain:
                return cast("Tensor", super().forward(x, *args, **kwargs))
            found: Tensor = self.base_layer(x)
            reduced = functional.linear(self.lora_dropout[_NAME](x), down.to(x.dtype)) * self.scaling[_NAME]
            rows, rank = found.reshape(-1, found.shape[-1]), down.shape[0]
            return torch.addmm(rows, reduced.reshape(-1, rank), up.to(x.dtype).t()).view(found.shape)

    return FusedLoraLinear


def _check_layers(model: PreTrainedModel, *, head: bool) -> None:
    output = model.get_output_embeddings()
    for name, layer in adapted_layers(model).items():
        if layer is output and not head:
            raise ConfigError(
                f"the output head ({name}) cannot have an adapter: log-probabilities are computed from its weights",
                hint=f"remove it from model.lora.target_modules, or set model.lora.modules_to_save=[{name}]",
            )
        if _NAME not in layer.lora_A:
            raise ConfigError(f"{name} is not a linear layer", expected="linear layers in model.lora.target_modules")


def _fill(layer: Any, generator: torch.Generator, device: torch.device) -> None:
    """Initialize A with random values that do not depend on the device, and B with zeros, in float32."""
    down, up = layer.lora_A[_NAME], layer.lora_B[_NAME]
    bound = 1 / math.sqrt(down.weight.shape[1])  # the default of torch's linear layers
    values = torch.empty(down.weight.shape).uniform_(-bound, bound, generator=generator)
    down.weight = nn.Parameter(values.to(device))
    up.weight = nn.Parameter(torch.zeros(up.weight.shape, device=device))


def _train_whole(model: PreTrainedModel, wanted: list[str]) -> Iterator[str]:
    """Make whole modules trainable; yield their names (two names for tied weights)."""
    for end in wanted:
        if not any(_ends_with(name, end) for name, _ in model.named_modules()):
            raise ConfigError(
                "model.lora.modules_to_save matches no module", got=end, expected="a suffix of a module's name"
            )
    for name, module in model.named_modules():
        if any(_ends_with(name, end) for end in wanted):
            module.requires_grad_(True)
    for name, module in model.named_modules(remove_duplicate=False):
        own = list(module.parameters(recurse=False))
        if own and not is_adapter(name) and all(parameter.requires_grad for parameter in own):
            yield name


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def is_adapter(name: str) -> bool:
    """Return True if a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Find the layers with an adapter, by their names in the base."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}


def has_adapters(model: nn.Module) -> bool:
    """Return True if a model has adapters."""
    return bool(adapted_layers(model))


def base_is_reference(model: nn.Module) -> bool:
    """Return True if the model with disabled adapters equals the initial model."""
    return has_adapters(model) and all(is_adapter(name) for name, p in model.named_parameters() if p.requires_grad)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Compute without adapters in this block.

    peft's own switch also changes `requires_grad`, which sharded parameters do not support.
    """
    layers = adapted_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def adapter_dropout(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Enable the adapters' dropout in this block; with adapters, it seeds torch's generator."""
    layers = adapted_layers(model).values()
    if layers:
        torch.manual_seed(seed)
    for layer in layers:
        layer.lora_dropout.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_dropout.eval()


def base_names(model: nn.Module) -> dict[str, str]:
    """Map names of tensors in the base to their names in the model with adapters; adapter tensors are excluded."""
    known = {*(name for name, _ in model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())}
    names = (name for name in model.state_dict() if name in known and not is_adapter(name))
    return {name.replace(".base_layer.", "."): name for name in names}


def product(layer: Any, *, up: Tensor, down: Tensor) -> Tensor:
    """Compute the product scale B A that a layer's adapter adds to its weights, in float32."""
    return cast("Tensor", layer.scaling[_NAME] * (up.float() @ down.float()))


def factors(layer: Any) -> tuple[Tensor, Tensor]:
    """Return B and A of a layer."""
    return layer.lora_B[_NAME].weight, layer.lora_A[_NAME].weight


def frozen_weight(layer: Any) -> Tensor:
    """Return the base weights of a layer; 4-bit weights are dequantized."""
    weight: Tensor = layer.base_layer.weight
    if hasattr(weight, "quant_state"):
        dequantized: Tensor = PEFT.load("peft.utils.integrations").dequantize_module_weight(layer.base_layer)
        return dequantized
    return weight


def head_product(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and weights whose product is the output of a model's head, including its adapter, if any.

    With an adapter, both are wider by its rank: W h + scale B (A h) equals [W, B] [h, scale A h], with the same
    rounding as in the layer. ``hidden`` is [n, width]; the weights are [vocabulary, width] or wider.
    """
    if not hasattr(head, "lora_A") or head.disable_adapters:
        return hidden, head.weight
    up, down = factors(head)
    reduced = head.scaling[_NAME] * (hidden.float() @ down.float().mT)
    weight = head.base_layer.weight
    return torch.cat([hidden, reduced.to(hidden.dtype)], dim=1), torch.cat([weight, up.to(weight.dtype)], dim=1)


def trained_names(model: nn.Module) -> list[str]:
    """List the names of the trained parameters in the model; a tied parameter has two."""
    return [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]


def save_adapter(model: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write an adapter's unsharded tensors, by the names of `trained_names`, in peft's format."""
    cast("Any", model).peft_config[_NAME].save_pretrained(folder)
    values = {_file_name(name): tensors[name].detach().cpu().contiguous() for name in trained_names(model)}
    save_file({name: value.clone() for name, value in values.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Load an adapter that `save_adapter` wrote into a model with the same adapters.

    Raises:
        UsageError: the files contain other adapters.
    """
    found = load_file(Path(folder) / ADAPTER_WEIGHTS)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = {_file_name(name): parameters[name] for name in trained_names(model)}
    fits = found.keys() == wanted.keys() and all(found[name].shape == p.shape for name, p in wanted.items())
    if not fits:
        raise UsageError(
            "the adapter does not fit the model and model.lora",
            got=f"{len(found)} tensors in {folder}",
            expected=f"{len(wanted)} tensors of rank {cast('Any', model).peft_config[_NAME].r}",
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(found[name])


def _file_name(name: str) -> str:
    return _FILE_PREFIX + name.replace(f".{_NAME}.", ".")


def adapter_folder(model: Path, name: str) -> Path:
    """Return the folder of one of several adapters in a model's folder."""
    return model / ADAPTERS / name


def adapters_in(model: str | Path) -> list[str]:
    """List the adapters in a model's folder that contains several; empty for other folders."""
    return sorted(file.parent.name for file in (Path(model) / ADAPTERS).glob(f"*/{ADAPTER_CONFIG}"))


def check_one_model(path: str | Path) -> None:
    """Check that a folder does not contain several adapters.

    Raises:
        UsageError: it contains several adapters; the message names one.
    """
    if names := adapters_in(path):
        raise UsageError(
            f"{path} contains several adapters",
            got=", ".join(names),
            expected="one model",
            hint=f"use one of them: {adapter_folder(Path(path), names[0])}",
        )


OTHER_ADAPTERS = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("alora_invocation_tokens", "layer_replication", "kasa_config", "lora_bias", "target_parameters"),
)
"""Keys of peft's config with which B A is not added to every token with one scale."""
CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
"""Initializations in peft that also change the base's weights, so that the adapter fits only the changed base."""


def read_lora_config(folder: str | Path) -> LoraConfig:
    """Read the config of the adapter in a folder.

    Raises:
        UsageError: `add_adapters` does not support this kind of adapter.
    """
    found = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    targets = found.get("target_modules")
    others = [key for key in OTHER_ADAPTERS if found.get(key)]
    if str(found.get("init_lora_weights")).startswith(CHANGED_BASES):
        others.append("init_lora_weights")
    if found.get("peft_type") != "LORA" or others or not isinstance(targets, list):
        raise UsageError(
            f"{folder} contains a kind of adapter that agentrl does not train",
            got=", ".join([str(found.get("peft_type")), *others]),
            expected="plain LoRA, with modules listed by suffixes of their names",
        )
    return LoraConfig(rank=found["r"], alpha=found["lora_alpha"], target_modules=sorted(targets))


def with_adapter(
    base: PreTrainedModel, config: LoraConfig, *, path: str, seed: int, folder: str | Path | None = None
) -> PreTrainedModel:
    """Make a model with an adapter that shares the tensors of a frozen model but has its own modules.

    Args:
        base: Model whose parameters and buffers are shared.
        config: Layers and sizes of the adapter.
        path: Folder or name of the base, which is written to the adapter's files.
        seed: Seed of the random A; B is 0.
        folder: Folder with an adapter to load; ``None`` for a new one.

    Raises:
        ConfigError: the layers do not exist, or cannot have an adapter.
        UsageError: the files contain another adapter.
    """
    shared = {id(tensor): tensor for tensor in [*base.parameters(), *base.buffers()]}
    model: PreTrainedModel = copy.deepcopy(base, memo=shared)
    add_adapters(model, config, base=path, seed=seed)
    if folder is not None:
        load_adapter(model, folder)
    return model


def is_adapter_folder(path: str | Path) -> bool:
    """Return True if a folder contains an adapter instead of a whole model."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def find_base(folder: str | Path) -> str:
    """Find the base of an adapter's folder: a folder, or a name on the Hugging Face hub.

    Raises:
        UsageError: the adapter does not name its base, the base does not exist, or the extra is not installed.
    """
    found = PEFT.load().PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not found or (Path(found).is_absolute() and not Path(found).is_dir()):
        raise UsageError(
            "the base of an adapter was not found",
            got=f"{found or 'none'} in {Path(folder) / ADAPTER_CONFIG}",
            expected="the folder or name of the model that the adapter was trained on",
            hint="correct base_model_name_or_path in that file",
        )
    return str(found)


def merge_adapter(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Merge any adapter that peft supports into a model's weights; the result has no adapters.

    Raises:
        UsageError: the adapter does not fit the model.
    """
    was_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", model.config.tie_word_embeddings)
    if was_tied and _adapts_head(model, folder):  # the head's adapter must not change the embedding
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    try:
        with _quiet():
            adapted = PEFT.load().PeftModel.from_pretrained(model, str(folder))
            loaded = adapted.load_adapter(str(folder), adapted.active_adapter)  # the first time, peft only warns
            if wrong := [*loaded.missing_keys, *loaded.unexpected_keys]:
                missing = f"{len(loaded.missing_keys)} tensors are missing"
                raise ValueError(
                    f"{missing}, and {len(loaded.unexpected_keys)} are not of the base's layers: {wrong[-1]}"
                )
            merged = adapted.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            "the adapter does not fit its base",
            got=f"{folder} ({str(error).strip().splitlines()[0]})",
            expected=f"an adapter of the {type(model).__name__} {model.name_or_path}",
        ) from error
    if was_tied:
        _tie(merged)
    return cast("PreTrainedModel", merged.requires_grad_(True))


def _adapts_head(model: PreTrainedModel, folder: str | Path) -> bool:
    """Return True if an adapter changes the output head."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    targets = getattr(PEFT.load().PeftConfig.from_pretrained(str(folder)), "target_modules", None) or ()
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(_ends_with(name, end) for end in targets)


def _tie(model: PreTrainedModel) -> None:
    """Tie embedding and head again if they are equal; otherwise leave them untied."""
    text = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    are_equal = torch.equal(head.weight, embedding.weight)
    if are_equal:
        head.weight = embedding.weight
    text.tie_word_embeddings = model.config.tie_word_embeddings = are_equal


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress peft's warnings about tied weights and missing tensors (handled here) and a renamed symbol."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        handled = "(Model has `tie_word_embeddings=True`|Input and output embeddings|Found missing adapter keys)"
        warnings.filterwarnings("ignore", handled)
        yield


def find_adapter(path: str, name: str) -> Path:
    """Find the folder of an adapter.

    Args:
        path: Folder of an adapter, or a run or checkpoint with one or several adapters.
        name: Name of the adapter if there are several.

    Raises:
        UsageError: no adapter of that name is found.
    """
    found = Path(find_model(path))
    if is_adapter_folder(found):
        return found
    names = adapters_in(found)
    if name not in names:
        raise UsageError(
            f"no adapter {name} found in {path}",
            got=", ".join(names) or "a whole model",
            expected="a run with model.lora, or a folder in peft's format",
            hint=did_you_mean(name, names) or ("set source to the name of one of them" if names else None),
        )
    return adapter_folder(found, name)
