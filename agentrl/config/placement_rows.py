"""Where ranks and engines will be, in the words of a dry run."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config.placement import HEAD, Bundle, engine_bundles, rank_bundles
from agentrl.config.schema import Config


def placement_words(config: Config) -> list[tuple[str, str, str]]:
    """What is placed, where and with what, and which key says so; nothing without a cluster."""
    section = config.cluster
    if section is None:
        return []
    ranks = rank_bundles(config, section, gpus=False)
    engines = engine_bundles(config, section, gpus=False)
    started = section.address is None
    words = [
        (
            "cluster",
            "Ray, started here and ended with the run" if started else f"Ray at {section.address}",
            f"cluster.address; {section.strategy} (cluster.strategy)",
        ),
        (HEAD, f"this process, with {_asked(ranks[:1], section.rank)}", "cluster.rank"),
    ]
    if ranks[1:]:
        words.append((_names(ranks[1:]), f"an actor each, with {_asked(ranks[1:], section.rank)}", "cluster.rank"))
    if engines:
        words.append((_names(engines), f"an actor each, with {_asked(engines, section.engine)}", "cluster.engine"))
    return words


def _asked(bundles: Sequence[Bundle], chosen: object) -> str:
    return bundles[0].in_words + (", and GPUs where there are some" if chosen is None else "")


def _names(bundles: Sequence[Bundle]) -> str:
    return bundles[0].name if len(bundles) == 1 else f"{bundles[0].name} to {bundles[-1].name}"
