"""The side of verifiers 0.4 in the rollout comparison; see `verifiers_rooms`.

python rollout_verifiers.py URL FOLDER
"""

from __future__ import annotations

import asyncio
import logging

from side import Play, serve
from verifiers.v1.clients import ModelContext  # type: ignore[import-not-found]
from verifiers.v1.configs.client import EvalClientConfig  # type: ignore[import-not-found]
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig  # type: ignore[import-not-found]
from verifiers.v1.types import SamplingConfig  # type: ignore[import-not-found]
from verifiers.v1.utils.loaders import load_environment  # type: ignore[import-not-found]


async def make(url: str, _folder: str) -> Play:
    """Prepare the client's settings."""
    logging.disable(logging.WARNING)
    client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
    context = ModelContext(client=client, model="policy", sampling=SamplingConfig())

    async def play(episodes: int, at_once: int) -> int:
        agent = {"harness": {"id": "verifiers_rooms"}, "runtime": {"type": "subprocess"}}
        taskset = {"id": "verifiers_rooms", "episodes": episodes}
        environment = load_environment(SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": agent}))
        semaphore = asyncio.Semaphore(at_once)
        async with environment.serving():
            slots = [slot for task in environment.taskset for slot in environment.slots(task, 1)]
            played = await asyncio.gather(*(environment.run_slot(slot, context, semaphore) for slot in slots))
        if failed := [episode.errors or episode.traces[0].errors for episode in played if not episode.ok]:
            raise RuntimeError(f"an episode failed: {failed[0]}")
        return int(sum(episode.traces[0].reward for episode in played))

    return play


if __name__ == "__main__":
    serve(make)
