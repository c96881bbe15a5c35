"""The side of verifiers' classic `ToolEnv` (before 0.4) in the rollout comparison.

python rollout_verifiers_classic.py URL FOLDER
"""

from __future__ import annotations

import logging

import verifiers.legacy as vf  # type: ignore[import-not-found]
from datasets import Dataset  # type: ignore[import-not-found]
from side import Play, serve
from verifiers.legacy.types import ClientConfig  # type: ignore[import-not-found]
from work import FOUND, QUESTION, look


def _ignore(*_: object) -> None:
    pass


async def make(url: str, _folder: str) -> Play:
    """Prepare the environment."""
    logging.disable(logging.WARNING)
    rubric = vf.Rubric(funcs=[lambda completion, **_: float(completion[-1].content == FOUND)])
    client = ClientConfig(api_base_url=f"{url}/v1", api_key_var="NO_KEY", max_connections=10_000)

    async def play(episodes: int, at_once: int) -> int:
        rows = [{"prompt": [{"role": "user", "content": QUESTION.format(n)}], "answer": ""} for n in range(episodes)]
        environment = vf.ToolEnv(tools=[look], max_turns=100, dataset=Dataset.from_list(rows), rubric=rubric)
        outputs = await environment.generate(
            environment.get_dataset(),
            client=client,
            model="policy",
            max_concurrent=at_once,
            independent_scoring=True,
            on_start=_ignore,
            on_progress=_ignore,  # no progress bar
        )
        return int(sum(output["reward"] for output in outputs["outputs"]))

    return play


if __name__ == "__main__":
    serve(make)
