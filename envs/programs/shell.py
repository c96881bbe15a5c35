"""Environments in which the policy works in a shell until it submits its work."""

from __future__ import annotations

import hashlib
import re
import string
from abc import abstractmethod
from typing import Any

from gymnasium.spaces import Text

from agentrl.env import AsyncEnv
from agentrl.errors import UsageError
from agentrl.message import Content, Message, ToolCall
from agentrl.sandbox import Sandbox, SandboxSpec
from agentrl.tool import Tool

from ..task_ids import asked_task
from .acting import ActingSandbox, in_bash, run_command, show_result, visible
from .judging import Verdict

Step = tuple[str, float, bool, bool, dict[str, Any]]
SUBMIT = "submit"
MAX_COMMAND = 32 * 1024
_BLOCK = re.compile(r"```[ \t]*(?:bash|sh|shell)?[ \t]*\n(.*?)```", re.DOTALL)
RULE = (
    "Call a tool, or write one command in a block that begins with ```bash and ends with ```. When you are done, answer"
    " with the single word submit."
)
FENCED = "Each turn, write one command in a block like this, and you then read its output:\n\n```bash\nls\n```\n\n"


def read_command(action: str) -> str | None:
    r"""Return the command of an action: its first block, or ``submit``; ``None`` if it has neither.

    >>> read_command("I look.\n```bash\nls -l\n```"), read_command("Submit."), read_command("Done!")
    ('ls -l', 'submit', None)
    """
    if found := _BLOCK.search(action):
        return found[1].strip() or None
    return SUBMIT if action.strip().rstrip(".").lower() == SUBMIT else None


def write_command(command: str) -> str:
    """Return the action that runs a command."""
    return command if command == SUBMIT else f"```bash\n{command}\n```"


class ShellEnv(AsyncEnv):
    """Base class of the environments with a shell: the sandbox, the commands, the end.

    Args:
        name: Name of the environment, for messages.
        sandbox: Specification of the sandboxes.
        seconds: Time limit of a command.
        max_steps: Number of commands after which the work is judged.
    """

    action_hint = ""

    def __init__(self, *, name: str, sandbox: SandboxSpec, seconds: float, max_steps: int) -> None:
        if not 0 < seconds <= 25:
            raise UsageError(
                f"the option seconds of {name} is out of range", got=seconds, expected="more than 0, up to 25"
            )
        if max_steps < 1:
            raise UsageError(f"the option max_steps of {name} is too small", got=max_steps, expected="at least 1")
        self.name = name
        self.seconds = seconds
        self.max_steps = max_steps
        self.action_space = Text(256, charset=string.printable)
        self.tools = (
            Tool(self.bash, name="bash"),
            Tool(self.read_file, name="read_file"),
            Tool(self.write_file, name="write_file"),
        )
        self._acting = ActingSandbox(sandbox, self._prepare)
        self._done: list[str] | None = None
        """Commands of the episode; ``None`` before the first reset."""
        self._over = False
        self._content = ""
        """Content that identifies the task; set by `_pose`."""

    @abstractmethod
    def _draw(self, seed: int) -> str:
        """Return the id of a training task."""

    @abstractmethod
    def _pose(self, task_id: str) -> str:
        """Begin a task; return the text that the policy reads."""

    @abstractmethod
    async def _prepare(self, sandbox: Sandbox) -> None:
        """Fill the sandbox in which the policy works."""

    @abstractmethod
    async def _judge(self, sandbox: Sandbox) -> Verdict:
        """Judge the policy's work in another sandbox."""

    def _progress(self, verdict: Verdict) -> float:
        """Return the share of the task that is done, 0 to 1; 0 if nothing was changed."""
        return verdict.components["checks"]

    @abstractmethod
    def _info(self) -> dict[str, Any]:
        """Return the info of every step."""

    @abstractmethod
    def _expert_commands(self) -> list[str]:
        """Return commands that solve the task."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Begin a task.

        Raises:
            UsageError: an option is unknown, or the task does not exist.
        """
        task_id = asked_task(options, self.name) or self._draw(seed or 0)
        await self._acting.close()
        self._done, self._over = [], False
        return self._pose(task_id), self._info()

    async def step(self, action: str) -> Step:
        """Run a command, or judge the work.

        Raises:
            UsageError: the episode is over or has not begun.
            SandboxError: a sandbox failed.
        """
        if self._done is None or self._over:
            raise UsageError(f"the {self.name} episode is over", expected="reset before the next step")
        command = read_command(action)
        valid = command is not None and len(command) <= MAX_COMMAND
        self._done.append(command or "")
        is_last = len(self._done) >= self.max_steps
        observation = f"Your answer has no command. {RULE}"
        if command is not None and command != SUBMIT:
            too_long = f"Your command is longer than {MAX_COMMAND} characters."
            observation = await self._run(command) if valid else too_long
        if command == SUBMIT or is_last:
            return await self._end(observation, is_submitted=command == SUBMIT, valid=valid)
        return observation, 0.0, False, False, {**self._info(), "valid": valid}

    async def final_reward(self) -> tuple[float, dict[str, Any]]:
        """Judge work that was neither submitted nor ended by `max_steps`.

        Raises:
            SandboxError: a sandbox failed.
        """
        _, reward, _, _, info = await self._end("", is_submitted=False, valid=True)
        return reward, info

    async def _run(self, command: str) -> str:
        seconds = self.command_seconds
        result = await run_command(await self._acting.get(), in_bash(command), seconds=seconds, cwd=self.working_folder)
        return show_result(result, seconds=seconds)

    @property
    def command_seconds(self) -> float:
        """Time limit of a command of the policy."""
        return self.seconds

    @property
    def working_folder(self) -> str | None:
        """Folder in which the policy's commands start; ``None`` for the sandbox's own folder."""
        return None

    def _at(self, path: str) -> str:
        return path if self.working_folder is None else f"{self.working_folder}/{path}" if path[:1] != "/" else path

    async def _end(self, observation: str, *, is_submitted: bool, valid: bool) -> Step:
        """Judge the work; without a submission, the last command's output is shown."""
        verdict = await self._judge(await self._acting.get())
        return await self._finish(observation, verdict, is_submitted=is_submitted, valid=valid)

    async def _finish(self, observation: str, verdict: Verdict, *, is_submitted: bool, valid: bool) -> Step:
        await self._acting.close()
        self._over = True
        right = "It is done." if verdict.is_right else "It is not done."
        components = {**verdict.components, "checks": self._progress(verdict)}
        info = {**self._info(), "success": verdict.is_right, "valid": valid, "reward_components": components}
        text = right if is_submitted else f"{observation}\n{right}"
        return text, verdict.reward, is_submitted, not is_submitted, info

    async def bash(self, command: str) -> str:
        """Runs a shell command and returns its output.

        Args:
            command: The command; it may have several lines.
        """
        return await self._run(command)

    async def read_file(self, path: str) -> str:
        """Reads a file.

        Args:
            path: Path of the file.
        """
        return (await (await self._acting.get()).read(self._at(path), most=64 * 1024)).decode(errors="replace")

    async def write_file(self, path: str, content: str) -> str:
        """Writes a file and replaces what it contained.

        Args:
            path: Path of the file.
            content: The whole new content of the file.
        """
        await (await self._acting.get()).write(self._at(path), content.encode(errors="replace"))
        return f"Wrote {path}."

    def tool_message(self, action: str) -> Message:
        """Return the assistant message of a text action: a command is a call of bash, other text is the content."""
        command = read_command(action)
        if command is None or command == SUBMIT:
            return Message(role="assistant", content=action)
        return Message(role="assistant", tool_calls=(ToolCall(name="bash", arguments={"command": command}),))

    def expert(self) -> ShellExpert:
        """Return a policy that knows the commands."""
        return ShellExpert([*self._expert_commands(), SUBMIT])

    def state_key(self) -> str:
        """Return a key of the task and of the commands so far."""
        return hashlib.blake2b(repr([self._content, self._done]).encode(), digest_size=16).hexdigest()

    async def visible(self) -> dict[str, str]:
        """Return the readable contents of the policy's own sandbox, for reports on the reward's integrity."""
        return await visible(await self._acting.get(), seconds=self.seconds)

    @abstractmethod
    def secrets(self) -> list[str]:
        """Return texts that must not be readable there."""

    async def close(self) -> None:
        """Close the sandbox."""
        await self._acting.close()


class ShellExpert:
    """Expert that runs given commands, one after the other."""

    def __init__(self, commands: list[str]) -> None:
        self._left = commands

    def act(self, observation: Content) -> str:
        """Return the next command."""
        return write_command(self._left.pop(0) if self._left else SUBMIT)
