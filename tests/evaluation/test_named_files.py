"""Files, modules, variables and commands that sources name are part of an evaluation's key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.config import Config, load_config
from agentrl.evaluation.session import code_identity
from agentrl.observe.code_identity import CodeIdentity

PATH = "from pathlib import Path\n"
OS = "import glob, importlib, os, subprocess, sys\n"
READS = {
    "glob in the current folder": ("import glob\nX = glob.glob('data/*.txt')", "data/a.txt"),
    "glob of a path": (f"{PATH}X = list(Path('data').glob('*.txt'))", "data/a.txt"),
    "glob next to the source": (f"{PATH}X = list(Path(__file__).parent.glob('*.val'))", "pkg/b.val"),
    "glob of all below": (f"{PATH}X = list((Path(__file__).parent).rglob('*.val'))", "pkg/deep/c.val"),
    "a joined pattern": (f"{OS}X = glob.glob(os.path.join(os.path.dirname(__file__), '*.val'))", "pkg/b.val"),
    "a root folder": ("import glob\nX = glob.glob('*.txt', root_dir='data')", "data/a.txt"),
    "listed folder": ("import os\nX = os.listdir('data')", "data/a.txt"),
    "listed neighbours": (f"{PATH}X = list(Path(__file__).parent.iterdir())", "pkg/b.val"),
    "suffix": ("def f(name):\n    return open(name + '.val').read()", "pkg/b.val"),
    "suffix in the current folder": ("def f(name):\n    return open(f'{name}.txt').read()", "top.txt"),
    "computed stem": ("def f(name):\n    return open(f'data/{name}.txt').read()", "data/a.txt"),
    "format": ("def f(name):\n    return open('data/{}.txt'.format(name)).read()", "data/a.txt"),
    "percent": ("def f(name):\n    return open('data/%s.txt' % name).read()", "data/a.txt"),
    "constant suffix": ("END = '.val'\ndef f(name):\n    return open(name + END).read()", "pkg/b.val"),
    "other suffix": (f"{PATH}def f(p):\n    return Path(p).with_suffix('.val').read_text()", "pkg/b.val"),
    "unknown middle": (f"{PATH}def f(n):\n    return (Path('data') / n / 'd.csv').read_text()", "data/sub/d.csv"),
    "folder above": (f"{PATH}X = (Path(__file__).parent.parent / 'data' / 'a.txt').read_text()", "data/a.txt"),
    "folders above": (f"{PATH}X = (Path(__file__).resolve().parents[1] / 'data/a.txt').read_text()", "data/a.txt"),
    "folder of a variable": (f"{PATH}HERE = Path(__file__).parent\nX = open(HERE / 'deep/c.val')", "pkg/deep/c.val"),
    "home": (f"{PATH}X = (Path.home() / 'h.txt').read_text()", "home/h.txt"),
    "user": ("import os\nX = open(os.path.expanduser('~/h.txt')).read()", "home/h.txt"),
    "joined user": ("import os\nX = open(os.path.join(os.path.expanduser('~'), 'h.txt')).read()", "home/h.txt"),
    "address of a database": ("import sqlite3\nX = sqlite3.connect('file:s.db?mode=ro', uri=True)", "s.db"),
    "address of SQLAlchemy": ("URL = 'sqlite:///s.db'", "s.db"),
    "module": ("from importlib import import_module\nX = import_module('plug_' + 'a')", "plug_a.py"),
    "computed module": ("import importlib\ndef f(n):\n    return importlib.import_module(f'plug_{n}')", "plug_a.py"),
    "neighbour": (f"{OS}def f(p):\n    return importlib.import_module('.other', p)", "pkg/other.py"),
    "one of a package": ("import importlib\ndef f(n):\n    return importlib.import_module('pkg.' + n)", "pkg/other.py"),
    "named in YAML": ("X = open('conf.yaml')", "listed/e.txt"),
    "named in JSON": ("X = open('conf.json')", "listed/e.txt"),
    "relative to JSON": ("X = open('listed/near.json')", "listed/e.txt"),
    "program": ("import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'scorer'])", "scorer.py"),
    "helper of a program": ("import subprocess, sys\nC = [sys.executable, '-m', 'scorer']", "score_words.py"),
    "program of a shell": ("import os\nos.system('python -m scorer --quick')", "score_words.py"),
    "script of a shell": ("import subprocess\nsubprocess.run('python scorer.py < x', shell=True)", "score_words.py"),
    "words": (f"{OS}def f(exec_of):\n    return exec_of(sys.executable, '-m', 'scorer')", "scorer.py"),
    "shell script": ("import subprocess\nsubprocess.run(['bash', 'start.sh'])", "score_words.py"),
    "run_path": ("import runpy\nrunpy.run_path('scorer.py')", "score_words.py"),
}  # fmt: skip
FILES = {
    "data/a.txt": "1", "data/sub/d.csv": "1", "top.txt": "1", "s.db": "1", "home/h.txt": "1", "listed/e.txt": "1",
    "pkg/__init__.py": "", "pkg/b.val": "1", "pkg/deep/c.val": "1", "pkg/other.py": "A = 1\n", "plug_a.py": "A = 1\n",
    "conf.yaml": "score:\n  table: listed/e.txt\n", "conf.json": '{"tables": ["listed/e.txt"]}',
    "listed/near.json": '{"a": "e.txt"}', "scorer.py": "import score_words\n", "score_words.py": "A = 1\n",
    "start.sh": 'cd "$(dirname "$0")"\nexec python "$HERE/scorer.py" "$@"\n', "log.log": "1", "dd/x.txt": "1",
    "local/x.txt": "1",
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def key(outputs: Path | None = None) -> str:
    code = CodeIdentity(outputs)
    code.add_module("pkg.rewards")
    return code.digest()


@pytest.mark.parametrize("case", READS)
def test_an_edit_of_what_a_source_names_is_noticed(case: str, place: Path) -> None:
    source, changed = READS[case]
    (place / "pkg/rewards.py").write_text(f"{source}\n")
    before = key()
    assert key() == before
    with (place / changed).open("a") as file:
        file.write("# more\n")
    assert key() != before


@pytest.mark.parametrize(
    "source",
    [
        "open('log.log', mode='w')",
        "def f(n):\n    open(n + '.log', 'a')",
        "from pathlib import Path\ndef f(n):\n    Path(f'{n}.log').write_text('x')",
        "def f(a, b):\n    return f'{a}{b}', a + b, f'{a}/{b}', a / b",
        "import importlib\ndef f(n):\n    return importlib.import_module(n)",
        "from pathlib import Path\nHERE = Path(__file__).parent\nUP = HERE.parent\nX = Path(HERE) / '..'",
        "'Reads local, log and pkg. * is any.'",
    ],
)
def test_what_a_source_writes_or_does_not_name_is_no_part_of_the_key(source: str, place: Path) -> None:
    (place / "pkg/rewards.py").write_text(f"{source}\n")
    before = key()
    for name in ("log.log", "top.txt", "pkg/b.val", "pkg/other.py", "local/x.txt"):
        (place / name).write_text("more")
    assert key() == before


def test_patterns_do_not_stand_for_results(place: Path) -> None:
    (place / "pkg/rewards.py").write_text("import glob\nX = glob.glob('**/*.txt', recursive=True)\n")
    (place / "runs").mkdir()
    before = key(place / "runs")
    (place / "runs/a.txt").write_text("1")
    assert key(place / "runs") == before
    (place / "data/a.txt").write_text("2")
    assert key(place / "runs") != before


@pytest.mark.parametrize(
    "source",
    [
        "import os\nX = os.environ['SCORER_LEVEL']",
        "import os\nX = os.environ.get('SCORER_LEVEL', '1')",
        "from os import environ, getenv\nX = getenv('SCORER_' + 'LEVEL')",
        "import os\nNAME = 'SCORER_LEVEL'\nX = NAME in os.environ",
        "import os\ndef f(name):\n    return os.getenv(f'SCORER_{name}')",
    ],
)
def test_a_variable_that_a_source_reads_is_part_of_the_key(
    source: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "pkg/rewards.py").write_text(f"{source}\n")
    found = [key()]
    for value in ("1", "2"):
        monkeypatch.setenv("SCORER_LEVEL", value)
        monkeypatch.setenv("OTHER_LEVEL", value * 2)
        found.append(key())
    assert len(set(found)) == 3
    monkeypatch.setenv("OTHER_LEVEL", "9")
    assert key() == found[-1]


def test_values_of_variables_are_not_stored(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "pkg/rewards.py").write_text("import os\nX = os.environ['SCORER_KEY']\n")
    monkeypatch.setenv("SCORER_KEY", "sk-private")
    code = CodeIdentity()
    code.add_module("pkg.rewards")
    assert "variable SCORER_KEY" in code._parts
    assert "sk-private" not in str(code._parts)


def test_a_variable_that_the_source_sets_itself_is_no_part_of_the_key(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "pkg/rewards.py").write_text("import os\nos.environ['FAST'] = '1'\nX = os.environ['FAST']\n")
    before = key()
    monkeypatch.setenv("FAST", "1")
    assert key() == before


@pytest.mark.parametrize("source", ["X = " + " + ".join(["'a'"] * 3000), "A = A\nX = open(A + '.val')", "X = '\\0*.a'"])
def test_odd_sources_are_read(source: str, place: Path) -> None:
    (place / "pkg/rewards.py").write_text(f"{source}\n")
    assert key() == key()


def test_settings_that_name_each_other_end(place: Path) -> None:
    (place / "conf.yaml").write_text("next: conf.json\n")
    (place / "conf.json").write_bytes(b'{"next": "conf.yaml", "odd": "\xff\\u0000"}')
    (place / "pkg/rewards.py").write_text("X = open('conf.yaml')\n")
    assert key() == key()


def config(*words: str) -> Config:
    return load_config(None, ["environment=guess_number/valid", *words])


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("agent.tools=[{name: mcp, command: [python, -m, scorer]}]", "score_words.py"),
        ("agent.tools=[{name: mcp, command: [bash, start.sh]}]", "scorer.py"),
        ("agent.tools=[{name: mcp, command: [bash, start.sh]}]", "score_words.py"),
        ("agent.tools=[{name: mcp, command: [npx, server, '--dir=./dd']}]", "dd/x.txt"),
        ("agent.tools=[{name: mcp, command: [npx, server, --table=top.txt]}]", "top.txt"),
        ("agent.options={command: 'node server.js --dir=dd/'}", "dd/x.txt"),
        ("agent.options={command: 'python -m scorer'}", "score_words.py"),
        ("agent.tools=[{name: mcp, command: [python, s.py], env: {PLUGINS: ./dd}}]", "dd/x.txt"),
    ],
)
def test_files_of_commands_are_read(words: str, changed: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry != str(place)])
    before = code_identity(config(words), place / "runs")
    with (place / changed).open("a") as file:
        file.write("# more\n")
    assert code_identity(config(words), place / "runs") != before


@pytest.mark.parametrize("words", ["engine.type=local", "engine.type=vllm", "agent.tools=[bash]"])
def test_words_of_an_engine_name_no_folder(words: str, place: Path) -> None:
    for name in ("local", "auto", "vllm", "tool_calling", "fork", "bash"):
        (place / name).mkdir(exist_ok=True)
    before = code_identity(config(words), place / "runs")
    for name in ("local", "auto", "vllm", "tool_calling", "fork", "bash"):
        (place / name / "x.txt").write_text("more")
    assert code_identity(config(words), place / "runs") == before
