"""Environments behind AgentGym's HTTP servers (https://github.com/WooooDyy/AgentGym, as of May 2026).

A server holds many environments: ``POST /create`` creates one and returns its number, ``POST /reset`` starts the task
of an index, ``POST /step`` takes an action, ``GET /observation`` returns the state; all answer JSON. The servers use
different field names (see `WORLDS`). They do not recognize retries, so a lost answer ends the episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.task import Task

HINT = "set environment.options={world: textcraft, url: http://127.0.0.1:36001, train: [0, 374], test: [374, 474]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Field names of one of AgentGym's servers."""

    handle: str
    """Field with an environment's number."""
    index: str
    """Field of a reset with the task's index."""
    observation: str = "observation"
    reward: str = "reward"
    is_total: bool = False
    """True if steps report the best reward so far; the reward of a step is then the difference."""
    create: Mapping[str, Any] | None = None
    """Body of a creation; ``None`` for no body."""
    reset: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of a reset."""
    goal: str | None = None
    """Field of the reset's answer that is put before the first observation."""
    actions: str | None = None
    """Field with the admissible actions."""


_TOOLS = World(handle="env_idx", index="id", is_total=True, create={"id": 0})
WORLDS: Mapping[str, World] = {
    "academia": _TOOLS,
    "alfworld": World(handle="id", index="game", reset={"world_type": "Text"}, actions="available_actions"),
    "babyai": World(handle="id", index="data_idx", reward="score", is_total=True),
    "maze": World(handle="id", index="game"),
    "movie": _TOOLS,
    "sciworld": World(handle="id", index="data_idx", reward="score", is_total=True, goal="task_description"),
    "searchqa": World(handle="env_idx", index="id", create={"id": 0}),
    "sheet": _TOOLS,
    "sqlgym": World(handle="env_idx", index="item_id", observation="state"),
    "textcraft": World(handle="id", index="data_idx", create={}),
    "todo": _TOOLS,
    "weather": _TOOLS,
    "webshop": World(handle="env_idx", index="session_id", observation="state"),
    "wordle": World(handle="id", index="seed"),
}


class AgentGymEnv(AsyncEnv):
    """One environment of a server.

    Args:
        world: Name of one of AgentGym's servers.
        url: Its address.
        max_steps: Steps after which an episode is truncated.
        success_from: Minimum return of an episode that counts as solved.
        train: Range of the training tasks, for the task source.
        test: Range of the test tasks.

    Raises:
        UsageError: the world is unknown, or the address is missing.
    """

    def __init__(
        self,
        *,
        world: str | None = None,
        url: str | None = None,
        max_steps: int = 30,
        success_from: float = 1.0,
        train: Sequence[int] = (),
        test: Sequence[int] = (),
    ) -> None:
        del train, test
        if world is None or world not in WORLDS or url is None:
            got = f"world {world}, url {url}"
            raise UsageError(
                "the AgentGym server is not set", got=got, expected=f"one of {', '.join(WORLDS)}", hint=HINT
            )
        self.world, self.url = WORLDS[world], url.rstrip("/")
        self._max_steps, self._success_from = max_steps, success_from
        self._episode = _Episode()
        self._number: int | None = None
        self._session: aiohttp.ClientSession | None = None
        if self.world.actions is not None:
            self.admissible_actions = self._list_actions

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the task of the option ``index``; without one, that of the seed.

        Raises:
            EnvironmentFailure: the server failed.
        """
        world, index = self.world, (options or {}).get("index", seed or 0)
        if self._number is None:
            created = await self._ask("POST", "create", world.create)
            self._number = created["id"] if isinstance(created, dict) else int(created)
        answer = await self._ask("POST", "reset", {**self._handle, world.index: index, **world.reset})
        self._episode = _Episode()
        if not isinstance(answer, dict):  # a text or a pair: this server returns the observation elsewhere
            return str(await self._ask("GET", "observation", None)), {}
        self._note_actions(answer)
        parts = [str(answer[name]) for name in (world.goal, world.observation) if name is not None]
        return "\n".join(parts), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action.

        Raises:
            EnvironmentFailure: the server failed.
        """
        episode, world = self._episode, self.world
        answer = await self._ask("POST", "step", {**self._handle, "action": action})
        self._note_actions(answer)
        reported = float(answer[world.reward])
        reward = reported - episode.total if world.is_total else reported
        episode.total += reward
        episode.steps += 1
        done = bool(answer["done"])
        info = {"success": done and episode.total >= self._success_from}
        return str(answer[world.observation]), reward, done, episode.steps >= self._max_steps and not done, info

    async def close(self) -> None:
        """Close the environment, if the server supports it, and the connection."""
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if self._number is not None:
                async with session.post(f"{self.url}/close", json=self._handle, timeout=aiohttp.ClientTimeout(5)):
                    pass
        except (aiohttp.ClientError, OSError):
            pass  # the server's clean-up is not needed
        finally:
            await session.close()

    @property
    def _handle(self) -> dict[str, Any]:
        return {self.world.handle: self._number}

    def _list_actions(self) -> list[str]:
        return self._episode.actions

    def _note_actions(self, answer: Mapping[str, Any]) -> None:
        if self.world.actions is not None:
            self._episode.actions = [str(action) for action in answer[self.world.actions]]

    async def _ask(self, method: str, route: str, body: Mapping[str, Any] | None) -> Any:
        """Send a request and return the answer; answers of status 200 may also contain errors."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        query = self._handle if method == "GET" else None
        what = f"the AgentGym server {self.url}"
        try:
            async with self._session.request(method, f"{self.url}/{route}", json=body, params=query) as response:
                if response.status != 200:
                    got = f"{response.status} of /{route}: {(await response.text())[:200]}"
                    raise EnvironmentFailure(f"{what} refuses a request", got=got)
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EnvironmentFailure(f"{what} is lost", got=f"{type(error).__name__}: {error}") from error
        if isinstance(answer, dict) and "error" in answer:
            raise EnvironmentFailure(f"{what} failed", got=f"/{route}: {answer['error']}")
        return answer


@dataclass(slots=True)
class _Episode:
    total: float = 0.0
    steps: int = 0
    actions: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class IndexTasks:
    """The tasks of a range of indices."""

    split: str
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, place: int) -> Task:
        if not 0 <= place < len(self):
            raise IndexError(place)
        index = self.first + place
        return Task(id=f"{self.split}-{index}", environment="agentgym", seed=index, options={"index": index})


def tasks(
    split: str,
    *,
    train: Sequence[int] = (),
    test: Sequence[int] = (),
    world: str | None = None,
    url: str | None = None,
    max_steps: int = 30,
    success_from: float = 1.0,
) -> IndexTasks:
    """Return the tasks of a split, whose range is an option because the servers do not report how many they have.

    The other options are those of `AgentGymEnv` and are ignored.

    Raises:
        UsageError: the range is missing, empty, or overlaps with the other one.
    """
    del world, url, max_steps, success_from
    chosen, other = (train, test) if split == "train" else (test, train)
    if len(chosen) != 2 or not 0 <= chosen[0] < chosen[1]:
        raise UsageError(
            f"the range of tasks of split {split} is not valid", got=list(chosen), expected="[first, end]", hint=HINT
        )
    if len(other) == 2 and max(train[0], test[0]) < min(train[1], test[1]):
        raise UsageError(
            "train and test share tasks", got=f"{list(train)} and {list(test)}", expected="disjoint ranges"
        )
    return IndexTasks(split, *chosen)


SPEC = EnvironmentSpec(
    name="agentgym",
    make=AgentGymEnv,
    tasks=tasks,
    splits=("train", "test"),
    description=(
        "Environments behind AgentGym's HTTP servers: TextCraft, BabyAI, SciWorld, SQL, tools and others. "
        "Options world and url say which; train and test, the ranges of task indices."
    ),
    instructions=("You act in a text world. Each turn, write one action. The world answers with what you see."),
    isolation=Isolation.INLINE,
)
