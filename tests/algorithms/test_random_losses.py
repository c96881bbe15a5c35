"""Every loss and its gradient on 1,000 random batches against scalar float64 formulas, token by token.

Sequences of unequal length, several per trajectory, an advantage per turn, tokens without one, stale tokens.
"""

import dataclasses
import math

import pytest
import torch

from agentrl.algorithms.loss_input import LossInput
from agentrl.algorithms.marks import other_input
from agentrl.registry import Kind, lookup, names

BATCHES = 1000
MOST = 6
"""Tokens of a sequence."""


@pytest.fixture(scope="module")
def batches():
    """Of 1 to 4 sequences each."""
    generator = torch.Generator().manual_seed(5)
    return [random_batch(generator) for _ in range(BATCHES)]


def random_batch(generator):
    def whole(low, high, *size):
        return torch.randint(low, high + 1, size, generator=generator)

    def normal(scale):
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    lengths = whole(1, MOST, int(whole(1, 4, 1)))
    count = int(lengths.sum())
    sequence = torch.arange(lengths.numel()).repeat_interleave(lengths)
    turn = sequence * 2 + (whole(0, 1, count) == 1).long()
    return (
        LossInput(
            logp=(-normal(1.5).abs() - 0.01).requires_grad_(),
            old_logp=torch.zeros(count, dtype=torch.float64),
            behaviour_logp=torch.zeros(count, dtype=torch.float64),
            advantage=torch.tensor([-1.5, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)[whole(0, 4, 8)][turn],
            episode_return=torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64)[whole(0, 3, 4)][sequence // 2],
            sequence=sequence,
            sequences=lengths.numel(),
            reference_logp=-normal(1.5).abs(),
            teacher_logp=-normal(1.5).abs(),
            expert=(whole(0, 3, 4) == 0)[sequence],
        ),
        normal(0.4),
        normal(0.5),
    )


def shifted(parts):
    """pi_old and mu at a random distance; a few far away."""
    tokens, d, q = parts
    far = torch.where(d > 1.0, 25.0, d)
    old = tokens.logp.detach() - far
    return dataclasses.replace(tokens, old_logp=old, behaviour_logp=old - q)


@pytest.fixture(scope="module")
def inputs(batches):
    return [shifted(parts) for parts in batches]


@pytest.fixture(scope="module")
def joined(inputs):
    """All batches as one, for losses whose sequences do not look at one another."""
    offsets = torch.tensor([0] + [tokens.sequences for tokens in inputs]).cumsum(0)
    parts = {
        part.name: torch.cat([getattr(tokens, part.name) for tokens in inputs])
        for part in dataclasses.fields(LossInput)
        if isinstance(getattr(inputs[0], part.name), torch.Tensor) and part.name not in ("logp", "sequence")
    }
    return LossInput(
        logp=torch.cat([tokens.logp.detach() for tokens in inputs]).requires_grad_(),
        sequence=torch.cat([t.sequence + offset for t, offset in zip(inputs, offsets[:-1], strict=True)]),
        sequences=int(offsets[-1]),
        **parts,
    )


@dataclasses.dataclass
class Token:
    """One token for the references: x = log pi, d = log pi - log pi_old, q = log pi_old - log mu."""

    x: float
    d: float
    q: float
    a: float
    returned: float
    reference: float
    teacher: float
    expert: bool

    @property
    def r(self):
        return math.exp(self.d)

    @property
    def moves(self):
        return abs(self.d) < 20


def clamp(x, low=-20.0, high=20.0):
    return min(max(x, low), high)


def sequences_of(tokens):
    found = [[] for _ in range(tokens.sequences)]
    columns = (
        tokens.sequence,
        tokens.logp.detach(),
        tokens.old_logp,
        tokens.behaviour_logp,
        tokens.advantage,
        tokens.episode_return,
        tokens.reference_logp,
        tokens.teacher_logp,
        tokens.expert,
    )
    for s, x, old, mu, a, returned, reference, teacher, expert in zip(*(c.tolist() for c in columns), strict=True):
        found[s].append(Token(x, clamp(x - old), clamp(old - mu), a, returned, reference, teacher, expert))
    return found


def of_token(formula):
    return lambda sequence: [formula(token) for token in sequence]


def ppo(t, low=0.2, high=0.2, c=3.0, ratio=None):
    """Value and gradient with respect to log pi."""
    r = t.r if ratio is None else ratio
    plain, bounded = -t.a * r, -t.a * clamp(r, 1 - low, 1 + high)
    value, gradient = (bounded, 0.0) if bounded > plain else (plain, plain if t.moves or ratio else 0.0)
    if c is not None and t.a < 0 and value > -t.a * c:
        return -t.a * c, 0.0
    return value, gradient


def gspo(sequence):
    s = math.exp(sum(t.d for t in sequence) / len(sequence))
    return [ppo(t, 3e-4, 4e-4, None, ratio=s) for t in sequence]


def cispo(t):
    weight = min(t.r, 1.28)
    return -weight * t.a * t.x, -weight * t.a


def sapo(t):
    tau = 1.0 if t.a > 0 else 1.05
    sigmoid = 1 / (1 + math.exp(-tau * (t.r - 1))) if t.r < 500 else 1.0
    return -t.a * 4 / tau * sigmoid, -t.a * 4 * sigmoid * (1 - sigmoid) * t.r if t.moves else 0.0


def gmpo(sequence):
    clipped = [min(t.d, 0.4) if t.a > 0 else max(t.d, -0.4) for t in sequence]
    s = math.exp(sum(clipped) / len(sequence))
    return [(-t.a * s, -t.a * s if c == t.d and t.moves else 0.0) for t, c in zip(sequence, clipped, strict=True)]


def scaled(pair, weight):
    return tuple(weight * number for number in pair)


def decoupled_ppo(t):
    return scaled(ppo(t), min(math.exp(t.q), 5.0))


def vapo(t):
    value, gradient = ppo(t, 0.2, 0.28)
    return (value - 0.1 * t.x, gradient - 0.1) if t.returned > 0 else (value, gradient)


def dppo(t):
    pi, mu = math.exp(t.x), math.exp(t.x - t.d - t.q) if t.moves else math.exp(t.x - 25 - t.q)
    dropped = (t.a > 0 and pi - mu > 0.2) or (t.a < 0 and mu - pi > 0.2)
    return (0.0, 0.0) if dropped else (-t.a * t.r, -t.a * t.r if t.moves else 0.0)


def dppo_binary_kl(t):
    distance = t.d if t.moves else 25.0
    pi, mu = (clamp(math.exp(x), 1e-7, 1 - 1e-7) for x in (t.x, t.x - distance - t.q))
    divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    dropped = divergence > 0.05 and ((t.a > 0 and pi > mu) or (t.a < 0 and pi < mu))
    return (0.0, 0.0) if dropped else (-t.a * t.r, -t.a * t.r if t.moves else 0.0)


def topr(t):
    weight = 1.0 if t.returned > 0 else min(t.r, 1.0)
    return -weight * t.a * t.x, -weight * t.a


def kimi(t):
    return -t.a * t.x + 0.05 * t.d**2, -t.a + (0.1 * t.d if t.moves else 0.0)


def luffy(t):
    if not t.expert:
        return ppo(t)
    p = math.exp(t.x)
    return -t.a * p / (p + 0.1), -t.a * p * 0.1 / (p + 0.1) ** 2


def sppo(sequence):
    error = sum(t.x - t.reference for t in sequence) - (sequence[0].returned - 0.5)
    return [(error**2, 2 * error * len(sequence))] * len(sequence)


REFERENCES = {
    "ppo": of_token(ppo),
    "dapo": of_token(lambda t: ppo(t, 0.2, 0.28)),
    "gspo": gspo,
    "cispo": of_token(cispo),
    "sapo": of_token(sapo),
    "gmpo": gmpo,
    "reinforce": of_token(lambda t: (-t.a * t.x, -t.a)),
    "gpg": of_token(lambda t: (-t.a * t.x, -t.a)),
    "decoupled_ppo": of_token(decoupled_ppo),
    "vapo": of_token(vapo),
    "dppo": of_token(dppo),
    "dppo_binary_kl": of_token(dppo_binary_kl),
    "topr": of_token(topr),
    "kimi": of_token(kimi),
    "luffy": of_token(luffy),
    "sppo": sppo,
    "sft": of_token(lambda t: (-t.x, -1.0)),
    "distill": of_token(lambda t: (clamp(t.x - t.teacher), t.x - t.teacher)),
}


def assert_equal(name, tokens, expected, **options):
    logp = tokens.logp.detach().requires_grad_()
    loss = lookup(Kind.LOSS, name)(dataclasses.replace(tokens, logp=logp), **options)
    (gradient,) = torch.autograd.grad(loss.values.sum(), logp)
    for found, column in ((loss.values, 0), (gradient, 1)):
        wanted = torch.tensor([pair[column] for pair in expected], dtype=torch.float64)
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


def test_every_policy_loss_has_a_reference():
    policy = {name for name in names(Kind.LOSS) if ":" not in name and other_input(lookup(Kind.LOSS, name)) is None}
    assert policy == {*REFERENCES, *OVER_THE_UPDATE, "distill_top_k"}  # which reads other tokens: test_other_losses


@pytest.mark.parametrize("name", REFERENCES)
def test_loss_and_gradient_equal_the_reference(joined, name):
    expected = [pair for sequence in sequences_of(joined) for pair in REFERENCES[name](sequence)]
    assert_equal(name, joined, expected)


def covariances(tokens):
    centre = sum(t.a for t in tokens) / len(tokens), sum(t.x for t in tokens) / len(tokens)
    return [(t.a - centre[0]) * (t.x - centre[1]) for t in tokens]


def kl_cov(tokens, share):
    by = covariances(tokens)
    ranked = sorted(range(len(tokens)), key=lambda i: -by[i])[: max(1, int(share * len(tokens)))]
    return [
        (-t.a * t.r + abs(t.d) * (i in ranked), (-t.a * t.r + math.copysign(1, t.d) * (i in ranked)) * t.moves)
        for i, t in enumerate(tokens)
    ]


def m2po(tokens, share):
    kept, total = set(), 0.0
    for i in sorted(range(len(tokens)), key=lambda i: tokens[i].q ** 2):
        total += tokens[i].q ** 2
        if total / (len(kept) + 1) >= share:
            break
        kept.add(i)
    return [(-t.a * t.r * (i in kept), -t.a * t.r * (i in kept) * t.moves) for i, t in enumerate(tokens)]


def test_kl_cov_equals_the_reference(inputs):
    for parts in inputs:
        distinct = torch.linspace(0, 0.1, parts.logp.numel(), dtype=torch.float64)
        tokens = dataclasses.replace(parts, advantage=parts.advantage + distinct)
        flat = [token for sequence in sequences_of(tokens) for token in sequence]
        assert_equal("kl_cov", tokens, kl_cov(flat, 0.3), share=0.3)


def test_m2po_equals_the_reference(inputs):
    for tokens in inputs:
        flat = [token for sequence in sequences_of(tokens) for token in sequence]
        assert_equal("m2po", tokens, m2po(flat, 0.1), tau=0.1)


def test_clip_cov_is_ppo_without_some_tokens_of_the_band(inputs):
    for seed, tokens in enumerate(inputs):
        flat = [token for sequence in sequences_of(tokens) for token in sequence]
        band = {i for i, covariance in enumerate(covariances(flat)) if 0.2 <= covariance <= 2.0}
        options = {"share": 0.3, "cov_low": 0.2, "cov_high": 2.0, "seed": seed}
        mask = lookup(Kind.LOSS, "clip_cov").choice.choose(tokens, **options)
        chosen = set(mask.nonzero().squeeze(-1).tolist())
        assert chosen <= band
        assert len(chosen) == min(len(band), max(1, int(0.3 * len(flat))))
        expected = [(0.0, 0.0) if i in chosen else ppo(t) for i, t in enumerate(flat)]
        told = tokens if seed % 5 == 0 else dataclasses.replace(tokens, chosen=mask)  # what it would choose again
        assert_equal("clip_cov", told, expected, **options)


OVER_THE_UPDATE = {"kl_cov", "m2po", "clip_cov"}
