"""Generates pages and tables of the documentation from the code.

The text between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->`` in a page is generated, and so are all of
`PAGES`. Both are committed, so that they can be read in the repository: ``make docs-tables`` regenerates them, and a
test compares them with the code. As a hook of mkdocs, this module fills them in and adds a page per environment.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark_tables import TABLES as BENCHMARK_TABLES
from capability_tables import engines_table, modes_table
from environment_pages import generated_pages, index_table, page_path, reads_page, section
from recipe_tables import missing_table, recipes_table
from typer.testing import CliRunner

import agentrl
from agentrl.algorithms.traits import needed_inputs, other_input
from agentrl.cli.application import build
from agentrl.cli.commands import COMMANDS
from agentrl.config import shipped_configs
from agentrl.config.reference import config_reference
from agentrl.config.resume_rules import RULES as RESUME_RULES
from agentrl.observe.metric_table import metric_sections
from agentrl.registry import Kind, lookup, names
from agentrl.testing.env_check import INTEGRITY, RULES
from agentrl.testing.report import CheckRule
from agentrl.tool import Tool
from agentrl.training.algorithm_functions import PROVIDED

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
PUBLIC_MODULES = (
    "agentrl.env",
    "agentrl.tool",
    "agentrl.agent_loop",
    "agentrl.reward",
    "agentrl.task",
    "agentrl.message",
    "agentrl.errors",
    "agentrl.trajectory",
    "agentrl.testing",
    "agentrl.registry",
)
"""Modules that docs/stability.md calls public; each has a page in docs/api."""
MARK = re.compile(r"<!-- generated: ([\w ]+) -->(?:\n.*?<!-- end: \1 -->)?", re.DOTALL)
ENVIRONMENTS = "Environments"
"""Title of the navigation section."""
ENVIRONMENT = "environment "
"""Prefix of the markers for the facts of one environment."""
WIDTH = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


def configuration_page() -> str:
    """Return the reference of all config keys."""
    return f"# Config keys\n\nAlso printed by `agentrl config reference`.\n\n{config_reference()}"


def cli_page() -> str:
    """Return the help pages of all commands."""
    parts = ["# Command line\n", _help([])]
    for name, entry in COMMANDS.items():
        parts += [f"## agentrl {name}\n", _help([name])]
        if entry.is_group:
            for child in _children(name):
                parts += [f"### agentrl {name} {child}\n", _help([name, child])]
    return "\n".join(parts)


def rules_table(rules: Sequence[CheckRule]) -> str:
    """Return the table of rules for environments."""
    rows = [f"| {rule.name} | {rule.demand} | {rule.mend} |" for rule in rules]
    return "\n".join(["| rule | requirement | what to do if it is broken |", "|---|---|---|", *rows])


def tools_table() -> str:
    """Return the table of installed tools."""
    rows = [f"| `{name}` | {_summary(lookup(Kind.TOOL, name))} |" for name in names(Kind.TOOL)]
    return "\n".join(["| name | what it does |", "|---|---|", *rows])


def _summary(found: Any) -> str:
    summary: str = found.schema["function"]["description"] if isinstance(found, Tool) else str(found.__doc__)
    return " ".join(summary.strip().partition("\n\n")[0].split())


def documented_table(kind: Kind) -> str:
    """Return the names of a kind, each with the first line of its docstring."""
    rows = ["| name | what it is |", "|---|---|"]
    for name in names(kind):
        summary = (lookup(kind, name).__doc__ or "").strip().partition("\n")[0]
        rows.append(f"| `{name}` | {summary} |")
    return "\n".join(rows)


def algorithms_table(kind: Kind) -> str:
    """Return the functions of a kind with the first line of the docstring, options, and inputs other than episodes."""
    rows = ["| name | what it is | options | needs |", "|---|---|---|---|"]
    for name in names(kind):
        function = lookup(kind, name)
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        missing = other_input(function) or ", ".join(sorted(needed_inputs(function) - PROVIDED))
        rows.append(f"| `{name}` | {summary} | {_options(function)} | {missing} |")
    return "\n".join(rows)


def _options(function: Any) -> str:
    found = [p for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return ", ".join(
        f"`{p.name}`" if p.default is inspect.Parameter.empty else f"`{p.name}: {_yaml(p.default)}`" for p in found
    )


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def configs_table() -> str:
    """Return the list of shipped configs."""
    return "\n".join(f"- `{name}`" for name in shipped_configs())


PAGES: Mapping[str, Callable[[], str]] = {"configuration.md": configuration_page, "cli.md": cli_page}
"""Pages that are committed."""
SITE_PAGES: Mapping[str, Callable[[], str]] = {"what-the-policy-reads.md": reads_page}
"""Pages that exist only on the site, in addition to one per environment: they depend on the installed packages."""


def resume_table() -> str:
    """Return the table of what a resumed run may change."""
    rows = [f"| `{key}` | {'yes' if rule.may_change else 'no'} | {rule.why} |" for key, rule in RESUME_RULES.items()]
    return "\n".join(["| keys | may change | why |", "|---|---|---|", *rows])


def metrics_tables() -> str:
    """Return the tables of metrics, by section."""
    parts = []
    for title, rows in metric_sections().items():
        parts += [f"## {title}\n", "| metric | meaning | unit | healthy | otherwise |", "|---|---|---|---|---|"]
        for row in rows:
            names = ", ".join(f"`{name}`" for name in row.names)
            cells = (row.meaning, row.unit, row.healthy, row.remedy)
            parts.append(f"| {names} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)


TABLES: Mapping[str, Callable[[], str]] = {
    "resume": resume_table,
    "environments": index_table,
    "environment rules": lambda: rules_table(RULES),
    "integrity rules": lambda: rules_table(INTEGRITY),
    "tools": tools_table,
    "agent loops": lambda: documented_table(Kind.AGENT_LOOP),
    "advantages": lambda: algorithms_table(Kind.ADVANTAGE),
    "losses": lambda: algorithms_table(Kind.LOSS),
    "filters": lambda: algorithms_table(Kind.FILTER),
    "shapings": lambda: algorithms_table(Kind.SHAPING),
    "configs": configs_table,
    "recipes": recipes_table,
    "missing recipes": missing_table,
    "metrics": metrics_tables,
    "engine capabilities": engines_table,
    "advantage capabilities": lambda: modes_table(Kind.ADVANTAGE),
    "loss capabilities": lambda: modes_table(Kind.LOSS),
    **BENCHMARK_TABLES,
}


def fill(markdown: str) -> str:
    """Replace the markers in a page by their tables."""
    return MARK.sub(lambda mark: _generated(mark[1]), markdown)


def _generated(name: str) -> str:
    if name in TABLES:
        return TABLES[name]()
    return section(name.removeprefix(ENVIRONMENT))


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File  # installed only for building the site

    pages = {path: make() for path, make in SITE_PAGES.items()} | generated_pages()
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    for path in sorted(EXAMPLES.glob("*.*")):
        files.append(File.generated(config, f"examples/{path.name}", content=path.read_text(encoding="utf-8")))
    return files


def public_names() -> list[str]:
    """Return the dotted names that the Python reference must have, by the modules of `PUBLIC_MODULES`."""
    found = [f"agentrl.{name}" for name in agentrl.__all__ if f"agentrl.{name}" not in PUBLIC_MODULES]
    for module in map(importlib.import_module, PUBLIC_MODULES):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
        found += [f"{module.__name__}.{name}" for name in names]
    return found


def on_post_build(config: Any) -> None:
    """Check that the Python reference has an entry for every public name.

    Raises:
        SystemExit: some have none.
    """
    inventory = (Path(config.site_dir) / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = {line.partition(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    if missing := [name for name in public_names() if name not in entries]:
        sys.exit(f"docs/api has no entry for {', '.join(missing)}; add it to a page, and a docstring to the code")


def on_config(config: Any) -> Any:
    """Append the generated pages of environments to the navigation."""
    pages = next(part[ENVIRONMENTS] for part in config.nav if ENVIRONMENTS in part)
    listed = {path for entry in pages for path in (entry.values() if isinstance(entry, dict) else (entry,))}
    pages += [path for path in map(page_path, names(Kind.ENVIRONMENT)) if path not in listed]
    return config


def with_tables(markdown: str) -> str:
    """Return a page in its committed form: each marker is followed by its table."""

    def filled(mark: re.Match[str]) -> str:
        return f"<!-- generated: {mark[1]} -->\n\n{_generated(mark[1]).strip()}\n\n<!-- end: {mark[1]} -->"

    return MARK.sub(filled, markdown)


def render_committed() -> dict[Path, str]:
    """Return the up-to-date content of pages with generated text, by file."""
    pages = {DOCS / path: make().rstrip() + "\n" for path, make in PAGES.items()}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path not in pages and MARK.search(text):
            pages[path] = with_tables(text)
    return pages


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables of a page, and let links to examples lead to their copies on the site."""
    return fill(markdown).replace("](../examples/", "](examples/")


def _help(words: list[str]) -> str:
    result = CliRunner(env=WIDTH).invoke(build(next(iter(words), None)), [*words, "--help"], prog_name="agentrl")
    text = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
    return f"```text\n{text}\n```\n"


def _children(group: str) -> list[str]:
    (added,) = [found for found in build(group).registered_groups if found.name == group]
    assert added.typer_instance is not None
    commands = added.typer_instance.registered_commands
    return [command.name or str(command.callback and command.callback.__name__) for command in commands]


def main() -> None:
    """Write all generated text; with ``--check``, only report files that differ."""
    pages = render_committed()
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv and stale:
        different = ", ".join(str(path.relative_to(DOCS)) for path in stale)
        sys.exit(f"{different}: the text differs from the code; run make docs-tables")
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
        print(f"wrote {path.relative_to(DOCS)}")


if __name__ == "__main__":
    main()
