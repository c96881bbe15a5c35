"""Every policy loss as scalar formulas in plain Python, token by token, with its gradient with respect to log pi."""

import dataclasses
import math


@dataclasses.dataclass
class Token:
    """One token for the references: x = log pi, far = log pi - log pi_old, q = log pi_old - log mu."""

    x: float
    far: float
    q: float
    a: float
    returned: float
    reference: float
    teacher: float
    expert: bool
    turn: int
    episode: int
    group: int

    @property
    def d(self):
        return clamp(self.far)

    @property
    def r(self):
        return math.exp(self.d)

    @property
    def moves(self):
        return abs(self.far) < 20


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
        tokens.turn,
        tokens.episode,
        tokens.group,
    )
    for s, x, old, mu, *others in zip(*(c.tolist() for c in columns), strict=True):
        found[s].append(Token(x, x - old, clamp(old - mu), *others))
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


def ppo_clips(t, low=0.2, high=0.2, c=3.0):
    """Whether the clip takes the token's gradient."""
    return (t.a > 0 and t.r > 1 + high) or (t.a < 0 and (t.r < 1 - low or t.r > c))


def gspo(sequence):
    mean = sum(t.far for t in sequence) / len(sequence)
    found = [ppo(t, 3e-4, 4e-4, None, ratio=math.exp(min(mean, 10.0))) for t in sequence]
    return found if mean <= 10 else [(value, 0.0) for value, _ in found]


def ppo_turn(sequence):
    found = []
    for t in sequence:
        own = [other.far for other in sequence if other.turn == t.turn]
        mean = sum(own) / len(own)
        value, gradient = ppo(t, ratio=math.exp(clamp(mean)))
        found.append((value, gradient if abs(mean) < 20 else 0.0))
    return found


def vespo(sequence):
    log_w = clamp(sum(t.d + t.q for t in sequence), math.log(1e-8))

    def weight(t):
        k, strength = (2.0, 3.0) if t.a >= 0 else (3.0, 2.0)
        return math.exp(strength + k * log_w - strength * math.exp(log_w))

    return [(-weight(t) * t.a * t.x, -weight(t) * t.a) for t in sequence]


def cispo(t):
    weight = min(t.r, 5.0)
    return -weight * t.a * t.x, -weight * t.a


def sapo(t):
    tau = 1.0 if t.a > 0 else 1.05
    sigmoid = 1 / (1 + math.exp(-tau * (t.r - 1))) if t.r < 500 else 1.0
    return -t.a * 4 / tau * sigmoid, -t.a * 4 * sigmoid * (1 - sigmoid) * t.r if t.moves else 0.0


def gmpo(sequence):
    clipped = [min(t.far, 0.4) if t.a > 0 else max(t.far, -0.4) for t in sequence]
    mean = sum(clipped) / len(sequence)
    s = math.exp(min(mean, 10.0))
    return [(-t.a * s, -t.a * s * (c == t.far and mean <= 10)) for t, c in zip(sequence, clipped, strict=True)]


def scaled(pair, weight):
    return tuple(weight * number for number in pair)


def decoupled_ppo(t):
    return scaled(ppo(t), min(math.exp(t.q), 5.0))


def vapo(t):
    value, gradient = ppo(t, 0.2, 0.28)
    return (value - 0.1 * t.x, gradient - 0.1) if t.returned > 0 else (value, gradient)


def dppo(t):
    pi, mu = math.exp(t.x), math.exp(t.x - t.far - t.q)
    dropped = (t.a > 0 and pi - mu > 0.15) or (t.a < 0 and mu - pi > 0.15)
    return (0.0, 0.0) if dropped else (-t.a * min(t.r, 20.0),) * 2


def dppo_binary_kl(t):
    pi, mu = (clamp(math.exp(x), 1e-7, 1 - 1e-7) for x in (t.x, t.x - t.far - t.q))
    divergence = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    dropped = divergence > 0.05 and ((t.a > 0 and pi > mu) or (t.a < 0 and pi < mu))
    return (0.0, 0.0) if dropped else (-t.a * min(t.r, 20.0),) * 2


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


def rl_plus(t):
    if not t.expert:
        return ppo(t)
    p, old = math.exp(t.x), math.exp(t.x - t.far)
    loss = -t.a * math.sqrt(max(1 - p, 0.0)) * 2 * p / (1.5 * old + 0.5)
    return loss, loss


def sppo(sequence):
    error = sum(t.x - t.reference for t in sequence) - (sequence[0].returned - 0.5)
    return [(error**2, 2 * error * len(sequence))] * len(sequence)


REFERENCES = {
    "ppo": of_token(ppo),
    "dapo": of_token(lambda t: ppo(t, 0.2, 0.28)),
    "gspo": gspo,
    "luspo": gspo,
    "ppo_turn": ppo_turn,
    "vespo": vespo,
    "rl_plus": of_token(rl_plus),
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
    "dqo": of_token(lambda t: ((0.03 * (t.far + t.q) - t.a) ** 2, 0.06 * (0.03 * (t.far + t.q) - t.a))),
    "luffy": of_token(luffy),
    "sppo": sppo,
    "sft": of_token(lambda t: (-t.x, -1.0)),
    "distill": of_token(lambda t: (clamp(t.x - t.teacher), t.x - t.teacher)),
}


def covariances(tokens):
    centre = sum(t.a for t in tokens) / len(tokens), sum(t.x for t in tokens) / len(tokens)
    return [(t.a - centre[0]) * (t.x - centre[1]) for t in tokens]


def kl_cov(tokens, share):
    by = covariances(tokens)
    part = shares_of_largest(by, max(1, int(share * len(tokens))))
    return [
        (-t.a * t.r + abs(t.d) * part[i], (-t.a * t.r + ((t.d > 0) - (t.d < 0)) * part[i]) * t.moves)
        for i, t in enumerate(tokens)
    ]


def shares_of_largest(values, count):
    """1 for values above the least of the largest; those that equal it (but for rounding) share what is left."""
    least = sorted(values, reverse=True)[count - 1]
    equal = [abs(value - least) <= 4e-6 * max(map(abs, values)) for value in values]
    above = sum(value > least and not tied for value, tied in zip(values, equal, strict=True))
    return [
        (count - above) / sum(equal) if tied else float(value > least)
        for value, tied in zip(values, equal, strict=True)
    ]


def m2po(tokens, share):
    kept, total = set(), 0.0
    for i in sorted(range(len(tokens)), key=lambda i: tokens[i].q ** 2):
        total += tokens[i].q ** 2
        if total / (len(kept) + 1) >= share:
            break
        kept.add(i)
    return [(-t.a * t.r * (i in kept), -t.a * t.r * (i in kept) * t.moves) for i, t in enumerate(tokens)]


def by_episode(tokens):
    """Indices of the tokens of each episode, group by group."""
    groups = {}
    for i, t in enumerate(tokens):
        groups.setdefault(t.group, {}).setdefault(t.episode, []).append(i)
    return [list(episodes.values()) for episodes in groups.values()]


def coupled(loss_of_group):
    """Divide the loss of each episode among its tokens; `loss_of_group` gives each episode's loss and slope."""

    def of_update(tokens):
        found = [None] * len(tokens)
        for episodes in by_episode(tokens):
            losses = loss_of_group([[tokens[i] for i in own] for own in episodes])
            for own, (loss, slope) in zip(episodes, losses, strict=True):
                for i in own:
                    found[i] = (loss / len(own), slope)
        return found

    return of_update


def pacs(episodes):
    """BCE with RLOO logits; each log pi moves the logits of all members."""
    n, x, label = len(episodes), [sum(t.far for t in own) for own in episodes], [own[0].returned for own in episodes]
    logits = [x[i] - (sum(x) - x[i]) / (n - 1) if n > 1 else 0.0 for i in range(n)]
    chances = [1 / (1 + math.exp(-z)) for z in logits]
    found = []
    for i in range(n):
        loss = max(logits[i], 0) - logits[i] * label[i] + math.log1p(math.exp(-abs(logits[i])))
        slope = sum((chances[j] - label[j]) * (1.0 if i == j else -1 / (n - 1)) for j in range(n)) if n > 1 else 0.0
        found.append((loss, slope))
    return found


def gvpo(episodes):
    n, x = len(episodes), [0.1 * sum(t.far for t in own) for own in episodes]
    rewards = [own[0].returned for own in episodes]
    errors = [x[i] - sum(x) / n - rewards[i] + sum(rewards) / n for i in range(n)]
    scale = n / max(n - 1, 1)
    return [(scale * e**2 / 2, scale * 0.1 * e) for e in errors]


def flowrl(episodes):
    found = []
    x = [sum(t.x - t.reference - 15 * t.a for t in own) / len(own) for own in episodes]
    for own, score in zip(episodes, x, strict=True):
        weight = min(math.exp(min(sum(t.far for t in own), 20.0)), 10.0)
        error = score - sum(x) / len(x)
        found.append((weight * error**2, 2 * weight * error / len(own)))
    return found


def preferred(episodes, better, worse):
    """DPO of two episodes of a group, counted as often as the group has episodes."""
    found = [(0.0, 0.0) for _ in episodes]
    if better is None or worse is None:
        return found
    margin = 0.1 * sum(
        sign * (t.x - t.reference) for sign, own in ((1, episodes[better]), (-1, episodes[worse])) for t in own
    )
    n, loss = len(episodes), max(-margin, 0) + math.log1p(math.exp(-abs(margin)))
    for sign, i in ((1, better), (-1, worse)):
        found[i] = (n * loss / 2, -n * 0.1 * sign / (1 + math.exp(margin)))
    return found


def online_dpo(episodes):
    returns = [own[0].returned for own in episodes]
    if min(returns) == max(returns):
        return preferred(episodes, None, None)
    return preferred(episodes, returns.index(max(returns)), returns.index(min(returns)))


def online_spin(episodes):
    experts = [any(t.expert for t in own) for own in episodes]
    return preferred(episodes, *(experts.index(kind) if kind in experts else None for kind in (True, False)))


COUPLED = {
    "pacs": coupled(pacs),
    "gvpo": coupled(gvpo),
    "flowrl": coupled(flowrl),
    "online_dpo": coupled(online_dpo),
    "online_spin": coupled(online_spin),
}
"""Losses that depend on whole groups, as functions of all tokens of an update."""

OVER_THE_UPDATE = {*COUPLED, "kl_cov", "m2po", "clip_cov"}
"""Losses that choose among all tokens of an update."""
