import errno
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.errors import UsageError
from agentrl.observe.files import check_writable, replace_file, writing
from agentrl.observe.metrics import read_metrics


def test_a_full_disk_is_one_clear_message(tmp_path):
    full = Path("/dev/full")
    with pytest.raises(UsageError, match=r"cannot write .*: got no space left.*--resume"), writing(tmp_path):
        full.write_text("x")


def test_copies_that_fill_the_disk_or_fail_give_one_reason(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").touch()

    def copy(reason):
        def fail(*_):
            raise OSError(reason, os.strerror(reason))

        with writing(tmp_path / "copy"):
            shutil.copytree(tmp_path / "source", tmp_path / "copy", copy_function=fail, dirs_exist_ok=True)

    with pytest.raises(UsageError, match="copy: got no space left, expected free disk space"):
        copy(errno.ENOSPC)
    with pytest.raises(UsageError, match=r"copy: got \[Errno 13\] Permission denied, expected a writable folder"):
        copy(errno.EACCES)


@pytest.mark.parametrize("name", ["", "file/result.json", "taken"])
def test_where_nothing_can_be_written_is_known_before(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        check_writable(tmp_path / name)


@pytest.mark.parametrize(
    ("flags", "reason"), [(os.ST_RDONLY, "Read-only file system"), (0, "Permission denied")], ids=["disk", "folder"]
)
def test_write_errors_contain_the_systems_reason(tmp_path, monkeypatch, flags, reason):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(UsageError, match=f"cannot write .*: got {reason}, expected a writable folder"):
        check_writable(tmp_path / "result.json")


def test_where_something_can_be_written_nothing_is_written_yet(tmp_path):
    result = tmp_path / "new" / "result.json"
    check_writable(result)
    assert not any(tmp_path.iterdir())
    replace_file(result, b"{}")
    assert list(result.parent.iterdir()) == [result]


def test_a_file_size_limit_stops_the_writer_and_keeps_the_lines_before(tmp_path):
    """The limit stands in for a full disk: the kernel cuts the write short, then refuses."""
    code = textwrap.dedent(
        """
        import pathlib, resource, signal, sys
        from agentrl.errors import UsageError
        from agentrl.observe.metrics import MetricsFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (230, 230))
        metrics = MetricsFile(pathlib.Path(sys.argv[1]))
        try:
            for step in range(100):
                metrics.append_step(step, {"value": 0.5})
        except UsageError as error:
            sys.exit(str(error))
        """
    )
    path = tmp_path / "metrics.jsonl"
    process = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "no space left" in process.stderr
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    replace_file(path, b"old")
    replace_file(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        replace_file(tmp_path / "file" / "inside", b"")
