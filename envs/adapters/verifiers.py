"""Environments of `verifiers` with its v0 interface: `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv` and similar ones.

The library's own rollout runs unchanged, with a client that passes each prompt on and waits for the answer; the rubric
then gives the reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import string
from collections.abc import Mapping
from typing import Any, TypeAlias

from gymnasium.spaces import Text

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, UsageError

from .verifiers_client import Messages, client_type, content_of, field_of, tool_lines
from .verifiers_data import EXTRA, NAME, TEST, TRAIN, VerifiersTasks, load, row_at

Step: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]


class VerifiersEnv(AsyncEnv):
    """An environment of `verifiers`; an observation is the text of the messages since the last answer.

    An answer is text. If the environment has tools, an answer that calls them is only a JSON object, ``{"name": …,
    "arguments": {…}}``, or a list of such objects. `reset` takes the options ``split`` and ``row``; without them the
    seed is the number of a row of the training split, modulo its size. An unseeded reset draws a row.

    Args:
        environment: ``module:load_environment``, or the name of an installed environment of verifiers.
        arguments: Arguments of its `load_environment`.

    Raises:
        UsageError: the package or the environment is not installed, or the environment cannot be adapted.
    """

    def __init__(self, *, environment: str | None = None, **arguments: Any) -> None:
        self.environment = load(environment, arguments)
        self.name = environment
        self.action_space = Text(64, charset=string.ascii_letters + string.digits)
        """Space of a random policy's answers."""
        self._client = client_type()
        self._prompts: asyncio.Queue[Messages] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._rollout: asyncio.Task[dict[str, Any]] | None = None
        self._shown: Messages = ()
        self._rows = random.Random()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the rollout of a row.

        Raises:
            UsageError: the options do not name a row.
        """
        await self.close()
        if seed is not None:
            self._rows = random.Random(seed)
        row = self._row(self._rows.randrange(2**31) if seed is None else seed, options or {})
        self._prompts, self._answers, self._shown = asyncio.Queue(), asyncio.Queue(), ()
        self._rollout = asyncio.create_task(self._play(row))
        prompt = await self._next_prompt()
        if prompt is None:
            raise EnvironmentFailure(f"the rollout of {self.name} ended before its first prompt")
        return self._text(prompt) + tool_lines(self.environment), {"success": False, "task_type": self._type(row)}

    async def step(self, action: str) -> Step:
        """Answer the latest prompt.

        Raises:
            UsageError: the episode is over.
            EnvironmentFailure: the environment recorded an error.
        """
        if self._rollout is None or self._rollout.done():
            raise UsageError(f"the episode of {self.name} is over", expected="reset before the next step")
        await self._answers.put(action)
        prompt = await self._next_prompt()
        if prompt is not None:
            return self._text(prompt), 0.0, False, False, {"success": False, "valid": True}
        return self._finish(self._rollout.result())

    async def close(self) -> None:
        """Stop a running rollout; its own clean-up runs."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._rollout
        self._rollout = None

    async def _play(self, row: Mapping[str, Any]) -> dict[str, Any]:
        client = self._client(self._prompts, self._answers)
        state = await scored_rollout(self.environment, row, client)
        if state["error"] is not None:
            raise EnvironmentFailure(f"a rollout of {self.name} failed", got=repr(state["error"]))
        return state

    async def _next_prompt(self) -> Messages | None:
        """Wait for the next prompt; return ``None`` if the rollout has ended without one."""
        assert self._rollout is not None
        prompt = asyncio.create_task(self._prompts.get())
        await asyncio.wait({prompt, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if prompt.done():
            return prompt.result()
        prompt.cancel()
        self._rollout.result()  # raises the rollout's error
        return None

    def _text(self, prompt: Messages) -> str:
        """Return the new part of a prompt: all of it if the history was rewritten."""
        shown, self._shown = self._shown, list(prompt)
        is_longer = list(prompt[: len(shown)]) == list(shown)
        new = prompt[len(shown) :] if is_longer else prompt
        return "\n\n".join(
            content_of(message) for message in new if not shown or field_of(message, "role") != "assistant"
        )

    def _finish(self, state: Mapping[str, Any]) -> Step:
        reward = float(state["reward"] or 0.0)
        last = state.get("final_env_response")
        words = "\n\n".join(map(content_of, last)) if isinstance(last, list) else str(last or "")
        info = {
            "success": reward >= getattr(self.environment, "pass_threshold", 0.5),
            "valid": True,
            "reward_components": {name: float(value) for name, value in (state.get("metrics") or {}).items()},
        }
        most = getattr(self.environment, "max_turns", 1)
        is_cut = state.get("stop_condition") == "max_turns_reached" and most > 1
        return words or f"The end. Reward: {reward:g}.", reward, not is_cut, is_cut, info

    def _row(self, seed: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options and set(options) != {"split", "row"}:
            raise UsageError("verifiers cannot reset with these options", got=", ".join(options), expected="split, row")
        return row_at(self.environment, options.get("split", TRAIN), options.get("row", seed))

    def _type(self, row: Mapping[str, Any]) -> str:
        task = row.get("task")
        return task if isinstance(task, str) else str(self.name)


async def scored_rollout(environment: Any, row: Mapping[str, Any], client: Any) -> dict[str, Any]:
    """Run the library's rollout and score it unless it recorded an error; the rubric always cleans up."""
    state: dict[str, Any] = await environment.rollout(dict(row), client, "policy", {})
    try:
        if state["error"] is None:
            await environment.rubric.score_rollout(state)
    finally:
        await environment.rubric.cleanup(state)
    return state


SPEC = EnvironmentSpec(
    name=NAME,
    make=VerifiersEnv,
    tasks=VerifiersTasks,
    splits=(TRAIN, TEST),
    description=(
        "Environments of verifiers (its v0 interface: single-turn, multi-turn and tool environments), with their"
        " dataset as tasks and their rubric as reward. Option environment: module:load_environment, or the name of an"
        " installed one; other options are its arguments."
    ),
    isolation=Isolation.PROCESS,
    extra=EXTRA,
)
