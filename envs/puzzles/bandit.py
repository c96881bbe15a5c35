"""A multi-armed bandit: find the arm that pays most often."""

from __future__ import annotations

import math
import re
from random import Random

from agentrl.errors import UsageError
from agentrl.message import Content

from .bounds import within
from .environment import puzzle_spec
from .planner import read
from .rules import ChancePuzzle, Illegal, Played

NAMES = ("phoenix", "dragon", "griffin", "unicorn", "sphinx", "hydra", "kraken", "pegasus")
PERCENT = 100
BEST_PAYS, MIN_GAP, OTHERS_PAY = (60, 90), 30, (5, 60)
"""Percentage of pulls that pay: range of the best arm, minimum distance of the others, and range of the others."""


REWARDS = ("pays", "regret", "ucb")


class Bandit(ChancePuzzle):
    """The rules of a bandit. A pull that pays gives 1 / pulls; most pulls on the best arm count as a success.

    Args:
        arms: Number of arms.
        pulls: Number of pulls.
        reward: ``pays``; ``regret`` for (1 - (p of the best arm - p of the pulled arm)) / pulls, without chance; or
            ``ucb`` for 1 / pulls if the arm is the one that UCB1 would pull.
    """

    name = "bandit"
    fields = ("names", "chances", "tried", "paid", "dice")
    action_hint = "the name of an arm"
    max_steps = 40

    names: list[str]
    chances: list[int]
    tried: list[int]
    paid: list[int]

    def __init__(self, *, arms: int = 5, pulls: int = 30, reward: str = REWARDS[0]) -> None:
        if reward not in REWARDS:
            raise UsageError("unknown reward of bandit", got=repr(reward), expected=" or ".join(REWARDS))
        self.reward = reward
        self.arms = within("arms of bandit", arms, 2, len(NAMES))
        self.pulls = within("pulls of bandit", pulls, arms, 40)

    @property
    def task_type(self) -> str:
        """Number of arms, in words."""
        return f"{self.arms} arms"

    def start(self, rng: Random) -> None:
        """Name the arms, and draw the probability that each pays."""
        self.names, self.dice = rng.sample(NAMES, self.arms), rng.getrandbits(48)
        best = rng.randint(*BEST_PAYS)
        lowest, highest = OTHERS_PAY
        self.chances = [rng.randint(lowest, min(highest, best - MIN_GAP)) for _ in self.names]
        self.chances[rng.randrange(self.arms)] = best
        self.tried, self.paid = [0] * self.arms, [0] * self.arms

    def identity(self) -> list[str]:
        """Return the names of the arms, in their order, which is all that the player sees."""
        return self.names

    def play(self, action: str) -> Played:
        """Pull an arm."""
        if action not in self.names:
            raise Illegal(f"Answer with the name of an arm: {', '.join(self.names)}.")
        arm = self.names.index(action)
        advised = BanditExpert().act(self.text()) if self.reward == "ucb" else ""
        pays = self.roll(PERCENT) < self.chances[arm]
        self.tried[arm] += 1
        self.paid[arm] += pays
        gain = {
            "pays": float(pays),
            "regret": 1 - (max(self.chances) - self.chances[arm]) / PERCENT,
            "ucb": float(action == advised),
        }[self.reward]
        note = f"The {action} {'pays' if pays else 'does not pay'}."
        if sum(self.tried) < self.pulls:
            return Played(gain / self.pulls, note)
        best = self.chances.index(max(self.chances))
        return Played(gain / self.pulls, note, over=True, won=self.tried[best] > sum(self.tried) - self.tried[best])

    def text(self) -> str:
        """Return what each arm has paid so far."""
        arms = zip(self.names, self.paid, self.tried, strict=True)
        results = ", ".join([f"{name} {paid} of {tried}" for name, paid, tried in arms])
        return f"Paid so far: {results}. Pulls left: {self.pulls - sum(self.tried)}."

    def actions(self) -> list[str]:
        """Return all arms."""
        return list(self.names)

    def expert(self) -> BanditExpert:
        """Return a policy that balances exploration and exploitation."""
        return BanditExpert()


class BanditExpert:
    """Expert that pulls the arm with the largest share plus exploration bonus (UCB1, Auer et al., 2002)."""

    BONUS = 0.3
    """Weight of the bonus; smaller than the theorem's, because there are few pulls."""

    def act(self, observation: Content) -> str:
        """Return the name of an arm."""
        arms = re.findall(r"(\w+) (\d+) of (\d+)", read(observation))
        pulls = sum(int(tried) for _, _, tried in arms)

        def promise(arm: tuple[str, str, str]) -> float:
            paid, tried = int(arm[1]), int(arm[2])
            return math.inf if not tried else paid / tried + self.BONUS * math.sqrt(2 * math.log(pulls) / tried)

        return str(max(arms, key=promise)[0])


SPEC = puzzle_spec(
    Bandit,
    description=(
        "A bandit of five arms and 30 pulls, solved when more than half of the pulls went to the best arm. Playing"
        " one arm throughout solves a fifth of the tasks. Options: arms (2 to 8), pulls (up to 40), reward (pays,"
        " regret or ucb)."
    ),
    instructions=(
        "You play a slot machine with several arms. Each arm pays with a fixed probability that you do not know."
        " Each turn, name one arm to pull. Find out which arm pays most often, and pull that arm as often as you"
        " can: you win if more than half of all pulls are on the best arm."
    ),
    reward_range=(0.0, 1.001),
    scores={"random": 0.0, "blind": 0.2, "expert": 0.8},
    version=1,
)
make = SPEC.make
