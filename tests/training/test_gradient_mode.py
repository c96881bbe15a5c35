"""What is kept of a forward pass, and whether it is compiled, changes memory and time, and no gradient."""

import pytest
import torch
from pydantic import ValidationError
from support.models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.config.config import TrainerConfig
from agentrl.training.compile import checkpoint_activations, compile_layers
from agentrl.training.forward.layout import PADDED, Layout, choose_layout
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import ScoredSequence

MODES = (False, True, "full", "selective", "offload")
PACKED = Layout(packed=True)


class Count(TorchDispatchMode):
    """Counts attention that is computed."""

    def __init__(self):
        super().__init__()
        self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.attention += str(func).startswith("aten._scaled_dot_product") and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


def sequences():
    found = [torch.arange(3, 3 + count) for count in (30, 11)]
    return [ScoredSequence(input_ids=i[:-1], positions=torch.arange(len(i) - 1), targets=i[1:]) for i in found]


def gradients(model, mode, layout=PACKED):
    """By parameter, and how often attention was computed."""
    choose_layout(model, TrainerConfig())
    with checkpoint_activations(model, enabled=mode), Count() as count:
        score(model, sequences(), temperature=1.0, layout=layout).logp.cos().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found, count.attention


@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_the_same_in_all_modes(mode, layout):
    expected, attention = gradients(tiny_model(), False, layout)
    found, again = gradients(tiny_model(), mode, layout)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-6)
    assert again == (attention if mode in (False, "selective") else 2 * attention)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks there itself while it compiles
@pytest.mark.parametrize("mode", [False, True])
def test_compiled_layers_have_the_same_gradients(mode):
    expected, _ = gradients(tiny_model(layers=1), False)
    model = tiny_model(layers=1)
    config = TrainerConfig(kernels="compiled", gradient_checkpointing=mode)
    names = list(model.state_dict())
    compile_layers(model, config, backend="eager")
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert len(compiled) == (4 if mode else 1)
    assert list(model.state_dict()) == names
    choose_layout(model, TrainerConfig())
    with checkpoint_activations(model, enabled=mode):
        score(model, sequences(), temperature=1.0, layout=PACKED).logp.cos().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_config_takes_a_mode(mode):
    assert TrainerConfig(gradient_checkpointing=mode).gradient_checkpointing == mode


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_checkpointing": "half"}, "selective"),
        ({"kernels": "compiled", "lanes": 2}, "trainer.kernels compiled supports"),
        (
            {"kernels": "compiled", "processes": 2, "context_parallel": 2},
            "trainer.kernels compiled needs layers",
        ),
    ],
)
def test_what_the_config_refuses(settings, message):
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**settings)
