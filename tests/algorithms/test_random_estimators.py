"""Every estimator on 300 random steps against a float64 reference in plain Python, written from the formula."""

import dataclasses
import itertools
import math

import pytest
import torch

from agentrl.algorithms.types import EpisodeBatch, Estimate
from agentrl.registry import Kind, lookup, names

EPSILON = 1e-6
WHOLE = {
    "spo",
    "grpo_batch_std",
    "prpo",
    "reinforce++",
    "reinforce++_baseline",
    "trr++",
    "gdpo",
    "gpg",
    "gae",
    "gae_turn",
    "bi_level",
    "vapo",
    "dqo",
    "grpo_passk",
}
"""Those that look at a whole step; for the others 300 steps are as good as one, and are given as one."""


@pytest.fixture(scope="module")
def joined(random_steps):
    batches = [step.batch for step in random_steps]

    def cat(name, count=lambda _: 0):
        shifts = itertools.accumulate(map(count, batches), initial=0)
        return torch.cat([getattr(batch, name) + shift for batch, shift in zip(batches, shifts, strict=False)])

    return EpisodeBatch(
        group=cat("group", lambda batch: batch.groups),
        turn_episode=cat("turn_episode", lambda batch: batch.returns.numel()),
        turn_state=cat("turn_state", lambda batch: int(batch.turn_state.max()) + 1),
        token_turn=cat("token_turn", lambda batch: batch.turn_reward.numel()),
        **{
            name: cat(name)
            for name in (
                "returns",
                "turn_reward",
                "token_reward",
                "process_reward",
                "greedy_return",
                "baseline",
                "score_norm",
                "role_kind",
            )
        },
    )


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def std(numbers):
    centre = mean(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / max(len(numbers) - 1, 1))


def whitened(numbers):
    if len(numbers) < 2:
        return [0.0] * len(numbers)
    centre, spread = mean(numbers), std(numbers)
    return [(x - centre) / (spread + EPSILON) for x in numbers]


def peers(step, e, of=None):
    of = of or [episode.returns for episode in step.played]
    return [of[i] for i in step.members[step.played[e].group]]


def spread(step, of_episode):
    """A number per episode at each of its tokens."""
    return step.flat([[[of_episode(e)] * t.tokens for t in p.turns] for e, p in enumerate(step.played)])


def spread_turns(step, of_turn):
    """A number per turn at each of its tokens: of_turn[episode][turn]."""
    return step.flat([[[of_turn[e][k]] * t.tokens for k, t in enumerate(p.turns)] for e, p in enumerate(step.played)])


def grpo_of(step, e, of=None):
    own = (of or [episode.returns for episode in step.played])[e]
    return (own - mean(peers(step, e, of))) / (std(peers(step, e, of)) + EPSILON)


def grpo(step):
    return spread(step, lambda e: grpo_of(step, e))


def grpo_batch_std(step):
    scale = std([p.returns for p in step.played]) + EPSILON
    return spread(step, lambda e: (step.played[e].returns - mean(peers(step, e))) / scale)


def prpo(step):
    everyone = [p.returns for p in step.played]
    centre = mean(everyone)
    scale = math.sqrt(mean([(x - centre) ** 2 for x in everyone])) + EPSILON
    return spread(step, lambda e: (everyone[e] - centre) / scale)


def dr_grpo(step):
    return spread(step, lambda e: step.played[e].returns - mean(peers(step, e)))


def rloo(step):
    return spread(step, lambda e: rloo_of(step, e, [p.returns for p in step.played]))


def rloo_of(step, e, of):
    everyone = peers(step, e, of)
    return of[e] - (math.fsum(everyone) - of[e]) / (len(everyone) - 1)


def opo(step):
    def against(e):
        own = [step.played[i] for i in step.members[step.played[e].group]]
        return step.played[e].returns - sum(p.tokens * p.returns for p in own) / sum(p.tokens for p in own)

    return spread(step, against)


def gpg(step):
    centred = [p.returns - mean(peers(step, e)) for e, p in enumerate(step.played)]
    teaching = sum(abs(x) > 1e-9 for x in centred)
    return spread(step, lambda e: centred[e] * len(centred) / max(teaching, 1))


def maxrl(step):
    returns = [abs(p.returns) for p in step.played]

    def against(e):
        centre = mean(peers(step, e, returns))
        return (returns[e] - centre) / centre if centre > 0 else 0.0

    return spread(step, against)


def grpo_passk(step):
    def against(e):
        ranked = sorted(step.members[step.played[e].group], key=lambda i: (-step.played[i].returns, i))
        if e != ranked[0]:
            return 0.0
        return (step.played[e].returns - step.played[ranked[1]].returns) / (std(peers(step, e)) + EPSILON)

    return spread(step, against)


def gdpo(step):
    total = [0.0] * len(step.played)
    for name in ("right", "short"):
        of = [p.components[name] for p in step.played]
        total = [x + grpo_of(step, e, of) for e, x in enumerate(total)]
    white = whitened(total)
    return spread(step, lambda e: white[e])


def turn_rewards(step):
    return [[t.reward + sum(t.penalty) for t in p.turns] for p in step.played]


def discounted(rewards, gamma):
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def turn_returns(step, gamma):
    return [discounted(rewards, gamma) for rewards in turn_rewards(step)]


def reinforce(step, gamma=1.0):
    return spread_turns(step, turn_returns(step, gamma))


def among(step, returns, key):
    """Returns of turns, standardized among those with the same key(episode, turn)."""
    pools = {}
    for e, own in enumerate(returns):
        for k, number in enumerate(own):
            pools.setdefault(key(e, k), []).append(number)
    centre = {name: mean(pool) for name, pool in pools.items()}
    scale = {name: std(pool) + EPSILON for name, pool in pools.items()}
    return [[(x - centre[key(e, k)]) / scale[key(e, k)] for k, x in enumerate(own)] for e, own in enumerate(returns)]


def state_context(step, e, k, depth):
    turns = step.played[e].turns
    return (step.played[e].group, tuple(t.state for t in turns[max(0, k - depth) : k + 1]), min(k, depth))


def gigpo(step):
    found = among(step, turn_returns(step, 0.95), lambda e, k: state_context(step, e, k, 0))
    return spread_turns(step, [[grpo_of(step, e) + x for x in own] for e, own in enumerate(found)])


def hgpo(step):
    returns = turn_returns(step, 0.95)
    found = [[hgpo_of(step, returns, e, k) for k in range(len(own))] for e, own in enumerate(returns)]
    return spread_turns(step, found)


def hgpo_of(step, returns, e, k):
    """The mean over the depths at which the turn has peers that differ, of weight h + 2."""
    total = weights = 0.0
    for h in range(min(k, 2) + 1):
        own = state_context(step, e, k, h)
        pool = [
            x
            for other, known in enumerate(returns)
            for j, x in enumerate(known)
            if j >= h and state_context(step, other, j, h) == own
        ]
        if max(pool) - min(pool) > 1e-9:
            centre = mean(pool)
            advantage = (returns[e][k] - centre) / (math.sqrt(mean([(x - centre) ** 2 for x in pool])) + EPSILON)
            total, weights = total + (h + 2) * advantage, weights + (h + 2) * (abs(advantage) > 1e-9)
    return total / weights if weights else 0.0


def turn_rloo(step, gamma=1.0, key=lambda step, e, k: k):
    """G_k minus the mean over turns of other members with the same key; without such turns, over their returns."""
    returns = turn_returns(step, gamma)

    def of_turn(e, k):
        others = [i for i in step.members[step.played[e].group] if i != e]
        same = [returns[i][j] for i in others for j in range(len(returns[i])) if key(step, i, j) == key(step, e, k)]
        return returns[e][k] - mean(same or [step.played[i].returns for i in others])

    return spread_turns(step, [[of_turn(e, k) for k in range(len(own))] for e, own in enumerate(returns)])


def graphgpo(step):
    """Distances by relaxing every turn of the group until nothing changes."""
    advantages = {}
    for members in step.members.values():
        edges = [edge for e in members for edge in edges_of(step, e)]
        distance = {"goal": 0}
        for _ in edges:
            for state, after in edges:
                if after in distance:
                    distance[state] = min(distance.get(state, math.inf), distance[after] + 1)
        far = max(distance.values()) + 1
        for e in members:
            advantages[e] = [10 * 0.1 ** distance.get(after, far) for _, after in edges_of(step, e)]
    found = among(step, [advantages[e] for e in range(len(step.played))], lambda e, k: state_context(step, e, k, 0))
    return spread_turns(step, [[grpo_of(step, e) + x for x in own] for e, own in enumerate(found)])


def edges_of(step, e):
    states = [turn.state for turn in step.played[e].turns]
    return list(zip(states, [*states[1:], "goal" if step.played[e].returns > 1e-9 else f"end {e}"], strict=True))


def turn_discounted(step):
    found = among(step, turn_returns(step, 0.95), lambda e, k: (step.played[e].group, k))
    return spread_turns(step, found)


def turn_discounted_over_all(step):
    return spread_turns(step, among(step, turn_returns(step, 0.5), lambda e, _: step.played[e].group))


def token_rewards(episode):
    """r_t turn by turn: what a turn without tokens earned belongs to the last token before it."""
    found = [list(t.penalty) for t in episode.turns]
    for k, turn in enumerate(episode.turns):
        heard = [i for i in range(k + 1) if episode.turns[i].tokens]
        if heard:
            found[heard[-1]][-1] += turn.reward
    return found


def in_time(nested):
    return [x for own in nested for x in own]


def like(nested, numbers):
    rest = iter(numbers)
    return [[next(rest) for _ in own] for own in nested]


def per_token(step, of_episode):
    """of_episode(episode) gives one number per token in the order of time."""
    return step.flat([like([t.values for t in p.turns], of_episode(p)) for p in step.played])


def reinforce_plus_plus(step, gamma=1.0):
    return whitened(per_token(step, lambda p: discounted(in_time(token_rewards(p)), gamma)))


def trr_plus_plus(step, gamma=1.0):
    """Each role and kind of task by itself."""
    returns = [discounted(in_time(token_rewards(p)), gamma) for p in step.played]
    white = {}
    for kind in {p.kind for p in step.played}:
        own = [e for e, p in enumerate(step.played) if p.kind == kind]
        numbers = iter(whitened([x for e in own for x in returns[e]]))
        white |= {e: [next(numbers) for _ in returns[e]] for e in own}
    return step.flat([like([t.values for t in p.turns], white[e]) for e, p in enumerate(step.played)])


def remax(step):
    return spread(step, lambda e: step.played[e].returns - step.played[e].greedy)


def gae_sums(rewards, values, gamma, weight):
    """sum_l (gamma lambda)^l delta_{t+l}, straight from the definition."""
    following = [*values[1:], 0.0]
    delta = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return discounted(delta, gamma * weight)


def gae_of(weight):
    """L_t of an episode; weight(episode) is lambda."""
    return lambda p: gae_sums(in_time(token_rewards(p)), in_time([t.values for t in p.turns]), 1.0, weight(p))


def plus_values(sums):
    return lambda p: [x + v for x, v in zip(sums(p), in_time([t.values for t in p.turns]), strict=True)]


def at_turns(sums):
    """Numbers of the turns that have tokens, at each of these tokens."""

    def at_tokens(p):
        spoken = [t for t in p.turns if t.tokens]
        return [x for x, t in zip(sums(p), spoken, strict=True) for _ in range(t.tokens)]

    return at_tokens


def gae_of_turns(p):
    spoken = [(rewards, t) for rewards, t in zip(token_rewards(p), p.turns, strict=True) if t.tokens]
    return gae_sums([sum(r) for r, _ in spoken], [t.values[0] for _, t in spoken], 1.0, 0.95)


def turn_targets(p):
    """L + V at the first token of each turn, nothing elsewhere."""
    found, sums = [], iter(gae_of_turns(p))
    for turn in (t for t in p.turns if t.tokens):
        found += [next(sums) + turn.values[0], *[math.nan] * (turn.tokens - 1)]
    return found


def bi_level_of(p):
    spoken = [(rewards, t.values) for rewards, t in zip(token_rewards(p), p.turns, strict=True) if t.tokens]
    early = [sum(rewards[:-1]) for rewards, _ in spoken[1:]] + [0.0]
    ends = gae_sums([r[-1] + x for (r, _), x in zip(spoken, early, strict=True)], [v[-1] for _, v in spoken], 1, 0.95)
    found = []
    for (rewards, values), end in zip(spoken, ends, strict=True):
        delta = [rewards[j] + values[j + 1] - values[j] for j in range(len(values) - 1)] + [end]
        found += discounted(delta, 0.95)
    return found


def adaptive(p):
    return max(1 - 1 / (0.05 * p.tokens), 0.0)


CRITICS = {
    "gae": (gae_of(lambda _: 0.95), plus_values(gae_of(lambda _: 0.95))),
    "gae_turn": (at_turns(gae_of_turns), turn_targets),
    "bi_level": (bi_level_of, plus_values(bi_level_of)),
    "vapo": (gae_of(adaptive), plus_values(gae_of(lambda _: 1.0))),
}
"""Of one episode: L_t, which is whitened over the step, and what the critic learns."""


def prime(step):
    own = [mean(in_time([t.process for t in p.turns])) for p in step.played]

    def sums(p):
        e = next(i for i, other in enumerate(step.played) if other is p)
        others = own[e] - rloo_of(step, e, own)
        outcome = rloo_of(step, e, [q.returns for q in step.played])
        return [outcome + x for x in discounted([x - others for x in in_time([t.process for t in p.turns])], 1.0)]

    return per_token(step, sums)


def otb(step, zero_tail=True):
    """Sums over the members that are long enough, position by position."""
    found = [None] * len(step.played)
    for members in step.members.values():
        returns = {e: discounted(in_time(token_rewards(step.played[e])), 1.0) for e in members}
        norms = {e: in_time([t.norm for t in step.played[e].turns]) for e in members}
        total = [step.played[e].returns for e in members]
        for e in members:
            found[e] = []
            for t, own in enumerate(returns[e]):
                peers = [i for i in members if len(returns[i]) > t]
                weights = {i: sum(norms[i][: t + 1]) for i in peers}
                baseline = sum(weights[i] * returns[i][t] for i in peers) / (sum(weights.values()) + 1e-8)
                if len(peers) == 1:
                    baseline = 0.0 if zero_tail else own
                found[e].append(own - baseline if max(total) - min(total) > 1e-9 else 0.0)
    numbers = {id(p): own for p, own in zip(step.played, found, strict=True)}
    return per_token(step, lambda p: numbers[id(p)])


def spo(step):
    white = whitened([p.returns - p.baseline for p in step.played])
    return spread(step, lambda e: white[e])


REFERENCES = {
    "grpo": grpo,
    "grpo_batch_std": grpo_batch_std,
    "prpo": prpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "tree": rloo,  # without branches; test_tree_advantages.py has random trees
    "reinforce": reinforce,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": lambda step: whitened(dr_grpo(step)),
    "trr++": trr_plus_plus,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "maxrl": maxrl,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "turn_rloo": turn_rloo,
    "turn_discounted": turn_discounted,
    "graphgpo": graphgpo,
    "gigpo": gigpo,
    "hgpo": hgpo,
    **{name: lambda step, sums=sums: whitened(per_token(step, sums)) for name, (sums, _) in CRITICS.items()},
    "dqo": lambda step: per_token(step, gae_of(lambda _: 1.0)),
    "prime": prime,
    "otb": otb,
    "rae": lambda step: spread(step, lambda e: step.played[e].returns - step.played[e].baseline),
    "spo": spo,
}
OPTIONS = {
    ("reinforce", "gamma"): (lambda step: reinforce(step, 0.5), {"gamma": 0.5}),
    ("reinforce++", "gamma"): (lambda step: reinforce_plus_plus(step, 0.5), {"gamma": 0.5}),
    ("trr++", "gamma"): (lambda step: trr_plus_plus(step, 0.5), {"gamma": 0.5}),
    ("otb", "zero_tail"): (lambda step: otb(step, zero_tail=False), {"zero_tail": False}),
    ("turn_rloo", "compare"): (
        lambda step: turn_rloo(step, 0.5, lambda step, e, k: step.played[e].turns[k].state),
        {"gamma": 0.5, "compare": "state"},
    ),
    ("turn_discounted", "normalize_over"): (
        turn_discounted_over_all,
        {"normalize_over": "all_turns", "gamma": 0.5},
    ),
}


def test_every_estimator_has_a_reference():
    assert set(REFERENCES) == {name for name in names(Kind.ADVANTAGE) if ":" not in name}


def advantages(name, batch, **options):
    if name == "maxrl":
        batch = dataclasses.replace(batch, returns=batch.returns.abs())
    found = lookup(Kind.ADVANTAGE, name)(batch, **options)
    return found.advantage if isinstance(found, Estimate) else found


def assert_equal(found, expected, what):
    assert torch.allclose(found, found.new_tensor(expected), rtol=1e-9, atol=1e-7), what


@pytest.mark.parametrize("name", REFERENCES)
def test_estimator_equals_its_reference(random_steps, joined, name):
    if name not in WHOLE:
        expected = [number for step in random_steps for number in REFERENCES[name](step)]
        assert_equal(advantages(name, joined), expected, name)
        return
    for number, step in enumerate(random_steps):
        assert_equal(advantages(name, step.batch), REFERENCES[name](step), (name, number))


@pytest.mark.parametrize("name", CRITICS)
def test_critic_targets_equal_the_reference(random_steps, name):
    """Also in steps of one episode, after whose last token nothing comes."""
    for number, step in enumerate([*random_steps[:100], *map(alone, random_steps[:100])]):
        found = lookup(Kind.ADVANTAGE, name)(step.batch)
        wanted = found.value_target.new_tensor(per_token(step, CRITICS[name][1]))
        torch.testing.assert_close(found.value_target, wanted, rtol=1e-9, atol=1e-9, equal_nan=True, msg=str(number))
        assert_equal(found.advantage, REFERENCES[name](step), (name, number))


def alone(step):
    """The first episode of a step as a step of its own."""
    batch = step.batch
    turns, tokens = batch.turn_episode == 0, batch.token_episode == 0
    own = dataclasses.replace(
        batch,
        returns=batch.returns[:1],
        group=batch.group[:1],
        turn_reward=batch.turn_reward[turns],
        turn_episode=batch.turn_episode[turns],
        turn_state=batch.turn_state[turns],
        token_turn=batch.token_turn[tokens],
        token_reward=batch.token_reward[tokens],
        values=batch.values[tokens],
    )
    return dataclasses.replace(step, played=step.played[:1], batch=own, members={})


@pytest.mark.parametrize("case", OPTIONS, ids="-".join)
def test_options_equal_their_reference(random_steps, case):
    reference, options = OPTIONS[case]
    for number, step in enumerate(random_steps[:200]):
        assert_equal(advantages(case[0], step.batch, **options), reference(step), (case, number))
