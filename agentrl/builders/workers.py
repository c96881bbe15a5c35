"""Ranks 1, 2, … of a trainer: they do what rank 0 says until it says that this was all, or is gone.

    python -m agentrl.builders.workers

is how a run with ``trainer.processes`` starts them; under torchrun every process runs the same command line, and those
that are not rank 0 come here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.builders.models import load_images
from agentrl.builders.pairs import (
    BUILD_PREFERENCES,
    BUILD_REWARD_MODEL,
    build_preferences,
    build_reward_model,
)
from agentrl.builders.trainers import (
    BUILD,
    BUILD_LEARNER,
    build_learner,
    build_trainer,
)
from agentrl.config.config import Config
from agentrl.training.distributed import Ranks, join
from agentrl.training.distributed.group import leave
from agentrl.training.distributed.launch import launched_ranks, meet_starter
from agentrl.training.preferences import Pair
from agentrl.training.reward_model import TextPair
from agentrl.trajectory import Trajectory


def followed_launcher() -> bool:
    """Serve as a rank to the end, if torchrun has started this process as another one than rank 0.

    Returns:
        True if it did: only rank 0 runs the command.
    """
    if launched_ranks() <= 1 or not (rank := int(os.environ["RANK"])):
        return False
    serve(join(None, rank=rank, count=launched_ranks()))
    leave()
    return True


def serve(ranks: Ranks) -> None:
    """Run rank 0's calls until there are no more; an exception ends this rank, and with it the run."""
    calls: Mapping[str, Callable[..., object]] = {}
    while (call := ranks.receive()) is not None:
        if call.name in _BUILDERS:
            calls = {}  # what was built before is gone before there is more
            calls = _BUILDERS[call.name](ranks, *call.arguments)
        else:
            calls[call.name](*call.arguments)


def _build(
    ranks: Ranks, config: Mapping[str, Any], model_path: str, reference_path: str | None
) -> Mapping[str, Callable[..., object]]:
    parts = build_trainer(
        Config.model_validate(config),
        model_path=model_path,
        reference_path=reference_path,
        reader=load_images(model_path),
        ranks=ranks,
    )
    return parts.calls()


def _build_learner(
    ranks: Ranks, config: Mapping[str, Any], demonstrations: Sequence[Trajectory], model_path: str, pad_id: int
) -> Mapping[str, Callable[..., object]]:
    parts = build_learner(
        Config.model_validate(config),
        demonstrations,
        model_path=model_path,
        pad_id=pad_id,
        reader=load_images(model_path),
        ranks=ranks,
    )
    return parts.calls()


def _build_preferences(
    ranks: Ranks, config: Mapping[str, Any], pairs: Sequence[Pair], model_path: str, pad_id: int
) -> Mapping[str, Callable[..., object]]:
    parts = build_preferences(
        Config.model_validate(config),
        pairs,
        model_path=model_path,
        pad_id=pad_id,
        reader=load_images(model_path),
        ranks=ranks,
    )
    return parts.calls()


def _build_reward_model(
    ranks: Ranks, config: Mapping[str, Any], pairs: Sequence[TextPair], model_path: str
) -> Mapping[str, Callable[..., object]]:
    return build_reward_model(Config.model_validate(config), pairs, model_path=model_path, ranks=ranks).calls()


_BUILDERS: Mapping[str, Callable[..., Mapping[str, Callable[..., object]]]] = {
    BUILD: _build,
    BUILD_LEARNER: _build_learner,
    BUILD_PREFERENCES: _build_preferences,
    BUILD_REWARD_MODEL: _build_reward_model,
}


def main() -> None:
    """Serve as a rank that `agentrl.training.distributed.launch` has started."""
    threading.Thread(target=_end_with_standard_input, name="end", daemon=True).start()
    serve(meet_starter())
    leave()


def _end_with_standard_input() -> None:
    """End this process when the one that started it ends, which holds the other end of standard input."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
