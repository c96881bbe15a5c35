import logging
import shutil
import subprocess
import sys
import textwrap

import pytest

from agentrl.errors import UsageError
from agentrl.observe.checkpoints import Checkpoints


def writer(text):
    def write(folder):
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "state").write_text(text * 2)

    return write


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def test_the_newest_ones_are_kept(checkpoints):
    assert checkpoints.newest() is None
    for step in (9, 10, 11):
        checkpoints.save(step, writer(str(step)))
    assert [checkpoint.step for checkpoint in checkpoints.present()] == [10, 11]
    newest = checkpoints.newest()
    assert (newest.step, (newest.path / "model" / "weights").read_text()) == (11, "11")


def test_the_same_step_may_be_saved_again(checkpoints):
    checkpoints.save(3, writer("a"))
    checkpoints.save(3, writer("b"))
    assert (checkpoints.newest().path / "state").read_text() == "bb"
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000003"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failed_write_leaves_nothing(checkpoints, error):
    checkpoints.save(1, writer("a"))

    def fail(folder):
        (folder / "state").write_text("half")
        raise error

    with pytest.raises(type(error)):
        checkpoints.save(2, fail)
    assert checkpoints.newest().step == 1
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "state").write_text("xx"), "state is damaged"),
        (lambda folder: (folder / "state").write_text("x"), "state is damaged"),
        (lambda folder: (folder / "model" / "weights").unlink(), "model/weights is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest is missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest is missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest is missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {}}'), "manifest is missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text('{"a": {"bytes": 1}}'), "manifest is missing or damaged"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_message(checkpoints, caplog, damage, problem):
    checkpoints.save(1, writer("a"))
    checkpoints.save(2, writer("b"))
    damage(checkpoints.folder / "step-000002")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest().step == 1
    assert problem in caplog.text
    damage(checkpoints.folder / "step-000001")
    with pytest.raises(UsageError, match=r"all checkpoints in .* are damaged"):
        checkpoints.newest()


def test_a_new_checkpoint_replaces_later_ones_that_are_damaged(checkpoints):
    for step in (2, 4):
        checkpoints.save(step, writer("a"))
    (checkpoints.folder / "step-000004" / "state").write_text("xx")
    less = Checkpoints(checkpoints.folder, keep=1)
    assert less.newest().step == 2
    less.save(3, writer("b"))
    assert [checkpoint.step for checkpoint in less.present()] == [3]


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path):
    code = textwrap.dedent(
        """
        import pathlib, resource, signal, sys
        from agentrl.errors import UsageError
        from agentrl.observe.checkpoints import Checkpoints
        checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), keep=2)
        checkpoints.save(1, lambda folder: (folder / "state").write_bytes(bytes(1000)))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            checkpoints.save(2, lambda folder: (folder / "state").write_bytes(bytes(10000)))
        except UsageError as error:
            sys.exit(f"{checkpoints.newest().step}: {error}")
        """
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert process.stderr.startswith("1: cannot write")
    assert "no space left" in process.stderr


def test_what_a_killed_process_left_is_ignored_and_removed(checkpoints):
    (checkpoints.folder / ".partial-000007").mkdir(parents=True)
    assert checkpoints.newest() is None
    checkpoints.save(8, writer("a"))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-000008"]


def test_errors_of_the_writer_are_not_mistaken_for_the_disk(checkpoints):
    def fail(folder):
        raise UsageError("something else")

    with pytest.raises(UsageError, match="something else"):
        checkpoints.save(1, fail)


STRAYS = ("step-000002-keep", "step-000009.tmp", "step-", "step-9", "step-0000003", "step-٠٠٠٠٠٩", "step-000001 copy")


def test_what_the_user_puts_beside_checkpoints_is_left_alone(checkpoints):
    checkpoints.save(1, writer("a"))
    for name in STRAYS:
        shutil.copytree(checkpoints.folder / "step-000001", checkpoints.folder / name)
    for name in ("step-000007", "step-", "notes", ".partial-000001", ".partial-mine"):
        (checkpoints.folder / name).with_suffix(".txt").write_text("mine")
    (checkpoints.folder / "step-000008").write_text("mine")
    (checkpoints.folder / "step-000099").symlink_to("step-000001", target_is_directory=True)
    (checkpoints.folder / ".partial-000098").symlink_to("step-000001", target_is_directory=True)
    before = {path.name for path in checkpoints.folder.iterdir()}
    assert checkpoints.newest().step == 1
    for step in (2, 3):
        checkpoints.save(step, writer("b"))
    assert [checkpoint.step for checkpoint in checkpoints.present()] == [2, 3]
    after = {path.name for path in checkpoints.folder.iterdir()}
    assert after == before - {"step-000001"} | {"step-000002", "step-000003"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_lies_where_a_checkpoint_goes_is_renamed(checkpoints, kind):
    checkpoints.save(1, writer("a"))
    place = checkpoints.folder / "step-000002"
    place.write_text("mine") if kind == "file" else place.symlink_to("step-000001")
    checkpoints.save(2, writer("b"))
    assert checkpoints.newest().step == 2
    found = checkpoints.folder / "step-000002-found-1"
    assert found.is_symlink() if kind == "link" else found.read_text() == "mine"
    assert (checkpoints.folder / "step-000001" / "state").read_text() == "aa"
