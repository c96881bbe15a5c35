"""The table of commands. A command's module is imported when the command is used, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Where a command lives, and its line in `agentrl --help`."""

    module: str
    """Module with a `typer.Typer` named ``app``: a group, a lone command, or several commands that have names."""
    help: str
    panel: str
    is_group: bool = False


START = "Start here"
PARTS = "Environments and tools"
RUNS = "Train and measure"
LOOK = "Look at results"
MORE = "Servers and details"

COMMANDS: dict[str, CommandEntry] = {
    "init": CommandEntry("agentrl.cli.init", "Start a project with an environment and a tool of your own.", START),
    "doctor": CommandEntry("agentrl.cli.doctor", "See what this machine has, and what to do next.", START),
    "demo": CommandEntry("agentrl.cli.demo", "Watch a small agent learn household tasks, from nothing.", START),
    "env": CommandEntry("agentrl.cli.env", "List, show, check, play and serve environments.", PARTS, is_group=True),
    "tool": CommandEntry("agentrl.cli.tool", "List, show, call and check tools.", PARTS, is_group=True),
    "sandbox": CommandEntry("agentrl.cli.sandbox", "Check, use and serve sandboxes.", PARTS, is_group=True),
    "model": CommandEntry("agentrl.cli.model", "Keep models under names of your own.", RUNS, is_group=True),
    "config": CommandEntry("agentrl.cli.config", "Show a resolved config, or every key there is.", RUNS, is_group=True),
    "plan": CommandEntry("agentrl.cli.plan", "See what memory a run needs, before it runs.", RUNS),
    "sft": CommandEntry("agentrl.cli.learn", "Warm-start a model on an environment's expert.", RUNS),
    "train": CommandEntry("agentrl.cli.train", "Train an agent by reinforcement learning.", RUNS),
    "eval": CommandEntry("agentrl.cli.evaluate", "Measure a policy on fixed tasks, with intervals.", RUNS),
    "dpo": CommandEntry("agentrl.cli.learn", "Learn from pairs of a run's episodes: the better one of a task.", RUNS),
    "reward-model": CommandEntry("agentrl.cli.learn", "Train a reward model on a run's episodes.", RUNS),
    "view": CommandEntry("agentrl.cli.view", "See the episodes of a run or an evaluation token by token.", LOOK),
    "export": CommandEntry("agentrl.cli.export", "Write a run's model as a Hugging Face checkpoint.", LOOK),
    "replay-step": CommandEntry("agentrl.cli.replay_step", "Repeat an update that was not finite.", LOOK),
    "serve": CommandEntry("agentrl.cli.serve", "Start vLLM or SGLang servers alone.", MORE),
    "gateway": CommandEntry("agentrl.cli.gateway", "Answer clients of OpenAI and Anthropic, and record them.", MORE),
    "serve-training": CommandEntry(
        "agentrl.cli.serve_training", "Serve the tinker client, for loops of your own.", MORE
    ),
    "bench": CommandEntry("agentrl.cli.bench", "Run a benchmark of a source checkout.", MORE),
}
"""In the order of work, which is the order of ``agentrl --help``."""
