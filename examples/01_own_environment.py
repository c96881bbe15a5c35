"""Your own environment, with a tool for the policy, trained in a few lines.

    python examples/01_own_environment.py                                                  a small new model, on the CPU
    python examples/01_own_environment.py --model Qwen/Qwen2.5-0.5B-Instruct --steps 100   a real one

Prints the run's folder, and the success rate on tasks that were not trained, with its interval. A new model does not
learn the game in 20 steps; this shows that all parts work.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym

import agentrl


class GuessNumber(gym.Env[str, str]):
    """I think of a number from 1 to 100."""

    observation_space = action_space = gym.spaces.Text(200)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1, 101))
        return "I think of a number from 1 to 100. Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = agentrl.parse_int(action)  # None becomes a clear message, not a crash
        if guess is None:
            return "Answer with a number.", -0.1, False, False, {}
        won = guess == self.secret
        return ("Higher." if guess < self.secret else "Lower."), float(won), won, False, {}


@agentrl.tool
def midpoint(low: int, high: int) -> int:
    """The middle of a range.

    Args:
        low: Smallest candidate.
        high: Largest candidate.
    """
    return (low + high) // 2


gym.register("GuessNumber-v0", GuessNumber, max_episode_steps=10, reward_threshold=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scratch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*", help="further config keys, key=value")
    options = parser.parse_args()
    run = agentrl.train(
        env="GuessNumber-v0",
        tools=[midpoint],
        model=options.model,
        algorithm="grpo",
        steps=options.steps,
        overrides=options.overrides,
    )
    print(run.folder)
    print(agentrl.evaluate(env="GuessNumber-v0", tools=[midpoint], model=run.checkpoint, tasks=20, samples=4))


if __name__ == "__main__":
    main()
