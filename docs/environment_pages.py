"""A page per environment: what its spec, its factory and a played episode tell, and measured figures."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.env_lookup import resolve_environment
from agentrl.errors import AgentRLError
from agentrl.registry import Kind, names
from agentrl.testing.env_session import EnvSession, expert_policy, plain_text, play

FOLDER = Path(__file__).parent / "environments"
FIGURES = FOLDER / "figures.json"
STEPS_SHOWN = 3
OFFERED = ("admissible_actions", "state_key", "snapshot", "restore", "expert", "tools", "tool_message", "web_page")
"""What an environment may offer, by name."""
_BAR = re.compile(r"(`+).*?\1|\|")
_ARGUMENT = re.compile(r"^ {4}(\*{0,2}\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)

LABELS = {
    "random_steps_per_s": "steps per second, random play",
    "expert_steps_per_s": "steps per second, expert",
    "reset_p50_ms": "reset, median, ms",
    "reset_p99_ms": "reset, 99 %, ms",
    "first_reset_s": "first environment of its kind in a process, reset included, s",
    "bytes_per_instance": "memory of one more environment in an episode, bytes",
}


def page_path(name: str) -> str:
    """Where an environment's page is, below the folder of the documentation."""
    return f"environments/{name}.md"


def generated_pages() -> dict[str, str]:
    """The pages of environments that nobody has written one for, by path."""
    missing = (name for name in names(Kind.ENVIRONMENT) if not (FOLDER / f"{name}.md").is_file())
    return {page_path(name): f"# {name}\n\n{facts(name)}\n{_notes(name)}" for name in missing}


def index_table() -> str:
    """Every installed environment with its splits and the scores of scripted policies."""
    rows = ["| name | splits | random | expert | what it is |", "|---|---|---|---|---|"]
    for name in names(Kind.ENVIRONMENT):
        spec = resolve_environment(name)
        scores = [f"{spec.scores[policy]:.2g}" if policy in spec.scores else "" for policy in ("random", "expert")]
        link = f"[`{name}`]({page_path(name)})"
        rows.append(f"| {link} | {', '.join(spec.splits)} | {' | '.join(scores)} | {_cell(spec.description)} |")
    return "\n".join(rows)


def section(name: str) -> str:
    """What is known of an environment, as the last part of a page that somebody has written."""
    return "## Facts\nMade from the code.\n\n" + re.sub("^## ", "### ", facts(name), flags=re.MULTILINE)


def facts(name: str) -> str:
    """What is known of an environment without anybody's words."""
    spec = resolve_environment(name)
    parts = [spec.description, _facts_table(name, spec), _splits(spec), _options(spec), _figures(name)]
    if spec.instructions:
        parts.append(f"## What the policy is told\n{_fenced(spec.instructions)}")
    parts.append(_episode(spec))
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts_table(name: str, spec: EnvironmentSpec) -> str:
    low, high = spec.reward_range
    rows = {
        "steps": f"at most {spec.max_turns}" if spec.max_turns else "no limit of its own",
        "return of an episode": f"{low:g} to {high:g}",
        "success": _success(spec),
        "success of random play": f"{spec.scores['random']:.3g}" if "random" in spec.scores else "not stated",
        "success of the expert": f"{spec.scores['expert']:.3g}" if "expert" in spec.scores else "not stated",
        "its code runs": {"inline": "in the event loop"}.get(spec.isolation.value, f"in a {spec.isolation.value}"),
    }
    lines = [f"| {what} | {value} |" for what, value in rows.items()]
    return "\n".join([f"| `{name}` | |", "|---|---|", *lines])


def _success(spec: EnvironmentSpec) -> str:
    return "as its info says" if spec.success_threshold is None else f"a return of {spec.success_threshold:g}"


def _splits(spec: EnvironmentSpec) -> str:
    rows = [f"| `{spec.name}/{split}` | {_size(spec, split)} |" for split in spec.splits]
    return "\n".join(["## Splits", "| name | tasks |", "|---|---|", *rows])


def _size(spec: EnvironmentSpec, split: str) -> str:
    """How many tasks; where the data is not there, how to get it."""
    try:
        return f"{len(spec.tasks(split, **spec.options)):,}"
    except AgentRLError as error:
        return str(error.hint or error.what)


def _options(spec: EnvironmentSpec) -> str:
    """The options of the factory, in a config under `environment.options`."""
    rows = [
        f"| `{name}` | {_default(name, parameter, spec.options)} | {_cell(said)} |"
        for name, parameter, said in _parameters(spec.make)
    ]
    return "\n".join(["## Options", "| name | default | what it is |", "|---|---|---|", *rows]) if rows else ""


def _parameters(make: Any) -> Iterator[tuple[str, inspect.Parameter, str]]:
    """Options of a factory, and of what it was given a part of: a puzzle's rules."""
    inner = make.args if isinstance(make, functools.partial) else ()
    for target in (*filter(callable, inner), make):
        documented = inspect.getdoc(target.func if isinstance(target, functools.partial) else target) or ""
        said = {name.lstrip("*"): " ".join(text.split()) for name, text in _ARGUMENT.findall(documented)}
        for name, parameter in inspect.signature(target).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                yield name, parameter, said.get(name, "")


def _default(name: str, parameter: inspect.Parameter, options: Mapping[str, Any]) -> str:
    value = options.get(name, parameter.default)
    return "" if value is None else f"`{json.dumps(value, default=str)}`"


def _figures(name: str) -> str:
    """Measured figures, if there are any."""
    measured = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {"environments": {}}
    found = measured["environments"].get(name, {"not_measured": "not measured yet"})
    if "not_measured" in found:
        return f"## Speed\nNo figures: {found['not_measured']}."
    rows = [f"| {label} | {_number(found[key])} |" for key, label in LABELS.items() if key in found]
    conditions = measured["conditions"]
    told = (
        f"One process on one core of {conditions['processor']} that other work shared, Python {conditions['python']},"
        f" {conditions['date']}; seconds are of the processor. Steps are those of recorded episodes, in the fastest of"
        " five rounds: what an environment caches is warm. Choosing an action is not counted. `agentrl bench"
        " environments` measures again."
    )
    return "\n".join(["## Speed", "| what | figure |", "|---|---|", *rows, "", told])


def _number(value: float) -> str:
    """Two digits are what such a figure is good for."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 100 else f"{value:.2g}"


def _episode(spec: EnvironmentSpec) -> str:
    """The opening of the first training task, and the expert's first steps; nothing where data is missing."""
    try:
        task = spec.tasks(spec.splits[0], **spec.options)[0]
        session = EnvSession(spec.make, spec.options)
    except AgentRLError:
        return ""
    try:
        opening = plain_text(session.reset(task))
        shown = [f"## An episode\nTask `{task.id}` opens with:\n{_fenced(opening)}"]
        if session.find("action_hint"):
            shown.append(f"An action is {session.find('action_hint')}.")
        if offered := [f"`{name}`" for name in OFFERED if session.find(name) is not None]:
            shown.append(f"It offers {', '.join(offered)}.")
        if session.find("expert") is not None:
            steps = play(session, task, expert_policy(), STEPS_SHOWN).moments[1:]
            lines = "\n".join(f"> {m.action}\n{m.observation}\n[reward {m.reward:g}]" for m in steps)
            shown.append(f"The expert's first steps:\n{_fenced(lines)}")
        return "\n\n".join(shown)
    finally:
        session.close()


def _cell(text: str) -> str:
    """Text for a table, which bars in code do not end."""
    return _BAR.sub(lambda found: "\\|" if found[0] == "|" else found[0], text)


def _fenced(text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text.strip()}\n{fence}"


def _notes(name: str) -> str:
    """Where more is written: pages that name the environment in a table."""
    links = []
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if f"| `{name}` |" in text:
            links.append(f"[{text.partition(chr(10))[0].removeprefix('# ')}]({page.name})")
    return f"## More\n{', '.join(links)}.\n" if links else ""
