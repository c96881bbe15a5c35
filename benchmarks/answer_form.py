"""Share of a language model's answers with a valid format, per environment, agent loop and number of shots.

agentrl bench answer_form --model smollm2-135m-instruct
agentrl bench answer_form --model smollm2-135m-instruct 'environments=["webshop"]' 'shots=[0, 1, 3]' turns=6

First answers are answers to the opening prompt. An answer has a valid format if the loop can parse an action from it
and the environment accepts the action; a command without effect in the current state is valid, too.
Episodes are short: `turns` turns; the third unusable answer ends an episode as policy_error.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.errors import Outcome
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.model_check import first_answer
from agentrl.evaluation.panel import EvaluatedEpisode
from agentrl.evaluation.session import EvaluationRequest, FinishedEvaluation, run_evaluation
from agentrl.evaluation.settings import evaluation_config
from agentrl.observe.console import note
from agentrl.render.tokenizers import load_tokenizer

TEXT: dict[str, list[str]] = {
    "guess_number": [],
    "frozen_lake": [],
    "sokoban": [],
    "countdown": [],
    "household": ["agent.options.list_actions=true"],
    "webshop": ["agent.options.list_actions=true"],
    "search_qa": ["environment.options.remind=true", 'agent.options={format: free, prefill: "<"}'],
    "search_react": [],
    "code": ["agent.options={format: free}", "agent.max_answer_tokens=256"],
    "retail": ["agent.options={format: free}"],
}
"""Environments, with the overrides that their text answers need."""
TASKS = {"household": 100}
"""Number of tasks in small splits, each of which is played several times."""
COMMANDS = {
    "household": re.compile(
        r"(go to|open|close|use|examine) .+|(take) .+ from .+|(move) .+ to .+|(heat|cool|clean|slice) .+ with .+"
        r"|look|inventory|help"
    ),
    "webshop": re.compile(r"(search|click)\[.+\]"),
    "search_react": re.compile(r"(search|finish)\[.+\]"),
    "countdown": re.compile(r"[\d+\-*/() ]*\d[\d+\-*/() =.]*"),
}
"""Pattern of a well-formed command, for environments that reject well-formed commands without effect."""
ACTION = re.compile(r"<action>(.*?)(?:</action>|\n|$)|\"action\": *\"(.*?)\"")


def run(
    model: str,
    environments: Sequence[str] = tuple(TEXT),
    loops: Sequence[str] = ("react_text", "tool_calling"),
    shots: Sequence[int] = (0,),
    tasks: int = 200,
    turns: int = 1,
    chat_template: str | None = "chatml",
    options: dict[str, Any] | None = None,
    temperature: float = 1.0,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Play `tasks` episodes of at most `turns` turns in each case.

    Args:
        model: Model folder, or the name of a model.
        environments: Environments to play, from `TEXT`.
        loops: Agent loops.
        shots: Numbers of expert turns that the prompt shows.
        tasks: Episodes per case.
        turns: Maximum number of turns of an episode.
        chat_template: See ``model.chat_template``; ``None`` for the model's own.
        options: ``agent.options``, unless `TEXT` sets them.
        temperature: Sampling temperature.
        dtype: Number format of the weights.
    """
    figures: dict[str, Any] = {}
    for loop in loops:
        for count in shots:
            found = {}
            for environment in environments:
                words = [
                    *([f"agent.few_shot_turns={count}"] if count else []),
                    *([f"model.chat_template={chat_template}"] if chat_template else []),
                    f"model.dtype={dtype}",
                    f"agent.loop={loop}",
                    f"agent.options={json.dumps(options or {})}",
                    f"agent.max_turns={turns}",
                    "agent.max_parse_failures=3",
                    "agent.max_answer_tokens=96",
                    *(TEXT[environment] if loop == "react_text" else []),
                ]
                config = evaluation_config(env=environment, model=model, temperature=temperature, overrides=words)
                found[environment] = measure(environment, config, tasks)
                note(f"{loop}, {count} shots, {environment}: {found[environment]}")
            found["mean"] = {"form": statistics.mean(one["form"] for one in found.values())}
            figures[f"{loop}, {count} shots"] = found
    return figures


def measure(environment: str, config: Config, tasks: int) -> dict[str, float]:
    """Return the shares of first answers with a valid format, and of episodes that do not end as policy_error."""
    different = min(tasks, TASKS.get(environment, tasks))
    with tempfile.TemporaryDirectory() as folder:
        request = EvaluationRequest(
            config=config,
            policy=PolicyKind.ENGINE,
            n_tasks=different,
            samples=tasks // different,
            seed=0,
            folder=Path(folder),
        )
        finished = asyncio.run(run_evaluation(request))
        texts = first_answers(finished)
    episodes = [episode for episode in finished.result.episodes if episode.is_measured]
    formed = [is_in_form(environment, episode, texts[episode.slot]) for episode in episodes]
    played = [episode.trajectory.outcome is not Outcome.POLICY_ERROR for episode in episodes]
    return {
        "form": statistics.mean(formed),
        "no_policy_error": statistics.mean(played),
        "success": statistics.mean(bool(episode.trajectory.success) for episode in episodes),
        "episodes": len(episodes),
    }


def first_answers(finished: FinishedEvaluation) -> dict[tuple[str, int], str]:
    """Return the text of each episode's first answer."""
    assert finished.model_path is not None
    tokenizer = load_tokenizer(finished.model_path)
    return {
        episode.slot: tokenizer.decode(first_answer(episode.trajectory).token_ids, skip_special_tokens=True)
        for episode in finished.result.episodes
    }


def is_in_form(environment: str, episode: EvaluatedEpisode, text: str) -> bool:
    """Return True if the first answer of an episode is an action in a valid format."""
    turn = first_answer(episode.trajectory).turn
    if turn is None:
        return False
    if turn.valid or environment not in COMMANDS:
        return turn.valid
    actions = ACTION.findall(text)
    return bool(actions) and COMMANDS[environment].fullmatch("".join(actions[0]).strip().lower()) is not None
