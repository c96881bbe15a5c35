"""`agentrl reward-model`: a reward model from pairs of stored episodes."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl.builders.checks import check_reward_training
from agentrl.builders.workers import followed_launcher
from agentrl.cli.arguments import Words
from agentrl.cli.help import examples
from agentrl.cli.learning import Sources, learn, pairs_config
from agentrl.runs.preferences import train_reward

app = typer.Typer()


@app.command(
    "reward-model",
    epilog=examples(
        "agentrl reward-model --from runs/latest",
        "agentrl reward-model --from runs/grpo --model Qwen/Qwen2.5-0.5B preferences.learning_rate=1e-5",
        "agentrl train quickstart agent.reward_model.path=runs/latest",
    ),
)
def reward_model(
    words: Words = None,
    sources: Sources = None,
    model: Annotated[str | None, typer.Option(help="The language model to start from.")] = None,
) -> None:
    """Train a reward model that gives the better of two episodes of a task the greater reward.

    Without a config it is that of the first run, and its model gets a new output.
    """
    if followed_launcher():
        return
    config = pairs_config(words, sources or [], model)
    check_reward_training(config)
    use = "use it: agentrl train … agent.reward_model.path={folder}"
    learn(config, train_reward, kind="reward-model", next_step=use)
