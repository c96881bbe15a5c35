"""TRL's side of the rollout comparison: the rollouts of GRPOTrainer in environments (`environment_factory`).

Its generation asks the server for the whole batch at once, as TRL's client of its own vLLM server does.

python rollout_trl.py URL FOLDER
"""

from __future__ import annotations

import json
import logging
import os
import urllib.request
import warnings

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset  # type: ignore[import-not-found]
from side import Play, serve
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
from trl.chat_template_utils import qwen3_template  # type: ignore[import-not-found]
from work import FOUND, QUESTION, look


class Rooms:
    """Environment with one tool."""

    def __init__(self) -> None:
        self.reward = 1.0

    def reset(self, **_: object) -> None:
        """Start an episode; the prompt has the question."""

    def look(self, cabinet: int) -> str:
        """Look into a cabinet.

        Args:
            cabinet: Its number.
        """
        return look(cabinet)


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """Trainer whose generation is a request to the server."""

    url = ""

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *_: object, **__: object
    ) -> tuple[list[list[int]], list[list[float]]]:
        question = urllib.request.Request(f"{self.url}/generate/", json.dumps({"prompts": prompt_ids}).encode())
        with urllib.request.urlopen(question) as answer:
            body = json.load(answer)
        return body["completion_ids"], [[row[0] for row in rows] for rows in body["logprobs"]]


async def make(url: str, folder: str) -> Play:
    """Prepare the trainer."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    Trainer.url = url
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = qwen3_template  # which is also that of Qwen2.5
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda environments, **_: [environment.reward for environment in environments],
        args=GRPOConfig(
            output_dir=f"{folder}/trl",
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8192,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "0"}]}] * 2),
        processing_class=tokenizer,
        environment_factory=Rooms,
    )
    trainer.model.train()

    def play_batch(numbers: range) -> int:
        """Play a batch as `_generate_and_score_completions` does before it scores it."""
        trainer._batch_environments = [None] * len(numbers)
        pool = trainer._environment_pool[None]
        pool.extend(Rooms() for _ in range(len(numbers) - len(pool)))
        trainer.environments = pool[: len(numbers)]
        trainer._sync_tool_dicts = [{"look": environment.look} for environment in trainer.environments]
        trainer._async_tool_dicts = [{}] * len(numbers)
        for environment in trainer.environments:
            environment.reset()
        prompts = [[{"role": "user", "content": QUESTION.format(number)}] for number in numbers]
        _, _, _, completions, *_ = trainer._generate(prompts)
        return sum(completion[-1]["content"] == FOUND for completion in completions)

    async def play(episodes: int, at_once: int) -> int:
        starts = range(0, episodes, at_once)
        return sum(play_batch(range(start, min(start + at_once, episodes))) for start in starts)

    return play


if __name__ == "__main__":
    serve(make)
