"""The same multi-turn tool episodes played by agentrl and by other frameworks: `agentrl bench rollout --versus …`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from proxies.side_by_side import start_program
from support.models import tiny_model
from support.tokenizers import build_tokenizer
from throughput.server import open_server

from agentrl.builders.servers import ServedModel
from agentrl.config.engines import VLLMEngineConfig
from agentrl.errors import UsageError
from agentrl.message import user
from agentrl.render.renderer import Renderer
from agentrl.tool import tool
from peers import compare, work
from peers.installed import PEERS, conditions, find_python
from peers.instant import Script

EPISODES = {1: 16, 64: 128}
"""Episodes of a round, by the number at once; otherwise as many as are at once."""
ROUNDS = {1000: 1}
"""Rounds, by the number at once, where a round takes long."""
SIZES = {"layers": 4, "hidden_size": 384, "heads": 6, "kv_heads": 2, "max_context": 8192}
"""Sizes of the model with random weights that a real server computes: 7 million parameters."""


async def compare_rollouts(
    versus: str, *, engine: str | None, at_once: Sequence[int], rounds: int, turns: int
) -> dict[str, Any]:
    """Let all sides play the same episodes by turns.

    Args:
        versus: Peers; see `peers.compare.chosen_sides`.
        engine: ``vllm`` lets a vLLM server compute the tokens of each answer; ``None`` for answers at once.
        at_once: Numbers of concurrent episodes.
        rounds: Rounds of each number; fewer for some, see `ROUNDS`.
        turns: Answers of an episode: calls of the tool, and the last one.

    Raises:
        UsageError: a peer is not known or not installed, or a number is too small.
    """
    if engine not in (None, "vllm"):
        raise UsageError("the comparison does not use this engine", got=f"--engine {engine}", expected="vllm, or none")
    if not at_once or min(at_once) < 1 or rounds < 1 or turns < 2:
        got = f"at_once={list(at_once)} rounds={rounds} turns={turns}"
        raise UsageError("a size of the comparison is too small", got=got, expected="at least 1, 1 and 2")
    sides = compare.chosen_sides(versus)
    if engine == "vllm":
        sides.remove("agentrl_in_process")  # it has no server
    for name in sides:
        find_python(compare.SIDES[name].peer)
    plan = [(min(rounds, ROUNDS.get(number, rounds)), EPISODES.get(number, number), number) for number in at_once]
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as place:
        folder = Path(place)
        script = write_files(folder, turns=turns, episodes=compare.WARM + sum(times * many for times, many, _ in plan))
        async with AsyncExitStack() as stack:
            if engine == "vllm":
                script.behind = await stack.enter_async_context(_vllm(folder, max(at_once)))
            url = await stack.enter_async_context(_instant(folder, script))
            tokens = sum(map(len, script.calls[: turns - 1])) + len(script.found)
            comparison = compare.Comparison(url=url, turns=turns, answer_tokens=tokens)
            found = conditions([peer for name in sides if (peer := compare.SIDES[name].peer) in PEERS], rounds)
            await compare.run_rounds(comparison, sides, folder, plan)
    if comparison.unfinished:
        found["unfinished"] = comparison.unfinished
    figures = comparison.figures()
    return {
        "conditions": found | {"server": engine or "instant", "turns": turns, "tokens_per_episode": tokens},
        "sides": figures,
        "versus_best_peer": _versus_best(figures),
    }


def write_files(folder: Path, *, turns: int, episodes: int) -> Script:
    """Write a model with random weights, its tokenizer, and the script of the answers into a folder."""
    tokenizer = build_tokenizer("qwen2.5")
    tiny_model("qwen2", vocab_size=len(tokenizer), **SIZES).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    renderer = Renderer(tokenizer)
    end_id = renderer.boundary.end_id
    shown = renderer.prompt([user(work.QUESTION)], tools=[tool(work.look).schema])
    call = '<tool_call>\n{{"name": "look", "arguments": {{"cabinet": {}}}}}\n</tool_call>'
    script = Script(
        calls=[[*renderer.encoder.encode(call.format(n)), end_id] for n in range(episodes * (turns - 1))],
        found=[*renderer.encoder.encode(work.FOUND), end_id],
        end_id=end_id,
        first_messages=list(shown.ids).count(end_id),
        turns=turns,
    )
    (folder / "script.json").write_text(script.model_dump_json())
    return script


@asynccontextmanager
async def _instant(folder: Path, script: Script) -> AsyncIterator[str]:
    (folder / "script.json").write_text(script.model_dump_json())
    words = [sys.executable, "-m", "peers.instant", str(folder / "script.json")]
    async with start_program(words) as (url, _):
        yield url


@asynccontextmanager
async def _vllm(folder: Path, at_once: int) -> AsyncIterator[str]:
    section = VLLMEngineConfig(max_num_seqs=min(at_once, 64))
    served = ServedModel(path=str(folder), dtype="float32", vocab_size=len(build_tokenizer("qwen2.5")))
    async with open_server(section, served, folder) as url:
        yield url


def _versus_best(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the turns per second and core relative to the best peer, by the number of episodes at once."""
    found: dict[str, Any] = {}
    for own in compare.OWN:
        for at_once, row in figures.get(own, {}).items():
            peers = {
                name: rows[at_once] for name, rows in figures.items() if name not in compare.LIMITS and at_once in rows
            }
            if peers:
                best = min(peers, key=lambda name: peers[name]["cpu_ms_per_turn"])
                ratio = peers[best]["cpu_ms_per_turn"] / row["cpu_ms_per_turn"]
                found.setdefault(own, {})[at_once] = {"best_peer": best, "ratio_per_core": ratio}
    return found
