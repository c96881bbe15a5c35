"""What the sides of the end-to-end comparison share: settings, the order of the tasks, and their first prompts."""

from __future__ import annotations

import asyncio
import json
import sysconfig
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.agent_loops.prompting import goal_line

from agentrl.builders.episodes import build_env_pool, build_runner, sampling_params
from agentrl.builders.models import build_renderer
from agentrl.config import Config, load_config
from agentrl.engine import GenerateRequest
from agentrl.env.lookup import resolve_environment
from agentrl.errors import AgentRLError
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import Assignment, play_all
from agentrl.rollout.task_source import task_source
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import Task, TaskCursor
from agentrl.training.optimizer import OptimizerSettings
from agentrl.trajectory import Trajectory

CHECKED = 4
"""Number of tasks whose first turns are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """A task to learn, with the settings of all sides."""

    recipe: str
    overrides: tuple[str, ...]
    actions: tuple[str, str]
    """Two actions that end no episode; the sides must read the same after them."""
    calculator: bool = False
    micro_batch: int = 16
    """Episodes that TRL's side trains at once, which sets its memory."""

    def load(self, *more: str) -> Config:
        """Return the config with further overrides."""
        return load_config(self.recipe, [*self.overrides, *more])


HOUSEHOLD = Learning(
    recipe="quickstart",
    overrides=(
        "agent.loop=tool_calling",
        "agent.system_prompt=Act.",
        "agent.options={restate_goal: true}",
        "agent.max_answer_tokens=40",
        "agent.max_rejected_actions=null",
        "agent.max_parse_failures=1",
        "agent.max_tokens=2048",
        "model.scratch.max_context=4096",
        "sft.episodes=16000",
        "sft.stop_at=0.7",
        "sft.tokens_per_update=4000",
        "algorithm.advantage=grpo",
        "algorithm.aggregation=token-mean",
        "agent.max_turns=20",
        "algorithm.correction={proximal: behaviour}",
    ),
    actions=("look", "inventory"),
)
"""The quick start's task by calls of a tool, as TRL's environments have no other actions; GRPO, at most 20 turns."""
ARITHMETIC = Learning(
    recipe="qwen/math_problems",
    overrides=(
        "agent.options={}",
        "agent.few_shot_turns=2",
        "agent.max_answer_tokens=48",
        "agent.max_parse_failures=1",
        "model.lora=null",
        "algorithm.aggregation=token-mean",
        "trainer.learning_rate=2e-6",
    ),
    actions=("a", "b"),
    calculator=True,
    micro_batch=2,
)
"""Arithmetic with a calculator, for Qwen2.5-Coder-0.5B-Instruct; all weights are trained.

The prompts show two turns of the expert. Without them, the model writes its calls in another form, and never succeeds;
`qwen/math_problems` begins its answers with a call instead, which TRL cannot.
"""


def write_settings(
    config: Config, learning: Learning, model: str, folder: Path, *, steps: int, threads: int
) -> dict[str, Any]:
    """Return the settings of TRL's side, and write them into a folder.

    Args:
        config: Settings of agentrl's side.
        learning: The task.
        model: Folder of the model from which all sides start.
        folder: Folder of TRL's run.
        steps: Steps of agentrl's side.
        threads: Threads of TRL's side.
    """
    section = config.sole_environment
    tokenizer = load_tokenizer(model)
    renderer = build_renderer(config, model, tokenizer)
    cursor = TaskCursor(task_source(resolve_environment(section.name), section), seed=config.run.seed)
    tasks = [cursor.next() for _ in range(steps * config.trainer.tasks_per_step)]
    unique = list({task.id: task for task in tasks}.values())
    played = asyncio.run(_play_fixed(config, learning, renderer, unique, len(tokenizer)))
    restates = bool(config.agent.options.get("restate_goal"))
    rows = [_row(task, played[task.id], renderer, restates=restates) for task in unique]
    checks = [
        {
            "id": task.id,
            "actions": learning.actions,
            "answers": _answers(played[task.id]),
            "expected": played[task.id].sequences[0].ids_list()[: played[task.id].turns[2].start],
        }
        for task in unique[:CHECKED]
    ]
    clips = dict(config.algorithm.loss_options)
    trainer, updates = config.trainer, steps * config.trainer.mini_batches
    schedule = OptimizerSettings.of(trainer, trainer, total_updates=updates, min_lr_ratio=trainer.min_lr_ratio)
    settings = {
        "packages": [sysconfig.get_path("purelib")],
        "folder": str(folder),
        "model": model,
        "environment": section.name,
        "options": dict(section.options),
        "calculator": learning.calculator,
        "rows": rows,
        "order": [task.id for task in tasks],
        "check": checks,
        "seed": config.run.seed,
        "threads": threads,
        "steps": steps,
        "micro_batch": learning.micro_batch,
        "episodes_per_step": config.trainer.tasks_per_step * config.algorithm.group_size,
        "mini_batches": config.trainer.mini_batches,
        "group_size": config.algorithm.group_size,
        "optimizer": config.trainer.optimizer,
        "learning_rate": trainer.learning_rate,
        "learning_rates": [schedule.learning_rate_at(update) for update in range(updates)],
        "bf16": config.model.dtype == "bfloat16",
        "clip_low": clips["clip_low"],
        "clip_high": clips["clip_high"],
        "max_tokens": config.agent.max_tokens,
        "max_answer_tokens": config.agent.max_answer_tokens,
        "max_turns": config.agent.max_turns,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    return settings


def check_same_reading(settings: Mapping[str, Any], found: list[list[int]]) -> None:
    """Check that TRL's side read the same tokens as agentrl after the fixed actions.

    Raises:
        AgentRLError: it read other tokens.
    """
    for check, ids in zip(settings["check"], found, strict=True):
        if ids != check["expected"]:
            first = next((n for n, (a, b) in enumerate(zip(ids, check["expected"], strict=False)) if a != b), len(ids))
            raise AgentRLError(
                f"TRL's side reads other tokens in task {check['id']}, from token {first} on",
                got=ids[first : first + 12],
                expected=check["expected"][first : first + 12],
            )


async def _play_fixed(
    config: Config, learning: Learning, renderer: Renderer, tasks: list[Task], vocab_size: int
) -> dict[str, Trajectory]:
    """Play the fixed actions in each task."""

    def script(request: GenerateRequest) -> list[int]:
        turn = list(request.prompt_ids).count(renderer.boundary.end_id) // 2 - 1
        action = learning.actions[min(turn, len(learning.actions) - 1)]
        text = f'<tool_call>\n{{"name": "act", "arguments": {{"action": "{action}"}}}}\n</tool_call>'
        return [*renderer.encoder.encode(text), renderer.boundary.end_id]

    few_turns = config.agent.model_copy(update={"max_turns": len(learning.actions) + 1})
    config = config.model_copy(update={"agent": few_turns})
    engine = ScriptedEngine(script=script, vocab_size=vocab_size, max_context=16_384)
    async with AsyncExitStack() as stack:
        pool = build_env_pool(config, spec=resolve_environment(config.sole_environment.name))
        stack.push_async_callback(pool.close)
        policy = EngineEpisodePolicy(engine, renderer, sampling_params(config.sampling))
        runner = build_runner(config, pool, policy, retries=0)
        assignments = [Assignment(task=task, group_id=task.id, member=0, seed=0) for task in tasks]
        return {trajectory.task_id: trajectory async for trajectory in play_all(runner, assignments, concurrency=64)}


def _row(task: Task, played: Trajectory, renderer: Renderer, *, restates: bool) -> dict[str, Any]:
    sequence = played.sequences[0]
    prompt_ids = sequence.ids_list()[: sequence.turns[0].start]
    text = renderer.encoder.decode(prompt_ids)
    first = text[text.rindex("<|im_start|>user\n") :].removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
    goal = goal_line(first) if restates else ""
    return {"id": task.id, "seed": task.seed, "options": task.options, "prompt_ids": prompt_ids, "goal": goal}


def _answers(played: Trajectory) -> list[list[int]]:
    ids = played.sequences[0].ids_list()
    return [ids[turn.start : turn.end] for turn in played.turns[:2]]
