"""Tables of published recipes, and the headers of their configs, from ``configs/recipes/published.yaml``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.overrides import parse_source

FILE = Path(__file__).parent.parent / "configs" / "recipes" / "published.yaml"
WIDTH = 120


def published() -> dict[str, Any]:
    """Return the table of published values: the sections `recipes` and `missing`."""
    return parse_source(FILE.read_text(encoding="utf-8"), FILE.name).data


def config_of(name: str, entry: Mapping[str, Any]) -> str:
    """Return the name of a recipe's config."""
    return str(entry.get("config", f"recipes/{name}"))


def differences(entry: Mapping[str, Any]) -> list[str]:
    """Return the declared differences of a recipe as sentences."""
    compared = [f"{key}: {reason}." for key, reason in entry.get("differs", {}).items()]
    return compared + list(entry.get("also", []))


def header(name: str, entry: Mapping[str, Any]) -> str:
    """Return the comment at the top of a recipe's config."""
    passes = entry.get("passes")
    steps = [] if passes is None else [f"Passes over the published data: {passes}; set trainer.steps for your data."]
    equal = [key for key in entry["published"] if key not in entry.get("differs", {})]
    paragraphs = [
        f"{entry['system']}: {entry['algorithm']}. Source: {entry['source']}.",
        f"Equal: {', '.join(equal)} (see recipes/published).",
        "Differs: " + " ".join(differences(entry) + steps),
        f"Small: agentrl train {config_of(name, entry)} size=small",
    ]
    lines = [line for text in paragraphs for line in textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False)]
    return "".join(f"# {line}\n" for line in lines)


def small_environment(name: str, entry: Mapping[str, Any]) -> str:
    """Return the name of the environment that a recipe's small size plays."""
    file = FILE.parent.parent / f"{config_of(name, entry)}.yaml"
    small = parse_source(file.read_text(encoding="utf-8"), file.name).data["small"]
    return str(small.get("environment", {}).get("name", entry["environment"]))


def recipes_table() -> str:
    """Return the table of recipes."""
    rows = ["| recipe | system | algorithm | environment | its small size | differences |", "|---|---|---|---|---|---|"]
    for name, entry in published()["recipes"].items():
        told = " ".join(differences(entry)) or "see the file"
        environments = (f"`{entry['environment']}`", f"`{small_environment(name, entry)}`")
        cells = (f"`{config_of(name, entry)}`", entry["system"], entry["algorithm"], *environments, told)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def missing_table() -> str:
    """Return the table of systems without a recipe."""
    rows = [f"| {system} | {reason} |" for system, reason in published()["missing"].items()]
    return "\n".join(["| system | why |", "|---|---|", *rows])
