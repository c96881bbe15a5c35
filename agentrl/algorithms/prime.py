"""Implicit process rewards: a reward model that is a language model, learnt online from outcomes (PRIME).

PRIME, arXiv 2502.01456: the log-ratio of the reward model and a reference, summed over an answer, is the logit of its
success; what each token adds to it is that token's reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from agentrl.algorithms.episodes import EpisodeBatch
from agentrl.algorithms.given import given
from agentrl.algorithms.group_advantages import against_others, rloo
from agentrl.algorithms.marks import Input, compares_group, needs, takes
from agentrl.algorithms.ranges import Discount, Positive
from agentrl.algorithms.return_advantages import token_returns
from agentrl.algorithms.segments import segment_mean, segment_sum


@needs(Input.PROCESS_REWARD)
@compares_group
def prime(episodes: EpisodeBatch, *, gamma: Discount = 1.0) -> torch.Tensor:
    """A = `rloo` of R + return-to-go of (p_t - the others' mean p): [tokens] (PRIME, arXiv 2502.01456, equation 5).

    p_t is the implicit process reward of a token; each other member counts by the mean over its tokens, whatever its
    length.
    """
    process = given(episodes.process_reward, Input.PROCESS_REWARD)
    own = segment_mean(process, episodes.token_episode, episodes.returns.numel())
    others = own - against_others(own, episodes)
    return rloo(episodes) + token_returns(episodes, process - episodes.to_tokens(others), gamma)


def implicit_reward(rm_logp: torch.Tensor, reference_logp: torch.Tensor, *, beta: Positive = 0.05) -> torch.Tensor:
    """p_t = beta log(pi_rm / pi_ref): [tokens] from log-probabilities [tokens]."""
    return beta * (rm_logp - reference_logp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswers:
    """What a reward model is trained on: its tokens' log-probabilities, and which episodes succeeded."""

    rm_logp: torch.Tensor
    """log pi_rm: [tokens]; the gradient flows through it."""
    reference_logp: torch.Tensor
    """log pi_ref: [tokens]."""
    episode: torch.Tensor
    """Episode of each token: int64 [tokens]."""
    success: torch.Tensor
    """Outcome of each episode, in [0, 1]: [episodes]."""


@takes("the answers that a reward model has scored (ScoredAnswers)")
def prime_reward_model(answers: ScoredAnswers, *, beta: Positive = 0.05) -> torch.Tensor:
    """-log sigmoid of the outcome's logit sum_t p_t: [episodes] (PRIME, arXiv 2502.01456, equation 4)."""
    reward = implicit_reward(answers.rm_logp, answers.reference_logp, beta=beta)
    logit = segment_sum(reward, answers.episode, answers.success.numel())
    return functional.binary_cross_entropy_with_logits(logit, answers.success.to(logit.dtype), reduction="none")
