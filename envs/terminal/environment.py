"""The environment: a shell, an instruction, and checks on a copy of the policy's work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import Sandbox, read_spec

from ..programs.acting import ActingSandbox, in_bash, run_command
from ..programs.judging import Verdict
from ..programs.shell import FENCED, ShellEnv
from ..task_ids import SPLITS, TRAIN
from .checking import check_errand, check_folder
from .folders import FolderTask
from .kinds import Errand
from .places import Places, places_of
from .solutions import solving_commands
from .tasks import ENVIRONMENT, TerminalTasks, errand_of, folder_task_of

MAX_STEPS = 12
COMMAND_S = 10.0
STARTS_S = 90.0
"""Seconds to start and fill two sandboxes, in addition to the task's own limits."""
SETUP, KEPT = "setup.sh", ".kept"


class Terminal(ShellEnv):
    """Environment in which the policy does a task in a shell.

    The working folder is copied into a new sandbox and checked there: generated tasks by comparing files and output
    with texts that only this process knows, task folders by their script. `reset` takes the option ``task_id``; without
    it the seed draws a training task.

    Args:
        folders: Split to a folder of task folders, in the format of Harbor or terminal-bench; tasks are generated if
            left out.
        max_steps: Number of commands after which the work is checked.
        seconds: Time limit of a command; by default 10 seconds, or a task folder's limit for its agent.
        sandbox: Sandbox back end: its name, or its settings. A back end with images uses the task's image, if it names
            one. A task folder's limits of time, memory and disk apply unless these settings have their own.
    """

    def __init__(
        self,
        *,
        folders: Mapping[str, str] | None = None,
        max_steps: int = MAX_STEPS,
        seconds: float | None = None,
        sandbox: Any = "local",
    ) -> None:
        self._spec = read_spec(sandbox)
        given = COMMAND_S if seconds is None else seconds
        super().__init__(name=ENVIRONMENT, sandbox=self._spec, seconds=given, max_steps=max_steps)
        self._has_own_seconds = seconds is not None
        limits = sandbox.get("limits") if isinstance(sandbox, Mapping) else None
        self._own_limits = frozenset(limits) if isinstance(limits, Mapping) else frozenset()
        self.folders = dict(folders) if folders else None
        self._places: Places | None = None
        self._task: Errand | FolderTask | None = None

    @property
    def task(self) -> Errand | FolderTask:
        """The current task.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._task is None:
            raise UsageError("the terminal environment has no episode yet", expected="reset before anything else")
        return self._task

    def _pose(self, task_id: str) -> str:
        if self.folders is None:
            self._task = errand_of(task_id)
        else:
            self._task = folder_task_of(task_id, self.folders)
            self._places = places_of(self._spec, self._task, limits=self._own_limits)
            self._acting = ActingSandbox(self._places.spec, self._prepare)
        self._content = repr(self._task)
        return self._task.instruction

    def _draw(self, seed: int) -> str:
        return TerminalTasks(TRAIN, self.folders).draw(seed)

    async def _prepare(self, sandbox: Sandbox) -> None:
        if isinstance(self.task, Errand):
            for path, text in self.task.files.items():
                await sandbox.write(path, text.encode())
        else:
            await self._prepare_folder(sandbox, self.task, self.places)

    async def _prepare_folder(self, sandbox: Sandbox, task: FolderTask, places: Places) -> None:
        if places.folder is not None:
            await sandbox.write(f"{places.folder}/{KEPT}", b"")
            await run_command(sandbox, ["rm", KEPT], seconds=self.seconds, cwd=places.folder)
        for file in task.files:
            await sandbox.write(places.place_of(file.target, task), file.read(), executable=file.is_executable)
        if task.setup:
            command = in_bash(f"bash ./{SETUP} && rm {SETUP}")
            result = await run_command(sandbox, command, seconds=self.seconds, cwd=places.folder)
            if not result.is_success:
                errors = result.stderr.decode(errors="replace")[-300:]
                raise SandboxError(f"the set-up of task {task.name} failed", got=errors)

    @property
    def places(self) -> Places:
        """Layout of the current task folder in its sandboxes.

        Raises:
            UsageError: `reset` was not called yet, or tasks are generated.
        """
        if self._places is None:
            raise UsageError("the terminal environment has no task folder", expected="reset before anything else")
        return self._places

    @property
    def command_seconds(self) -> float:
        """Time limit of a command of the policy."""
        if isinstance(self._task, FolderTask) and not self._has_own_seconds:
            return self._task.agent_seconds
        return self.seconds

    @property
    def working_folder(self) -> str | None:
        """Folder in which the policy's commands start; ``None`` for the sandbox's own folder."""
        return self._places.folder if self._places is not None else None

    async def _judge(self, sandbox: Sandbox) -> Verdict:
        if isinstance(self.task, Errand):
            return await check_errand(self._acting.spec, sandbox, self.task.checks)
        return await check_folder(self.places, sandbox, self.task)

    def _expert_commands(self) -> list[str]:
        if isinstance(self.task, Errand):
            return list(self.task.commands)
        return solving_commands(self.task, self.places)

    def secrets(self) -> list[str]:
        """Return the solution, and the hidden tests."""
        if isinstance(self.task, Errand):
            return [*self.task.commands, *(check.stdin for check in self.task.checks if check.stdin)]
        files = [path for path in (self.task.script, self.task.solution) if path is not None]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        return [*texts, *([self.task.solution_commands] if self.task.solution_commands else [])]

    def _info(self) -> dict[str, Any]:
        if isinstance(self.task, Errand):
            return {"success": False, "task_type": self.task.kind}
        longest = self.command_seconds + self.task.verifier_seconds + STARTS_S
        return {"success": False, "task_type": self.task.name, "step_timeout_s": longest}


def tasks(split: str, *, folders: Mapping[str, str] | None = None, **_options: Any) -> TerminalTasks:
    """Return the task source of a split."""
    return TerminalTasks(split, folders)


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=Terminal,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Shell tasks in a sandbox, checked on a copy in a second one: generated tasks of eight kinds, with other"
        " instructions in each split, or task folders in the format of Harbor or terminal-bench."
    ),
    instructions=("You work in a shell. " + FENCED + "When the task is done, answer with the single word submit."),
    answer_format="free",
    tool_instructions=(
        "You work with the tools bash, read_file and write_file. When the task is done, do not call a tool: answer with"
        " the single word submit."
    ),
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    isolation=Isolation.INLINE,
    scores={"random": 0.0, "expert": 1.0},
    version=1,
)
