"""Log what services refuse or lose in other programs: ``log_oddities.py FOLDER TRACKER``; the run is resumed once."""

import math
import sys
from pathlib import Path

from agentrl.observe.traces import EpisodeTrace
from agentrl.observe.trackers import Trackers

folder, kind = Path(sys.argv[1]), sys.argv[2]
CONFIG = {
    "run": {"name": "run", "seed": 0, "nothing": None},
    "agent": {"options": {"mean@8 (greedy)": {"a/../b": 1}, "": "empty"}, "tools": ["x" * 9000]},
    "trainer": {"rate": 1e-6, "betas": [0.9, 0.999], "limit": math.inf, "unknown": math.nan},
    **{f"key{number}": number for number in range(250)},
}
ODD = {
    "reward/mean": 0.5,
    "train/kl": math.nan,
    "train/ratio": math.inf,
    "eval/pass@8 (greedy)": 0.25,
    "reward/component/Länge, Wörter": 1.0,
    "reward/component/": 2.0,
    "env/" + "long " * 80: 3.0,
    "tool/../up": 4.0,
    **{f"many/{number}": float(number) for number in range(1200)},
}


def trace(step: int) -> EpisodeTrace:
    scored = {"reward": 0.5, "success": True} if step != 2 else {}
    return EpisodeTrace(
        name=f"step{step}/0.0",
        group=f"step{step}",
        step=step,
        began=0.0,
        seconds=1.0,
        spans=(),
        environment="letters",
        task='"quoted", and\nbroken',
        outcome="finished",
        **scored,
    )


for steps in ((1, 2, 3), (2, 3, 4)):  # the second part repeats two steps
    trackers = Trackers([kind], folder=folder, name="run", config=CONFIG)
    for step in steps:
        trackers.trace(trace(step))
        trackers.log(step, {**ODD, "reward/mean": step + (0.25 if steps[0] == 2 else 0.0)})
    trackers.close(within_s=200)
