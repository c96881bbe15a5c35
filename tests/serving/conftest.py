from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.policy import GenerateRequest, SamplingParams


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices are slower on several threads, and other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def request_of() -> Callable[..., GenerateRequest]:
    """Build a request whose request id and session are its name."""

    def build(prompt: Sequence[int], name: str = "r", session: str | None = None, **params) -> GenerateRequest:
        settings = SamplingParams(**params)
        return GenerateRequest(prompt_ids=prompt, params=settings, session_id=session or name, request_id=name)

    return build


@pytest.fixture
def reference_of() -> Callable[[PreTrainedModel], Callable[[Sequence[int], float], list[float]]]:
    """Log-probabilities of a model by a full forward pass, without any cache."""

    def build(model: PreTrainedModel) -> Callable[[Sequence[int], float], list[float]]:
        @torch.no_grad()
        def logprobs(ids: Sequence[int], temperature: float) -> list[float]:
            logits = model(torch.tensor([list(ids)])).logits[0] / temperature
            chosen = torch.tensor(ids)[1:, None]
            return torch.log_softmax(logits, -1)[:-1].gather(1, chosen)[:, 0].tolist()

        return logprobs

    return build
