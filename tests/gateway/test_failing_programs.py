"""A program that cannot work is detected in its first attempts, and its own error message is shown."""

import pytest
from agentrl.agent_loops.external import MAX_IDENTICAL_FAILURES, External, FirstAttempts

from agentrl.errors import EnvironmentFailure, Outcome, UsageError
from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.observe.terminal import status_words
from agentrl.rollout.waits import WaitTracker
from agentrl.runs.record import MAX_SHOWN, EpisodeRecorder
from agentrl.trajectory import Trajectory

BROKEN = """
    print("starting", file=sys.stderr)
    import no_such_package
"""


async def attempts(run_loop, loop, number):
    return [(await run_loop(loop, "42"))[0] for _ in range(number)]


async def test_a_program_that_fails_alike_each_time_ends_the_run(run_loop, program):
    loop = External(command=program(BROKEN))
    failed = await attempts(run_loop, loop, MAX_IDENTICAL_FAILURES - 1)
    assert {trajectory.outcome for trajectory in failed} == {Outcome.ENVIRONMENT_ERROR}
    assert all("No module named 'no_such_package'" in trajectory.error for trajectory in failed)
    with pytest.raises(UsageError, match=rf"failed in all of its {MAX_IDENTICAL_FAILURES} attempts") as ended:
        await run_loop(loop, "42")
    assert "the program ended with 1" in str(ended.value)
    assert str(ended.value).count("no_such_package") >= 1


async def test_a_program_that_never_asks_ends_the_run_with_what_to_do(run_loop, program):
    loop = External(command=program('print("42")'))
    await attempts(run_loop, loop, MAX_IDENTICAL_FAILURES - 1)
    with pytest.raises(UsageError, match=r"never got an answer.*OPENAI_BASE_URL"):
        await run_loop(loop, "42")


FIRST = """
    import pathlib
    seen = pathlib.Path("{folder}/seen")
    is_first = not seen.exists()
    seen.touch()
    if is_first:
        print(ask("What is it?"))
    else:
        sys.exit("gone")
"""


@pytest.mark.slow
async def test_a_program_that_has_worked_once_ends_nothing(run_loop, program, tmp_path):
    loop = External(command=program(FIRST.format(folder=tmp_path)))
    played = await attempts(run_loop, loop, MAX_IDENTICAL_FAILURES + 2)
    assert [trajectory.outcome for trajectory in played[:2]] == [Outcome.FINISHED, Outcome.ENVIRONMENT_ERROR]


def test_what_the_policy_makes_a_program_do_is_not_the_programs_failure():
    gone = EnvironmentFailure("no answer", got="gone")
    first, never_worked = FirstAttempts(), FirstAttempts()
    for _ in range(MAX_IDENTICAL_FAILURES - 1):
        first.fail(gone)
        never_worked.fail(gone)
    first.succeed()
    for _ in range(MAX_IDENTICAL_FAILURES):
        first.fail(gone)
    with pytest.raises(UsageError, match=f"all of its {MAX_IDENTICAL_FAILURES} attempts"):
        never_worked.fail(gone)


@pytest.mark.parametrize(
    ("words", "is_alike"),
    [
        ("port {} is taken", True),
        ("/tmp/agentrl-program-a{}b/x.py, line 3", True),
        ("object at 0x7f{:x}", True),
        ("{}", True),
        (["the shop is closed", "the shop does not answer"], False),
    ],
)
def test_attempts_fail_alike_whatever_numbers_and_folders_they_name(words, is_alike):
    def fail():
        first = FirstAttempts()
        for number in range(3 * MAX_IDENTICAL_FAILURES):
            told = words.format(number) if isinstance(words, str) else words[number % 2]
            first.fail(EnvironmentFailure("no answer", got=told))

    if is_alike:
        with pytest.raises(UsageError, match=f"all of its {MAX_IDENTICAL_FAILURES} attempts"):
            fail()
    else:
        fail()


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        (
            "for n in range(30): print(n, file=sys.stderr)\nsys.exit(5)",
            "ended with 5: " + "\n".join(map(str, range(22, 30))),
        ),
        ('print("on standard output")\nsys.exit(5)', "ended with 5: on standard output"),
        ('print("output")\nprint("the error", file=sys.stderr)\nsys.exit(5)', "ended with 5: the error"),
        ("sys.exit(5)", "ended with 5, and wrote nothing"),
        ('print("x" * 5000, file=sys.stderr)\nprint("the end", file=sys.stderr)\nsys.exit(5)', "ended with 5: the end"),
    ],
)
async def test_the_last_lines_of_a_failed_program_are_quoted(run_loop, program, lines, quoted):
    trajectory, _ = await run_loop(External(command=program(lines)), "42")
    assert trajectory.error.endswith(quoted)


class Messages(RunWatcher):
    def __init__(self):
        self.said = []

    def on_message(self, text):
        self.said.append(text)


class Nowhere:
    def start(self, trajectory):
        """Keep nothing."""

    def end(self, trajectory):
        """Keep nothing."""


def ended(number, outcome, error=None):
    return Trajectory(
        id=f"g/{number}.0", task_id="t", environment="e", seed=1, group_id="g", outcome=outcome, error=error
    )


def test_a_run_says_how_many_attempts_failed_and_why():
    status, watcher = RunStatus(), Messages()
    recorder = EpisodeRecorder(Nowhere(), status, watcher, WaitTracker())
    traceback = "the program ended with 1: Traceback:\n  File x.py\nKeyError: 'a'"
    failures = [traceback, traceback.replace("1", "2"), "the shop is closed"]
    rows = [(Outcome.ENVIRONMENT_ERROR, error) for error in failures]
    rows += [(Outcome.FINISHED, None), (Outcome.POLICY_ERROR, "unusable"), (Outcome.CANCELLED, "stopped")]
    for number, (outcome, error) in enumerate(rows):
        trajectory = ended(number, outcome, error)
        recorder.on_start(trajectory)
        recorder.on_end(trajectory)
        if number == 1:
            assert status_words(status).endswith(
                "2 failed attempts, the latest: the program ended with 2: Traceback: … KeyError: 'a'"
            )
    assert (status.attempts_failed, status.episodes_done, status.latest_failure) == (3, 2, "the shop is closed")
    assert [text.partition(":")[0] for text in watcher.said] == [
        "attempt g/0.0 failed (environment_error)",
        "attempt g/2.0 failed (environment_error)",
    ]
    assert traceback in watcher.said[0]


def test_a_run_shows_a_few_kinds_of_failures_only():
    watcher = Messages()
    recorder = EpisodeRecorder(Nowhere(), RunStatus(), watcher, WaitTracker())
    for number in range(4 * MAX_SHOWN):
        recorder.on_start(ended(number, None))
        recorder.on_end(ended(number, Outcome.ENGINE_ERROR, "x" * number))
    assert watcher.said == [], "the error that ends a run without a good episode tells them"
    recorder.on_start(ended(0, None))
    recorder.on_end(ended(0, Outcome.FINISHED))
    assert len(watcher.said) == MAX_SHOWN
