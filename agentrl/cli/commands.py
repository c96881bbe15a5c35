"""Table of commands. A command's module is imported when the command runs, so that ``--help`` is fast."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.observe.run_folder import RUN, RUN_OR_CHECKPOINT, RUN_OR_EVALUATION


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Module of a command, and its line in `agentrl --help`."""

    module: str
    """Module with a `typer.Typer` named ``app``: a group, a single command, or several named commands."""
    help: str
    panel: str
    is_group: bool = False
    reads: str = ""
    """Kind of folder that the first argument names; it is checked before the slow import of the module."""


START = "Start here"
PARTS = "Environments and tools"
RUNS = "Train and measure"
LOOK = "Look at results"
MORE = "Servers and details"
RUN_OR_CONFIG = "run or config"

COMMANDS: dict[str, CommandEntry] = {
    "init": CommandEntry("agentrl.cli.init", "Create a project with your own environment and tool.", START),
    "doctor": CommandEntry("agentrl.cli.doctor", "Show this machine's hardware and software, and next steps.", START),
    "demo": CommandEntry("agentrl.cli.demo", "Train a small agent from scratch on household tasks.", START),
    "env": CommandEntry("agentrl.cli.env", "List, show, check, play and serve environments.", PARTS, is_group=True),
    "tool": CommandEntry("agentrl.cli.tool", "List, show, call and check tools.", PARTS, is_group=True),
    "sandbox": CommandEntry("agentrl.cli.sandbox", "Check, use and serve sandboxes.", PARTS, is_group=True),
    "model": CommandEntry(
        "agentrl.cli.model", "Check models, and add models under your own names.", RUNS, is_group=True
    ),
    "config": CommandEntry("agentrl.cli.config", "Show a resolved config, or all keys.", RUNS, is_group=True),
    "plan": CommandEntry("agentrl.cli.plan", "Estimate the memory of a run without running it.", RUNS),
    "sft": CommandEntry("agentrl.cli.learn", "Warm-start a model on episodes of an expert.", RUNS),
    "train": CommandEntry("agentrl.cli.train", "Train an agent with reinforcement learning.", RUNS),
    "launch": CommandEntry(
        "agentrl.cli.launch", "Train on Slurm, Kubernetes (KubeRay) or a cloud (SkyPilot).", RUNS, is_group=True
    ),
    "rollout": CommandEntry("agentrl.cli.rollout", "Play and store episodes without training.", RUNS),
    "eval": CommandEntry(
        "agentrl.cli.evaluate", "Measure a policy on fixed tasks, with confidence intervals.", RUNS, reads=RUN_OR_CONFIG
    ),
    "dpo": CommandEntry("agentrl.cli.learn", "Train on pairs of better and worse episodes of a run.", RUNS),
    "reward-model": CommandEntry("agentrl.cli.learn", "Train a reward model on a run's episodes.", RUNS),
    "status": CommandEntry("agentrl.cli.status", "Show what a run is doing, and what it waits for.", LOOK, reads=RUN),
    "view": CommandEntry(
        "agentrl.cli.view", "Show the episodes of a run or an evaluation token by token.", LOOK, reads=RUN_OR_EVALUATION
    ),
    "diagnose": CommandEntry(
        "agentrl.cli.diagnose",
        "Find out what is wrong with a run, and which key to change.",
        LOOK,
        reads=RUN_OR_EVALUATION,
    ),
    "report": CommandEntry(
        "agentrl.cli.report", "Write a report of runs, or of evaluations side by side.", LOOK, reads=RUN_OR_EVALUATION
    ),
    "rescore": CommandEntry(
        "agentrl.cli.rescore", "Score stored episodes again, with other reward functions.", LOOK, reads=RUN
    ),
    "replay": CommandEntry("agentrl.cli.replay", "Continue a stored episode from one of its turns.", LOOK, reads=RUN),
    "profile": CommandEntry("agentrl.cli.profile", "Show where the time of some training steps goes.", LOOK),
    "trace": CommandEntry("agentrl.cli.trace", "Write a timeline of a training step for Perfetto.", LOOK, reads=RUN),
    "export": CommandEntry(
        "agentrl.cli.export", "Write a run's model as a Hugging Face checkpoint.", LOOK, reads=RUN_OR_CHECKPOINT
    ),
    "export-episodes": CommandEntry(
        "agentrl.cli.export_episodes", "Write episodes as conversations, pairs or data sets.", LOOK, reads=RUN
    ),
    "repeat-update": CommandEntry(
        "agentrl.cli.repeat_update", "Repeat a skipped update, to find values that are not finite.", LOOK
    ),
    "serve": CommandEntry("agentrl.cli.serve", "Start vLLM or SGLang servers without a run.", MORE),
    "gateway": CommandEntry("agentrl.cli.gateway", "Serve OpenAI and Anthropic clients, and record them.", MORE),
    "serve-training": CommandEntry(
        "agentrl.cli.serve_training", "Serve the tinker client, for your own training loops.", MORE
    ),
    "chaos": CommandEntry("agentrl.cli.chaos", "Inject random faults into runs, and check every episode.", MORE),
    "bench": CommandEntry("agentrl.cli.bench", "Run a benchmark of a source checkout.", MORE),
}
"""Commands in the order of ``agentrl --help``."""
