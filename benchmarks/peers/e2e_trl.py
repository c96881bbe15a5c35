"""TRL's side of the end-to-end comparison: GRPOTrainer with an environment of agentrl (`environment_factory`).

The first prompts are the token ids that agentrl renders for the same tasks in the same order; TRL renders the rest. An
episode ends with its environment, as in agentrl: TRL itself would let the policy play on until its turns are spent.
Answers have the same limit of tokens, and their calls are read by agentrl's parser, which also accepts calls without
tags; TRL's own parser would end the episode there. An answer without a call ends the episode, as always in TRL.

python e2e_trl.py SETTINGS.json

It first writes what it has read of two fixed turns (`check.json`), and then one line per 128 episodes
(`metrics.jsonl`). It runs in TRL's environment, and finds agentrl in the folder of packages that the settings name.
"""

from __future__ import annotations

import json
import os
import site
import sys
import warnings
from pathlib import Path
from typing import Any

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
for place in SETTINGS["packages"]:
    site.addsitedir(place)
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl.trainer.grpo_trainer as trl_trainer  # type: ignore[import-not-found]
from agentrl.tools.calculator import calculator
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
from trl.chat_template_utils import qwen3_template  # type: ignore[import-not-found]

from agentrl.env.lookup import resolve_environment
from agentrl.render.tool_parsers import repair_of

OVER = "The episode is over."
ROWS = {row["id"]: row for row in SETTINGS["rows"]}


class Played:
    """An environment of agentrl whose actions are calls of a tool."""

    def __init__(self) -> None:
        self._environment = resolve_environment(SETTINGS["environment"]).make(**SETTINGS["options"])
        self.reward, self._goal, self._over = 0.0, "", False

    def reset(self, prompt: list[dict[str, str]], **_: object) -> None:
        """Start the episode that the prompt names."""
        row = ROWS[prompt[-1]["content"]]
        self._environment.reset(seed=row["seed"], options=row["options"])
        self.reward, self._goal, self._over = 0.0, row["goal"], False

    def act(self, action: str) -> str:
        """Take an action in the environment.

        Args:
            action: The action, as text.
        """
        if self._over:
            return OVER
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        self.reward += float(reward)
        self._over = terminated or truncated
        if self._over:
            return OVER
        return f"{observation}\n{self._goal}" if self._goal else str(observation)


class PlayedWithCalculator(Played):
    """The same, with the calculator."""

    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: The expression.
        """
        return str(calculator.function(expression))


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the blocks and AdamW for the rest, with the settings of ``trainer.optimizer=muon``."""

    def __init__(self, model: torch.nn.Module, *, lr: float, betas: tuple[float, float]) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if ".layers." in name and p.ndim == 2]
        others = [p for name, p in named if ".layers." not in name or p.ndim != 2]
        super().__init__([{"params": matrices}, {"params": others}], {"lr": lr})
        self._parts: tuple[torch.optim.Optimizer, torch.optim.Optimizer] = (
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=0.0),
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters at the current learning rate."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups[0]["lr"] = group["lr"]
            part.step(closure)


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """Trainer whose first prompts are given, and whose episodes end with the environment."""

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Make agentrl's optimizer."""
        if SETTINGS["optimizer"] == "muon":
            self.optimizer = MuonAndAdamW(model or self.model, lr=self.args.learning_rate, betas=(0.9, 0.95))
            return self.optimizer
        return super().create_optimizer(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """Make agentrl's schedule; those of transformers with a warm-up begin with an update at learning rate 0."""
        factors = [rate / SETTINGS["learning_rate"] for rate in SETTINGS["learning_rates"]]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda update: factors[min(update, len(factors) - 1)]
        )
        return self.lr_scheduler

    def _tokenize_prompts(self, prompts: list[list[dict[str, str]]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [list(ROWS[prompt[-1]["content"]]["prompt_ids"]) for prompt in prompts], None, {}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, fields: Any, num_generations: int, **others: Any
    ) -> tuple[list[list[int]], None]:
        ended = [OVER in self._tokenizer.decode(ids[-48:]) for ids in prompt_ids]
        going = [ids for ids, over in zip(prompt_ids, ended, strict=True) if not over]
        answers: list[list[int]] = []
        if going:
            answers, _ = super()._generate_single_turn(going, images, fields, num_generations, **others)
        following = iter(answers)
        return [[] if over else next(following) for over in ended], None  # an end token here would be trained


def parse_calls(tokenizer: Any, ids: list[int], prefix: object = None, tools: Any = None) -> dict[str, Any]:
    """Return an answer as a message; a call that cannot be read stays text."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    schemas = {schema["function"]["name"]: schema for schema in map(get_json_schema, tools)}
    repair = repair_of("hermes")
    assert repair is not None
    parsed = repair(text, schemas, is_whole=bool(ids) and ids[-1] == tokenizer.eos_token_id)
    if not parsed.calls:
        return {"role": "assistant", "content": text}
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in parsed.calls]
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": parsed.content, "tool_calls": calls}


def check(trainer: Trainer) -> None:
    """Write the token ids of the first tasks after two fixed actions, to be compared with agentrl's."""
    found = []
    for expected in SETTINGS["check"]:
        played = Played()
        played.reset([{"content": expected["id"]}])
        ids = list(ROWS[expected["id"]]["prompt_ids"])
        for action, answer_ids in zip(expected["actions"], expected["answers"], strict=True):
            message = {"role": "tool", "name": "act", "content": played.act(action)}
            ids += answer_ids + trainer._get_tool_suffix_ids([message])
        found.append(ids)
    (Path(SETTINGS["folder"]) / "check.json").write_text(json.dumps(found))


def main() -> None:
    """Train."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(SETTINGS["threads"])
    torch.manual_seed(SETTINGS["seed"])
    tokenizer = AutoTokenizer.from_pretrained(SETTINGS["model"])
    tokenizer.response_template = qwen3_template
    trl_trainer.parse_response = parse_calls
    metrics = Path(SETTINGS["folder"]) / "metrics.jsonl"

    def score(environments: list[Played], **_: object) -> list[float]:
        rewards = [environment.reward for environment in environments]
        lengths = trainer._metrics["train"]["completions/mean_length"]
        line = {
            "success/mean": sum(reward >= 1.0 for reward in rewards) / len(rewards),
            "tokens/sampled": lengths[-1] * len(rewards),
        }
        with metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return rewards

    prompts = [{"prompt": [{"role": "user", "content": name}]} for name in SETTINGS["order"]]
    batch, episodes = SETTINGS["micro_batch"], SETTINGS["episodes_per_step"]
    updates = SETTINGS["mini_batches"]
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(SETTINGS["model"], dtype=torch.float32),
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=SETTINGS["folder"],
            seed=SETTINGS["seed"],
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=episodes // updates // batch,
            generation_batch_size=episodes,
            num_generations=SETTINGS["group_size"],
            max_steps=updates * SETTINGS["steps"],
            learning_rate=SETTINGS["learning_rate"],
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            loss_type="dapo",
            beta=0.0,
            epsilon=SETTINGS["clip_low"],
            epsilon_high=SETTINGS["clip_high"],
            temperature=1.0,
            max_completion_length=SETTINGS["max_tokens"],
            generation_kwargs={"max_new_tokens": SETTINGS["max_answer_tokens"]},
            max_tool_calling_iterations=SETTINGS["max_turns"],
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=SETTINGS["bf16"],
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        environment_factory=PlayedWithCalculator if SETTINGS["calculator"] else Played,
    )
    check(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
