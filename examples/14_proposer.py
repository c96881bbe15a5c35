"""An environment in which a proposer writes the tasks: letters to repeat, with two attempts of a solver per task.

    python examples/14_proposer.py

The proposer is rewarded for tasks that some attempts solve, but not all. Valid tasks are added to a buffer, from which
later steps sample; the buffer is part of a run's checkpoint.

Prints the numbers of valid and of new tasks in the last step, and the mean return of the proposer.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

import gymnasium as gym

import agentrl
from agentrl.env import EnvironmentSpec
from agentrl.registry import Kind, register
from agentrl.task import ProposedTasks, Task, TaskBuffer

ATTEMPTS = ["solver#1", "solver#2"]


class Letters(gym.Env[str, str]):
    """The option ``letter`` of a task poses it; a task without it asks for one."""

    observation_space = action_space = gym.spaces.Text(1000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.letter = (options or {}).get("letter")
        self.players = ["solver"] if self.letter else ["proposer", *ATTEMPTS]
        self.turn = 0
        return self.show(), {"players": self.players, "player": self.players[0]}

    def show(self) -> str:
        return f"Write {self.letter}." if self.letter else "Write letters."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        is_over = self.turn == len(self.players)
        info: dict[str, Any] = {"player": self.players[min(self.turn, len(self.players) - 1)], "valid": True}
        if self.letter is None:  # the proposal
            self.letter = next((letter for letter in action if letter.isalpha()), None)
            if self.letter is None:
                return "Refused.", 0.0, True, False, {"success": False, "valid": False}
            return self.show(), 0.0, False, False, {**info, "proposals": [{"letter": self.letter}]}
        is_right = self.letter in action
        return (
            self.show(),
            float(is_right and is_over and self.turn == 1),
            is_over,
            False,
            {**info, "success": is_right},
        )


class LetterTasks(ProposedTasks):
    """Requests for tasks, alternating with tasks of the buffer."""

    def __init__(self, split: str) -> None:
        super().__init__(capacity=100)

    def request(self, kind: str, rng: random.Random, buffer: TaskBuffer) -> Task:
        return Task(id=f"request-{rng.getrandbits(32)}", environment="letters")

    def pose(self, proposal: Mapping[str, Any], rng: random.Random) -> Task:
        return Task(id=f"write-{proposal['letter']}", environment="letters", options=proposal)


SPEC = EnvironmentSpec(name="letters", make=Letters, tasks=LetterTasks, splits=("train",))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="further config keys, key=value")
    given = parser.parse_args()
    register(Kind.ENVIRONMENT, "letters", SPEC)
    settings = ["environment.name=letters", "agent.options.attempts=2", "algorithm.group_size=1", *given.overrides]
    run = agentrl.train(model="scratch", algorithm="trr++", loop="propose_solve", steps=given.steps, overrides=settings)
    print({name: run.metrics[name] for name in ("proposals/valid", "proposals/new", "role/proposer/return/mean")})


if __name__ == "__main__":
    main()
