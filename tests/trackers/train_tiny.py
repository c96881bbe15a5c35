"""Train a tiny run twice with trackers, the second time resumed: ``train_tiny.py FOLDER TRACKER…``."""

import sys

from agentrl.config.load import load_config
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run, start_run

sys.path.insert(0, __file__.rpartition("/")[0] + "/..")

from support.fixtures import TINY_RUN

folder, *trackers = sys.argv[1:]
chosen = f"trackers=[{', '.join(trackers)}]"
own = [f"run.directory={folder}/runs", "run.name=run", "trainer.steps=1", "checkpoint.every=1", chosen]
run = start_run(load_config(None, [*TINY_RUN, *own]), kind="test")
train(run)
train(resume_run(run.folder.path, ["trainer.steps=2"]))
