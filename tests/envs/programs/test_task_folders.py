"""Task folders of Harbor and terminal-bench of many shapes: each pays its own solution, and nothing else."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.terminal import environment as terminal
from agentrl.envs.terminal.checking import _warn
from agentrl.envs.terminal.dockerfile import CopiedFile, compose_variables, filled_variables, read_dockerfile
from agentrl.envs.terminal.environment import Terminal
from agentrl.envs.terminal.folders import read_folder
from agentrl.envs.terminal.places import places_of

from agentrl.errors import UsageError
from agentrl.rollout.env_pool import EnvPool
from agentrl.sandbox import read_spec
from agentrl.task import Task

REWARD = 'echo "$1" > "$LOGS_DIR/verifier/reward.txt"\n'
BASH_TEST = """#!/bin/bash
shopt -s nullglob
wanted=(hello there)
read -r -a found < out.txt
if [[ "${found[*]}" == "${wanted[*]}" && ${#found[@]} -eq 2 ]]; then reward=1; else reward=0; fi
echo "$reward" > "$LOGS_DIR/verifier/reward.txt"
exit 7
"""
PYTHON_TEST = """#!/usr/bin/env python3
import json, os, pathlib
found = pathlib.Path("out.json")
right = found.exists() and json.loads(found.read_text()) == {"answer": 42}
folder = pathlib.Path(os.environ["LOGS_DIR"], "verifier")
(folder / "reward.json").write_text(json.dumps({"reward": float(right), "style": 0.25, "note": "text"}))
"""
PYTHON_SOLUTION = """#!/usr/bin/env python3
import json
with open("out.json", "w") as file:
    json.dump({"answer": 42}, file)
"""
PARTIAL_TEST = """#!/bin/bash
score=0
[ -f one ] && score=0.5
[ -f one ] && [ -f two ] && score=1.0
echo $score > "$LOGS_DIR/verifier/reward.txt"
"""
HELPED_SOLUTION = """#!/bin/bash
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cp "$here/parts/answer.md" answer.md
echo "$TOKEN" > token
"""
PYTEST_RUN = """#!/bin/bash
printf '== short test summary info ==\\n' | tee log
if [ -d box ]; then echo 'PASSED test_a.py::test_box'; else echo 'FAILED test_a.py::test_box'; fi | cat
"""
TASKS: dict[str, dict[str, str]] = {
    "bash-isms": {
        "task.toml": "[verifier]\ntimeout_sec = 30\n",
        "tests/test.sh": BASH_TEST,
        "solution/solve.sh": "#!/bin/bash\nwords=(hello there)\necho ${words[@]} > out.txt\n",
    },
    "python": {"task.toml": "", "tests/test.sh": PYTHON_TEST, "solution/solve.sh": PYTHON_SOLUTION},
    "partial": {"task.toml": "", "tests/test.sh": PARTIAL_TEST, "solution/solve.sh": "touch one two\n"},
    "exit-code": {
        "task.toml": "",
        "tests/test.sh": "set -e\ntest -f done\n",
        "solution/solve.sh": "#!/bin/sh -e\ntouch done\n",
    },
    "files": {
        "task.toml": "",
        "environment/data/input.txt": "7\n",
        "environment/tool.sh": "#!/bin/sh\ntr 7 8\n",
        "tests/test.sh": f"set -- $(cmp -s out.txt $TEST_DIR/expected && echo 1 || echo 0)\n{REWARD}",
        "tests/expected": "8\n",
        "solution/solve.sh": "./tool.sh < data/input.txt > out.txt\n",
    },
    "dockerfile": {
        "task.toml": "",
        "environment/Dockerfile": "FROM ubuntu:24.04\nARG NAME=notes\nENV GREETING='good day' \\\n    LEVEL=3\n"
        "WORKDIR /app\nWORKDIR src\n# COPY hidden.txt .\nCOPY --chown=1:1 seed.txt other.txt ./\n"
        'COPY ["deep", "/app/$NAME"]\n',
        "environment/seed.txt": "seed\n",
        "environment/other.txt": "other\n",
        "environment/hidden.txt": "hidden\n",
        "environment/deep/er/x.txt": "x\n",
        "tests/test.sh": "#!/bin/bash\n"
        f'set -- $([ "$(cat out.txt)" = "good day 3 seed other x" ] && echo 1 || echo 0)\n{REWARD}',
        "solution/solve.sh": 'echo "$GREETING $LEVEL $(cat seed.txt other.txt ../notes/er/x.txt | xargs)" > out.txt\n'
        "test ! -e hidden.txt && test ! -e Dockerfile\n",
    },
    "absolute-paths": {
        "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 120.0\n[agent]\n'
        "timeout_sec = 120.0\n[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\nmemory_mb = 512\nstorage_mb = 64\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "tests/test.sh": "#!/bin/bash\nif python3 /tests/test_state.py; then echo 1 > /logs/verifier/reward.txt\n"
        "else echo 0 > /logs/verifier/reward.txt\nfi\n",
        "tests/test_state.py": "from pathlib import Path\n"
        "assert Path('/app/hello.txt').read_text().strip() == Path('/tests/right.txt').read_text().strip()\n",
        "tests/right.txt": "Hello, world!\n",
        "solution/solve.sh": "#!/bin/bash\ncp /solution/text.txt /app/hello.txt\n",
        "solution/text.txt": "Hello, world!\n",
    },
    "variables": {
        "task.toml": '[environment.env]\nMODE = "${MODE:-fast}"\n[verifier]\nenv = { WANTED = "fast sesame" }\n'
        '[solution.env]\nTOKEN = "sesame"\n',
        "tests/test.sh": '#!/bin/bash\nset -- $([[ "$MODE $(cat token)" == "$WANTED" ]] && grep -q code answer.md'
        f" && echo 1 || echo 0)\n{REWARD}",
        "solution/solve.sh": HELPED_SOLUTION,
        "solution/parts/answer.md": "```\ncode\n```\n",
    },
    "steps": {
        "task.toml": "[verifier]\ntimeout_sec = 30\n[environment]\nworkdir = '/app'\n[[steps]]\nname = 'one'\n"
        "min_reward = 0.5\n[steps.agent]\ntimeout_sec = 20\n[[steps]]\nname = 'two'\n",
        "tests/test.sh": f"set -- $(. $TEST_DIR/check.sh)\n{REWARD}",
        "tests/check.sh": "echo 0",
        "steps/one/instruction.md": "Make one.\n",
        "steps/one/tests/check.sh": "test -f one && cat one || echo 0",
        "steps/one/solution/solve.sh": "echo 1 > one\n",
        "steps/two/instruction.md": "Make two.\n",
        "steps/two/workdir/setup.sh": "cp given two\n",
        "steps/two/workdir/given": "two\n",
        "steps/two/tests/check.sh": "grep -q done two && test -f one -a ! -e setup.sh && echo 1 || echo 0",
        "steps/two/solution/solve.sh": "echo done >> two\n",
    },
    "parts": {
        "task.toml": "",
        "tests/test.sh": 'a=0; b=0; [ -f a ] && a=1; [ -f b ] && b=1; echo "{\\"a\\": $a, \\"b\\": $b}"'
        ' > "$LOGS_DIR/verifier/reward.json"\n',
        "solution/solve.sh": "touch a b\n",
    },
    "bench": {
        "task.yaml": "instruction: Make the folder box.\nmax_test_timeout_sec: 30.0\nparser_name: pytest\n",
        "Dockerfile": "FROM python:3.13\nWORKDIR /app\nCOPY start.txt .\n",
        "start.txt": "start\n",
        "docker-compose.yaml": "services:\n  client:\n    environment: [COLOUR=red, 'TEST_DIR=${T_DIR}']\n",
        "run-tests.sh": PYTEST_RUN,
        "tests/test_a.py": "",
        "solution.yaml": "- command: test $COLOUR = red && mkdir box\n- command: cp start.txt box\n  block: true\n",
    },
}  # fmt: skip
PARTIAL = {"parts": ("touch b", 0.5, {"a": 0.0, "b": 1.0}), "partial": ("touch one", 0.5, {})}


@pytest.fixture(params=["plain", "local"])
def sandbox(request: pytest.FixtureRequest) -> str:
    if request.param == "local" and shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here: apt-get install bubblewrap")
    return str(request.param)


@pytest.fixture(autouse=True)
def _unread() -> Iterator[None]:
    yield
    read_folder.cache_clear()
    _warn.cache_clear()


def written(folder: Path, name: str, **files: str) -> dict[str, str]:
    """A folder with one task; further files replace its own."""
    for path, text in {"instruction.md": "Do it.\n", **TASKS[name], **files}.items():
        file = folder / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if path.endswith("tool.sh"):
            file.chmod(0o755)
    return {"test": str(folder)}


async def played(world: Terminal, *commands: str) -> tuple[Any, ...]:
    """The last step of an episode: by commands that are then submitted, or by the solution."""
    observation, _ = await world.reset(options={"task_id": "test-0"})
    expert = world.expert() if not commands else None
    actions = [f"```bash\n{command}\n```" for command in commands if command] + ["submit"]
    try:
        while True:
            step = await world.step(actions.pop(0) if expert is None else expert.act(observation))
            observation = step[0]
            if step[2] or step[3]:
                return tuple(step)
    finally:
        await world.close()


@pytest.mark.parametrize("name", TASKS)
async def test_a_task_pays_its_own_solution_in_full_and_nothing_without_it(
    tmp_path: Path, sandbox: str, name: str
) -> None:
    if name in ("dockerfile", "absolute-paths") and sandbox == "plain":
        pytest.skip("its absolute paths take a sandbox with folders of its own")
    world = Terminal(folders=written(tmp_path, name), sandbox=sandbox)
    assert (await played(world))[:4] == ("It is done.", 1.0, True, False)
    assert (await played(world, ""))[:4] == ("It is not done.", 0.0, True, False)


@pytest.mark.parametrize("name", PARTIAL)
async def test_a_partial_reward_is_paid_in_part(tmp_path: Path, sandbox: str, name: str) -> None:
    command, reward, parts = PARTIAL[name]
    step = await played(Terminal(folders=written(tmp_path, name), sandbox=sandbox), command)
    assert (step[1], step[4]["success"]) == (reward, False)
    assert step[4]["reward_components"] == {**parts, "checks": reward}


async def test_the_parts_of_a_reward_are_components(tmp_path: Path, sandbox: str) -> None:
    step = await played(Terminal(folders=written(tmp_path, "python"), sandbox=sandbox))
    assert step[4]["reward_components"] == {"style": 0.25, "checks": 1.0}


REWARDS: list[tuple[Mapping[str, str], float]] = [
    ({"reward.txt": " 0.75\n"}, 0.75),
    ({"reward.txt": "1e-1"}, 0.1),
    ({"reward.json": "0.5"}, 0.5),
    ({"reward.json": '{"reward": 0.25, "x": 1}', "reward.txt": "1"}, 0.25),
    ({"reward.json": '{"x": 1, "y": "text"}', "reward.txt": "0.5"}, 0.5),
    ({"reward.json": '{"x": 1, "y": 0.5, "z": null}'}, 0.75),
    ({"reward.json": '{"reward": "0.5"}'}, 0.5),
    ({"reward.txt": "-1"}, -1.0),
    ({"test.sh": '#!/bin/sh\r\necho 0.5 > "$LOGS_DIR/verifier/reward.txt"\r\n'}, 0.5),  # SWE-bench#661
]
NO_REWARDS = [
    {"reward.txt": ""},
    {"reward.txt": "nan"},
    {"reward.txt": "high"},
    {"reward.json": "{"},
    {"reward.json": "[" * 50_000},
    {"reward.json": '{"reward": ' + "9" * 5000 + "}"},
    {"reward.json": '{"x": null}'},
]


def writing(files: Mapping[str, str]) -> str:
    lines = [f"cp $TEST_DIR/{name} $LOGS_DIR/verifier/{name}" for name in files]
    return "\n".join(["#!/bin/sh", *lines, "exit 3"])


@pytest.mark.parametrize(("files", "reward"), REWARDS)
async def test_rewards_are_read_as_they_are_written(tmp_path: Path, files: dict[str, str], reward: float) -> None:
    given = {f"tests/{name}": text for name, text in files.items()}
    folders = written(tmp_path, "partial", **{"tests/test.sh": writing(files), **given})
    assert (await played(Terminal(folders=folders, sandbox="plain"), "true"))[1] == pytest.approx(reward)


@pytest.mark.parametrize("files", NO_REWARDS)
async def test_what_is_no_reward_is_0_and_says_so(
    tmp_path: Path, files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    given = {f"tests/{name}": text for name, text in files.items()}
    folders = written(tmp_path, "partial", **{"tests/test.sh": writing(files), **given})
    with caplog.at_level(logging.WARNING):
        assert (await played(Terminal(folders=folders, sandbox="plain"), "true"))[1] == 0.0
    assert "task partial: its verifier wrote a reward that is not a number" in caplog.text


async def test_a_verifier_without_a_reward_is_reported_where_its_format_requires_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # reef#215, evalscope#1608: the verifier fails before it writes a reward, and its last command succeeds
    failing = "no-such-pytest tests || true\necho done\n"
    with caplog.at_level(logging.WARNING):
        harbor = written(tmp_path / "a", "partial", **{"tests/test.sh": failing})
        assert (await played(Terminal(folders=harbor, sandbox="plain"), "true"))[1] == 1.0
    assert "task partial: its verifier wrote no reward.json or reward.txt, which Harbor requires" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        bench = written(tmp_path / "b", "bench", **{"run-tests.sh": failing})
        await played(Terminal(folders=bench, sandbox="plain"), "true")
    assert "reward.txt" not in caplog.text


async def test_verifier_timeout_gives_no_reward_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"task.toml": "[verifier]\ntimeout_sec = 0.2\n", "tests/test.sh": "#!/bin/sh\nexec tail -f /dev/null\n"}
    with caplog.at_level(logging.WARNING):
        step = await played(Terminal(folders=written(tmp_path, "partial", **files), sandbox="plain"), "true")
    assert step[1] == 0.0
    assert "task partial: its verifier was stopped after its limit of 0.2 s" in caplog.text
    early = {**files, "tests/test.sh": f"#!/bin/sh\nset -- 0.5\n{REWARD}exec tail -f /dev/null\n"}
    read_folder.cache_clear()
    step = await played(Terminal(folders=written(tmp_path, "partial", **early), sandbox="plain"), "true")
    assert step[1] == 0.5


@pytest.mark.parametrize(
    ("printed", "code", "reward"),
    [
        ("== short test summary info ==\nPASSED a\nPASSED b", 0, 1.0),
        ("== short test summary info ==\nPASSED a\nSKIPPED b\nXFAIL c", 1, 1.0),
        ("== short test summary info ==\nPASSED a\nFAILED b", 0, 0.0),
        ("== short test summary info ==\nERROR a", 0, 0.0),
        ("== short test summary info ==\n\x1b[31mFAILED\x1b[0m a", 0, 0.0),  # agent-lightning#599
        ("== short test summary info ==\nSKIPPED a", 0, 0.0),
        ("PASSED a\n== short test summary info ==\nFAILED a", 0, 0.0),
        ("no tests ran", 0, 1.0),
        ("no tests ran", 5, 0.0),
        ("PASSED by a program without tests", 1, 0.0),  # SWE-bench#601
    ],
)
async def test_what_pytest_prints_decides_where_a_script_hides_its_exit_code(
    tmp_path: Path, printed: str, code: int, reward: float
) -> None:
    script = f"cat $TEST_DIR/printed.txt | cat\nexit {code}\n"
    folders = written(tmp_path, "bench", **{"run-tests.sh": script, "tests/printed.txt": printed + "\n"})
    assert (await played(Terminal(folders=folders, sandbox="plain"), "true"))[1] == reward
    own = {"task.yaml": "instruction: Do it.\nparser_name: own\n", "run-tests.sh": script}
    other = written(tmp_path, "bench", **own)
    read_folder.cache_clear()
    step = await played(Terminal(folders=other, sandbox="plain"), "true")
    assert step[1] == float(code == 0)


def test_task_limits_apply_unless_the_user_sets_others(tmp_path: Path) -> None:
    toml = (
        "[verifier]\ntimeout_sec = 900\n[agent]\ntimeout_sec = 300.5\n"
        '[environment]\nmemory = "1.5G"\nstorage_mb = 3000\ncpus = 4\n'
    )
    (task,) = read_folder(written(tmp_path, "partial", **{"task.toml": toml})["test"])
    assert (task.verifier_seconds, task.agent_seconds) == (900.0, 300.5)
    limits = places_of(read_spec("local"), task).spec.limits
    assert (limits.seconds, limits.cpu_seconds) == (900.0, 900.0)
    assert (limits.memory_bytes, limits.disk_bytes) == (1536 * 2**20, 3000 * 2**20)
    own = {"seconds": 5, "memory_bytes": 2**20}
    world = Terminal(folders={"test": str(tmp_path)}, sandbox={"type": "local", "limits": own})
    kept = places_of(read_spec({"type": "local", "limits": own}), task, limits=world._own_limits).spec.limits
    assert (kept.seconds, kept.memory_bytes, kept.disk_bytes) == (5, 2**20, 3000 * 2**20)
    assert kept.cpu_seconds == 900.0


def test_missing_task_limits_have_the_formats_defaults(tmp_path: Path) -> None:
    written(tmp_path, "bench", **{"task.yaml": "instruction: Do it."})
    written(tmp_path, "files")
    bench, harbor = read_folder(str(tmp_path))
    assert (bench.verifier_seconds, bench.agent_seconds) == (60.0, 360.0)
    assert (harbor.verifier_seconds, harbor.agent_seconds) == (600.0, 600.0)
    assert (bench.memory_bytes, harbor.disk_bytes) == (None, None)


async def test_command_timeout_is_the_tasks_agent_timeout(tmp_path: Path) -> None:
    folders = written(tmp_path, "partial", **{"task.toml": "[agent]\ntimeout_sec = 0.2\n"})
    for seconds, stopped in ((None, "0.2"), (0.1, "0.1")):
        world = Terminal(folders=folders, sandbox="plain", seconds=seconds)
        await world.reset(options={"task_id": "test-0"})
        said = (await world.step("```bash\ntail -f /dev/null\n```"))[0]
        assert said == f"[stopped after {stopped} seconds]"
        await world.close()


async def test_step_timeout_covers_the_tasks_limits(tmp_path: Path) -> None:
    toml = "[verifier]\ntimeout_sec = 900\n[agent]\ntimeout_sec = 300\n"
    options = {"folders": written(tmp_path, "partial", **{"task.toml": toml}), "sandbox": "plain"}
    pool = EnvPool(terminal.SPEC, options=options, step_timeout_s=0.001)
    async with pool.borrow("test") as handle:
        await handle.reset(Task(id="test-0", environment="terminal", options={"task_id": "test-0"}))
        assert (await handle.step("```bash\necho hi\n```")).result.observation == "hi"
    await pool.close()


def test_places_follow_the_type_of_the_sandbox(tmp_path: Path) -> None:
    (task,) = read_folder(written(tmp_path, "dockerfile")["test"])
    local = places_of(read_spec("local"), task)
    assert (local.folder, local.further, local.spec.options["folder"]) == ("/app/src", (), "/app")
    assert local.spec.options["writable"] == ["/tests", "/logs", "/solution"]
    assert local.spec.env == {"GREETING": "good day", "LEVEL": "3"}
    docker = places_of(read_spec({"type": "docker", "image": "some", "options": {"writable": ["/x"]}}), task)
    assert (docker.spec.image, docker.spec.options["folder"]) == ("some", "/app")
    assert docker.spec.options["writable"] == ["/x", "/tests", "/logs", "/solution"]
    elsewhere = places_of(read_spec("plain"), task)
    assert (elsewhere.folder, elsewhere.is_absolute, elsewhere.spec.options) == (None, False, {})
    assert elsewhere.place_of("/app/src/seed.txt", task) == "seed.txt"
    with pytest.raises(UsageError, match="sandboxes of type plain do not allow: got /app/notes/x"):
        elsewhere.place_of("/app/notes/x", task)


def test_an_image_has_the_files_of_its_task(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "org/one:1"\n'
    (task,) = read_folder(written(tmp_path, "dockerfile", **{"task.toml": toml})["test"])
    places = places_of(read_spec({"type": "docker", "image": "other"}), task)
    assert (task.files, places.spec.image, places.folder) == ((), "org/one:1", None)
    assert "folder" not in places.spec.options
    (bare,) = read_folder(written(tmp_path / "bare", "files", **{"task.toml": toml})["test"])
    places = places_of(read_spec({"type": "docker", "image": "other"}), bare)
    placed = [places.place_of(one.target, bare) for one in bare.files]
    assert placed == ["data/input.txt", "tool.sh"], "they go into the image's own working folder"


async def test_files_outside_the_working_folder_reach_the_verifier(tmp_path: Path, sandbox: str) -> None:
    files = {
        "environment/Dockerfile": "FROM x\nCOPY seed.txt /data/in/\nWORKDIR /app\n",
        "tests/test.sh": f'set -- $([ "$(cat /data/in/seed.txt /data/out)" = "seed\nmore" ] && echo 1)\n{REWARD}',
        "solution/solve.sh": "echo more > /data/out\n",
    }
    world = Terminal(folders=written(tmp_path, "dockerfile", **files), sandbox=sandbox)
    if sandbox == "plain":
        with pytest.raises(UsageError, match=r"do not allow: got /data/in/seed\.txt"):
            await played(world, "ls")
        await world.close()
    else:
        assert (await played(world))[1] == 1.0


def test_a_dockerfile_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    for name in ("one.txt", "two.txt", "a b/c.txt", "Dockerfile"):
        (tmp_path / name).write_text(
            "FROM base AS first\nENV OLD=1\nCOPY one.txt /old/\nFROM base\n"
            'ENV A=1 B="two words"\nENV C three words\nARG D=4\nENV E=${D}-${F:-five}$A\n'
            "RUN apt-get update && \\\n    # a comment\n    apt-get install -y x\n"
            "COPY --from=first /x /y\nADD https://example.com/x.tar /z/\n"
            'WORKDIR /srv/${A}\nCOPY *.txt ./\nCOPY one.txt named\nCOPY ["a b", "ab/"]\nCOPY . .\nCMD ["x"]\n'
        )
    recipe = read_dockerfile(tmp_path / "Dockerfile")
    assert recipe.folder == "/srv/1"
    assert recipe.variables == {"A": "1", "B": "two words", "C": "three words", "E": "4-five1"}
    assert recipe.commands == ["apt-get update &&  apt-get install -y x"]
    assert [one.target for one in recipe.copies] == [
        "/srv/1/one.txt",
        "/srv/1/two.txt",
        "/srv/1/named",
        "/srv/1/ab/c.txt",
        "/srv/1/a b/c.txt",
        "/srv/1/one.txt",
        "/srv/1/two.txt",
    ]
    assert recipe.copies[2] == CopiedFile(source=tmp_path / "one.txt", target="/srv/1/named")


def test_texts_in_a_dockerfile_are_files(tmp_path: Path) -> None:
    (tmp_path / "seed.txt").write_text("7")
    (tmp_path / "Dockerfile").write_text(
        "FROM x\nENV A=1\nWORKDIR /app\nCOPY <<EOF conf.txt\n# kept $A\n\nCOPY no.txt /x \\\nEOF\n"
        'COPY --chmod=755 <<-"END" /usr/bin/run.sh\n\techo $A\n\tEND\n'
        "RUN <<EOF\nCOPY no.txt /\nEOF\nRUN echo $((1<<3)) && cat <<< x\n"
        "COPY <<a.txt <<'b.txt' seed.txt /d/\n1\na.txt\n$A\nb.txt\nCOPY seed.txt .\n"
    )
    recipe = read_dockerfile(tmp_path / "Dockerfile")
    assert {one.target: one.read() for one in recipe.copies} == {
        "/app/conf.txt": b"# kept 1\n\nCOPY no.txt /x \\\n",
        "/usr/bin/run.sh": b"echo $A\n",
        "/d/a.txt": b"1\n",
        "/d/b.txt": b"$A\n",
        "/d/seed.txt": b"7",
        "/app/seed.txt": b"7",
    }
    assert [one.target for one in recipe.copies if one.is_executable] == ["/usr/bin/run.sh"]
    assert len(recipe.commands) == 2


IGNORED = "# comment\n*.log\n/secret\n**/cache\ndeep/*/x?.txt\n!keep.log\ndata/[ab].csv\n\n./top.md\n"


@pytest.mark.parametrize("name", [".dockerignore", "Dockerfile.dockerignore"])
@pytest.mark.parametrize("lines", ["COPY . .\n", ""])
def test_a_dockerignore_leaves_files_out(name: str, lines: str, tmp_path: Path) -> None:
    kept = {"keep.log", "sub/other.log", "deep/x1.txt", "data/c.csv", "secrets", "sub/secret"}
    left_out = {"a.log", "secret/key", "cache/a", "sub/cache/b", "deep/in/x1.txt", "data/a.csv", "top.md"}
    files = {f"environment/{path}": "1" for path in kept | left_out}
    files |= {"environment/Dockerfile": f"FROM x\nWORKDIR /w\n{lines}", f"environment/{name}": IGNORED}
    (task,) = read_folder(written(tmp_path, "python", **files)["test"])
    assert {one.target for one in task.files} == {f"/w/{path}" for path in kept}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("COPY <<EOF /app/a.txt\nno end", "here-document without an end: got <<EOF /app/a.txt, expected a line EOF"),
        ("COPY left.out /app/", "copies a file that does not exist: got left.out, excluded by .dockerignore"),
        ("COPY none.txt /app/", "copies a file that does not exist: got none.txt"),
        ("COPY ../secret /app/", "copies a file that does not exist"),
        ("COPY one", "has a copy instruction that cannot be read"),
        ('COPY ["one', "has a copy instruction that cannot be read"),
    ],
)
def test_a_dockerfile_that_copies_what_is_not_there_is_rejected(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "context" / "left.out").write_text("x")
    (tmp_path / "context" / ".dockerignore").write_text("left.*\n")
    file = tmp_path / "context" / "Dockerfile"
    file.write_text(f"FROM x\n{line}\n")
    with pytest.raises(UsageError, match=words):
        read_dockerfile(file)


def test_instructions_that_are_not_run_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"environment/Dockerfile": "FROM x\nRUN make\n"}
    with caplog.at_level(logging.WARNING):
        read_folder(written(tmp_path, "files", **files)["test"])
    assert "has 1 RUN instructions, which are skipped" in caplog.text


def test_services_of_a_compose_file_are_named_and_its_variables_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compose = "services: {db: {image: redis}, main: {environment: {COLOUR: red, MODE: slow}}}"
    files = {"environment/docker-compose.yaml": compose}  # harbor's task with a data base
    with caplog.at_level(logging.WARNING):
        (task,) = read_folder(written(tmp_path, "variables", **files)["test"])
    assert "docker-compose.yaml has the services db, which sandboxes do not start" in caplog.text
    assert task.variables == {"COLOUR": "red", "MODE": "${MODE:-fast}"}


def test_variables_of_a_compose_file(tmp_path: Path) -> None:
    file = tmp_path / "docker-compose.yaml"
    for text, found in [
        ("services: {db: {environment: [A=0]}, main: {environment: {A: 1, B: $X, C: null}}}", {"A": "1"}),
        ("services:\n  one:\n    environment:\n      - A=b=c\n      - D\n", {"A": "b=c"}),
        ("services: {one: {}}", {}),
        ("services: []", {}),
        ("- 1", {}),
    ]:
        file.write_text(text)
        assert compose_variables(file) == found
    file.write_text("services: {")
    with pytest.raises(UsageError, match="cannot be read"):
        compose_variables(file)


def test_variables_that_a_task_refers_to_come_from_the_sandboxs_settings() -> None:
    given = {"A": "${KEY}-x", "B": "${OTHER:-y}", "C": 3}
    assert filled_variables(given, {"KEY": "k"}, "task a") == {"A": "k-x", "B": "y", "C": "3"}
    with pytest.raises(UsageError, match=r"task a needs the variable KEY.*environment.options.sandbox.env.KEY=…"):
        filled_variables(given, {}, "task a")
    with pytest.raises(UsageError, match="task a is not a table"):
        filled_variables(["A"], {}, "task a")


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("partial", {"task.toml": "[verifier]\ntimeout_sec = '9'\n"}, "a time limit in .*task.toml is not valid"),
        ("partial", {"task.toml": "[agent]\ntimeout_sec = -1\n"}, "a time limit"),
        ("partial", {"task.toml": "[agent]\ntimeout_sec = inf\n"}, "a time limit"),
        ("partial", {"task.toml": "agent = 3\n"}, "agent of .*task.toml is not a table"),
        ("partial", {"task.toml": "[environment]\nenv = 'A=1'\n"}, "env of .*task.toml is not a table"),
        ("partial", {"task.toml": "[verifier]\nenv = ['A=1']\n"}, "env of .*task.toml is not a table"),
        ("partial", {"task.toml": "[environment]\nmemory_mb = 'much'\n"}, "memory of .*task.toml is not valid"),
        ("partial", {"task.toml": "[[steps]]\nname = 'one'\n"}, "a task folder has no instruction"),
        ("partial", {"task.toml": "[[steps]]\nname = '../one'\n"}, "step of .*task.toml is missing or not valid"),
        ("partial", {"task.toml": "steps = 3\n"}, "steps of .*task.toml are not tables"),
        ("partial", {"task.toml": "multi_step_reward_strategy = 'best'\n[[steps]]\n"}, "unknown multi_step_reward_st"),
        (
            "steps",
            {"steps/two/tests/test.sh": "", "task.toml": "[[steps]]\nname = 'two'\nmin_reward = 'much'\n"},
            "min_rew",
        ),
        ("steps", {"task.toml": "[[steps]]\nname = 'one'\n[[steps]]\nname = 'one'\n"}, "two steps of .* have the same"),
        ("partial", {"task.toml": "[verifier]\nenvironment_mode = 'own'\n"}, "unknown verifier.environment_mode"),
        ("partial", {"task.toml": "[\n"}, "a task.toml cannot be read"),
        ("bench", {"task.yaml": "instruction: [\n"}, "a task.yaml cannot be read"),
        ("bench", {"task.yaml": "instruction: x\nmax_agent_timeout_sec: soon\n"}, "a time limit in .*task.yaml"),
        ("bench", {"solution.yaml": "command: x\n"}, "solution.yaml cannot be read"),
    ],
)
def test_a_task_that_cannot_be_read_is_named(tmp_path: Path, name: str, files: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_folder(written(tmp_path, name, **files)["test"])


@pytest.mark.parametrize("place", ["environment/data", "tests/data", "data", "solution"])
@pytest.mark.parametrize("target", ["file", "folder"])
def test_a_link_to_files_of_this_machine_is_rejected(tmp_path: Path, place: str, target: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("secret")
    folders = written(tmp_path / "tasks", "files")
    link = tmp_path / "tasks" / "files" / place
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(outside if target == "folder" else outside / "key")
    with pytest.raises(UsageError, match=r"task files has a link that leads out of .*outside"):
        read_folder(folders["test"])
    link.unlink()
    link.symlink_to(tmp_path / "tasks" / "files" / "task.toml")
    assert read_folder(folders["test"])


def test_the_base_description_of_an_early_task_is_its_instruction(tmp_path: Path) -> None:
    text = "descriptions:\n  - {key: hard, description: Guess.}\n  - {key: base, description: Make it.}\n"
    (task,) = read_folder(written(tmp_path, "bench", **{"task.yaml": text})["test"])
    assert task.instruction == "Make it."


async def test_a_solution_that_cannot_be_typed_is_rejected(tmp_path: Path) -> None:
    files = {"solution/data.bin": "x" * 40_000, "solution/solve.sh": "touch one two\n"}
    world = Terminal(folders=written(tmp_path, "partial", **files), sandbox="plain")
    await world.reset(options={"task_id": "test-0"})
    with pytest.raises(UsageError, match="the solution of task partial is too long for a command"):
        world.expert()
    shutil.rmtree(tmp_path / "partial" / "solution")
    read_folder.cache_clear()
    await world.reset(options={"task_id": "test-0"})
    with pytest.raises(UsageError, match="task partial has no solution"):
        world.expert()
    await world.close()
