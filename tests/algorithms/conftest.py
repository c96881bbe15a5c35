"""Random steps of whole ledgers, for comparing estimators with loops over episodes, turns and tokens.

Groups of unequal size, unequal lengths, observations between turns, turns without tokens, several sequences per
trajectory, forks that put turns out of order, members that the machinery failed, and a KL penalty on single tokens.
"""

import dataclasses
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from agentrl.algorithms.types import EpisodeBatch
from agentrl.errors import Outcome
from agentrl.training.batch import select, step_batch
from agentrl.training.rewards import RewardShaping
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

sys.path.append(str(Path(__file__).parent))  # for loss_loops

STEPS = 300
UNSHAPED = RewardShaping({}, max_tokens=1000)


@dataclass
class Told:
    """One turn, as the reference sees it; lists hold one number per token."""

    reward: float
    state: str
    sequence: int
    values: list
    process: list
    norm: list
    penalty: list

    @property
    def tokens(self):
        return len(self.values)


@dataclass
class Played:
    """One episode, as the reference sees it."""

    group: str
    turns: list
    components: dict
    greedy: float
    baseline: float
    failed: bool = False
    kind: int = 0

    @property
    def returns(self):
        return sum(turn.reward + sum(turn.penalty) for turn in self.turns)

    @property
    def tokens(self):
        return sum(turn.tokens for turn in self.turns)


@dataclass
class Step:
    """What trains of a step: `played` for the reference, `batch` for the estimator, in the same order."""

    played: list
    batch: EpisodeBatch
    members: dict = field(default_factory=dict)
    """Indices of episodes by group."""

    def flat(self, numbers):
        """numbers[episode][turn][token] in the order of the batch's tokens."""
        return [
            number
            for e, episode in enumerate(self.played)
            for s in sorted({turn.sequence for turn in episode.turns})
            for k, turn in enumerate(episode.turns)
            if turn.sequence == s
            for number in numbers[e][k]
        ]


@pytest.fixture(scope="session")
def random_steps():
    """300 of them."""
    rng = random.Random(11)
    return [random_step(rng) for _ in range(STEPS)]


def random_step(rng):
    """A step with at least one group that can be compared."""
    penal = rng.random() < 0.5
    played = [
        random_episode(rng, name, penal=penal, may_fail=name != "a")
        for name in rng.choice(["a", "ab", "abc"])
        for _ in range(rng.choice([1, 2, 3, 4] if name != "a" else [2, 3, 4]))
    ]
    greedy = {name: rng.choice([0.0, 0.5]) for name in "abc"}
    for episode in played:
        episode.greedy = greedy[episode.group]
    selected = select([ledger(rng, episode) for episode in played], compare_groups=True)
    sizes = defaultdict(list)
    for episode in played:
        sizes[episode.group].append(not episode.failed)
    kept = [e for e in played if not e.failed and sum(sizes[e.group]) > 1]
    return measured(Step(played=kept, batch=step_batch(selected, UNSHAPED).episodes))


def measured(step):
    """The step with what models would say about it."""
    for e, episode in enumerate(step.played):
        step.members.setdefault(episode.group, []).append(e)
    numbers = {
        name: torch.tensor(
            step.flat([[getattr(turn, name) for turn in episode.turns] for episode in step.played]),
            dtype=torch.float64,
        )
        for name in ("values", "process", "norm", "penalty")
    }
    step.batch = dataclasses.replace(
        step.batch.with_token_reward(numbers["penalty"]),
        values=numbers["values"],
        process_reward=numbers["process"],
        score_norm=numbers["norm"],
        role_kind=torch.tensor([episode.kind for episode in step.played]),
        baseline=torch.tensor([episode.baseline for episode in step.played], dtype=torch.float64),
        greedy_return=torch.tensor([step.played[own[0]].greedy for own in step.members.values()], dtype=torch.float64),
    )
    return step


def random_episode(rng, group, *, penal, may_fail):
    shape = rng.choice(["one", "one", "several", "fork"])
    turns = [
        random_turn(rng, penal, sequence={"one": 0, "several": k // 2, "fork": int(k == 1)}[shape])
        for k in range(rng.randint(1, 4))
    ]
    if not any(turn.tokens for turn in turns):
        turns[0] = random_turn(rng, penal, sequence=0, least=1)
    components = {"right": rng.choice([0.0, 1.0]), "short": rng.random()}
    failed = may_fail and rng.random() < 0.2
    played = Played(group=group, turns=turns, components=components, greedy=0.0, baseline=rng.random(), failed=failed)
    played.kind = len(turns) % 3
    return played


def random_turn(rng, penal, *, sequence, least=0):
    tokens = max(rng.randint(0, 4), least) if rng.random() < 0.97 else rng.randint(20, 40)
    return Told(
        reward=rng.choice([0.0, 0.0, 0.25, 1.0, -0.25]),
        state=rng.choice("xyz"),
        sequence=sequence,
        values=[rng.uniform(-1, 1) for _ in range(tokens)],
        process=[rng.uniform(-0.1, 0.1) for _ in range(tokens)],
        norm=[rng.uniform(0.01, 1.5) for _ in range(tokens)],
        penalty=[rng.uniform(-0.05, 0.0) if penal else 0.0 for _ in range(tokens)],
    )


def ledger(rng, episode):
    """The trajectory that the reference's episode stands for."""
    sequences = {}
    for index, turn in enumerate(episode.turns):
        sequence = sequences.get(turn.sequence) or new_sequence(sequences, turn.sequence)
        start = len(sequence)
        sequence.extend_sampled([7] * turn.tokens, logprobs=[-1.0] * turn.tokens, versions=[0] * turn.tokens)
        sequence.turns.append(
            Turn(index=index, start=start, end=len(sequence), reward=turn.reward, state_key=turn.state)
        )
        sequence.extend([5] * rng.randint(1, 3), Source.OBSERVATION)
    return Trajectory(
        id="0",
        task_id=episode.group,
        environment="maze",
        seed=0,
        group_id=episode.group,
        sequences=list(sequences.values()),
        outcome=Outcome.SANDBOX_ERROR if episode.failed else Outcome.FINISHED,
        reward=sum(turn.reward for turn in episode.turns),
        reward_components=episode.components,
    )


def new_sequence(sequences, number):
    parent = sequences.get(0)
    if parent is not None and number == 1 and len(parent.turns) == 1:
        sequences[number] = parent.fork(parent.turns[0].end)
    else:
        sequences[number] = TokenSequence()
    sequences[number].extend([3, 4], Source.PROMPT)
    return sequences[number]
