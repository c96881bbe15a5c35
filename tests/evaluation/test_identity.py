"""Identities of code, files, weights and served models: changes under the same name are detected."""

from __future__ import annotations

import functools
import http.server
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import huggingface_hub
import pytest

from agentrl.config import Config, load_config
from agentrl.config.config import SCRATCH
from agentrl.config.engines import OpenAIEngineConfig
from agentrl.evaluation.panel import EpisodeStore, EvaluatedEpisode, task_digest
from agentrl.evaluation.session import code_identity, model_identity, served_model, served_models
from agentrl.models.identity import weights
from agentrl.observe import file_identity
from agentrl.observe.code_identity import CodeIdentity
from agentrl.observe.file_identity import file_digest, folder_digest
from agentrl.task import Task
from agentrl.trajectory import Trajectory


def digest(target: object) -> str:
    code = CodeIdentity()
    code.add(target)
    return code.digest()


def session(text: str, name: str = "f") -> Any:
    """Return an object of a notebook: one whose source is in no file."""
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), found)
    return found[name]


PAIRS = {
    "constant": ("def f(x): return x + 1", "def f(x): return x + 2"),
    "name": ("def f(x): return max(x)", "def f(x): return min(x)"),
    "nested": ("def f(x): return [y + 1 for y in x]", "def f(x): return [y + 2 for y in x]"),
    "inner function": ("def f(x):\n def g(): return 1\n return g", "def f(x):\n def g(): return 2\n return g"),
    "default": ("def f(x=1): return x", "def f(x=2): return x"),
    "keyword default": ("def f(*, x=1): return x", "def f(*, x=2): return x"),
    "closure": (
        "def make(k):\n def f(x): return k * x\n return f\nf = make(1)",
        "def make(k):\n def f(x): return k * x\n return f\nf = make(2)",
    ),
    "global": ("K = 1\ndef f(x): return K * x", "K = 2\ndef f(x): return K * x"),
    "helper": ("def g(x): return x\ndef f(x): return g(x)", "def g(x): return -x\ndef f(x): return g(x)"),
    "helper class": (
        "class G:\n def h(self): return 1\ndef f(x): return G().h()",
        "class G:\n def h(self): return 2\ndef f(x): return G().h()",
    ),
    "method": ("class f:\n def step(self): return 1", "class f:\n def step(self): return 2"),
    "class attribute": ("class f:\n reward = 1", "class f:\n reward = 2"),
    "property": (
        "class f:\n @property\n def reward(self): return 1",
        "class f:\n @property\n def reward(self): return 2",
    ),
    "base class": (
        "class B:\n def r(self): return 1\nclass f(B): pass",
        "class B:\n def r(self): return 2\nclass f(B): pass",
    ),
    "instance": (
        "class C:\n def __init__(self, k): self.k = k\n def __call__(self): return self.k\nf = C(1)",
        "class C:\n def __init__(self, k): self.k = k\n def __call__(self): return self.k\nf = C(2)",
    ),
    "partial": (
        "import functools\ndef g(k): return k\nf = functools.partial(g, k=1)",
        "import functools\ndef g(k): return k\nf = functools.partial(g, k=2)",
    ),
    "set": ("def f(x): return x in {'a', 'b', 'c'}", "def f(x): return x in {'a', 'b', 'd'}"),
}


@pytest.mark.parametrize("case", PAIRS)
def test_a_changed_object_of_a_notebook_is_told_from_the_earlier_one(case: str) -> None:
    before, after = PAIRS[case]
    assert digest(session(before)) == digest(session(before))
    assert digest(session(after)) != digest(session(before))


SOURCES = {
    "rewards.py": "from .deep import scale\nfrom .other import *\nimport json, torch\n",
    "deep/__init__.py": "from .scale import scale\n",
    "deep/scale.py": "def scale(x):\n    from importlib import import_module\n    import_module('pkg.late').late(x)\n",
    "late.py": "def late(x): return open('pkg/words.txt').read()\n",
    "other.py": "import os\nHERE = os.path.join('pkg', 'data', 'a.csv')\n",
    "words.txt": "one\n",
    "data/a.csv": "1\n",
    "__init__.py": "VERSION = 1\n",
}


@pytest.mark.parametrize("changed", [*SOURCES, "unused.py", "log.txt"])
def test_what_a_module_imports_and_reads_belongs_to_it(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {**SOURCES, "unused.py": "x = 1\n", "log.txt": "x = 1\n"}.items():
        (tmp_path / "pkg" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pkg" / name).write_text(text)
    (tmp_path / "pkg/other.py").write_text(SOURCES["other.py"] + "open('pkg/log.txt', 'w')\n")

    def found() -> str:
        code = CodeIdentity()
        code.add_module("pkg.rewards")
        return code.digest()

    before = found()
    with (tmp_path / "pkg" / changed).open("a") as file:
        file.write("# more\n")
    assert (found() != before) == (changed in SOURCES)


def test_a_module_that_changes_after_its_import_counts_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "imported_early.py").write_text("def f(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("imported_early")
    before = digest(module.f)
    (tmp_path / "imported_early.py").write_text("def f(): return 22\n")
    assert digest(module.f) == before
    assert "imported_early.py has changed, but this process still runs the version that it imported" in caplog.text
    assert digest(importlib.reload(module).f) != before


def test_installed_code_counts_by_its_version() -> None:
    code = CodeIdentity()
    code.add(json.JSONDecoder)
    code.add_module("pytest")
    assert f"package pytest pytest {pytest.__version__}" in "\n".join(f"{k} {v}" for k, v in code._parts.items())


def small_config(*words: str) -> Config:
    return load_config(None, ["environment=guess_number/valid", *words])


@pytest.mark.parametrize(
    "words",
    [
        "environment.options={files: {valid: here/a.txt}}",
        "environment.options={data: here}",
        "agent.options={command: 'python here/a.txt --quiet'}",
        "agent.options={command: [python, here/a.txt]}",
        "agent.tools=[{name: sql, database: here/a.txt}]",
    ],
)
def test_files_that_the_config_names_are_read(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.txt").write_text("1")
    config = small_config(words)
    before = code_identity(config, tmp_path / "runs")
    assert code_identity(config, tmp_path / "runs") == before
    (tmp_path / "here" / "a.txt").write_text("2")
    assert code_identity(config, tmp_path / "runs") != before


def test_the_file_that_a_name_is_of_belongs_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward itself is a function of a library, wherever its file gets it from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    found = []
    for more in ("", "", "TABLE = 'c'\n"):
        monkeypatch.delitem(sys.modules, "made", raising=False)
        Path("made.py").write_text(f"import functools\nimport math\nscore = functools.partial(math.dist, [0])\n{more}")
        found.append(code_identity(small_config("agent.reward=[./made.py:score]"), tmp_path)["reward ./made.py:score"])
    assert found[0] == found[1] != found[2]


def test_a_script_is_followed_into_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "main.py").write_text("import agent_words\n")
    config = small_config("agent.options={command: '{python} agent/main.py'}")
    found = []
    for text in ("ANSWER = 50\n", "ANSWER = 51\n"):
        (tmp_path / "agent" / "agent_words.py").write_text(text)
        found.append(code_identity(config, tmp_path / "runs"))
    assert found[0] != found[1]


def test_a_folder_that_holds_the_results_is_not_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_config("environment.options={data: runs}")
    (tmp_path / "runs" / "evaluations").mkdir(parents=True)
    before = code_identity(config, tmp_path / "runs" / "evaluations")
    (tmp_path / "runs" / "log.txt").write_text("more")
    assert code_identity(config, tmp_path / "runs" / "evaluations") == before


REGISTERED = """
import gymnasium

class Registered(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(9)

    def __init__(self, word="a"):
        self.word = word

    def reset(self, *, seed=None, options=None):
        return self.word, {}

    def step(self, action):
        return "", 1.0, True, False, {}

class RegisteredToo(Registered):
    pass
"""


@pytest.mark.parametrize(
    "change",
    [
        {"kwargs": {"word": "b"}},
        {"max_episode_steps": 4},
        {"reward_threshold": 0.75},
        {"entry_point": "registered_world:RegisteredToo"},
    ],
)
def test_what_is_registered_with_an_environment_belongs_to_it(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "registered_world.py").write_text(REGISTERED)
    found = []
    for more in ({}, {}, change):
        fields = {"entry_point": "registered_world:Registered", "max_episode_steps": 3, "reward_threshold": 0.5, **more}
        gymnasium.register("tests/Registered-v0", **fields)
        try:
            config = load_config(None, ["environment=tests/Registered-v0"])
            found.append(code_identity(config, tmp_path))
        finally:
            del gymnasium.registry["tests/Registered-v0"]
            sys.modules.pop("registered_world", None)
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_two_classes_or_functions_of_one_file_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "twins.py").write_text("class A: pass\nclass B: pass\ndef f(): pass\ndef g(): pass\n")
    twins = importlib.import_module("twins")
    found = set()
    for target in (twins.A, twins.B, twins.f, twins.g):
        code = CodeIdentity()
        code.add(functools.partial(target))
        found.add(code.digest())
    assert len(found) == 4


def test_the_roles_own_tools_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "role_tools.py").write_text("def look() -> str:\n    'Look.'\n    return 'a'\n")
    found = code_identity(small_config("agent.roles={helper: {tools: [role_tools:look]}}"), tmp_path)
    assert "tool role_tools:look" in found


def test_large_files_are_told_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_identity, "WHOLE_BYTES", 10)
    monkeypatch.setattr(file_identity, "SAMPLE_BYTES", 4)
    monkeypatch.setattr(file_identity, "SAMPLES", 3)
    file = tmp_path / "weights"
    file.write_bytes(b"0123456789abcdefghij")
    time_of = file.stat().st_mtime_ns
    before = file_digest(file)
    for place in (0, 9, 19):
        content = bytearray(b"0123456789abcdefghij")
        content[place] = 0
        file.write_bytes(content)
        os.utime(file, ns=(time_of, time_of))
        assert file_digest(file) != before, place


def test_a_folder_is_its_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    (tmp_path / ".hidden").write_text("1")
    before = folder_digest(tmp_path)
    (tmp_path / ".hidden").write_text("2")
    assert folder_digest(tmp_path) == before
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    assert folder_digest(tmp_path) != before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "adapters/planner/adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"]
)
def test_every_file_of_a_model_is_part_of_it(name: str, tmp_path: Path) -> None:
    config = small_config()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("1")
    before = weights(str(tmp_path), config)
    (tmp_path / name).write_text("2")
    assert weights(str(tmp_path), config) != before


def test_every_adapter_is_part_of_the_model(tmp_path: Path) -> None:
    words = [f"model.path={tmp_path}/base", "model.lora={rank: 4}", "agent.loop=planner_worker"]
    for name in ("base", "planner", "worker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text("1")
    words += [f"adapters={{planner: {{path: '{tmp_path}/planner'}}, worker: {{path: '{tmp_path}/worker'}}, new: {{}}}}"]
    config = small_config(*words)
    before = model_identity(config)
    for name in ("base", "planner", "worker"):
        (tmp_path / name / "adapter_model.safetensors").write_text("2")
        assert model_identity(config) != before, name
        before = model_identity(config)


def test_a_name_on_the_hub_is_its_revision_and_not_its_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch main of a repository may move to other weights under the same name."""
    in_cache = functools.partial(huggingface_hub.try_to_load_from_cache, cache_dir=tmp_path)
    monkeypatch.setattr("agentrl.models.identity.try_to_load_from_cache", in_cache)
    repository = tmp_path / "models--owner--name"
    found = [weights("owner/name", small_config())]
    for revision in ("aaa", "bbb"):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(revision)
        (repository / "snapshots" / revision).mkdir(parents=True)
        (repository / "snapshots" / revision / "config.json").write_text("{}")
        found.append(weights("owner/name", small_config()))
    assert found[1:] == [["owner/name", "revision aaa"], ["owner/name", "revision bbb"]]
    assert found[0] == ["owner/name", "not in the cache"]


def test_a_new_model_is_its_seed() -> None:
    assert weights(SCRATCH, small_config("run.seed=3")) != weights(SCRATCH, small_config("run.seed=4"))


Answers = dict[str, Any]


@pytest.fixture
def service() -> Iterator[Callable[[Answers], str]]:
    """Starts a server that answers GET requests by their paths."""
    running: list[http.server.ThreadingHTTPServer] = []

    def start(answers: Answers) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(self.path)
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        running.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_address[1]}/v1"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def card(**more: object) -> Answers:
    other = {"id": "other", "root": "/models/other", "created": 7}
    return {"/v1/models": {"data": [other, {"id": "m", **more}]}}


CHANGES: list[tuple[Answers, Answers]] = [
    (card(root="/models/a"), card(root="/models/b")),
    (card(created=1_700_000_000), card(created=1_700_000_001)),
    (card(meta={"size": 1}), card(meta={"size": 2})),
    (
        {"/model_info": {"model_path": "a", "weight_version": "1"}},
        {"/model_info": {"model_path": "a", "weight_version": "2"}},
    ),
    ({"/get_model_info": {"model_path": "a"}}, {"/get_model_info": {"model_path": "b"}}),
    (
        {"/api/tags": {"models": [{"name": "m", "digest": "1"}]}},
        {"/api/tags": {"models": [{"name": "m", "digest": "2"}]}},
    ),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
async def test_another_model_behind_the_same_name_is_noticed(
    before: Answers, after: Answers, service: Callable[[Answers], str]
) -> None:
    first, again, changed = [
        await served_model(OpenAIEngineConfig(url=service(answers), model="m")) for answers in (before, before, after)
    ]
    assert first
    assert first == again
    assert changed != first


@pytest.mark.parametrize(
    "words",
    [
        "engine={type: openai, url: 'URL', model: m}",
        "agent.judge={engine: {url: 'URL', model: m}}",
        "agent.roles={helper: {engine: {url: 'URL', model: m}}}",
    ],
)
async def test_every_service_of_an_evaluation_is_asked(words: str, service: Callable[[Answers], str]) -> None:
    url = service(card(root="/models/a"))
    found = await served_models(small_config(words.replace("URL", url)), has_model=True)
    assert found == {f"m at {url}": {"id": "m", "root": "/models/a"}}
    assert bool(await served_models(small_config(words.replace("URL", url)), has_model=False)) == ("agent" in words)


async def test_the_time_of_the_request_is_not_part_of_a_model(service: Callable[[Answers], str]) -> None:
    told = card(root="/models/a", created=int(time.time()), permission=[{"id": "modelperm-1"}])
    assert await served_model(OpenAIEngineConfig(url=service(told), model="m")) == {"id": "m", "root": "/models/a"}


@pytest.mark.parametrize("said", [b"<html>", b"[1]", b'{"data": 3}', b'{"data": [3]}', b"[" * 100_000, b"\xff\xfe"])
async def test_a_service_that_says_nothing_useful_is_no_error(said: bytes, service: Callable[[Answers], str]) -> None:
    paths = ("/v1/models", "/model_info", "/get_model_info", "/api/tags")
    url = service(dict.fromkeys(paths, said))
    assert await served_model(OpenAIEngineConfig(url=url, model="m")) == {}


async def test_the_folder_that_a_service_serves_is_read_where_it_is_on_this_machine(
    tmp_path: Path, service: Callable[[Answers], str]
) -> None:
    config = OpenAIEngineConfig(url=service(card(root=str(tmp_path))), model="m")
    (tmp_path / "model.safetensors").write_text("1")
    before = await served_model(config)
    (tmp_path / "model.safetensors").write_text("2")
    assert await served_model(config) != before


def test_an_episode_of_an_earlier_version_of_its_task_is_not_found(tmp_path: Path) -> None:
    task = Task(id="a", environment="w", prompt="before")
    trajectory = Trajectory(id="e", task_id="a", environment="w", seed=0, group_id="g")
    store = EpisodeStore(tmp_path / "episodes.jsonl")
    store.add(EvaluatedEpisode(task_id="a", sample=0, trajectory=trajectory, task=task_digest(task), played_at=9.5))
    store.close()
    store = EpisodeStore(tmp_path / "episodes.jsonl")
    found = store.find(task, 0)
    assert found is not None
    assert found.played_at == 9.5
    assert store.find(Task(id="a", environment="w", prompt="after"), 0) is None
    assert store.find(task, 1) is None
    store.close()


def test_a_partial_of_a_library_s_function_is_its_arguments() -> None:
    assert digest(functools.partial(json.dumps, indent=1)) != digest(functools.partial(json.dumps, indent=2))
