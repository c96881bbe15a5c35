"""Makes vLLM's workers give log-probabilities at the request's temperature and before top-p, top-k and min-p.

vLLM has those before temperature and cuts (``raw_logprobs``) and those after both (``processed_logprobs``); a trainer
needs those in between. vLLM imports this module by ``--worker-extension-cls``, in its own environment; with
``--logprobs-mode processed_logprobs`` the values that it would give are replaced. What receives broadcast weights is
imported along with it, and so known to vLLM before it makes one.
"""

from __future__ import annotations

from typing import Any

import agentrl_vllm_receiver  # type: ignore[import-not-found]  # noqa: F401
from agentrl_vllm_adapter import AdapterExchange  # type: ignore[import-not-found]
from vllm.v1.sample.sampler import Sampler

_LEAST_TEMPERATURE = 1e-5
"""Below it vLLM is greedy; log-probabilities are those of temperature 1."""
_sample = Sampler.sample


def sample_with_uncut_logprobs(
    sampler: Any, logits: Any, sampling_metadata: Any, logprobs_mode_override: str | None = None
) -> tuple[Any, Any]:
    """In place of ``Sampler.sample``: its tokens, and the log-probabilities of the uncut distribution.

    Args:
        sampler: The sampler.
        logits: (requests, vocabulary), float32; changed in place.
        sampling_metadata: Its ``temperature`` is (requests,), or ``None`` when all requests are greedy.
        logprobs_mode_override: Set by speculative decoding, which has its own use for the values.
    """
    wanted = sampling_metadata.max_num_logprobs is not None and logprobs_mode_override is None
    uncut = sampler.compute_logprobs(_scale(logits, sampling_metadata.temperature)) if wanted else None
    sampled, processed = _sample(sampler, logits, sampling_metadata, logprobs_mode_override)
    return sampled, processed if processed is None or uncut is None else uncut


def _scale(logits: Any, temperature: Any) -> Any:
    if temperature is None:
        return logits
    return logits / temperature.masked_fill(temperature < _LEAST_TEMPERATURE, 1.0).unsqueeze(1)


Sampler.sample = sample_with_uncut_logprobs


class UncutLogprobs(AdapterExchange):  # type: ignore[misc]
    """Names this module to ``--worker-extension-cls``; what it adds to the workers is how they exchange an adapter."""
