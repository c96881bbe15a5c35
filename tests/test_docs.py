"""The documentation does what it says: code blocks run, commands exist, links lead somewhere, tables are made."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import re
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import pytest
from support.sandboxes import needs_bubblewrap

from agentrl.cli import main
from agentrl.cli.commands import COMMANDS
from agentrl.config import shipped_configs
from agentrl.registry import Kind, names, unregister

ROOT = Path(__file__).parent.parent
AT_THE_TOP = ["README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "SECURITY.md"]
PAGES = [*(ROOT / name for name in AT_THE_TOP), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?<![\w./-])(?:agentrl|envs|tools|agent_loops|tests|benchmarks)/[\w./-]+\.(?:py|md|yaml|json)\b")
MODULE = re.compile(r"(?<![\w/.-])agentrl(?:\.[A-Za-z_]\w*)+")
NO_MODULES = {"agentrl.plugins", "agentrl.owner", "agentrl.until"}
"""An entry point group, and labels of containers."""
LINK = re.compile(r"\]\((?!https?://)([^)#]+)(#[^)]*)?\)")
SMALL = (
    "'trainer.tasks_per_step=1', 'algorithm.group_size=2', 'agent.max_turns=2', 'agent.max_answer_tokens=8', "
    "'model.scratch.hidden_size=32', 'model.scratch.layers=1', 'trackers=[]'"
)
SHORTER = {
    'algorithm="grpo", steps=2, overrides=small)': f"steps=1, overrides=[{SMALL}])",
    "tasks=8))": "samples=2, tasks=2))",
    'steps=2, overrides=["trainer.tasks_per_step=2"])': f"steps=1, overrides=[{SMALL}])",
}
"""What is changed in blocks before they run: no download, and seconds instead of hours."""


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def pages_with(language: str) -> list[Any]:
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[needs_bubblewrap] if "sandbox" in page.stem else [])
        for page in PAGES
        if blocks(page, language)
    ]


def commands(page: Path, language: str) -> Iterator[list[str]]:
    for block in blocks(page, language):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                assert words[0] == "agentrl", line
                yield words[1:]


@pytest.fixture(autouse=True)
def _own_environment_ids() -> Iterator[None]:
    """Gymnasium warns when an id is registered twice; what is registered here is forgotten."""
    before = dict(gymnasium.registry)
    gymnasium.registry.pop("GuessNumber-v0", None)
    yield
    plugins = {id_: spec for id_, spec in gymnasium.registry.items() if id_.startswith("agentrl/")}  # loaded once only
    gymnasium.registry.clear()
    gymnasium.registry.update(before | plugins)


@pytest.mark.timeout(300)  # some blocks are whole runs
@pytest.mark.parametrize("page", pages_with("python"))
@pytest.mark.slow
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    defined: dict[str, Any] = {"__name__": f"docs_{page.stem}"}
    try:
        exec(compile(code, str(page), "exec"), defined)
        assert set(compile(code, str(page), "exec").co_names) & set(defined), "the page's code ran and left nothing"
    finally:
        unregister(Kind.TOOL, "midpoint")


@pytest.mark.parametrize("page", pages_with("bash"))
@pytest.mark.slow
def test_bash_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands(page, "bash"):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code, words


@functools.cache
def help_of(*command: str) -> str:
    """The help of a command, at the current width of the terminal."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main([*command, "--help"])
    return out.getvalue()


@pytest.mark.parametrize("page", pages_with("console"))
def test_console_blocks_name_commands_and_options_that_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for words in commands(page, "console"):
        known = help_of(*words[: 2 if COMMANDS[words[0]].is_group else 1])
        unknown = [word for word in words if word.startswith("--") and f"{word} " not in known]
        assert unknown == [], words
        assert [word for word in words if word.count("{") != word.count("}")] == [], "values with spaces need quotes"
        if words[0] == "train" and not words[1].startswith("-") and "=" not in words[1]:
            assert words[1] in shipped_configs() or words[1].endswith(".yaml"), words


INLINE = re.compile(r"`(agentrl [^`]+|make [\w-]+)`")


def test_commands_and_targets_of_the_page_for_assistants_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = (ROOT / "AGENTS.md").read_text().replace("\n  ", " ")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = [shlex.split(words) for words in INLINE.findall(text)]
    assert len(found) > 10
    for program, *words in found:
        if program == "make":
            assert words[0] in targets
            continue
        command = words[: 2 if COMMANDS[words[0]].is_group else 1]
        with pytest.raises(SystemExit) as end:
            main([*command, "--help"])
        known = capsys.readouterr().out
        assert not end.value.code
        assert [word for word in words if word.startswith("--") and f"{word} " not in known] == [], words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for target, anchor in LINK.findall(page.read_text()):
        path = page.parent / target
        if not path.exists() or (anchor and path.suffix == ".md" and anchor[1:] not in anchors(path)):
            missing.append(target + anchor)
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as code hosts and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


EMPTY_TABLE = re.compile(r"^\|[^\n]*\|\n\|[-:| ]+\|\n(?!\|)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_table_is_empty_in_the_repository(page: Path) -> None:
    text = page.read_text()
    assert EMPTY_TABLE.findall(text) == []
    for name in re.findall(r"<!-- generated: ([\w ]+) -->", text):
        filled = re.search(rf"<!-- generated: {name} -->\n\n(.+?)\n\n<!-- end: {name} -->", text, re.DOTALL)
        assert filled, f"{name} has no text: run make docs-tables"


def test_an_empty_table_is_noticed() -> None:
    assert EMPTY_TABLE.search("| name | what |\n|---|---|\n\nText")
    assert not EMPTY_TABLE.search("| name | what |\n|---|---|\n| a | b |\n")


def test_the_readme_links_every_page() -> None:
    linked = {(ROOT / target).resolve() for target, _ in LINK.findall((ROOT / "README.md").read_text())}
    index = ROOT / "docs" / "api" / "index.md"
    linked |= {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text())}
    assert [str(page.relative_to(ROOT)) for page in PAGES[1:] if page.resolve() not in linked] == []


def test_the_python_reference_has_a_page_for_every_public_module(generator: ModuleType) -> None:
    """`on_post_build` compares the names on the built pages."""
    stability = (ROOT / "docs" / "stability.md").read_text()
    contracts, registry = (
        re.search(rf"^\| the {what}\b.*$", stability, re.MULTILINE) for what in ("contracts", "entry")
    )
    assert contracts is not None
    assert registry is not None
    public = re.findall(r"`(agentrl\.\w+)`", contracts[0]) + re.findall(r"`(agentrl\.registry)`", registry[0])
    assert sorted(public) == sorted(generator.PUBLIC_MODULES)
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert [name for name in public if name not in entries] == []
    own = [name for name in generator.public_names() if name.count(".") == 1]
    assert [name for name in own if name not in entries] == []


def test_a_public_name_without_an_entry_fails_the_build(generator: ModuleType, tmp_path: Path) -> None:
    def build(names: list[str]) -> None:
        lines = "".join(f"{name} py:function 1 api/python/#$ -\n" for name in names)
        (tmp_path / "objects.inv").write_bytes(b"#\n" * 4 + zlib.compress(lines.encode()))
        generator.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))

    build(generator.public_names())
    with pytest.raises(SystemExit, match=r"no entry for agentrl\.train;"):
        build([name for name in generator.public_names() if name != "agentrl.train"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    catalogue = ("agentrl/envs/", "agentrl/tools/", "agentrl/agent_loops/")
    files = [file.removeprefix("agentrl/") if file.startswith(catalogue) else file for file in FILE.findall(text)]
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert [name for name in sorted(set(MODULE.findall(text)) - NO_MODULES) if not _resolves(name)] == []


NOT_OURS = {"cannot import my_game", "Segmentation fault", "vllm is not installed", "metrics.jsonl is truncated"}
"""Messages of other programs, and of ours with names filled in."""


def test_messages_that_the_troubleshooting_page_quotes_are_in_the_sources() -> None:
    sources = "\n".join(
        path.read_text()
        for folder in ("agentrl", "envs", "tools", "agent_loops")
        for path in (ROOT / folder).rglob("*.py")
    )
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    first_cells = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [span for cell in first_cells for span in re.findall(r"`([^`=]+ [^`=]+)`", cell)]
    pieces = [piece.strip(" ;:,") for span in quoted for piece in re.split(r"…|\bN of M\b|\bM\b", span)]
    assert len(pieces) > 20
    assert {piece for piece in pieces if len(piece) > 8 and piece not in sources} <= NOT_OURS


def _resolves(dotted: str) -> bool:
    """True if a dotted name is a module, or attributes of one."""
    found: Any = importlib.import_module("agentrl")
    path = "agentrl"
    for part in dotted.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")  # as mkdocs does for its hooks
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_page_is_in_the_navigation_and_every_table_can_be_made(generator: ModuleType) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f" {page.relative_to(ROOT / 'docs')}\n" in navigation
        filled = generator.fill(page.read_text())
        assert "<!-- generated" not in filled


@pytest.mark.slow
def test_generated_text_is_what_the_code_says(generator: ModuleType) -> None:
    """Pages of environments whose data may be anywhere are left out."""
    elsewhere = {generator.DOCS / "environments" / name for name in ("alfworld.md", "webshop.md")}
    different = [
        p.name for p, text in generator.render_committed().items() if p not in elsewhere and p.read_text() != text
    ]
    assert different == [], "run make docs-tables"


def test_reference_pages_are_made_from_the_code(generator: ModuleType) -> None:
    assert "| `trainer.learning_rate` |" in generator.configuration_page()
    page = generator.cli_page()
    for name in COMMANDS:
        assert f"## agentrl {name}\n" in page
    assert "### agentrl env check\n" in page
    assert "╭" in page
    assert "[`webshop`](environments/webshop.md)" in generator.fill("<!-- generated: environments -->")


@needs_bubblewrap
@pytest.mark.slow
def test_every_environment_has_a_page(generator: ModuleType) -> None:
    made, index = generator.generated_pages(), generator.fill("<!-- generated: environments -->")
    for name in names(Kind.ENVIRONMENT):
        path = f"environments/{name}.md"
        assert f"| `{name}` |" in index or f"[`{name}`](environments/" in index
        if path not in made:
            assert f"\n<!-- generated: environment {name} -->\n" in (ROOT / "docs" / path).read_text()


@pytest.mark.slow
@needs_bubblewrap
def test_a_made_page_tells_what_can_be_known_without_words(generator: ModuleType) -> None:
    page = generator.generated_pages()["environments/household.md"]
    for told in (
        "| `household/valid_unseen` | 134 |",
        '| `size` | `"full"` |',
        "at most 50",
        "> go to ",
        "write one command",
    ):
        assert told in page
    assert page == generator.generated_pages()["environments/household.md"]
    assert "(puzzles.md)" in generator.generated_pages()["environments/sokoban.md"]


def test_pages_that_are_made_are_in_the_navigation(generator: ModuleType) -> None:
    config = SimpleNamespace(nav=[{"Environments": [{"All": "environments.md"}, "environments/sudoku.md"]}])
    pages = generator.on_config(config).nav[0]["Environments"]
    assert pages.count("environments/sudoku.md") == 1
    assert "environments/household.md" in pages
