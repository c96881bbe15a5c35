"""Extension of vLLM's workers: log-probabilities at the request's temperature, before top-p, top-k and min-p.

vLLM reports log-probabilities before temperature and truncation (``raw_logprobs``) or after both
(``processed_logprobs``); a trainer needs those between the two. vLLM imports this module through
``--worker-extension-cls``; with ``--logprobs-mode processed_logprobs``, its values are replaced. The module also
imports the receiver of broadcast weights, so that it is registered before vLLM needs it.
"""

from __future__ import annotations

from typing import Any

import agentrl_vllm_receiver  # type: ignore[import-not-found]  # noqa: F401
from agentrl_vllm_adapter import AdapterExchange  # type: ignore[import-not-found]
from vllm.v1.sample.sampler import Sampler

_MIN_TEMPERATURE = 1e-5
"""Temperature below which vLLM is greedy and log-probabilities are those of temperature 1."""
_sample = Sampler.sample


def sample_with_pre_truncation_logprobs(
    sampler: Any, logits: Any, sampling_metadata: Any, logprobs_mode_override: str | None = None
) -> tuple[Any, Any]:
    """Sample as ``Sampler.sample`` does, but return log-probabilities before truncation.

    Args:
        sampler: Sampler of vLLM.
        logits: Logits, float32[requests, vocabulary]; changed in place.
        sampling_metadata: Settings; their ``temperature`` is [requests], or ``None`` if all requests are greedy.
        logprobs_mode_override: Mode set by speculative decoding, which uses the values itself; they are not replaced.
    """
    wanted = sampling_metadata.max_num_logprobs is not None and logprobs_mode_override is None
    uncut = sampler.compute_logprobs(_scale(logits, sampling_metadata.temperature)) if wanted else None
    sampled, processed = _sample(sampler, logits, sampling_metadata, logprobs_mode_override)
    return sampled, processed if processed is None or uncut is None else uncut


def _scale(logits: Any, temperature: Any) -> Any:
    if temperature is None:
        return logits
    return logits / temperature.masked_fill(temperature < _MIN_TEMPERATURE, 1.0).unsqueeze(1)


Sampler.sample = sample_with_pre_truncation_logprobs


class PreTruncationLogprobs(AdapterExchange):  # type: ignore[misc]
    """Class for ``--worker-extension-cls``, which loads this module; adds `AdapterExchange` to the workers."""
