"""Blackjack against a dealer, by Gymnasium's rules."""

from __future__ import annotations

import re
from random import Random

from agentrl.errors import UsageError
from agentrl.message import Content

from .environment import puzzle_spec
from .planner import read
from .rules import ChancePuzzle, Illegal, Played

HIT, STAND = "hit", "stand"
BEST, DEALER_STOPS = 21, 17


class Blackjack(ChancePuzzle):
    """The rules of Blackjack with cards from an endless deck: 1 for a win, -1 for a loss, 0 for a draw."""

    name = "blackjack"
    fields = ("player", "dealer", "dice")
    action_hint = "hit or stand, for example: hit"
    max_steps = 20
    loss_reward = -1.0

    player: list[int]
    dealer: list[int]
    """Cards of the dealer; only the first one is open."""

    def start(self, rng: Random) -> None:
        """Deal two cards each."""
        self.dice = rng.getrandbits(48)
        self.player = [self._card(), self._card()]
        self.dealer = [self._card(), self._card()]

    def identity(self) -> list[int]:
        """Return the player's cards, in any order, and the dealer's open card."""
        return [*sorted(self.player), self.dealer[0]]

    def play(self, action: str) -> Played:
        """Take a card, or let the dealer play."""
        if action not in (HIT, STAND):
            raise Illegal("Answer with hit or stand.")
        if action == HIT:
            self.player.append(self._card())
            if total(self.player) > BEST:
                return Played(self.loss_reward, "You have more than 21.", over=True)
            return Played()
        while total(self.dealer) < DEALER_STOPS:
            self.dealer.append(self._card())
        yours, theirs = total(self.player), total(self.dealer)
        note = f"The dealer has {_join_cards(self.dealer)}: {theirs}."
        if theirs > BEST or yours > theirs:
            return Played(1.0, f"{note} You win.", over=True, won=True)
        if yours == theirs:
            return Played(0.0, f"{note} That is a draw.", over=True)
        return Played(self.loss_reward, f"{note} You lose.", over=True)

    def text(self) -> str:
        """Return the player's cards and the dealer's open one."""
        soft = " (an ace counts as 11)" if is_soft(self.player) else ""
        yours = f"Your cards: {_join_cards(self.player)}: {total(self.player)}{soft}."
        return f"{yours} The dealer shows {_join_cards(self.dealer[:1])}."

    def actions(self) -> list[str]:
        """Return both actions."""
        return [HIT, STAND]

    def expert(self) -> BlackjackExpert:
        """Return a policy that plays basic strategy."""
        return BlackjackExpert()

    def _card(self) -> int:
        return min(self.roll(13) + 1, 10)


def is_soft(cards: list[int]) -> bool:
    """Return True if an ace counts as 11."""
    return 1 in cards and sum(cards) + 10 <= BEST


def total(cards: list[int]) -> int:
    """Return the value of cards.

    >>> total([1, 10]), total([1, 10, 5])
    (21, 16)
    """
    return sum(cards) + 10 * is_soft(cards)


def _join_cards(cards: list[int]) -> str:
    return ", ".join("A" if card == 1 else str(card) for card in cards)


class BlackjackExpert:
    """Expert that plays basic strategy (Baldwin et al., 1956), restricted to hitting and standing."""

    def act(self, observation: Content) -> str:
        """Return hit or stand.

        Raises:
            UsageError: the text shows no cards.
        """
        shown = re.search(r": (\d+)( \(an ace counts as 11\))?\. The dealer shows (\w+)", read(observation))
        if shown is None:
            raise UsageError("the text shows no cards", got=repr(observation))
        count, dealer = int(shown[1]), 11 if shown[3] == "A" else int(shown[3])
        if shown[2]:
            return STAND if count >= 19 or (count == 18 and dealer <= 8) else HIT
        if count >= 17 or (count >= 13 and dealer <= 6) or (count == 12 and 4 <= dealer <= 6):
            return STAND
        return HIT


SPEC = puzzle_spec(
    Blackjack,
    description="Blackjack by Gymnasium's rules: hit or stand, against a dealer who draws to 17, from an endless deck.",
    instructions=(
        "You play blackjack. Get closer to 21 than the dealer without going above 21. Number cards count their"
        " number. A jack, a queen and a king are shown as 10 and count 10. An ace is shown as A and counts 11 or"
        " 1. Each turn, answer hit to take another card, or stand to stop. After you stand, the dealer takes cards"
        " up to a total of 17 or more. You see one of the dealer's cards."
    ),
    reward_range=(-1.0, 1.0),
    scores={"blind": 0.38, "random": 0.28, "expert": 0.44},
    version=1,
)
make = SPEC.make
