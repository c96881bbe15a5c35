"""What a group of episodes says about its task."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How often one group solved its task."""

    position: int
    """Of the group in the run."""
    environment: str
    """Label of its environment."""
    task_id: str
    task_type: str | None
    horizon: int | None
    """At which it was played; ``None`` where none grows."""
    episodes: int
    """That say something about the policy."""
    tries: int
    """Those among them that tell whether the task was solved."""
    successes: int

    def check_told(self, setting: str) -> None:
        """Check that success is known.

        Args:
            setting: The setting that needs it.

        Raises:
            UsageError: the environment does not tell it.
        """
        if self.episodes and not self.tries:
            raise UsageError(
                f"the environment of task {self.task_id} does not tell whether a task is solved",
                expected='info["success"] at the end of an episode',
                hint=f"remove {setting}",
            )
