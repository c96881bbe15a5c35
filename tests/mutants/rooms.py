"""Rooms of the mutation tests: sources, the tests that should notice changes, and the goals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).parents[2]
EXPLAINED = Path(__file__).with_name("explained.yaml")
"""Survivors that no test can notice, or that tests need not notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A part of the sources with its tests."""

    sources: tuple[str, ...]
    """Files, or folders of which every file is changed."""
    tests: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Sources that no process of these tests can import, or that belong to another room."""
    goal: float
    """Minimum share of noticed changes, not counting explained survivors."""

    def files(self) -> Iterator[str]:
        """Yield the paths of the sources, relative to the checkout."""
        for source in self.sources:
            found = sorted((TREE / source).rglob("*.py")) if (TREE / source).is_dir() else [TREE / source]
            for path in found:
                relative = path.relative_to(TREE).as_posix()
                if not relative.startswith(self.left_out):
                    yield relative


def _training(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/training/test_{name}.py" for name in names)


def _files(folder: str, pattern: str = "test_*.py") -> tuple[str, ...]:
    """Return the test files of a folder without its subfolders, whose requirements most machines lack."""
    return tuple(sorted(path.relative_to(TREE).as_posix() for path in (TREE / folder).glob(pattern)))


ROOMS = {
    "weights": Room(sources=("agentrl/weights",), tests=("tests/weights",), goal=0.90),
    "serving": Room(
        sources=("agentrl/serving",),
        tests=("tests/serving",),
        left_out=(
            "agentrl/serving/sglang/cpu_modules/",
            "agentrl/serving/sglang/start_with_key.py",
            "agentrl/serving/vllm/worker/",
        ),
        goal=0.90,
    ),
    "ledger": Room(
        sources=("agentrl/trajectory.py", "agentrl/models/routed_experts.py", "agentrl/observe/trajectory_record.py"),
        tests=(
            "tests/test_trajectory.py",
            "tests/test_images.py",
            "tests/models/test_routed_experts.py",
            "tests/observe/test_trajectory_store.py",
        ),
        goal=0.95,
    ),
    "gateway": Room(
        sources=(
            "agentrl/gateway",
            "agentrl/evaluation/live_traffic.py",
            "agent_loops/external.py",
            "agent_loops/external_programs.py",
        ),
        tests=_files("tests/gateway"),
        goal=0.90,
    ),
    "training_service": Room(sources=("agentrl/training_service",), tests=("tests/training_service",), goal=0.90),
    "data_files": Room(
        sources=("agentrl/message/data_file.py", "agentrl/training/chat_file.py"),
        tests=("tests/test_data_file.py", "tests/training/test_chat_file.py", "tests/rollout/test_task_file.py"),
        goal=0.95,
    ),
    "rollout": Room(
        sources=("agentrl/rollout",),
        tests=("tests/rollout", "tests/builders/test_parts.py", "tests/builders/test_settings.py"),
        goal=0.90,
    ),
    "remote": Room(
        sources=("agentrl/remote",),
        tests=(
            "tests/remote_server",
            "tests/envs/test_search_qa_retrieval.py",
            "tests/rollout/test_judge_client.py",
            "tests/rollout/test_judge_verdicts.py",
            "tests/sandbox",
            "tests/serving/test_openai.py",
        ),
        goal=0.90,
    ),
    "sandbox": Room(
        sources=("agentrl/sandbox",),
        tests=("tests/sandbox", "tests/docker_api"),
        left_out=(
            "agentrl/sandbox/interpreter_main.py",
            "agentrl/sandbox/program_guard.py",
            "agentrl/sandbox/supervisor.py",
            "agentrl/sandbox/supervisor_files.py",
            "agentrl/sandbox/supervisor_ports.py",
        ),
        goal=0.90,
    ),
    "observe": Room(
        sources=("agentrl/observe",),
        tests=("tests/observe", "tests/test_diagnosed_runs.py"),
        left_out=("agentrl/observe/trajectory_record.py",),
        goal=0.90,
    ),
    "diagnosis": Room(
        sources=("agentrl/evaluation/diagnosis",),
        tests=("tests/evaluation/diagnosis", "tests/test_diagnosed_runs.py"),
        goal=0.80,
    ),
    "rewards": Room(
        sources=(
            "agentrl/reward/__init__.py",
            "agentrl/rollout/judges",
            "agentrl/rollout/reward_functions.py",
            "agentrl/rollout/reward_conventions.py",
        ),
        tests=(
            "tests/algorithms/test_traps.py",
            *_files("tests/rollout", "test_judge*.py"),
            *_files("tests/rollout", "test_reward_*.py"),
        ),
        goal=0.95,
    ),
    "algorithms": Room(sources=("agentrl/algorithms",), tests=("tests/algorithms",), goal=0.95),
    "render": Room(sources=("agentrl/render",), tests=("tests/render", "tests/vision/test_rendering.py"), goal=0.90),
    "agent_loops": Room(
        sources=("agent_loops",),
        tests=(
            "tests/agent_loops",
            "tests/gateway/test_demonstrations.py",
            "tests/gateway/test_external.py",
            "tests/gateway/test_external_sandbox.py",
            "tests/gateway/test_left_processes.py",
        ),
        goal=0.90,
    ),
    "evaluation": Room(
        sources=("agentrl/evaluation",),
        tests=(
            "tests/evaluation",
            "tests/agent_loops/test_react_text.py",
            "tests/cli/test_changed_evaluations.py",
            "tests/cli/test_eval.py",
            "tests/cli/test_model.py",
            "tests/cli/test_replay.py",
            "tests/test_evaluations_beside_training.py",
            "tests/test_mixed_runs.py",
        ),
        left_out=("agentrl/evaluation/live_traffic.py",),
        goal=0.90,
    ),
    "builders": Room(
        sources=(
            "agentrl/builders",
            "agentrl/config/resume_rules.py",
            "agentrl/models/identity.py",
            "agentrl/runs/record.py",
            "agentrl/runs/start.py",
            "agentrl/training/stored_episodes.py",
        ),
        tests=(
            "tests/builders",
            "tests/cli/test_bad_starts.py",
            "tests/cli/test_pairs.py",
            "tests/cli/test_start_checks.py",
            "tests/rollout/test_environment_roles.py",
            "tests/rollout/test_reward_checks.py",
            "tests/rollout/test_roles.py",
            "tests/rollout/test_task_file.py",
            "tests/test_adapter_runs.py",
            "tests/test_signal_runs.py",
            "tests/test_resume.py",
            "tests/test_role_runs.py",
            "tests/training/test_lora.py",
        ),
        left_out=("agentrl/builders/ray/",),
        goal=0.90,
    ),
    "losses": Room(
        sources=(
            "agentrl/training/algorithm_functions.py",
            "agentrl/training/gradients.py",
            *(f"agentrl/training/forward/{name}.py" for name in ("micro_batches", "runner")),
            *(f"agentrl/training/{name}.py" for name in ("batch", "rewards", "report")),
            *(f"agentrl/training/signals/{name}.py" for name in ("critic", "reference", "teacher", "without_model")),
        ),
        tests=_training(
            "gradients",
            "critic",
            "signals",
            "observation_loss",
            "running_baselines",
            "score_norm",
            "window_entropy",
            "matrix",
            "reference",
            "selection",
            "batch",
            "trainer",
            "watch",
        ),
        goal=0.90,
    ),
}


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, 1927); (0, 1) if the count is 0."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, hits / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)
