import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

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


@pytest.fixture
def play_sessions() -> Callable[..., Any]:
    """Play sessions on an engine."""

    async def play(engine, request_of, *, sessions=6, turns=3, vocabulary=64, **params):
        """Play multi-turn sessions of different lengths at once: per session, the prompt and answer of each turn."""

        async def session(number):
            generator = random.Random(number)
            ids = [generator.randrange(vocabulary) for _ in range(3 + 9 * number)]
            played = []
            for turn in range(turns):
                name = f"{number}.{turn}"
                settings = {"max_tokens": generator.randint(3, 12), "seed": 100 * number + turn, **params}
                answer = await engine.generate(request_of(ids, name, str(number), **settings))
                played.append((ids, answer))
                ids = [*ids, *answer.token_ids, *(generator.randrange(vocabulary) for _ in range(7))]
            await engine.end_session(str(number))
            return played

        return await asyncio.gather(*map(session, range(sessions)))

    return play
