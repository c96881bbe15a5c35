"""The environments with a shell, and the one with an interpreter: solved by their experts, deaf to tricks."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.programs.shell import read_command
from agentrl.envs.python_math import environment as python_math
from agentrl.envs.python_math.environment import PythonMath
from agentrl.envs.repo_fix import environment as repo_fix
from agentrl.envs.repo_fix.environment import RepoFix
from agentrl.envs.repo_fix.mutations import mutations, with_mistakes
from agentrl.envs.repo_fix.tasks import cases_of, faults_of, share_right
from agentrl.envs.task_ids import SPLITS
from agentrl.envs.terminal import environment as terminal
from agentrl.envs.terminal.environment import Terminal
from agentrl.envs.terminal.folders import read_folder
from agentrl.envs.terminal.kinds import KINDS
from agentrl.envs.terminal.tasks import errand_of

from agentrl.errors import UsageError
from agentrl.testing.env_check import reward_integrity
from agentrl.testing.report import CheckStatus

REPO_DIGESTS = {"train": "14f5922fb819593b", "valid": "718e132ad4d2395a", "test": "60daa325e56ab8b8"}
TERMINAL_DIGESTS = {"train": "970cb9a1c1ba9014", "valid": "4c86ed861e2cb885", "test": "933ef484bb965c53"}


def digest(texts: list[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


async def play(world: Any, actions: list[str] | None = None, **reset: Any) -> tuple[Any, ...]:
    """The last step of an episode, by given actions or by the expert."""
    observation, _ = await world.reset(**reset)
    expert = world.expert()
    left = list(actions or ())
    try:
        while True:
            step = await world.step(left.pop(0) if actions else expert.act(observation))
            observation = step[0]
            if step[2] or step[3]:
                return tuple(step)
    finally:
        await world.close()


def bash(command: str) -> str:
    return f"```bash\n{command}\n```"


def task_options(split: str, number: int) -> dict[str, Any]:
    return {"options": {"task_id": f"{split}-{number}"}}


async def test_work_that_is_not_submitted_can_be_judged() -> None:
    world = Terminal()
    errand = errand_of("train-0")
    await world.reset(**task_options("train", 0))
    try:
        for command in errand.commands:
            await world.step(bash(command))
        reward, info = await world.final_reward()
    finally:
        await world.close()
    assert (reward, info["success"]) == (1.0, True)
    assert info["reward_components"]["checks"] == 1.0


# repo_fix


def test_repositories_are_unchanged() -> None:
    found = {s: digest([repr((f.library.package, f.source, f.failing)) for f in faults_of(s)]) for s in SPLITS}
    assert found == REPO_DIGESTS


def test_splits_have_separate_repositories() -> None:
    packages = [{fault.library.package for fault in faults_of(split)} for split in SPLITS]
    assert not (packages[0] & packages[1] | packages[0] & packages[2] | packages[1] & packages[2])
    assert all(fault.failing for split in SPLITS for fault in faults_of(split))


def test_a_mutation_changes_one_place() -> None:
    source = "def f(a):\n    return a + 1 if a < 3 else 0\n"
    changed = {mutation.code.splitlines()[1].strip() for mutation in mutations(source)}
    assert changed == {
        "return a - 1 if a < 3 else 0",
        "return a + 2 if a < 3 else 0",
        "return a + 0 if a < 3 else 0",
        "return a + 1 if a <= 3 else 0",
        "return a + 1 if a < 4 else 0",
        "return a + 1 if a < 2 else 0",
        "return a + 1 if a < 3 else 1",
    }


@pytest.mark.parametrize(("split", "number"), [("train", 0), ("train", 5), ("valid", 1), ("test", 2)])
async def test_the_expert_mends_repositories(split: str, number: int) -> None:
    observation, reward, terminated, _, info = await play(RepoFix(sandbox="plain"), **task_options(split, number))
    assert (observation, reward, terminated, info["success"]) == ("It is done.", 1.0, True, True)


@pytest.mark.parametrize("number", [0, 3, 8])
async def test_submitting_at_once_earns_nothing(number: int) -> None:
    """Most hidden calls are right at the start: what was never broken pays nothing."""
    assert share_right(faults_of("train")[number]) > 0.5
    step = await play(RepoFix(sandbox="plain"), ["submit"], **task_options("train", number))
    assert (step[1], step[4]["reward_components"]) == (0.0, {"checks": 0.0})


async def test_half_of_two_repairs_earn_a_part() -> None:
    """One of two mistakes is repaired."""
    number, fault = next((n, fault) for n, fault in enumerate(faults_of("train")) if fault.count == 2)
    library, right = fault.library, with_mistakes(fault.library.source, ()).splitlines()
    lines = fault.source.splitlines()
    first = next(n for n, line in enumerate(lines) if line != right[n])
    lines[first] = right[first]
    repaired = "\n".join(lines)
    write = bash(f"cat > {library.package}/{library.module}.py <<'END'\n{repaired}\nEND")
    step = await play(RepoFix(sandbox="plain"), [write, "submit"], **task_options("train", number))
    assert step[1] == 0.0
    assert 0.0 < step[4]["reward_components"]["checks"] < 1.0


async def test_run_times_of_tests_are_not_shown() -> None:
    world = RepoFix(sandbox="plain")
    await world.reset(**task_options("train", 0))
    shown = (await world.step(bash("python3 -m unittest discover tests")))[0]
    assert re.search(r"^Ran \d+ tests?$", shown, re.MULTILINE)
    await world.close()


async def test_changed_tests_mend_nothing() -> None:
    world = RepoFix(sandbox="plain")
    tricks = ["rm -r tests", "mkdir tests; echo 'assert True' > tests/test_all.py", "git commit -qam done"]
    step = await play(world, [*map(bash, tricks), "submit"], **task_options("train", 0))
    assert step[:4] == ("It is not done.", 0.0, True, False)


async def test_a_package_that_is_not_there_mends_nothing() -> None:
    world = RepoFix(sandbox="plain")
    package = faults_of("train")[0].library.package
    step = await play(world, [bash(f"rm -r {package}"), "submit"], **task_options("train", 0))
    assert (step[1], step[4]["reward_components"]) == (0.0, {"checks": 0.0})


async def test_a_module_that_knows_the_repositorys_tests_only_mends_nothing() -> None:
    fault = faults_of("train")[0]
    library = fault.library
    known = {
        (name, repr(case.arguments)): case.value for name, cases in cases_of(library).items() for case in cases[:4]
    }
    lines = [f"KNOWN = {known!r}", *(f"def {n}(*a): return KNOWN.get(({n!r}, repr(a)))" for n in library.calls)]
    code = "\n".join(lines)
    path = f"{library.package}/{library.module}.py"
    mend = bash(f"cat > {path} <<'END'\n{code}\nEND\npython3 -m unittest discover tests 2>&1 | tail -1")
    world = RepoFix(sandbox="plain")
    await world.reset(**task_options("train", 0))
    assert (await world.step(mend))[0] == "OK"
    assert (await world.step("submit"))[1] == 0.0
    await world.close()


# terminal


def test_errands_are_unchanged() -> None:
    found = {split: digest([repr(errand_of(task.id)) for task in terminal.tasks(split)]) for split in TERMINAL_DIGESTS}
    assert found == TERMINAL_DIGESTS


@pytest.mark.parametrize("number", range(len(KINDS)))
async def test_the_expert_runs_errands(number: int) -> None:
    step = await play(Terminal(sandbox="plain"), **task_options("valid", number))
    assert step[:4] == ("It is done.", 1.0, True, False)


@pytest.mark.parametrize("number", range(len(KINDS)))
async def test_nothing_done_is_nothing_won(number: int) -> None:
    step = await play(Terminal(sandbox="plain"), ["submit"], **task_options("valid", number))
    assert step[:4] == ("It is not done.", 0.0, True, False)


async def test_the_last_command_ends_an_episode() -> None:
    step = await play(Terminal(sandbox="plain", max_steps=2), ["What?", bash("echo hi")], **task_options("train", 0))
    assert step[:4] == ("hi\nIt is not done.", 0.0, False, True)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    harbor, bench = tmp_path / "one-harbor", tmp_path / "two-bench"
    for path, text in {
        harbor / "task.toml": "[verifier]\ntimeout_sec = 900\n",
        harbor / "instruction.md": "Write hello to out.txt.\n",
        harbor / "environment" / "setup.sh": "echo ready > state.txt\n",
        harbor / "tests" / "test.sh": 'reward="$LOGS_DIR/verifier/reward.txt"\necho 0 > "$reward"\n'
        'if [ "$(cat out.txt)" = "$(cat "$TEST_DIR/right.txt")" ]; then echo 1 > "$reward"; fi\n',
        harbor / "tests" / "right.txt": "hello\n",
        harbor / "solution" / "solve.sh": "grep -q ready state.txt && echo hello > out.txt\n",
        bench / "task.yaml": "instruction: Make the folder box.\nmax_test_timeout_sec: 30\n",
        bench / "run-tests.sh": "test -d box && test -f $TEST_DIR/some_test.py\n",
        bench / "tests" / "some_test.py": "",
        bench / "solution.sh": "mkdir -p box && touch box/thing\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return {"test": str(tmp_path)}


@pytest.mark.parametrize("number", [0, 1])
async def test_task_folders_are_solved_by_their_solutions(folders: dict[str, str], number: int) -> None:
    assert len(terminal.tasks("test", folders=folders)) == 2
    step = await play(Terminal(folders=folders, sandbox="plain"), **task_options("test", number))
    assert step[:4] == ("It is done.", 1.0, True, False)


@pytest.mark.parametrize("number", [0, 1])
async def test_the_tests_of_task_folders_are_not_where_the_policy_is(folders: dict[str, str], number: int) -> None:
    world = Terminal(folders=folders, sandbox="plain")
    await world.reset(**task_options("test", number))
    shown = (await world.step(bash("find . -type f | sort; cat out.txt")))[0]
    assert "right" not in shown
    assert "test" not in shown
    assert (await world.step("submit"))[1] == 0.0
    await world.close()


def test_broken_task_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder of tasks does not exist"):
        read_folder(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="contains no tasks"):
        read_folder(str(tmp_path))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "task.yaml").write_text("instruction: Do it.")
    with pytest.raises(UsageError, match="no checking script"):
        read_folder(str(tmp_path))
    (tmp_path / "one" / "task.yaml").write_text("- 1")
    read_folder.cache_clear()
    with pytest.raises(UsageError, match="no instruction"):
        read_folder(str(tmp_path))


# python_math


@pytest.mark.parametrize("kinds", ["coded", "told"])
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_the_expert_computes(kinds: str, seed: int) -> None:
    step = await play(PythonMath(kinds=kinds, sandbox="plain"), seed=seed)
    assert step[:4] == ("Right.", 1.0, True, False)


@pytest.mark.slow
async def test_the_interpreter_remembers_until_it_ends() -> None:
    world = PythonMath(sandbox="plain", seconds=1.0)
    await world.reset(seed=0)
    assert await world.python("x = 6") == "[no output]"
    assert (await world.step("```python\nprint(x * 7)\n```"))[0] == "42"
    assert (await world.python("x.y")).endswith("AttributeError: 'int' object has no attribute 'y'")
    assert (await world.python("while True: pass")).endswith("[stopped after 1 s; variables are kept]")
    assert await world.python("x") == "6"
    assert await world.python("import os; os._exit(0)") == (
        "The interpreter ended with exit code 0. The interpreter starts again without your variables."
    )
    assert (await world.python("x")).endswith("NameError: name 'x' is not defined")
    assert await world.python("#" * 40_000) == "Your code is longer than 32768 characters."
    await world.close()


async def test_an_answer_ends_a_problem() -> None:
    world = PythonMath(sandbox="plain")
    step = await play(world, [f"\\boxed{{{10**50}}}"], seed=3)
    assert step[:4] == ("That is wrong.", 0.0, True, False)
    problem = {"question": "What is 1 + 1?", "answer": "2", "kind": "sums"}
    step = await play(world, ["Hm.", "So the answer is 2."], options=problem)
    assert step[:4] == ("Right.", 1.0, True, False)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (PythonMath, {"kinds": "all"}),
        (PythonMath, {"max_steps": 0}),
        (PythonMath, {"seconds": 0}),
        (RepoFix, {"mistakes": 3}),
        (RepoFix, {"seconds": 100}),
        (Terminal, {"max_steps": 0}),
        (Terminal, {"seconds": 0}),
        (Terminal, {"sandbox": {"kind": "local"}}),
    ],
)
def test_wrong_options_are_rejected(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**options)


@pytest.mark.parametrize("module", [repo_fix, terminal, python_math])
def test_unknown_splits_are_rejected(module: Any) -> None:
    with pytest.raises(UsageError):
        module.tasks("dev")


def test_commands_are_read_from_answers() -> None:
    assert read_command("```\nls\n```") == "ls"
    assert read_command("```bash\n\n```") is None
    assert read_command(" SUBMIT. ") == "submit"


# integrity of the reward


@pytest.mark.parametrize("name", ["code", "repo_fix", "terminal"])
@pytest.mark.slow
def test_nothing_that_a_policy_reads_goes_with_the_reward(name: str) -> None:
    report = reward_integrity(name, options={"sandbox": "plain"}, episodes=2, skip=["reads no files"])
    wrong = report.with_status(CheckStatus.FAILED) + report.with_status(CheckStatus.WARNED)
    assert wrong == (), report
    rows = {row.check: row for row in report.rows}
    assert rows["printed success earns nothing"].detail == "mean return 0, of a solution 1"
    assert rows["keeps secrets out of the sandbox"].figures["read"] > 10


async def test_the_report_sees_what_lies_open() -> None:
    world = RepoFix(sandbox="plain")
    await world.reset(**task_options("train", 0))
    assert not any(secret in text for text in (await world.visible()).values() for secret in world.secrets())
    await world.write_file("left.py", world.secrets()[-1])
    assert any(secret in text for text in (await world.visible()).values() for secret in world.secrets())
    await world.close()
