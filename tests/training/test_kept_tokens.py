"""Every loss with every filter and correction, value and gradient, against loops over the tokens that are kept.

Two updates on the same tokens: at the second one no ratio is 1. Turns have advantages of both signs.
"""

import copy
import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from loss_loops import COUPLED, REFERENCES, Token, clamp, covariances, kl_cov, m2po, ppo, ppo_clips
from support.trainers import compute_logprobs

from agentrl.algorithms.traits import needed_inputs, other_input, weighs_behaviour
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.registry import Kind, lookup, names
from agentrl.training.algorithm_functions import PROVIDED
from agentrl.training.trainer import Trainer

LOSSES = [
    name
    for name in names(Kind.LOSS)
    if ":" not in name
    and other_input(lookup(Kind.LOSS, name)) is None
    and needed_inputs(lookup(Kind.LOSS, name)) <= PROVIDED
]
LOSS_OPTIONS = {
    "kl_cov": {"share": 0.3},
    "clip_cov": {"share": 1.0, "cov_low": 0.0, "cov_high": 9.0},  # all of the band: nothing is left to chance
    "m2po": {"tau": 0.02},
}


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def by_token(formula):
    return lambda tokens: {i for i, token in enumerate(tokens) if formula(token)}


def by_sequence(formula):
    """formula(tokens of the sequence)"""

    def kept(tokens):
        good = {s for s in {t.sequence for t in tokens} if formula([t for t in tokens if t.sequence == s])}
        return {i for i, token in enumerate(tokens) if token.sequence in good}

    return kept


def most_uncertain(tokens):
    ranked = sorted(range(len(tokens)), key=lambda i: -tokens[i].entropy)
    return set(ranked[: round(0.6 * len(tokens))])


def near_or_good(tokens):
    """Tokens without a negative advantage, and those of sequences at most 0.05 away from mu."""
    near = by_sequence(lambda own: -mean([t.far + t.q for t in own]) <= 0.05)(tokens)
    return {i for i, token in enumerate(tokens) if i in near or token.a >= 0}


def k3(q):
    return math.exp(q) - q - 1


FILTERS = [
    ("k1", {"limit": 0.5}, by_token(lambda t: abs(t.q) <= 0.5)),
    ("k1", {"limit": 0.2, "of": "sequence"}, by_sequence(lambda own: abs(mean([t.q for t in own])) <= 0.2)),
    ("k2", {"limit": 0.1}, by_token(lambda t: t.q**2 / 2 <= 0.1)),
    ("k2", {"limit": 0.15, "of": "sequence"}, by_sequence(lambda own: mean([t.q**2 / 2 for t in own]) <= 0.15)),
    ("k3", {"limit": 0.1}, by_token(lambda t: k3(t.q) <= 0.1)),
    ("k3", {"limit": 0.15, "of": "sequence"}, by_sequence(lambda own: mean([k3(t.q) for t in own]) <= 0.15)),
    ("geometric", {"band": [0.8, 1.25]}, by_sequence(lambda own: 0.8 <= math.exp(mean([t.q for t in own])) <= 1.25)),
    ("off_policy_sequence", {"delta": 0.05}, near_or_good),
    ("top_entropy", {"share": 0.6}, most_uncertain),
]
ALL = ("none", None, lambda tokens: set(range(len(tokens))))
CASES = [
    *itertools.product(FILTERS, ["sequence"]),
    *itertools.product([FILTERS[0]], ["token", "icepop"]),
    *itertools.product([ALL], ["sequence", "icepop", "off"]),
]


def test_every_filter_is_among_the_cases():
    assert {name for name, *_ in FILTERS} == {name for name in names(Kind.FILTER) if ":" not in name}


@dataclass(kw_only=True)
class Trained(Token):
    """A token of the step."""

    sequence: int
    trajectory: int
    entropy: float


@pytest.fixture
def played(model, trajectories):
    """Rewards at every turn, and an engine that is a little off, and far off at some tokens."""
    rng = random.Random(7)
    trainer = Trainer(model, AlgorithmConfig(), TrainerConfig(), seed=0, max_tokens=100)
    few = [trajectories[1], *trajectories[3:5]]
    for trajectory in few:
        for turn in trajectory.turns:
            turn.reward = rng.choice([-1.0, -0.5, 0.5, 1.0])
        trajectory.reward = sum(turn.reward for turn in trajectory.turns)
        for sequence in trajectory.sequences:
            (exact,) = compute_logprobs(trainer, [sequence])
            for t, value in zip(sequence.loss_mask[sequence.shared :].nonzero()[0], exact.tolist(), strict=True):
                sequence._logprobs[int(t)] = value - rng.gauss(0, 0.3) - (rng.random() < 0.1)
    return few


@dataclass
class Seen:
    """The weights before each update, and the gradients of each."""

    weights: list = field(default_factory=list)
    gradients: list = field(default_factory=list)


def two_updates(model, reference, trajectories, config):
    settings = {"learning_rate": 2e-2, "epochs": 2, "max_grad_norm": 1e9, "tokens_per_micro_batch": 120}
    trainer = Trainer(
        copy.deepcopy(model),
        config,
        TrainerConfig(**settings),
        seed=0,
        max_tokens=100,
        signal_models={"reference": reference},
    )
    seen, update = Seen(), trainer._optimizer.update

    def record():
        seen.weights.append(copy.deepcopy(trainer.model.state_dict()))
        seen.gradients.append({name: p.grad.double() for name, p in trainer.model.named_parameters()})
        return update()

    trainer._optimizer.update = record
    return trainer.step(trajectories, temperature=1.0), seen


def scored(model, trajectories):
    """log pi of every sampled token, with its gradient, and entropy: [tokens] each."""
    found, entropies = [], []
    for sequence in itertools.chain.from_iterable(t.sequences for t in trajectories):
        ids = torch.from_numpy(sequence.token_ids).long()
        distribution = model(ids[None]).logits[0].log_softmax(-1)
        where = torch.from_numpy(sequence.loss_mask.nonzero()[0])
        found.append(distribution[where - 1, ids[where]])
        entropies.append(-(distribution.exp() * distribution).sum(-1)[where - 1])
    return torch.cat(found), torch.cat(entropies)


def with_weights(model, weights):
    other = copy.deepcopy(model)
    other.load_state_dict(weights)
    return other.double()


def tokens_of(trajectories, logp, old, reference, entropy, *, first):
    """What the loops are told of each token; A is the return from its turn on."""
    numbers, found = zip(logp.tolist(), old.tolist(), reference.tolist(), entropy.tolist(), strict=True), []
    sequences = ((n, s) for n, t in enumerate(trajectories) for s in t.sequences)
    for s, (n, sequence) in enumerate(sequences):
        for t in sequence.loss_mask.nonzero()[0]:
            x, before, ref, uncertainty = next(numbers)
            turn = next(turn for turn in sequence.turns if turn.start <= t < turn.end)
            own = trajectories[n].turns
            found.append(
                Trained(
                    x=x,
                    far=0.0 if first else x - before,
                    q=(x if first else before) - float(sequence.logprobs[t]),
                    a=sum(later.reward for later in own[own.index(turn) :]),
                    returned=trajectories[n].reward,
                    reference=ref,
                    teacher=0.0,
                    expert=False,
                    turn=turn.index,
                    episode=n,
                    group=trajectories[n].group_id,
                    sequence=s,
                    trajectory=n,
                    entropy=uncertainty,
                )
            )
    return found


def pairs_of(loss, tokens):
    """Value and gradient of each token's loss, from nothing but these tokens."""
    if loss == "kl_cov":
        return kl_cov(tokens, 0.3)
    if loss == "clip_cov":
        band = covariances(tokens)
        return [(0.0, 0.0) if 0 <= band[i] <= 9 and not ppo_clips(t) else ppo(t) for i, t in enumerate(tokens)]
    if loss == "m2po":
        return m2po(tokens, 1e9)
    if loss in COUPLED:
        return COUPLED[loss](tokens)
    pairs = {}
    for own in ([t for t in tokens if t.sequence == s] for s in {t.sequence for t in tokens}):
        pairs.update(zip(map(id, own), REFERENCES[loss](own), strict=True))
    return [pairs[id(t)] for t in tokens]


def corrected(mode, token, tokens):
    if mode == "off":
        return 1.0
    if mode == "sequence":
        product = math.fsum(t.q for t in tokens if t.sequence == token.sequence)
        return min(math.exp(clamp(product)), 5.0)
    return min(math.exp(token.q), 2.0) if mode == "token" else math.exp(token.q)


def coefficients(loss, mode, tokens, kept):
    """Value and coefficient of log pi of each token in the loss of an update, and which tokens are kept in the end."""
    if mode == "icepop":
        kept = {i for i in kept if 0.5 <= math.exp(tokens[i].q) <= 5.0}
    if loss == "m2po":
        squares, total, few = sorted((tokens[i].q ** 2, i) for i in kept), 0.0, set()
        for square, i in squares:
            total += square
            if total / (len(few) + 1) >= 0.02:
                break
            few.add(i)
        kept = few
    own = [tokens[i] for i in sorted(kept)]
    sizes = {s: sum(t.sequence == s for t in own) for s in {t.sequence for t in own}}
    found = [(0.0, 0.0)] * len(tokens)
    for i, token, pair in zip(sorted(kept), own, pairs_of(loss, own), strict=True):
        share = corrected(mode, token, own) / len(sizes) / sizes[token.sequence]
        found[i] = (share * pair[0], share * pair[1])
    if loss == "sppo":  # each token's value depends on all tokens of its sequence alike
        for s in sizes:
            members = [i for i in kept if tokens[i].sequence == s]
            total = mean([found[i][1] for i in members])
            for i in members:
                found[i] = (found[i][0], total)
    return found, kept


def truncated(mode, tokens, kept):
    """What the correction bounds, one flag a token: of the kept ones, or all that icepop looks at."""
    if mode == "icepop":
        return [not 0.5 <= math.exp(t.q) <= 5.0 for t in tokens]
    own = [tokens[i] for i in sorted(kept)]
    if mode == "sequence":
        return [math.fsum(t.q for t in own if t.sequence == token.sequence) > math.log(5) for token in own]
    return [mode == "token" and math.exp(t.q) > 2 for t in own]


QUICK = ("ppo", "gspo", "gmpo", "cispo")
"""Losses that `make test` compares: per token, and with ratios of sequences; `make test-slow` has the others."""


@pytest.mark.parametrize(
    "loss", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LOSSES]
)
@pytest.mark.slow
def test_a_loss_with_a_filter_is_the_loss_of_the_kept_tokens_alone(model, played, loss):
    alone = weighs_behaviour.of(lookup(Kind.LOSS, loss))
    cases = [(each, "off") for each in [*FILTERS, ALL]] if alone else CASES
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
        told, _ = scored(copy.deepcopy(reference).double(), played)
        old, entropy = scored(copy.deepcopy(model).double(), played)
    for (name, options, keep), mode in cases:
        config = AlgorithmConfig(
            advantage="reinforce",
            loss=loss,
            loss_options=LOSS_OPTIONS.get(loss, {}),
            aggregation="seq-mean-token-mean",
            filters={} if options is None else {name: options},
            correction={"mode": mode},
        )
        report, seen = two_updates(model, reference, played, config)
        losses, counts, clipped, bounded = [], [], [], []
        for number, (weights, gradients) in enumerate(zip(seen.weights, seen.gradients, strict=True)):
            policy = with_weights(model, weights)
            logp, _ = scored(policy, played)
            tokens = tokens_of(played, logp, old, told, entropy, first=number == 0)
            found, kept = coefficients(loss, mode, tokens, keep(tokens))
            losses.append(math.fsum(value for value, _ in found))
            counts.append(len(kept) / len(tokens))
            learning = {
                token.sequence for token in tokens if token.a != 0
            }  # others are read where something is dropped
            every = options is not None or mode == "icepop"
            clipped += [ppo_clips(tokens[i]) for i in kept if every or tokens[i].sequence in learning]
            bounded += truncated(mode, tokens, kept)
            (logp * torch.tensor([pair[1] for pair in found], dtype=torch.float64)).sum().backward()
            for parameter, own in policy.named_parameters():
                wanted = torch.zeros_like(own) if own.grad is None else own.grad
                scale = max(1e-3, float(wanted.abs().max()))
                what = (name, mode, number, parameter)
                assert float((gradients[parameter] - wanted).abs().max()) < 1e-4 * scale, what
        assert report.metrics["train/loss"] == pytest.approx(mean(losses), rel=1e-4, abs=1e-5), (name, mode)
        assert report.metrics.get("train/dropped_share", 0.0) == pytest.approx(1 - mean(counts)), (name, mode)
        assert report.metrics["mismatch/clip_share"] == pytest.approx(mean(bounded)), (name, mode)
        if loss == "ppo":
            assert report.metrics["train/clip_share"] == pytest.approx(mean(clipped)), (name, mode)


@pytest.mark.parametrize("loss", ["flowrl", "gvpo", "online_dpo", "pacs"])
def test_losses_of_groups_allow_that_every_token_is_rejected(model, trajectories, loss):
    config = AlgorithmConfig(loss=loss, filters={"k1": {"limit": 0.0}})
    report = Trainer(model, config, TrainerConfig(), seed=0, max_tokens=100).step(trajectories, temperature=0.8)
    assert (report.metrics["train/dropped_share"], report.metrics["train/loss"]) == (1, 0)
