"""The environment: a shell, an instruction, and checks on a copy of what was left."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import Sandbox, read_spec

from ..programs.acting import ActingSandbox, run_command
from ..programs.judging import Verdict
from ..programs.shell import FENCED, ShellEnv
from ..task_ids import SPLITS, TRAIN
from .checking import check_errand, check_folder, write_folder
from .folders import FolderTask
from .kinds import Errand
from .tasks import ENVIRONMENT, TerminalTasks, errand_of, folder_task_of

MAX_STEPS = 12
SETUP = "setup.sh"


class Terminal(ShellEnv):
    """Do something in a shell. What the policy leaves in the working folder is copied into a new sandbox and checked
    there: generated tasks by comparing files and output with what only this process knows, task folders by their
    script.

    `reset` takes the option ``task_id``; without it the seed draws a training task.

    Args:
        folders: Split to a folder of task folders, in the form of Harbor or terminal-bench; tasks are generated when
            left out.
        max_steps: Commands after which what there is is checked.
        seconds: For a command.
        sandbox: What sandboxes are like: a back end's name, or its settings. A back end with images takes the task's
            own, where it names one.
    """

    def __init__(
        self,
        *,
        folders: Mapping[str, str] | None = None,
        max_steps: int = MAX_STEPS,
        seconds: float = 10.0,
        sandbox: Any = "local",
    ) -> None:
        self._spec = read_spec(sandbox)
        super().__init__(name=ENVIRONMENT, sandbox=self._spec, seconds=seconds, max_steps=max_steps)
        self.folders = dict(folders) if folders else None
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
            if self._spec.type != "local":
                spec = dataclasses.replace(self._spec, image=self._task.image or self._spec.image)
                self._acting = ActingSandbox(spec, self._prepare)
        self._content = repr(self._task)
        return self._task.instruction

    def _draw(self, seed: int) -> str:
        return TerminalTasks(TRAIN, self.folders).draw(seed)

    async def _prepare(self, sandbox: Sandbox) -> None:
        if isinstance(self.task, Errand):
            for path, text in self.task.files.items():
                await sandbox.write(path, text.encode())
        elif self.task.start is not None:
            await write_folder(sandbox, self.task.start)
            if (self.task.start / SETUP).is_file():
                result = await run_command(sandbox, f"sh ./{SETUP} && rm {SETUP}", seconds=self.seconds)
                if not result.succeeded:
                    said = result.stderr.decode(errors="replace")[-300:]
                    raise SandboxError(f"the set-up of task {self.task.name} failed", got=said)

    async def _judge(self, sandbox: Sandbox) -> Verdict:
        if isinstance(self.task, Errand):
            return await check_errand(self._acting.spec, sandbox, self.task.checks)
        return await check_folder(self._acting.spec, sandbox, self.task)

    def _expert_commands(self) -> list[str]:
        if isinstance(self.task, Errand):
            return list(self.task.commands)
        if self.task.solution is None:
            raise UsageError(f"task {self.task.name} brings no solution", hint="give it solution/solve.sh")
        return [self.task.solution]

    def secrets(self) -> list[str]:
        """The solution, and the tests of a task folder."""
        if isinstance(self.task, Errand):
            return [*self.task.commands, *(check.stdin for check in self.task.checks if check.stdin)]
        return [self.task.script.read_text(encoding="utf-8"), *filter(None, [self.task.solution])]

    def _info(self) -> dict[str, Any]:
        return {"success": False, "task_type": self.task.kind if isinstance(self.task, Errand) else self.task.name}


def tasks(split: str, *, folders: Mapping[str, str] | None = None, **_options: Any) -> TerminalTasks:
    """The task source of a split."""
    return TerminalTasks(split, folders)


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=Terminal,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Tasks for a shell in a sandbox, checked on a copy in a second one: generated ones of eight kinds, or task"
        " folders in the form of Harbor and terminal-bench."
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
)
