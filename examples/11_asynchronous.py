"""Asynchronous training: episodes run ahead of the trainer, and every token records the weight version that sampled it.

    python examples/11_asynchronous.py

The loop is the same as in synchronous training (`rollout.max_staleness` 0), with all of its features. The loss corrects
for the staleness of the tokens. It saves time if the engine has its own processors.

Prints, for each step, the age of the trained episodes, and the share of time that training waited for episodes.
"""

from __future__ import annotations

import argparse

import agentrl
from agentrl.observe.metrics import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--staleness", type=int, default=2, help="maximum age of a trained episode in weight versions")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*", help="further config keys, key=value")
    given = parser.parse_args()
    run = agentrl.train(
        env="guess_number",
        model="scratch",
        steps=given.steps,
        overrides=[f"rollout.max_staleness={given.staleness}", *given.overrides],
    )
    for line in read_metrics(run.folder / "metrics.jsonl"):
        oldest, waiting = line["staleness/max"], line["time/share/rollout"]
        print(f"step {line['step']}: at most {oldest:.0f} versions old, {waiting:.0%} of the time waiting for episodes")


if __name__ == "__main__":
    main()
