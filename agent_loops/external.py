"""Episodes played by an external agent: a program or a function that uses the API of OpenAI or Anthropic.

reset ─► gateway session ─► program with the session's variables ─► the policy answers its requests ─► reward ─► end
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.agent_loop import AgentLoop, Episode, EpisodeEnd
from agentrl.errors import (
    A_REWARD,
    EnvironmentFailure,
    Outcome,
    PolicyError,
    ToolError,
    UsageError,
    bounded_reward,
    described_error,
    is_addressed_to,
    running_task,
)
from agentrl.errors.foreign import DaemonThreads, await_or_abandon, call_in_thread
from agentrl.gateway import Gateway, GatewaySession, UntrainedRequestRules
from agentrl.message import Message, ToolCall, text_of
from agentrl.sandbox import open_sandbox

from .external_programs import (
    HostFolder,
    ProgramFolder,
    ProgramInput,
    SandboxFolder,
    read_program,
    read_program_sandbox,
)

MAX_VARIABLE_BYTES = 100_000
"""Maximum bytes of a prompt in an environment variable; Linux refuses more than 128 KiB."""
ACTION = "{action}"
"""Placeholder of the action in a demonstration."""
MIN_WAIT_S = 0.02
_THREADS = DaemonThreads("agentrl-external")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTask:
    """Argument of a function that plays an episode."""

    prompt: str
    """The task: the environment's first observation."""
    instructions: str
    """The environment's instructions, or the configured ones that replace them."""
    base_url: str
    """Base URL of the session for Anthropic's clients; see `openai_url` for OpenAI's."""
    api_key: str
    step: Callable[[str], Any] = field(repr=False)
    """Function that takes an action in the environment and returns its `StepResult`; async functions await it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task, with which the environment was reset."""

    @property
    def openai_url(self) -> str:
        """Base URL for OpenAI's clients, ending with ``/v1``."""
        return f"{self.base_url}/v1"


MAX_IDENTICAL_FAILURES = 8
"""Number of identical failures, without an earlier success, that ends the run."""
_VARYING = re.compile(r"0x[0-9a-f]+|agentrl-program-\w+|\d+")
"""Parts of an error that differ between attempts with the same failure: addresses, folders, process ids, ports."""


class FirstAttempts:
    """The attempts of a program until one succeeds; it ends the run if they all fail in the same way."""

    def __init__(self) -> None:
        self._has_succeeded = False
        self._failed = 0
        self._causes: set[str] = set()

    def succeed(self) -> None:
        """Record an attempt in which the program worked, even if the policy failed."""
        self._has_succeeded = True

    def fail(self, error: EnvironmentFailure) -> None:
        """Record an attempt in which the program failed.

        Raises:
            UsageError: all of the first attempts failed in the same way.
        """
        if self._has_succeeded:
            return
        self._failed += 1
        self._causes.add(_VARYING.sub("", str(error)))
        if self._failed >= MAX_IDENTICAL_FAILURES and len(self._causes) == 1:
            raise UsageError(
                f"the program failed in all of its {self._failed} attempts, each time in the same way: {error.what}",
                got=error.got,
                expected=error.expected,
                hint=error.hint or "start the program by hand, with the variables listed in docs/external-agents.md",
            ) from error


class External(AgentLoop):
    """An unchanged program plays, and the policy answers its requests to OpenAI or Anthropic.

    The program finds the address and a key in the variables that the vendors' packages read: ``OPENAI_BASE_URL``,
    ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``; its task in ``AGENTRL_PROMPT``, ``AGENTRL_TASK``
    (path of a JSON file) and on its standard input. Its standard output is its answer.

    Args:
        command: The program and its arguments, as a shell command or a list; ``{python}`` stands for this Python (in a
            sandbox: for its ``python3``).
        function: ``module:name`` of a function, async or not, to call with an `ExternalTask` instead. It returns its
            answer, a number or ``{"reward", "success"}`` as the reward, or nothing. An `EnvironmentFailure` that it
            raises is not the policy's fault.
        answer: ``step`` passes the answer to the environment as an action; ``none`` ignores it, for programs that take
            actions themselves (``POST $AGENTRL_URL/step``) or post rewards (``POST $AGENTRL_URL/reward``), both with
            ``$AGENTRL_SECRET``.
        reward_file: File in the program's folder that holds the reward, as a number or ``{"reward", "success"}``. Such
            a program gets no ``$AGENTRL_SECRET`` unless it takes actions itself, so that a shell that it gives to the
            policy cannot post another reward.
        seconds: Time limit of one program, not counting the time that it waits for answers.
        grace_seconds: Time that a program has to end once a budget of the episode is spent; some clients retry for
            minutes.
        variables: Additional environment variables. A program gets only a few of this process's variables, and in a
            sandbox none.
        sandbox: Runs the program in a sandbox, with the keys of `agentrl.sandbox.SandboxSpec`; the default network is
            ``gateway``. Files that the command names by relative paths are copied into it.
        crash: Outcome of a program that fails: ``policy_error`` (the policy's fault), or ``environment_error`` (not
            the policy's fault; the episode is played again).
        side_models: Model names of requests that are not trained, such as those for titles.
        side_markers: Texts in a system message that mark such requests.
        forms: ``enforce`` constrains answers to the JSON schemas and the forced tool calls of a request, if the engine
            can, in evaluations and untrained requests; an answer that is trained cannot be constrained, so such a
            request is refused. With ``free``, nothing is constrained: the policy has to learn the format from the
            program's reactions.
        calls: ``as_served`` reads the calls that an inference server's parser would read; ``repaired`` also those that
            differ slightly from the model's notation (see `ToolCalling`).
        demonstration: Format of the answers from which the program reads an action: a text with ``{action}``, or
            ``{"tool": …, "argument": …}`` for a call. With it, experts play through the program in warm starts
            (`agentrl sft`).
    """

    follow_ups = ("user", "tool")
    opens_with_task = False
    is_deterministic = False

    def __init__(
        self,
        *,
        command: str | Sequence[str] | None = None,
        function: str | None = None,
        answer: Literal["step", "none"] = "step",
        reward_file: str | None = None,
        seconds: float = 600.0,
        grace_seconds: float = 20.0,
        variables: Mapping[str, str] | None = None,
        sandbox: Mapping[str, Any] | None = None,
        crash: Literal["policy_error", "environment_error"] = "policy_error",
        side_models: Sequence[str] = (),
        side_markers: Sequence[str] = (),
        forms: Literal["enforce", "free"] = "enforce",
        calls: Literal["as_served", "repaired"] = "as_served",
        demonstration: str | Mapping[str, str] | None = None,
    ) -> None:
        if (command is None) == (function is None):
            raise UsageError(
                "the external loop plays one program",
                got="both command and function" if command else "neither command nor function",
                expected="agent.options.command, or agent.options.function=module:name",
            )
        _check_word("answer", answer, ("step", "none"))
        _check_word("crash", crash, ("policy_error", "environment_error"))
        _check_word("forms", forms, ("enforce", "free"))
        _check_word("calls", calls, ("as_served", "repaired"))
        for option, number in (("seconds", seconds), ("grace_seconds", grace_seconds)):
            if number <= 0:
                raise UsageError(f"agent.options.{option} is too small", got=number, expected="more than 0")
        if sandbox is not None and command is None:
            raise UsageError("a function does not run in a sandbox (agent.options.sandbox)", expected="a command")
        self._sandbox = None if sandbox is None else read_program_sandbox(sandbox)
        if self._sandbox is not None:
            open_sandbox(self._sandbox, has_gateway=True)  # report impossible specs before the run
        self._program = None if command is None else read_program(command, is_sandboxed=sandbox is not None)
        self._function = None if function is None else _import_function(function)
        self._answers = answer == "step"
        self.repairs_calls = calls == "repaired"
        self._reward_file = reward_file
        self._seconds, self._grace_s = seconds, grace_seconds
        self._variables = dict(variables or {})
        self._crash = Outcome(crash)
        self._side_calls = UntrainedRequestRules.of(side_models, side_markers)
        self._demonstration = None if demonstration is None else _read_demonstration(demonstration)
        self._holds_forms = forms == "enforce"
        self._attempts = FirstAttempts()
        self._gateways: dict[asyncio.AbstractEventLoop, Gateway] = {}

    async def run(self, episode: Episode) -> None:
        """Play one episode.

        Raises:
            UsageError: every attempt so far has failed in the same way.
        """
        prompt = text_of(await episode.reset())
        try:
            await self._play(episode, prompt)
        except EnvironmentFailure as error:
            self._attempts.fail(error)
            raise
        except (EpisodeEnd, PolicyError):
            self._attempts.succeed()
            raise
        self._attempts.succeed()

    async def _play(self, episode: Episode, prompt: str) -> None:
        gateway = await self._gateway()
        opened = gateway.session(
            episode, side_calls=self._side_calls, steps=not self._answers, holds_forms=self._holds_forms
        )
        async with opened as session:
            async with self._folder(gateway, session) as folder:
                play = _Play(episode=episode, session=session, url=folder.url, prompt=prompt)
                run = self._call(play) if self._function else self._execute(play, folder)
                problem = await self._within(run, play)
                reward = None if problem or play.is_late else await self._read_reward(folder, play)
            self._check(play, problem)
        if session.answers and not play.is_late:
            await self._judge(play, reward)
        if session.outcome is not None:
            raise EpisodeEnd(session.outcome)

    def demonstration_problem(self) -> str | None:
        """Return an error message if the option `demonstration` is missing."""
        return None if self._demonstration else "agent.options.demonstration of the external loop is not set"

    def demonstrate(self, action: str) -> Message:
        """Write the answer from which the program reads an action."""
        if self._demonstration is None:
            raise UsageError(
                "the external loop needs the format in which the program expects actions",
                expected='agent.options.demonstration="<action>{action}</action>", or {tool: act, argument: action}',
            )
        return self._demonstration(action)

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

    @asynccontextmanager
    async def _folder(self, gateway: Gateway, session: GatewaySession) -> AsyncIterator[ProgramFolder]:
        """Open the folder of one program, with the address of its session."""
        if self._sandbox is None:
            with tempfile.TemporaryDirectory(prefix="agentrl-program-") as folder:
                yield HostFolder(Path(folder), gateway.url_of(session))
            return
        async with open_sandbox(self._sandbox, has_gateway=True) as sandbox:
            port = await sandbox.forward(await gateway.protocol_of(session))
            yield SandboxFolder(sandbox, f"http://127.0.0.1:{port}{gateway.path_of(session)}")

    async def _within(self, run: Coroutine[Any, Any, str | None], play: _Play) -> str | None:
        """Wait for the program: up to its time limit, not counting waits; briefly once a budget is spent."""
        began = time.monotonic()
        running, spent = asyncio.ensure_future(run), asyncio.ensure_future(play.session.spent.wait())
        waited: set[asyncio.Future[Any]] = {running, spent}
        try:
            while not running.done():
                left = self._seconds - (time.monotonic() - began - play.session.waited_s)
                play.is_late = left <= 0
                if play.is_late:
                    break
                if spent in waited and spent.done():
                    waited = {running}
                    await asyncio.wait(waited, timeout=min(left, self._grace_s))
                    break
                await asyncio.wait(waited, timeout=max(left, MIN_WAIT_S), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            spent.cancel()
            await asyncio.wait({running, spent})
        return None if running.cancelled() else running.result()

    def _check(self, play: _Play, problem: str | None) -> None:
        """Raise the failure of the infrastructure or the error of the policy, if there is one.

        Args:
            play: The run of the program.
            problem: Description of the program's failure.
        """
        session = play.session
        if session.failure is not None:
            raise session.failure
        if play.failure is not None and session.outcome is None:
            raise play.failure
        if not session.answers and session.outcome is None:
            raise EnvironmentFailure(
                "the program never got an answer from the gateway",
                got=problem or session.refusal or ("no request within its time" if play.is_late else "no request"),
                expected=None if problem else "a client that reads OPENAI_BASE_URL or ANTHROPIC_BASE_URL",
                hint=None if problem else "pass the address and the key from the variables to the client explicitly",
            )
        if play.is_late:
            session.outcome = session.outcome or Outcome.TRUNCATED_TIME
        elif problem is not None and session.outcome is None:
            if session.refusal is not None:
                raise EnvironmentFailure("the gateway refused a request of the program", got=session.refusal)
            raise (PolicyError if self._crash is Outcome.POLICY_ERROR else EnvironmentFailure)(problem)

    async def _call(self, play: _Play) -> str | None:
        """Call the function; return a description of its failure."""
        assert self._function is not None
        is_async, loop = inspect.iscoroutinefunction(self._function), asyncio.get_running_loop()

        def step(action: str) -> Any:
            taken = play.session.step(action)
            return taken if is_async else asyncio.run_coroutine_threadsafe(taken, loop).result()

        task = ExternalTask(
            prompt=play.prompt,
            instructions=play.episode.spec.instructions,
            base_url=play.url,
            api_key=play.session.key,
            step=step,
            options=play.episode.task.options,
        )
        what, caller = "the external function", running_task()
        try:
            if is_async:
                play.answer = await await_or_abandon(self._function(task), what)
            else:
                play.answer = await call_in_thread(_THREADS, functools.partial(self._function, task), what)
        except EnvironmentFailure as error:
            play.failure = error
            return str(error)
        except BaseException as error:
            if is_addressed_to(caller, error):
                raise
            return f"the function raised {described_error(error)}"
        return None

    async def _execute(self, play: _Play, folder: ProgramFolder) -> str | None:
        """Run the program; return a description of its failure."""
        assert self._program is not None
        variables = variables_of(play.session, play.url)
        if self._reward_file is not None and self._answers:
            del variables["AGENTRL_SECRET"]
        if len(play.prompt.encode()) <= MAX_VARIABLE_BYTES:
            variables["AGENTRL_PROMPT"] = play.prompt
        task = {"id": play.episode.task.id, "prompt": play.prompt, "instructions": play.episode.spec.instructions}
        given = ProgramInput(
            prompt=play.prompt, task=task, variables={**variables, **self._variables}, keep_log=play.episode.keep_log
        )
        ended = await folder.run(self._program, given)
        if ended.problem is None:
            play.answer = ended.output.strip()
        return ended.problem

    async def _read_reward(self, folder: ProgramFolder, play: _Play) -> tuple[float, bool | None] | None:
        if self._reward_file is None:
            return None
        try:
            return _reward_in(json.loads((await folder.read(self._reward_file)).decode()))
        except (OSError, ToolError, ValueError) as error:
            if play.session.outcome is not None or play.session.failure is not None:
                return None
            raise EnvironmentFailure(
                f"the program left no reward in {self._reward_file}",
                got=str(error),
                expected='a number, or {"reward": …}',
            ) from error

    async def _judge(self, play: _Play, reward: tuple[float, bool | None] | None) -> None:
        """Give the episode its reward, once."""
        answer = play.answer
        if reward is not None:
            play.episode.give_reward(reward[0], success=reward[1])
        elif isinstance(answer, str) or answer is None:
            if self._answers and answer is not None:
                await play.episode.step(answer)
        else:
            try:
                number, success = _reward_in(answer)
            except ValueError as error:
                raise EnvironmentFailure(
                    "the function returned no reward", got=repr(answer)[:80], expected=A_REWARD
                ) from error
            play.episode.give_reward(number, success=success)


@dataclass(slots=True, kw_only=True)
class _Play:
    """One run of the program."""

    episode: Episode
    session: GatewaySession
    url: str
    prompt: str
    answer: Any = None
    """The program's output, or the function's result."""
    is_late: bool = False
    """True if its time limit has passed."""
    failure: EnvironmentFailure | None = None
    """Failure of the environment that the function reported."""


def _reward_in(found: Any) -> tuple[float, bool | None]:
    """Return the reward and the success from a number or ``{"reward": …, "success": …}``.

    Raises:
        ValueError: it is neither.
    """
    reward, success = (found.get("reward"), found.get("success")) if isinstance(found, dict) else (found, None)
    number = bounded_reward(reward)
    if number is None or not isinstance(success, bool | None):
        raise ValueError(f"{reward!r}, {success!r}")
    return number, success


def variables_of(session: GatewaySession, url: str) -> dict[str, str]:
    """Return the environment variables with which the vendors' packages find the gateway."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "AGENTRL_URL": url,
        "AGENTRL_SECRET": session.secret,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def _read_demonstration(option: str | Mapping[str, str]) -> Callable[[str], Message]:
    """Return a function that writes the answer for an action."""
    if isinstance(option, str) and ACTION in option:
        return lambda action: Message(role="assistant", content=option.replace(ACTION, action))
    if isinstance(option, Mapping) and set(option) == {"tool", "argument"}:
        tool, argument = option["tool"], option["argument"]
        return lambda action: Message(role="assistant", tool_calls=(ToolCall(name=tool, arguments={argument: action}),))
    raise UsageError(
        "agent.options.demonstration is not valid",
        got=repr(option),
        expected=f"a text with {ACTION}, or {{tool: act, argument: action}}",
    )


def _check_word(option: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise UsageError(f"agent.options.{option} is not known", got=word, expected=" or ".join(known))


def _import_function(name: str) -> Callable[[ExternalTask], Any]:
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
        raise UsageError("agent.options.function is not a function", got=name, expected="module:name of a function")
    function: Callable[[ExternalTask], Any] = found
    return function
