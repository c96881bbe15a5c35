"""An agent of somebody else plays the episode: a program or a function that speaks to OpenAI or Anthropic.

reset ─► session of the gateway ─► program, with its variables ─► its answers come from the policy ─► reward ─► end
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.agent_loop import AgentLoop, Episode, EpisodeEnd
from agentrl.errors import EnvironmentFailure, Outcome, PolicyError, UsageError
from agentrl.gateway import Gateway, GatewaySession, SideCalls
from agentrl.message import described

LONGEST_LOG = 64 * 1024
KILL_AFTER_S = 2.0
KEYS_OF_VENDORS = ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_AUTH_TOKEN")
"""Variables of the user's own account, which a program must not send to the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTask:
    """What a function that plays an episode gets."""

    prompt: str
    """The task: the environment's first observation."""
    instructions: str
    """The environment's instructions, or what replaces them."""
    base_url: str
    """For OpenAI's clients it ends with ``/v1``: see `openai_url`."""
    api_key: str
    step: Callable[[str], Any] = field(repr=False)
    """Takes an action in the environment, and returns its `StepResult`; async functions await it."""

    @property
    def openai_url(self) -> str:
        """``base_url`` as OpenAI's clients want it."""
        return f"{self.base_url}/v1"


class External(AgentLoop):
    """Lets a program of yours play, unchanged: whatever it asks OpenAI or Anthropic, the policy answers.

    The program finds the address and a key in the variables that the vendors' packages read: ``OPENAI_BASE_URL``,
    ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``; its task in ``AGENTRL_PROMPT``, ``AGENTRL_TASK``
    (a file of JSON) and on its standard input. What it prints last is its answer.

    Args:
        command: The program, in a shell's words or as a list; ``{python}`` stands for this Python.
        function: ``module:name`` of a function of an `ExternalTask` instead, async or not. It returns its answer, a
            number as the reward, or nothing.
        answer: ``step`` gives the answer to the environment as an action; ``none`` leaves it, for programs that act
            with ``POST $AGENTRL_URL/step`` or post rewards.
        reward_file: File in the program's folder that holds the reward, as a number or ``{"reward", "success"}``.
        seconds: Time of one program.
        variables: More environment variables.
        crash: Whose fault a program is that fails: ``policy_error`` (it is the policy's), or ``environment_error`` (it
            is not, and the episode is played again).
        side_models: Models by whose names the program asks for what is not trained, such as titles.
        side_markers: Texts in a system message that mark such requests.
    """

    follow_ups = ("user", "tool")

    def __init__(
        self,
        *,
        command: str | Sequence[str] | None = None,
        function: str | None = None,
        answer: Literal["step", "none"] = "step",
        reward_file: str | None = None,
        seconds: float = 600.0,
        variables: Mapping[str, str] | None = None,
        crash: Literal["policy_error", "environment_error"] = "policy_error",
        side_models: Sequence[str] = (),
        side_markers: Sequence[str] = (),
    ) -> None:
        if (command is None) == (function is None):
            raise UsageError(
                "the external loop plays one program",
                got="both command and function" if command else "neither command nor function",
                expected="agent.options.command, or agent.options.function=module:name",
            )
        if answer not in ("step", "none") or crash not in ("policy_error", "environment_error"):
            raise UsageError("an option of the external loop", got=f"answer={answer}, crash={crash}")
        if seconds <= 0:
            raise UsageError("agent.options.seconds", got=seconds, expected="more than 0")
        self._words = None if command is None else _words(command)
        self._function = None if function is None else _imported(function)
        self._answers = answer == "step"
        self._reward_file = reward_file
        self._seconds = seconds
        self._variables = dict(variables or {})
        self._crash = Outcome(crash)
        self._side_calls = SideCalls(models=tuple(side_models), markers=tuple(side_markers))
        self._gateways: dict[asyncio.AbstractEventLoop, Gateway] = {}

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        prompt = described(await episode.reset())
        gateway = await self._gateway()
        async with gateway.session(episode, side_calls=self._side_calls) as session:
            url = gateway.url_of(session)
            with tempfile.TemporaryDirectory(prefix="agentrl-program-") as folder:
                play = self._call if self._function else self._execute
                answer = await self._within(play(episode, session, url, prompt, Path(folder)), session)
                reward = self._read_reward(Path(folder))
            if session.failure is not None:
                raise session.failure
            if session.outcome is not None:
                raise EpisodeEnd(session.outcome)
        await self._judge(episode, session, answer, reward)

    async def close(self) -> None:
        """Close the gateways."""
        gateways, self._gateways = list(self._gateways.values()), {}
        for gateway in gateways:
            await gateway.close()

    async def _gateway(self) -> Gateway:
        loop = asyncio.get_running_loop()
        if loop not in self._gateways:
            self._gateways[loop] = Gateway()
        gateway = self._gateways[loop]
        await gateway.start()
        return gateway

    async def _within(self, work: Any, session: GatewaySession) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                return await work
        except TimeoutError:
            session.outcome = session.outcome or Outcome.TRUNCATED_TIME
            return None

    async def _call(self, episode: Episode, session: GatewaySession, url: str, prompt: str, folder: Path) -> Any:
        assert self._function is not None
        is_async, loop = inspect.iscoroutinefunction(self._function), asyncio.get_running_loop()

        def step(action: str) -> Any:
            taken = session.step(action)
            return taken if is_async else asyncio.run_coroutine_threadsafe(taken, loop).result()

        task = ExternalTask(
            prompt=prompt, instructions=episode.spec.instructions, base_url=url, api_key=session.key, step=step
        )
        try:
            return await self._function(task) if is_async else await asyncio.to_thread(self._function, task)
        except TimeoutError:
            raise
        except Exception as error:
            return self._failed(session, f"the function raised {type(error).__name__}: {error}", error)

    async def _execute(self, episode: Episode, session: GatewaySession, url: str, prompt: str, folder: Path) -> Any:
        assert self._words is not None
        told = {"id": episode.task.id, "prompt": prompt, "instructions": episode.spec.instructions}
        task_file = folder / "task.json"
        task_file.write_text(json.dumps(told), encoding="utf-8")
        variables = {
            **{name: value for name, value in os.environ.items() if name not in KEYS_OF_VENDORS},
            **variables_of(session, url),
            "AGENTRL_PROMPT": prompt,
            "AGENTRL_TASK": str(task_file),
            **self._variables,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                cwd=folder,
                env=variables,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError("the program cannot be started", got=f"{shlex.join(self._words)}: {error}") from error
        try:
            said, complained = await process.communicate(prompt.encode())
        finally:
            await _kill(process)
        output, errors = said.decode(errors="replace"), complained.decode(errors="replace")
        episode.keep_log((output + errors)[-LONGEST_LOG:])
        if process.returncode:
            return self._failed(session, f"the program ended with {process.returncode}: {errors[-500:].strip()}", None)
        return output.strip()

    def _failed(self, session: GatewaySession, what: str, cause: Exception | None) -> None:
        """A program that failed; nothing, where a budget or the engine had already ended its episode."""
        if session.outcome is not None or session.failure is not None:
            return
        if self._crash is Outcome.POLICY_ERROR and session.requests:
            raise PolicyError(what) from cause
        raise EnvironmentFailure(what) from cause  # before it has asked, nothing was the policy's

    def _read_reward(self, folder: Path) -> tuple[float, bool | None] | None:
        if self._reward_file is None:
            return None
        path = folder / self._reward_file
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(told, dict):
                return float(told["reward"]), told.get("success")
            return float(told), None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise EnvironmentFailure(
                f"the program left no reward in {self._reward_file}",
                got=str(error),
                expected='a number, or {"reward": …}',
            ) from error

    async def _judge(self, episode: Episode, session: GatewaySession, answer: Any, reward: Any) -> None:
        if session.requests == 0:
            raise EnvironmentFailure(
                "the program never asked the gateway",
                expected="a client that reads OPENAI_BASE_URL or ANTHROPIC_BASE_URL",
                hint="pass the address and the key from the variables to the client by hand",
            )
        if reward is not None:
            episode.give_reward(reward[0], success=reward[1])
        elif isinstance(answer, bool | int | float):
            episode.give_reward(float(answer))
        elif self._answers and isinstance(answer, str):
            await episode.step(answer)


def variables_of(session: GatewaySession, url: str) -> dict[str, str]:
    """Return the environment variables with which the vendors' packages find the gateway."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "AGENTRL_URL": url,
        "AGENTRL_KEY": session.key,
    }


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End a program and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), KILL_AFTER_S)


def _words(command: str | Sequence[str]) -> list[str]:
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    except ValueError as error:
        raise UsageError("agent.options.command cannot be read", got=f"{command!r}: {error}") from error
    if not words:
        raise UsageError("agent.options.command is empty", expected="a program and its arguments")
    words = [word.replace("{python}", sys.executable) for word in words]
    return [str(Path(word).resolve()) if "/" not in word and Path(word).is_file() else word for word in words]


def _imported(name: str) -> Callable[[ExternalTask], Any]:
    module, colon, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            "agent.options.function cannot be imported",
            got=f"{name}: {error}",
            expected="module:name of a function, in a folder on the path",
        ) from error
    if not colon or not callable(found):
        raise UsageError("agent.options.function", got=name, expected="module:name of a function")
    return found  # type: ignore[no-any-return]
