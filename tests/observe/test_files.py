import os
import threading

import pytest
from support.waiting import join

from agentrl.errors import UsageError
from agentrl.observe.files import JsonLinesWriter, read_json_lines, write_output


def test_lone_surrogates_are_written_out(tmp_path):
    lines = JsonLinesWriter(tmp_path / "x.jsonl")
    lines.append({"error": "boom \ud83d", "parts": [("a\udc00", 1)], "ok": "é💥"})
    lines.append({"ok": 2})
    lines.close()
    written = list(read_json_lines(tmp_path / "x.jsonl"))
    assert written == [{"error": "boom \\ud83d", "parts": [["a\\udc00", 1]], "ok": "é💥"}, {"ok": 2}]


def test_an_output_goes_through_links_and_pipes_and_replaces_files(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_output(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"through")
    join(reader)
    assert read == [b"through"]
    assert pipe.is_fifo()
    write_output(tmp_path / "new" / "file", b"made")
    assert (tmp_path / "new" / "file").read_text() == "made"
    with pytest.raises(UsageError, match="a folder"):
        write_output(tmp_path, b"")
    assert not list(tmp_path.parent.glob("*.partial"))
