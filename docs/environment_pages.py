"""Generates a page per environment from its spec, its factory, a played episode and measured figures."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config import load_config
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import resolve_environment
from agentrl.errors import AgentRLError
from agentrl.evaluation.prompt_preview import preview_prompts
from agentrl.registry import Kind, names
from agentrl.testing.env_session import EnvSession, expert_policy, plain_text, play

FOLDER = Path(__file__).parent / "environments"
FIGURES = FOLDER / "figures.json"
STEPS_SHOWN = 3
READING = ("react_text", "step_independent", "tool_calling")
"""Agent loops whose prompts are shown for every environment."""
READING_ALSO = {
    "household": {"planner_worker": ""},
    "long_qa": {"memory": ""},
    "tic_tac_toe": {"self_play": "environment.options.opponent=self"},
}
"""Additional loops of some environments, each with an override that it needs there."""
MAX_SHOWN_CHARS = 1500
"""Maximum number of characters of a message that are shown."""
OFFERED = ("admissible_actions", "state_key", "snapshot", "restore", "expert", "tools", "tool_message", "web_page")
"""Optional methods and attributes of an environment."""
_BAR = re.compile(r"(`+).*?\1|\|")
_ARGUMENT = re.compile(r"^ {4}(\*{0,2}\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)

LABELS = {
    "random_steps_per_s": "steps per second, random play",
    "expert_steps_per_s": "steps per second, expert",
    "reset_p50_ms": "reset, median, ms",
    "reset_p99_ms": "reset, 99th percentile, ms",
    "first_reset_s": "first environment in a process, including reset, s",
    "bytes_per_instance": "memory of each further environment instance in an episode, bytes",
}


def page_path(name: str) -> str:
    """Return the path of an environment's page below the documentation folder."""
    return f"environments/{name}.md"


def generated_pages() -> dict[str, str]:
    """Return the pages of environments without a handwritten page, by path."""
    missing = (name for name in names(Kind.ENVIRONMENT) if not (FOLDER / f"{name}.md").is_file())
    return {page_path(name): f"# {name}\n\n{facts(name)}\n{_notes(name)}" for name in missing}


def handwritten_page(name: str) -> str:
    """Return the path of an environment's own page, or else of the page that names it most often; empty for none."""
    if (FOLDER / f"{name}.md").is_file():
        return page_path(name)
    counts = {page.name: page.read_text(encoding="utf-8").count(f"`{name}`") for page in sorted(FOLDER.glob("*.md"))}
    most = max(counts, key=lambda page: counts[page])
    return f"environments/{most}" if counts[most] else ""


def index_table() -> str:
    """Return the table of installed environments with splits and scores of scripted policies."""
    rows = ["| name | splits | random | expert | what it is |", "|---|---|---|---|---|"]
    for name in names(Kind.ENVIRONMENT):
        spec = resolve_environment(name)
        scores = [f"{spec.scores[policy]:.2g}" if policy in spec.scores else "" for policy in ("random", "expert")]
        page = handwritten_page(name)
        link = f"[`{name}`]({page})" if page else f"`{name}`"
        rows.append(f"| {link} | {', '.join(spec.splits)} | {' | '.join(scores)} | {_cell(spec.description)} |")
    return "\n".join(rows)


def section(name: str) -> str:
    """Return an environment's facts as the last section of a handwritten page."""
    return "## Facts\nGenerated from the code.\n\n" + re.sub("^## ", "### ", facts(name), flags=re.MULTILINE)


def facts(name: str) -> str:
    """Return the generated facts of an environment."""
    spec = resolve_environment(name)
    parts = [spec.description, _facts_table(name, spec), _splits(spec), _options(spec), _figures(name)]
    if spec.instructions:
        parts.append(f"## Instructions to the policy\n{_fenced(spec.instructions)}")
    parts.append(_episode(spec))
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts_table(name: str, spec: EnvironmentSpec) -> str:
    low, high = spec.reward_range
    rows = {
        "steps": f"at most {spec.max_turns}" if spec.max_turns else "no limit",
        "return range": f"{low:g} to {high:g}",
        "success": _success(spec),
        "success rate of random play": f"{spec.scores['random']:.3g}" if "random" in spec.scores else "not stated",
        "success rate of the expert": f"{spec.scores['expert']:.3g}" if "expert" in spec.scores else "not stated",
        "code runs": {"inline": "in the event loop"}.get(spec.isolation.value, f"in a {spec.isolation.value}"),
    }
    lines = [f"| {what} | {value} |" for what, value in rows.items()]
    return "\n".join([f"| `{name}` | |", "|---|---|", *lines])


def _success(spec: EnvironmentSpec) -> str:
    return "reported in `info`" if spec.success_threshold is None else f"return of at least {spec.success_threshold:g}"


def _splits(spec: EnvironmentSpec) -> str:
    rows = [f"| `{spec.name}/{split}` | {_size(spec, split)} |" for split in spec.splits]
    return "\n".join(["## Splits", "| name | tasks |", "|---|---|", *rows])


def _size(spec: EnvironmentSpec, split: str) -> str:
    """Return the number of tasks or, if data is missing, how to get it."""
    try:
        return f"{len(spec.tasks(split, **spec.options)):,}"
    except AgentRLError as error:
        return str(error.hint or error.what)


def _options(spec: EnvironmentSpec) -> str:
    """Return the table of the factory's options (`environment.options` in a config)."""
    rows = [
        f"| `{name}` | {_default(name, parameter, spec.options)} | {_cell(text)} |"
        for name, parameter, text in _parameters(spec.make)
    ]
    return "\n".join(["## Options", "| name | default | what it is |", "|---|---|---|", *rows]) if rows else ""


def _parameters(make: Any) -> Iterator[tuple[str, inspect.Parameter, str]]:
    """Yield the options of a factory, and of callables bound to it, such as a puzzle's rules."""
    inner = make.args if isinstance(make, functools.partial) else ()
    for target in (*filter(callable, inner), make):
        documented = inspect.getdoc(target.func if isinstance(target, functools.partial) else target) or ""
        descriptions = {name.lstrip("*"): " ".join(text.split()) for name, text in _ARGUMENT.findall(documented)}
        for name, parameter in inspect.signature(target).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                yield name, parameter, descriptions.get(name, "")


def _default(name: str, parameter: inspect.Parameter, options: Mapping[str, Any]) -> str:
    value = options.get(name, parameter.default)
    return "" if value is None else f"`{json.dumps(value, default=str)}`"


def _figures(name: str) -> str:
    """Return the measured figures, if any."""
    measured = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {"environments": {}}
    found = measured["environments"].get(name, {"not_measured": "not measured yet"})
    if "not_measured" in found:
        return f"## Speed\nNo figures: {found['not_measured']}."
    rows = [f"| {label} | {_number(found[key])} |" for key, label in LABELS.items() if key in found]
    conditions = measured["conditions"]
    note = (
        f"Measured in one process on a shared core of {conditions['processor']}, Python {conditions['python']},"
        f" {conditions['date']}; times are CPU times. Steps replay recorded episodes, in the fastest of five rounds,"
        " with warm caches and without the time to choose actions. Run `agentrl bench environments` to repeat them."
    )
    return "\n".join(["## Speed", "| measurement | figure |", "|---|---|", *rows, "", note])


def _number(value: float) -> str:
    """Round a figure to two significant digits."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 100 else f"{value:.2g}"


def _episode(spec: EnvironmentSpec) -> str:
    """Return the opening of the first training task and the expert's first steps, or nothing if data is missing."""
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
            shown.append(f"Supported methods: {', '.join(offered)}.")
        if session.find("expert") is not None:
            steps = play(session, task, expert_policy(), STEPS_SHOWN).moments[1:]
            lines = "\n".join(f"> {m.action}\n{m.observation}\n[reward {m.reward:g}]" for m in steps)
            shown.append(f"The expert's first steps:\n{_fenced(lines)}")
        return "\n\n".join(shown)
    finally:
        session.close()


def reads_page() -> str:
    """Return the page that shows what a policy reads, in each environment and loop."""
    parts = [
        "# What the policy reads",
        "Generated with `agentrl env prompt` for the first training task: the opening, the first step of the expert (or"
        " a random one), and the reply to an answer in the wrong format. Long observations are truncated here.",
    ]
    for name in names(Kind.ENVIRONMENT):
        loops = {**dict.fromkeys(READING, ""), **READING_ALSO.get(name, {})}
        shows = [
            f"### {loop} in {name}\n{_fenced(text)}"
            for loop, need in loops.items()
            if (text := _read(name, loop, need))
        ]
        if shows:
            parts += [f"## {name}", *shows]
    return "\n\n".join(parts) + "\n"


def _read(name: str, loop: str, setting: str) -> str:
    """Return the prompts of a loop in an environment, or an empty text if its data or package is missing."""
    words = [
        f"environment={name}",
        f"agent.loop={loop}",
        f"agent.max_turns={1 + (loop not in READING)}",
        *([setting] if setting else []),
    ]
    try:
        found = asyncio.run(preview_prompts(load_config(None, words)))
    except AgentRLError:
        return ""
    return "\n".join(f"── {part.title}\n{_cut(part.text)}" for part in found.parts)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]} …"


def _cell(text: str) -> str:
    """Escape bars in code for use in a table."""
    return _BAR.sub(lambda found: "\\|" if found[0] == "|" else found[0], text)


def _fenced(text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text.strip()}\n{fence}"


def _notes(name: str) -> str:
    """Return links to pages that list the environment in a table."""
    links = []
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if f"| `{name}` |" in text:
            links.append(f"[{text.partition(chr(10))[0].removeprefix('# ')}]({page.name})")
    return f"## More\n{', '.join(links)}.\n" if links else ""
