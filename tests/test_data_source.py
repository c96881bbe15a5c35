"""Rows of folders, patterns, saved data sets, and data sets of the hub."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from huggingface_hub import constants
from pyarrow import ipc, parquet

from agentrl.errors import UsageError
from agentrl.message.data_file import read_rows
from agentrl.message.data_source import data_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_parquet(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist([{"name": name} for name in names]), path)


def names(path: object) -> list[str]:
    return [row.values["name"] for row in read_rows(str(path))]


def test_a_folder_and_a_pattern_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", "c")
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", "a", "b")
    (tmp_path / "data" / "README.md").write_text("text")
    (tmp_path / "data" / "dataset_info.json").write_text("{}")
    assert names(tmp_path / "data") == ["a", "b", "c"]
    assert [row.number for row in read_rows(tmp_path / "data")] == [1, 2, 3], "ids made from numbers stay unique"
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", "d")
    with pytest.raises(UsageError, match=r"contains files of several splits: got test-00000.*, train-00000"):
        names(tmp_path / "data")
    assert names(tmp_path / "data" / "train-*.parquet") == ["a", "b", "c"]
    assert names(tmp_path / "data" / "t[e]st*") == ["d"]


@pytest.mark.parametrize("name", ["empty", "none-*.jsonl"])
def test_error_names_the_location_without_data(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("text")
    with pytest.raises(UsageError, match="no file in "):
        names(tmp_path / name)


@pytest.mark.parametrize("make", [ipc.new_stream, ipc.new_file])
def test_a_data_set_that_was_saved_to_disk(tmp_path: Path, make: object) -> None:
    table = pa.Table.from_pylist([{"name": "a"}, {"name": "b"}])
    with make(str(tmp_path / "data-00000-of-00001.arrow"), table.schema) as writer:  # type: ignore[operator]
        writer.write_table(table)
    (tmp_path / "state.json").write_text("{}")
    assert names(tmp_path) == ["a", "b"]
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    with pytest.raises(UsageError, match="cannot be read as Arrow"):
        names(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one data set, used offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "datasets--my--sums"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    write_parquet(kept / "snapshots" / COMMIT / "main" / "train-00000-of-00001.parquet", "a")
    write_parquet(kept / "snapshots" / COMMIT / "main" / "test-00000-of-00001.parquet", "b")
    yield kept
    data_files.__globals__["_hub_files"].cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        "hf://datasets/my/sums/main/train-*.parquet",
        "hf://my/sums/main/train-00000-of-00001.parquet",
        f"hf://datasets/my/sums@{COMMIT}/main/train-*",
    ],
)
def test_a_data_set_in_the_cache_is_read_offline(cache: Path, name: str) -> None:
    assert names(name) == ["a"]
    assert names(Path(name)) == ["a"], "a path has one slash"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf://datasets/my/sums/main", "contains files of several splits"),
        ("hf://datasets/my/sums/main/valid-*.parquet", "no file in"),
        ("hf://datasets/my/sums/other.jsonl", "matches no data file .*: got a data set with main/test-00000"),
        ("hf://datasets/my/others/train.jsonl", "cannot fetch hf://datasets/my/others"),
        ("hf://datasets", "the address of a data set is not valid"),
    ],
)
def test_error_names_the_mistake_in_an_address(cache: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        names(name)


@pytest.mark.parametrize("name", ["https://example.com/rows.jsonl", "s3://bucket/rows.jsonl", "file:///rows.jsonl"])
def test_other_addresses_are_rejected(name: str) -> None:
    for given in (name, Path(name)):
        with pytest.raises(UsageError, match=r"the file is an address.*hf://datasets.*Download it, and"):
            data_files(given)


def test_partially_cached_data_set_is_an_error(cache: Path) -> None:
    folder = cache / "snapshots" / COMMIT / "parts"
    for number in (0, 2):
        write_parquet(folder / f"train-0000{number}-of-00003.parquet", str(number))
    for name in ("parts", "parts/train-*", "parts/*.parquet"):
        with pytest.raises(UsageError, match=r"only a part of .*without train-00001-of-00003\.parquet"):
            names(f"hf://datasets/my/sums/{name}")
    assert names("hf://datasets/my/sums/parts/train-0000[02]-*") == ["0", "2"]
    assert names("hf://datasets/my/sums/parts/train-00002-of-00003.parquet") == ["2"]
    write_parquet(cache / "snapshots" / COMMIT / "from1" / "train-1-of-1.parquet", "a")
    assert names("hf://datasets/my/sums/from1") == ["a"]
    write_parquet(folder / "train-00001-of-00003.parquet", "1")
    assert names("hf://datasets/my/sums/parts/train-*") == ["0", "1", "2"]


class Hub(http.server.BaseHTTPRequestHandler):
    """The three requests of the hub's client that read a data set of one file."""

    body = b'{"name": "a"}\n{"name": "b"}\n'

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        files = [
            {"type": "file", "path": "train.jsonl", "rfilename": "train.jsonl", "size": len(self.body), "oid": "1"}
        ]
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/my/sums"):
            listed = "/tree/" in path
            data = json.dumps(files if listed else {"id": "my/sums", "sha": COMMIT, "siblings": files}).encode()
        elif path.endswith("/resolve/" + COMMIT + "/train.jsonl"):
            data = self.body
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


READ = """
import sys
from agentrl.message.data_file import read_rows
from agentrl.errors import UsageError
print([row.values["name"] for row in read_rows(sys.argv[1])])
try:
    list(read_rows("hf://datasets/my/sums"))
except UsageError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_hubs_own_client_downloads_from_another_endpoint(hub: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    words = [sys.executable, "-c", READ, "hf://datasets/my/sums/train.jsonl"]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == "['a', 'b']"
    assert "matches no data file of the data set: got a data set with train.jsonl" in second


def test_patterns_may_match_folders(tmp_path: Path) -> None:
    for name in ("a[1]/b/train.jsonl", "a[1]/c/train.jsonl", "a[1]/c/d/train.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    root = tmp_path / "a[1]"
    assert data_files(root / "*" / "train.jsonl") == [root / "b" / "train.jsonl", root / "c" / "train.jsonl"]
    assert len(data_files(root / "**" / "*.jsonl")) == 3
    assert data_files(root / "missing.jsonl") == [root / "missing.jsonl"]
    with pytest.raises(UsageError, match="nothing that matches"):
        data_files(root / "*" / "test.jsonl")
    with pytest.raises(UsageError, match="nothing that matches"):
        data_files(root / "**.jsonl")


def test_folders_of_several_splits_are_not_mixed(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="contains files of several splits"):
        data_files(tmp_path / "*" / "rows.jsonl")
