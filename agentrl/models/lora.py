"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) in a model that otherwise stays as it is.

A layer computes W x + scale B (A x) with W frozen. peft puts A and B into it; the rest of what training needs is here.
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
from agentrl.errors import ConfigError, UsageError
from agentrl.registry import Extra

PEFT = Extra(name="lora", module="peft")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"
"""Of the adapter, among those that peft could put into a layer."""
_FILE_PREFIX = "base_model.model."


def add_adapters(
    model: PreTrainedModel,
    config: LoraConfig,
    *,
    base: str,
    seed: int,
    device: torch.device | None = None,
    head: bool = False,
) -> None:
    """Freeze a model, and put adapters into its layers that change nothing yet.

    Args:
        model: Changed in place; parameters may be without memory (meta).
        config: Which, and how large.
        base: Where the frozen weights come from, for readers of the adapter's files.
        seed: Decides A; B is 0.
        device: Of the adapters; the model's when left out.
        head: Whether `config.target_modules` may name the output head; for training in one process.

    Raises:
        ConfigError: no such layers, or ones that cannot have an adapter.
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
    except ValueError as error:  # peft lists the whole model
        raise ConfigError(
            "model.lora.target_modules fit no layer, or one that cannot have an adapter",
            got=config.target_modules,
            expected="ends of names of linear layers such as q_proj, or all-linear",
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
    """Return peft's linear layer with a forward that reads and writes its output [tokens, out] once.

    peft computes W x + scale * (B (A x)) in three passes over the output, in float32 where the adapter is. Here the
    scale is applied to A x [tokens, rank], and B's product is added as it is computed, in the dtype of x.
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
                hint=f"leave it out of model.lora.target_modules, or set model.lora.modules_to_save=[{name}]",
            )
        if _NAME not in layer.lora_A:
            raise ConfigError(f"{name} is no linear layer", expected="linear layers in model.lora.target_modules")


def _fill(layer: Any, generator: torch.Generator, device: torch.device) -> None:
    """Give A its random values, the same on all devices, and B zeros; float32 each."""
    down, up = layer.lora_A[_NAME], layer.lora_B[_NAME]
    bound = 1 / math.sqrt(down.weight.shape[1])  # as torch's linear layers begin
    values = torch.empty(down.weight.shape).uniform_(-bound, bound, generator=generator)
    down.weight = nn.Parameter(values.to(device))
    up.weight = nn.Parameter(torch.zeros(up.weight.shape, device=device))


def _train_whole(model: PreTrainedModel, wanted: list[str]) -> Iterator[str]:
    """Train some modules themselves; gives the names under which others find them, two for a tied head."""
    for end in wanted:
        if not any(_ends_with(name, end) for name, _ in model.named_modules()):
            raise ConfigError(
                "model.lora.modules_to_save fits no module", got=end, expected="the end of a module's name"
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
    """The layers with an adapter, by their names in the base."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}


def has_adapters(model: nn.Module) -> bool:
    """Return True if `add_adapters` has changed a model."""
    return bool(adapted_layers(model))


def base_is_reference(model: nn.Module) -> bool:
    """Return True if a model without its adapters is what it was before training."""
    return has_adapters(model) and all(is_adapter(name) for name, p in model.named_parameters() if p.requires_grad)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute with its frozen weights alone inside the block.

    peft's own switch would also stop parameters from being trained, which shards do not forgive.
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
def adapter_dropout(model: nn.Module) -> Iterator[None]:
    """Let the adapters' dropout work inside the block."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.lora_dropout.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_dropout.eval()


def base_names(model: nn.Module) -> dict[str, str]:
    """The names of a model's tensors with their names in the base; adapters have none."""
    known = {*(name for name, _ in model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())}
    names = (name for name in model.state_dict() if name in known and not is_adapter(name))
    return {name.replace(".base_layer.", "."): name for name in names}


def product(layer: Any, *, up: Tensor, down: Tensor) -> Tensor:
    """Compute what a layer's adapter adds to its weights: scale B A, float32."""
    return cast("Tensor", layer.scaling[_NAME] * (up.float() @ down.float()))


def factors(layer: Any) -> tuple[Tensor, Tensor]:
    """B and A of a layer."""
    return layer.lora_B[_NAME].weight, layer.lora_A[_NAME].weight


def frozen_weight(layer: Any) -> Tensor:
    """The base's weights of a layer, also where they are kept in 4 bits."""
    weight: Tensor = layer.base_layer.weight
    if hasattr(weight, "quant_state"):
        dequantized: Tensor = PEFT.load("peft.utils.integrations").dequantize_module_weight(layer.base_layer)
        return dequantized
    return weight


def head_product(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Give inputs and weights whose product is that of a model's output head, with its adapter if it has one.

    An adapter widens both by its rank: W h + scale B (A h) is [W, B] [h, scale A h], which rounds as the layer itself
    does. ``hidden`` is [n, width]; the weights are [vocabulary, width], or wider.
    """
    if not hasattr(head, "lora_A") or head.disable_adapters:
        return hidden, head.weight
    up, down = factors(head)
    reduced = head.scaling[_NAME] * (hidden.float() @ down.float().mT)
    weight = head.base_layer.weight
    return torch.cat([hidden, reduced.to(hidden.dtype)], dim=1), torch.cat([weight, up.to(weight.dtype)], dim=1)


def trained_names(model: nn.Module) -> list[str]:
    """Names of the parameters that are trained, as the model has them; a tied one has two."""
    return [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]


def save_adapter(model: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write an adapter's tensors, those of `trained_names` in one piece, as peft does."""
    cast("Any", model).peft_config[_NAME].save_pretrained(folder)
    values = {_file_name(name): tensors[name].detach().cpu().contiguous() for name in trained_names(model)}
    save_file({name: value.clone() for name, value in values.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Read what `save_adapter` wrote into a model with the same adapters.

    Raises:
        UsageError: the files are of other adapters.
    """
    found = load_file(Path(folder) / ADAPTER_WEIGHTS)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = {_file_name(name): parameters[name] for name in trained_names(model)}
    fits = found.keys() == wanted.keys() and all(found[name].shape == p.shape for name, p in wanted.items())
    if not fits:
        raise UsageError(
            "the adapter is not of this model and model.lora",
            got=f"{len(found)} tensors in {folder}",
            expected=f"{len(wanted)} tensors of rank {cast('Any', model).peft_config[_NAME].r}",
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(found[name])


def _file_name(name: str) -> str:
    return _FILE_PREFIX + name.replace(f".{_NAME}.", ".")


ADAPTERS = "adapters"
"""Holds the folders of several adapters, in that of a model."""


def adapter_folder(model: Path, name: str) -> Path:
    """Return the folder of one of several adapters of a model's folder."""
    return model / ADAPTERS / name


def adapters_in(model: str | Path) -> list[str]:
    """Return the names of the adapters in a model's folder, where there are several."""
    return sorted(file.parent.name for file in (Path(model) / ADAPTERS).glob(f"*/{ADAPTER_CONFIG}"))


def check_one_model(path: str | Path) -> None:
    """Check that a folder does not hold several adapters.

    Raises:
        UsageError: it does; names one of them.
    """
    if names := adapters_in(path):
        raise UsageError(
            f"{path} holds several adapters",
            got=", ".join(names),
            expected="one model",
            hint=f"name one of them: {adapter_folder(Path(path), names[0])}",
        )


def lora_of(folder: str | Path) -> LoraConfig:
    """Read which adapters a folder holds.

    Raises:
        UsageError: kinds that `add_adapters` does not make.
    """
    found = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    targets = found.get("target_modules")
    others = [key for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern") if found.get(key)]
    if found.get("peft_type") != "LORA" or others or not isinstance(targets, list):
        raise UsageError(
            f"{folder} holds other adapters than agentrl trains",
            got=", ".join([str(found.get("peft_type")), *others]),
            expected="plain LoRA on modules that are named by their ends",
        )
    return LoraConfig(rank=found["r"], alpha=found["lora_alpha"], target_modules=sorted(targets))


def with_adapter(
    base: PreTrainedModel, config: LoraConfig, *, path: str, seed: int, folder: str | Path | None = None
) -> PreTrainedModel:
    """Make a model of a frozen one's tensors, with modules of its own around them and a new adapter in these.

    Args:
        base: Its parameters and buffers are shared.
        config: The adapter.
        path: Where the base comes from, for readers of the adapter's files.
        seed: Decides A; B is 0.
        folder: Holds values of the adapter, instead.

    Raises:
        ConfigError: no such layers, or ones that cannot have an adapter.
        UsageError: the files are of other adapters.
    """
    shared = {id(tensor): tensor for tensor in [*base.parameters(), *base.buffers()]}
    model: PreTrainedModel = copy.deepcopy(base, memo=shared)
    add_adapters(model, config, base=path, seed=seed)
    if folder is not None:
        load_adapter(model, folder)
    return model


def is_adapter_folder(path: str | Path) -> bool:
    """Return True if a folder holds an adapter, and not a whole model."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def base_of(folder: str | Path) -> str:
    """Find the base of an adapter's folder: a folder, or a name on the Hugging Face hub.

    Raises:
        UsageError: the adapter does not say it, it is gone, or the extra is not installed.
    """
    found = PEFT.load().PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not found or (Path(found).is_absolute() and not Path(found).is_dir()):
        raise UsageError(
            "the base of an adapter is not there",
            got=f"{found or 'none'} in {Path(folder) / ADAPTER_CONFIG}",
            expected="the folder or name of the model that the adapter was trained on",
            hint="write the right one there, under base_model_name_or_path",
        )
    return str(found)


def merged_into(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """A model with an adapter of its files added to its weights: as plain as before; any adapter that peft knows."""
    was_tied = model.config.get_text_config().tie_word_embeddings
    if was_tied and _adapts_head(model, folder):  # what is added to the head must not change the embedding
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    try:
        with _quiet():
            merged = PEFT.load().PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            "the adapter does not fit its base",
            got=f"{folder} ({str(error).strip().splitlines()[0]})",
            expected=f"an adapter of {type(model).__name__} as {model.name_or_path} is",
        ) from error
    if was_tied:
        _tie(merged)
    return cast("PreTrainedModel", merged.requires_grad_(True))


def _adapts_head(model: PreTrainedModel, folder: str | Path) -> bool:
    """Return True if an adapter is also one of the output head."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    targets = getattr(PEFT.load().PeftConfig.from_pretrained(str(folder)), "target_modules", None) or ()
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(_ends_with(name, end) for end in targets)


def _tie(model: PreTrainedModel) -> None:
    """Let an embedding and a head that were trained apart, and are equal, be one again; else they are two for good."""
    text = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_one = torch.equal(head.weight, embedding.weight)
    if is_one:
        head.weight = embedding.weight
    text.tie_word_embeddings = model.config.tie_word_embeddings = is_one


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what peft warns of: a name in transformers that has changed, and tied weights, which are dealt with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "(Model has `tie_word_embeddings=True`|Input and output embeddings)")
        yield
