"""A real daemon for tests: one that runs here, else one that is started for them, else Podman's."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker

IMAGE = "agentrl-test:latest"
"""Made without a registry: empty folders and links, to be run with this machine's ``/usr`` in it."""
WAIT_S = 60
_FOLDERS = ("usr", "tmp", "proc", "sys", "dev", "etc", "run", "var/tmp", "root", "home", "opt", "app/kept")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "app/link": "kept/file"}


class NoEngineError(Exception):
    """Says what was tried."""


@contextmanager
def engine() -> Iterator[str]:
    """The address of a daemon that has `IMAGE`.

    Raises:
        NoEngineError: there is none, and none can be started.
    """
    url = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if _answers(url):
        with _image(url, IMAGE):
            yield url
        return
    complaints = [f"no daemon answers at {url}"]
    for start in (_private_dockerd, _podman):
        with tempfile.TemporaryDirectory(prefix="agentrl-engine-") as folder:
            try:
                process, url = start(Path(folder))
            except NoEngineError as complaint:
                complaints.append(str(complaint))
                continue
            try:
                _await_answer(process, url, Path(folder))
                with _image(url, IMAGE):
                    yield url
            finally:
                _stop(process, Path(folder))
            return
    raise NoEngineError("; ".join(complaints))


def _private_dockerd(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """It leaves no bridge and no firewall rules behind."""
    program = shutil.which("dockerd")
    if program is None or os.geteuid() != 0:
        raise NoEngineError("no dockerd to be started" if program is None else "only root can start dockerd")
    url = f"unix://{folder}/docker.sock"
    flags = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
    places = ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "-p", str(folder / "pid")]
    return _launch([program, *places, "-H", url, *flags], folder), url


def _podman(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    program = shutil.which("podman")
    if program is None:
        raise NoEngineError("no podman")
    settings = folder / "containers.conf"
    runtime = 'runtime="runc"\n' if shutil.which("runc") else ""
    settings.write_text(
        f'[engine]\n{runtime}cgroup_manager="cgroupfs"\nevents_logger="file"\ntmp_dir="{folder}/tmp"\n'
        '[containers]\ndefault_ulimits=["nofile=1024:1024","nproc=4096:4096"]\n'
    )
    places = ["--root", str(folder / "data"), "--runroot", str(folder / "exec")]
    words = [program, *places, "system", "service", "--time=0", f"unix://{folder}/docker.sock"]
    return _launch(words, folder, CONTAINERS_CONF=str(settings)), f"unix://{folder}/docker.sock"


def _launch(words: list[str], folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **variables})


def _answers(url: str) -> bool:
    if url.startswith("unix://") and not Path(url.removeprefix("unix://")).exists():
        return False
    try:
        client = docker.APIClient(base_url=url, version="1.40", timeout=10)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


def _await_answer(process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise NoEngineError(f"{process.args} does not answer: {(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """And unmount what it may have left, before its folder is deleted."""
    process.terminate()
    try:
        process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)
    left = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    for place in sorted(left, reverse=True):
        subprocess.run(["umount", "--lazy", place], check=False)


@contextmanager
def _image(url: str, name: str) -> Iterator[None]:
    client = docker.APIClient(base_url=url, version="1.40")
    try:
        repository, _, tag = name.partition(":")
        client.import_image_from_data(_tar(), repository=repository, tag=tag, changes=["WORKDIR /app"])
        yield
    finally:
        for one in client.containers(all=True, filters={"ancestor": name}):  # of an interrupted run
            client.remove_container(one["Id"], force=True)
        client.remove_image(name, force=True)
        client.close()


def _tar() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in _FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            archive.addfile(folder)
        for name, target in _LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        file = tarfile.TarInfo("app/kept/file")
        file.size, file.mode = 5, 0o755
        archive.addfile(file, io.BytesIO(b"image"))
    return data.getvalue()
