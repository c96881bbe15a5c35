"""The environment: a shell, an instruction, and checks on a copy of the policy's work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import Sandbox, SandboxFileError, read_spec

from ..programs.acting import ActingSandbox, in_bash, run_command
from ..programs.judging import Verdict
from ..programs.shell import FENCED, SUBMIT, ShellEnv, Step
from ..task_ids import SPLITS, TRAIN
from .checking import check_errand, check_folder
from .dockerfile import CopiedFile
from .kinds import Errand
from .places import Places, places_of
from .solutions import solving_commands
from .task_folder import FolderTask
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
            left out. After the steps of a task but the last, `submit` leads to the next one.
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
        self._steps: tuple[FolderTask, ...] = ()
        """Steps of the current task folder; a task without steps is its only one."""
        self._earned: dict[str, float] = {}
        """Rewards of the judged steps by name."""

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
            self._steps, self._earned = (self._task, *self._task.following), {}
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
        await self._add(sandbox, task.files, task.setup, task, places)
        await self._add(sandbox, task.step_files, task.step_setup, task, places)

    async def _add(
        self, sandbox: Sandbox, files: Sequence[CopiedFile], has_setup: bool, task: FolderTask, places: Places
    ) -> None:
        """Add files to the working sandbox, and run and remove their ``setup.sh``."""
        for file in files:
            await sandbox.write(places.place_of(file.target, task), file.read(), executable=file.is_executable)
        if has_setup:
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

    async def _end(self, observation: str, *, is_submitted: bool, valid: bool) -> Step:
        """Judge the work; if another step follows, begin that step."""
        task = self.task
        if isinstance(task, Errand) or not task.step_name:
            return await super()._end(observation, is_submitted=is_submitted, valid=valid)
        sandbox, number = await self._acting.get(), len(self._earned) + 1
        verdict = await self._judge(sandbox)
        self._earned[task.step_name] = verdict.reward
        is_last = number == len(self._steps) or len(self._done or ()) >= self.max_steps
        if not is_submitted or is_last or not _may_go_on(verdict, task):
            return await self._finish(observation, self._sum_up(), is_submitted=is_submitted, valid=valid)
        following = self._steps[number]
        try:
            await self.places.clean(sandbox)
            await self._add(sandbox, following.step_files, following.step_setup, following, self.places)
        except SandboxFileError as error:  # the policy has left them no room or permission, or a folder in their place
            ended = await self._finish(observation, self._sum_up(), is_submitted=is_submitted, valid=valid)
            return f"The next step cannot begin: {error}\n{ended[0]}", *ended[1:]
        self._task = following
        text = f"Step {number} of {len(self._steps)} is over. The next step:\n\n{following.instruction}"
        return text, 0.0, False, False, {**self._info(), "valid": valid}

    def _sum_up(self) -> Verdict:
        """Return the verdict over all steps; those that were not reached count 0."""
        rewards = [self._earned.get(step.step_name, 0.0) for step in self._steps]
        total = rewards[-1] if self._steps[0].pays_last else math.fsum(rewards) / len(rewards)
        problem = "" if total >= 1 else "the checking scripts do not agree"
        parts = {f"step {name}": reward for name, reward in self._earned.items()}
        return Verdict(problems=(problem,), given={**parts, "reward": total})

    def _expert_commands(self) -> list[str]:
        if isinstance(self.task, Errand):
            return list(self.task.commands)
        first, *others = (solving_commands(step, self.places) for step in self._steps)
        return [*first, *(command for commands in others for command in (SUBMIT, *commands))]

    def secrets(self) -> list[str]:
        """Return the solution, and the hidden tests."""
        if isinstance(self.task, Errand):
            return [*self.task.commands, *(check.stdin for check in self.task.checks if check.stdin)]
        files = [path for step in self._steps for path in (step.script, step.solution) if path is not None]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in dict.fromkeys(files)]
        return [*texts, *([self.task.solution_commands] if self.task.solution_commands else [])]

    def _info(self) -> dict[str, Any]:
        if isinstance(self.task, Errand):
            return {"success": False, "task_type": self.task.kind}
        seconds = (self.seconds if self._has_own_seconds else step.agent_seconds for step in self._steps)
        longest = max(seconds) + max(step.verifier_seconds for step in self._steps) + STARTS_S
        return {"success": False, "task_type": self.task.name, "step_timeout_s": longest}


def _may_go_on(verdict: Verdict, task: FolderTask) -> bool:
    """Return True if the rewards of a step reach its minimum."""
    earned = {**(verdict.given or {}), "reward": verdict.reward}
    return all(earned.get(name, 0.0) >= least for name, least in task.least_reward.items())


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
