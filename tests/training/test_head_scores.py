"""Scores behind the head: gradients against autograd, and memory that the vocabulary does not decide."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.training.forward.logprobs import chunk_tokens, head_scores

WIDTH = 16


def head(tokens, vocabulary, *, bias=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return numbers(tokens, WIDTH), numbers(vocabulary, WIDTH), numbers(vocabulary) if bias else None, targets


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_values_and_gradients(cap, chunk, bias, entropy_gradient):
    hidden, weight, offset, targets = head(20, 33, bias=bias)
    found = head_scores(
        hidden, weight, offset, targets, temperature=0.7, chunk=chunk, entropy_gradient=entropy_gradient, cap=cap
    )
    logits = torch.nn.functional.linear(hidden, weight, offset)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    distribution = (logits / 0.7).log_softmax(-1)
    logp = distribution.gather(1, targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    torch.testing.assert_close((found.logp, found.entropy), (logp, entropy), atol=1e-5, rtol=1e-5)
    wanted = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    factors = torch.linspace(-1, 2, 20)
    losses = [
        (factors * own.logp).sum() + (factors.cos() * own.entropy).sum() * entropy_gradient
        for own in (found, type(found)(logp=logp, entropy=entropy))
    ]
    gradients = [torch.autograd.grad(loss, wanted) for loss in losses]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_short_formats_stay_short():
    hidden, weight, _, targets = head(5, 33, dtype=torch.bfloat16)
    found = head_scores(hidden, weight, None, targets, temperature=1.0, chunk=2)
    gradients = torch.autograd.grad(found.logp.sum(), [hidden, weight])
    assert found.logp.dtype == found.entropy.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 2
    expected = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.logp.double(), expected, atol=0.1, rtol=0.05)


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, _, targets = head(5, 33)
    found = head_scores(hidden, weight.detach(), None, targets, temperature=1.0, chunk=2)
    (gradient,) = torch.autograd.grad(found.logp.sum(), [hidden])
    assert bool(gradient.any())
    assert not found.entropy.requires_grad


class Memory(TorchDispatchMode):
    """Bytes of tensors that operations have made and that live at once, but for those of the head's own size."""

    def __init__(self, own_size):
        super().__init__()
        self.own_size, self.now, self.peak, self.largest, self._known = own_size, 0, 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage):
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._known or size == self.own_size or size == 0:
            return
        self._known.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key, size):
        self._known.discard(key)
        self.now -= size


LOGITS = 2**22


def memory_of_step(vocabulary, tokens=30):
    hidden, weight, _, targets = head(tokens, vocabulary)
    with Memory(weight.untyped_storage().nbytes()) as memory:
        chunk = chunk_tokens(vocabulary, LOGITS >> 20)
        scores = head_scores(hidden, weight, None, targets, temperature=1.0, chunk=chunk, entropy_gradient=True)
        (scores.logp.sum() + scores.entropy.sum()).backward()
    return memory


def test_memory_does_not_grow_with_the_vocabulary():
    small, large = memory_of_step(150_000), memory_of_step(300_000)
    assert LOGITS < small.peak < 4 * LOGITS
    assert large.peak < 1.1 * small.peak
    assert max(small.largest, large.largest) <= LOGITS < 30 * 150_000 * 4


def test_a_chunk_is_never_empty():
    assert chunk_tokens(10**9, 1) == 1
    assert chunk_tokens(1000, 4) == 1048
