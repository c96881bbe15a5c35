"""Guess a number from 1 to 100 in ten turns: the smallest environment."""

import gymnasium

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.message import parse_int
from agentrl.task import SeedTasks


class GuessNumber(gymnasium.Env[str, str]):
    """Guess a number; each wrong guess is answered by "Higher." or "Lower."."""

    observation_space = action_space = gymnasium.spaces.Text(200, charset=frozenset(map(chr, range(32, 127))))

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        """Think of a number."""
        super().reset(seed=seed)
        self.secret, self.turns = int(self.np_random.integers(1, 101)), 0
        return "I think of a number from 1 to 100. Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Answer a guess."""
        guess, self.turns = parse_int(action), self.turns + 1
        won = guess == self.secret
        answer = "Answer with a number." if guess is None else "Higher." if guess < self.secret else "Lower."
        return answer, float(won), won, self.turns >= 10 and not won, {"success": won, "valid": guess is not None}


SPEC = EnvironmentSpec(
    name="guess_number",
    make=GuessNumber,
    tasks=lambda split, **_: SeedTasks("guess_number", split),
    description="Guess a number from 1 to 100 in ten turns, told higher or lower: the smallest environment.",
    instructions="Guess the number that I think of. Each turn, answer with one whole number.",
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
)
