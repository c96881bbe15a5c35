"""An evaluation with intervals: several samples per task, pass@k, and a comparison of two policies on the same tasks.

    python examples/07_evaluation.py

Prints the success rate of the random policy with its 95 % interval, the probabilities that at least one or all of k
samples solve a task, and the difference of a second policy. Finished episodes are stored; the same call reuses them.
"""

from __future__ import annotations

import argparse

import agentrl
from agentrl.evaluation.comparison import compare, evaluation_scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--samples", type=int, default=4)
    given = parser.parse_args()

    result = agentrl.evaluate("tic_tac_toe", policy="random", tasks=given.tasks, samples=given.samples)
    assert result.success is not None
    print(f"success {result.success.mean:.1%}, 95 % interval {result.success.low:.1%} to {result.success.high:.1%}")
    for k in sorted(result.pass_at_k):
        print(f"pass@{k} {result.pass_at_k[k]:.1%}   pass^{k} {result.pass_hat_k[k]:.1%}")

    expert = agentrl.evaluate("tic_tac_toe", policy="expert", tasks=given.tasks, samples=given.samples)
    test = compare(evaluation_scores(result.episodes), evaluation_scores(expert.episodes)).test
    print("expert minus random:", test)


if __name__ == "__main__":
    main()
