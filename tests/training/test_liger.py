"""What is asked of Liger's kernels, which run on a GPU only, and what is said where they cannot run."""

import sys
from types import ModuleType

import pytest
import torch

from agentrl.config.config import TrainerConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.training.compile import compile_layers, use_liger

LIGER = TrainerConfig(kernels="liger")


@pytest.fixture
def on_gpu(model, monkeypatch):
    """A model that says that it is on one."""
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    return model


@pytest.fixture
def asked(monkeypatch):
    """The library's two names as version 0.8 has them, without its kernels: what they were called with."""
    found = []
    package, patch, top = (
        ModuleType(f"liger_kernel{end}") for end in (".transformers", ".transformers.monkey_patch", "")
    )
    package._apply_liger_kernel_to_instance = lambda model, **kwargs: found.append((model, kwargs))
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None, "qwen3": None}
    for module in (top, package, patch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_kernels_go_into_the_model_and_liger_s_own_losses_do_not(on_gpu, asked):
    compile_layers(on_gpu, TrainerConfig())
    assert asked == []
    compile_layers(on_gpu, LIGER)
    assert asked == [(on_gpu, {"cross_entropy": False, "fused_linear_cross_entropy": False})]


def test_models_without_kernels_are_named(on_gpu, asked):
    on_gpu.config.model_type = "gpt2"
    with pytest.raises(ConfigError, match=r"no kernels.*got model type gpt2 .*expected one of llama, qwen3"):
        use_liger(on_gpu)


def test_a_missing_package_is_named(on_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(UsageError, match=r"the extra gpu is not installed.*pip install"):
        use_liger(on_gpu)


def test_a_model_on_the_cpu_is_refused(model):
    with pytest.raises(ConfigError, match=r"trainer\.kernels=liger needs a GPU: got a model on cpu"):
        compile_layers(model, LIGER)


def test_parts_of_norms_have_no_kernels():
    with pytest.raises(ValueError, match=r"trainer\.kernels liger needs whole layers"):
        TrainerConfig(kernels="liger", processes=2, tensor_parallel=2)
