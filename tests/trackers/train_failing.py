"""Train a tiny run with a tracker until its second step fails: ``train_failing.py FOLDER TRACKER``."""

import sys

from agentrl.config.load import load_config
from agentrl.errors import TrainingError
from agentrl.runs.rl import train
from agentrl.runs.start import start_run
from agentrl.training.trainer import Trainer

sys.path.insert(0, __file__.rpartition("/")[0] + "/..")

from support.fixtures import TINY_RUN

folder, tracker = sys.argv[1:]
own = [f"run.directory={folder}/runs", "run.name=run", "trainer.steps=2", f"trackers=[{tracker}]"]
train_step, steps = Trainer.step, []


def fail_in_the_second(self, *arguments, **options):
    steps.append(1)
    if len(steps) == 2:
        raise TrainingError("the numbers are not finite")
    return train_step(self, *arguments, **options)


Trainer.step = fail_in_the_second
try:
    train(start_run(load_config(None, [*TINY_RUN, *own]), kind="test"))
except TrainingError:
    print("failed")
