"""Comparison of sides by turns: each plays the same episodes in every round, one side at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import note
from agentrl.sandbox.program_guard import children_of
from peers.installed import find_python
from peers.work import FIGURES, READY, Tally

FOLDER = Path(__file__).parent
MAX_LINE_BYTES = 1 << 20
WARM = 8
"""Number of episodes before the first measurement."""
SLOWEST_START_S, SLOWEST_PLAY_S, SLOWEST_END_S = 900.0, 900.0, 1.0


class UnfinishedError(AgentRLError):
    """A side does not finish its episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideProgram:
    """Program of one side."""

    peer: str
    """Name in `peers.installed.PEERS`, or agentrl."""
    words: tuple[str, ...]
    """Name of the file, and further arguments."""
    most_at_once: int = 10_000
    """Largest number of concurrent episodes that fits this machine."""


SIDES: Mapping[str, SideProgram] = {
    "agentrl": SideProgram(peer="agentrl", words=("rollout_agentrl.py",)),
    "agentrl_in_process": SideProgram(peer="agentrl", words=("rollout_agentrl.py", "in_process")),
    "bare": SideProgram(peer="agentrl", words=("rollout_bare.py",)),
    "trl": SideProgram(peer="trl", words=("rollout_trl.py",)),
    "verifiers": SideProgram(peer="verifiers", words=("rollout_verifiers.py",)),
    "verifiers_classic": SideProgram(peer="verifiers_classic", words=("rollout_verifiers_classic.py",)),
    # of 1,000 episodes at once, agentlightning 0.3.0 did not finish all within 900 s
    "agentlightning": SideProgram(peer="agentlightning", words=("rollout_agentlightning.py",), most_at_once=64),
}
"""Sides of the rollout comparison."""
OWN = ("agentrl", "agentrl_in_process")
LIMITS = (*OWN, "bare")
"""Sides that are no peers."""


def chosen_sides(versus: str) -> list[str]:
    """Return the sides of a comparison with one peer, with several (comma-separated), or with all.

    Raises:
        UsageError: a peer is not known.
    """
    known = [name for name in SIDES if name not in LIMITS]
    asked = known if versus == "all" else versus.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise UsageError("unknown peer", got=f"versus={unknown[0]}", expected=f"all, or some of {', '.join(known)}")
    return [*LIMITS, *asked]


class Side:
    """A running side, and the figures of its rounds."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process
        self.rounds: dict[int, list[dict[str, float]]] = {}
        self.cabinet = 0
        """First cabinet that this side has not looked into."""

    async def wait_until_ready(self) -> None:
        """Wait until the side can play."""
        await asyncio.wait_for(self._line(READY), SLOWEST_START_S)

    async def play(self, episodes: int, at_once: int) -> dict[str, float]:
        """Let the side play; returns its own figures, with the CPU time of its other processes added."""
        assert self._process.stdin is not None
        before = self._others_cpu_s()
        self._process.stdin.write(json.dumps({"episodes": episodes, "at_once": at_once}).encode() + b"\n")
        try:
            line = await asyncio.wait_for(self._line(FIGURES), SLOWEST_PLAY_S)
        except TimeoutError:
            raise UnfinishedError(
                f"the side {self.name} of the comparison does not finish its episodes",
                got=f"no answer for {SLOWEST_PLAY_S:g} s",
                expected=f"{episodes} episodes, {at_once} at once",
            ) from None
        figures: dict[str, float] = json.loads(line.removeprefix(FIGURES))
        figures["cpu_s"] += self._others_cpu_s() - before
        return figures

    async def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        while raw := await self._process.stdout.readline():
            if (line := raw.decode(errors="replace").strip()).startswith(start.strip()):
                return line
        raise AgentRLError(f"the side {self.name} of the comparison has ended", hint="its errors are above")

    def _others_cpu_s(self) -> float:
        ticks = 0
        for pid in children_of(self._process.pid):
            with contextlib.suppress(OSError):
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def open_side(name: str, url: str, folder: Path) -> AsyncIterator[Side]:
    """Start a side in its own environment; it ends with the block."""
    program = SIDES[name]
    words = [find_python(program.peer), str(FOLDER / program.words[0]), url, str(folder), *program.words[1:]]
    variables = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if program.peer == "agentrl":
        variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    pipe = asyncio.subprocess.PIPE
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=log, limit=MAX_LINE_BYTES, env=variables
        )
    try:
        yield Side(name, process)
    except BaseException:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), SLOWEST_END_S)
        if process.returncode:
            note(f"{name}: {(folder / f'{name}.log').read_text(errors='replace')[-3000:]}")
        raise
    finally:
        for pid in (*children_of(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        await process.wait()


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Rounds of all sides, and what they played."""

    url: str
    turns: int
    answer_tokens: int
    """Sampled tokens of an episode."""
    sides: list[Side] = field(default_factory=list)
    unfinished: dict[str, int] = field(default_factory=dict)
    """Sides that did not finish their episodes, and the number at once; they take no further part."""

    async def round(self, episodes: int, at_once: int, *, kept: bool = True) -> None:
        """Let each side play, in an order that changes from round to round.

        Raises:
            AgentRLError: a side has not done the same work.
        """
        self.sides.append(self.sides.pop(0))
        for side in self.sides:
            if at_once > SIDES[side.name].most_at_once or side.name in self.unfinished:
                continue
            await self._counts(side.cabinet)
            try:
                figures = await side.play(episodes, at_once)
            except UnfinishedError as error:
                if not kept:
                    raise
                self.unfinished[side.name] = at_once
                note(f"{error}; it takes no further part")
                continue
            self._check(side, figures, await self._counts(side.cabinet), episodes)
            side.cabinet += episodes * (self.turns - 1)
            turns = episodes * self.turns
            row = {
                "turns_per_s": turns / figures["seconds"],
                "tokens_per_s": self._tokens(episodes) / figures["seconds"],
                "cpu_ms_per_turn": 1000 * figures["cpu_s"] / turns,
                "kb_per_episode": max(0.0, figures["grown_bytes"]) / 1024 / at_once,
                "resident_mb": figures["resident_bytes"] / 2**20,
            }
            if kept:
                side.rounds.setdefault(at_once, []).append(row)
                note(f"{side.name}, {at_once} at once: {row['cpu_ms_per_turn']:.2f} ms of CPU per turn")

    def figures(self) -> dict[str, Any]:
        """Return medians, and the spread of the CPU times, by side and number of episodes at once."""
        return {
            side.name: {str(at_once): _summarize(rounds) for at_once, rounds in side.rounds.items()}
            for side in sorted(self.sides, key=lambda side: list(SIDES).index(side.name))
        }

    async def _counts(self, cabinet: int) -> dict[str, int]:
        async with aiohttp.ClientSession() as http, http.post(f"{self.url}/counts?cabinet={cabinet}") as answer:
            counts: dict[str, int] = await answer.json()
            return counts

    def _tokens(self, episodes: int) -> int:
        return self.answer_tokens * episodes

    def _check(self, side: Side, figures: Mapping[str, float], counts: Mapping[str, int], episodes: int) -> None:
        calls = episodes * (self.turns - 1)
        expected = {
            "calls": calls,
            "checksum of the calls": Tally.checksum_of(range(side.cabinet, side.cabinet + calls)),
            "ended with the last answer": episodes,
        }
        got = {
            "calls": figures["calls"],
            "checksum of the calls": figures["checksum"],
            "ended with the last answer": figures["ended"],
        }
        if side.name != "agentrl_in_process":  # it does not use the server
            expected |= {"turns of the server": calls + episodes, "last answers of the server": episodes}
            got |= {"turns of the server": counts["turns"], "last answers of the server": counts["last"]}
        if got != expected:
            raise AgentRLError(f"{side.name} has not done the same work", got=got, expected=expected)


def _summarize(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    cpu = [row["cpu_ms_per_turn"] for row in rounds]
    return {
        **{key: median(row[key] for row in rounds) for key in ("turns_per_s", "tokens_per_s", "cpu_ms_per_turn")},
        "cpu_ms_lowest": min(cpu),
        "cpu_ms_highest": max(cpu),
        # freed memory is used again, so only the first round shows all of it
        "kb_per_episode": max(row["kb_per_episode"] for row in rounds),
        "resident_mb": rounds[0]["resident_mb"],
    }


async def run_rounds(
    comparison: Comparison, sides: Sequence[str], folder: Path, plan: Sequence[tuple[int, int, int]]
) -> None:
    """Start all sides, warm them up, and play.

    Args:
        comparison: Receives the figures.
        sides: Names of `SIDES`.
        folder: Folder of the model, for logs too.
        plan: Rounds, episodes, and episodes at once.
    """
    async with AsyncExitStack() as stack:
        for name in sides:
            side = await stack.enter_async_context(open_side(name, comparison.url, folder))
            await side.wait_until_ready()
            comparison.sides.append(side)
        await comparison.round(WARM, WARM, kept=False)
        for rounds, episodes, at_once in plan:
            for _ in range(rounds):
                await comparison.round(episodes, at_once)
