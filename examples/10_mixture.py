"""Several environments in one run, in fixed shares, with episodes that become longer while the policy improves.

    python examples/10_mixture.py

Each environment has a label, its own weight and, if it differs, its own agent settings. Every group plays one
environment, so returns of different environments are never compared.

Prints the metrics of each environment in the last step, and the horizon: the maximum number of turns of that step.
"""

from __future__ import annotations

import argparse

import agentrl
from agentrl.observe.metrics import ENVIRONMENT_PREFIX

MIXTURE = """environments={
  lake: {name: frozen_lake, weight: 2},
  guess: {name: guess_number, weight: 1, agent: {max_turns: 4}},
}"""
HORIZON = "curriculum.horizon={turns: [2, 4, 8], at_steps: [0, 2, 4]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="further config keys, key=value")
    given = parser.parse_args()
    run = agentrl.train(
        model="scratch",
        steps=given.steps,
        overrides=[MIXTURE, HORIZON, "agent.max_turns=8", *given.overrides],
    )
    for name, value in sorted(run.metrics.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            print(f"{name:30} {value:.3f}")
    print("horizon", run.metrics["curriculum/turns"])


if __name__ == "__main__":
    main()
