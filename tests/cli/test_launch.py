"""Files of `agentrl launch`: they parse, and the scripts run with stand-ins for the cluster's programs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.waiting import wait_until

from agentrl.config import load_config

Cli = Callable[..., Any]

KUBERAY = ("kuberay", "--image", "registry.example.com/agentrl:1", "--claim", "runs")
SKYPILOT = ("skypilot", "--accelerator", "H100", "--bucket", "s3://my-runs")
TWO_NODES = (
    *("trainer.processes=8", "trainer.lanes=1", "engine={type: vllm, replicas: 8, transport: collective}"),
    *("--nodes", "2", "--gpus-per-node", "8"),
)
CPU = ("model.device=cpu", "--cpus-per-node", "3")


def launch(agentrl: Cli, kind: tuple[str, ...], *words: str) -> Path:
    """Write the files of a job called test-run; return their folder."""
    ended = agentrl("launch", *kind, "quickstart", "--name", "Test run", *words, "--dry-run")
    assert ended.code == 0, ended.err
    folder = Path("launch/test-run").absolute()
    wrote = [file.name for file in folder.iterdir()]
    assert all(str(folder / name) in ended.err.replace("\n", "") for name in wrote)
    assert "submit it with:" in ended.err
    return folder


def options_of(script: Path) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script.read_text(), re.MULTILINE)
    return dict(found)


def check_script(text: str, folder: Path) -> None:
    file = folder / "checked.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)


@pytest.mark.parametrize("words", [TWO_NODES, CPU])
def test_a_batch_script_has_the_options_of_the_job(agentrl: Cli, workplace: Path, words: tuple[str, ...]) -> None:
    extra = ("--time", "2-00:00:00", "--partition", "long", "--setup", "module load cuda")
    folder = launch(agentrl, ("slurm",), *words, *extra)
    text = (folder / "job.sbatch").read_text()
    check_script(text, folder)
    assert text.startswith("#!/bin/bash\n#SBATCH")
    options = options_of(folder / "job.sbatch")
    assert options["signal"] == "B:TERM@600"
    assert (options["time"], options["partition"], options["job-name"]) == ("2-00:00:00", "long", "test-run")
    assert "requeue" in options
    assert "module load cuda\n" in text
    config = load_config(str(folder / "config.yaml"))
    assert config.run.name == "test-run"
    assert Path(config.run.directory) == workplace / "runs"
    if words is CPU:
        assert (options["nodes"], options["cpus-per-task"]) == ("1", "3")
        assert "gpus-per-node" not in options
        assert "ray" not in text
        assert config.cluster is None
    else:
        assert (options["nodes"], options["gpus-per-node"]) == ("2", "8")
        assert config.cluster is not None
        assert config.cluster.address == "auto"
        assert text.count("--num-gpus=8") == 2


STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >> "{log}"
{body}
"""
BODIES = {
    "scontrol": 'if [ "$1" = show ]; then echo node-a; echo node-b; fi',
    "srun": "",
    "ray": "",
    "hostname": "echo 10.0.0.1",
    "agentrl": "exit 0",
}
INTERRUPTED = "trap 'exit 130' TERM\ntouch \"{log}.started\"\nwhile :; do sleep 0.05; done"


def stand_ins(folder: Path, **bodies: str) -> Path:
    """Write programs that log their arguments; return the log."""
    log, programs = folder / "log", folder / "bin"
    programs.mkdir()
    for name, body in {**BODIES, **bodies}.items():
        (programs / name).write_text(STAND_IN.format(log=log, body=body.format(log=log)))
        (programs / name).chmod(0o755)
    return log


def environment_of(log: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{log.parent / 'bin'}:{os.environ['PATH']}", **variables}


def test_a_batch_script_starts_ray_on_all_nodes_and_resumes(agentrl: Cli, workplace: Path) -> None:
    folder = launch(agentrl, ("slurm",), *TWO_NODES)
    log = stand_ins(workplace)
    job = environment_of(log, SLURM_JOB_NODELIST="node-[a-b]", SLURM_JOB_ID="7")
    subprocess.run(["bash", str(folder / "job.sbatch")], check=True, env=job, timeout=60)
    until = time.monotonic() + 30
    while "--exclude" not in log.read_text() and time.monotonic() < until:  # the workers start in the background
        time.sleep(0.05)
    lines = log.read_text().splitlines()
    assert "ray health-check --address 10.0.0.1:6379" in lines
    (head,) = [line for line in lines if "--head" in line]
    assert "--nodelist=node-a ray start --head" in head
    assert "--node-ip-address=10.0.0.1 --port=6379" in head
    (worker,) = [line for line in lines if "--exclude=node-a" in line]
    assert "--nodes=1 --ntasks=1" in worker
    assert "--address=10.0.0.1:6379" in worker
    started = f"agentrl train {folder / 'config.yaml'} cluster.address=10.0.0.1:6379"
    assert started in lines
    (workplace / "runs/test-run").mkdir(parents=True)
    (workplace / "runs/test-run/config.yaml").touch()
    subprocess.run(["bash", str(folder / "job.sbatch")], check=True, env=job, timeout=60)
    resumed = f"agentrl train --resume {workplace}/runs/test-run cluster.address=10.0.0.1:6379"
    assert resumed in log.read_text().splitlines()


def test_a_job_that_slurm_ends_is_queued_again(agentrl: Cli, workplace: Path) -> None:
    folder = launch(agentrl, ("slurm",), *CPU)
    log = stand_ins(workplace, agentrl=INTERRUPTED)
    job = subprocess.Popen(["bash", str(folder / "job.sbatch")], env=environment_of(log, SLURM_JOB_ID="7"))
    wait_until(lambda: Path(f"{log}.started").exists() or job.poll() is not None, "the start of the job")
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 130
    assert "scontrol requeue 7" in log.read_text().splitlines()


def test_the_exit_code_of_a_failed_run_is_that_of_the_job(agentrl: Cli, workplace: Path) -> None:
    folder = launch(agentrl, ("slurm",), *CPU)
    log = stand_ins(workplace, agentrl="exit 2")
    ended = subprocess.run(
        ["bash", str(folder / "job.sbatch")], check=False, env=environment_of(log, SLURM_JOB_ID="7"), timeout=60
    )
    assert ended.returncode == 2
    assert "scontrol requeue 7" not in log.read_text()


NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.mark.parametrize(("words", "workers"), [(TWO_NODES, 1), (CPU, 0)])
def test_a_ray_job_is_a_manifest(agentrl: Cli, workplace: Path, words: tuple[str, ...], workers: int) -> None:
    folder = launch(agentrl, KUBERAY, *words, "--memory", "64Gi", "--namespace", "team")
    settings, job = yaml.safe_load_all((folder / "rayjob.yaml").read_text())
    assert (settings["apiVersion"], settings["kind"]) == ("v1", "ConfigMap")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    for one in (settings, job):
        assert one["metadata"]["namespace"] == "team"
        assert NAME.fullmatch(one["metadata"]["name"])
    check_script(settings["data"]["run.sh"], folder)
    config = load_config(str(folder / "config.yaml"))
    assert settings["data"]["config.yaml"] == (folder / "config.yaml").read_text()
    assert (config.run.directory, config.run.name) == ("/runs", "test-run")
    assert config.cluster is not None
    assert config.cluster.address == "auto"
    spec = job["spec"]
    assert spec["entrypoint"] == "bash /etc/agentrl/run.sh"
    assert spec["backoffLimit"] > 0
    cluster = spec["rayClusterSpec"]
    groups = cluster.get("workerGroupSpecs", [])
    assert sum(group["replicas"] for group in groups) == workers
    for group in (cluster["headGroupSpec"], *groups):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "registry.example.com/agentrl:1"
        limits = container["resources"]["limits"]
        assert limits["memory"] == "64Gi"
        assert limits.get("nvidia.com/gpu") == (8 if workers else None)
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
        assert (mounted["runs"], mounted["settings"]) == ("/runs", "/etc/agentrl")
        claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
        assert claims == ["runs"]


@pytest.mark.parametrize(("words", "nodes"), [(TWO_NODES, 2), (CPU, 1)])
def test_a_skypilot_task(agentrl: Cli, workplace: Path, words: tuple[str, ...], nodes: int) -> None:
    folder = launch(agentrl, SKYPILOT, *words, "--setup", "pip install agentrl", "--infra", "aws/us-east-1")
    task = yaml.safe_load((folder / "task.yaml").read_text())
    assert (task["name"], task["num_nodes"], task["setup"]) == ("test-run", nodes, "pip install agentrl\n")
    assert task["resources"].get("accelerators") == ("H100:8" if nodes > 1 else None)
    assert task["resources"]["infra"] == "aws/us-east-1"
    assert task["file_mounts"]["/runs"] == {"source": "s3://my-runs", "mode": "MOUNT"}
    assert task["file_mounts"]["/etc/agentrl/config.yaml"] == str(folder / "config.yaml")
    check_script(task["run"], folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_nodes_of_a_skypilot_task_join_and_leave(agentrl: Cli, workplace: Path, rank: int) -> None:
    task = yaml.safe_load((launch(agentrl, SKYPILOT, *TWO_NODES) / "task.yaml").read_text())
    up_once = """
if [ "$1" = health-check ] && [ -e "{log}.joined" ]; then exit 1; fi
[ "$2" != --address=10.0.0.1:6379 ] || touch "{log}.joined"
"""
    log = stand_ins(workplace, ray=up_once, agentrl="exit 3")
    job = environment_of(log, SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2")
    ended = subprocess.run(["bash", "-c", task["run"]], check=False, env=job, timeout=60)
    lines = [line for line in log.read_text().splitlines() if "health-check" not in line]
    if rank:
        assert lines == ["ray start --address=10.0.0.1:6379 --num-gpus=8"]
        assert ended.returncode == 0
    else:
        assert lines == [
            "ray start --head --node-ip-address=10.0.0.1 --port=6379 --num-gpus=8",
            "agentrl train /etc/agentrl/config.yaml cluster.address=10.0.0.1:6379",
            "ray stop",
        ]
        assert ended.returncode == 3


@pytest.mark.parametrize(
    ("kind", "client"), [(("slurm",), "sbatch"), (KUBERAY, "kubectl"), (SKYPILOT, "sky")], ids=lambda value: str(value)
)
def test_a_missing_client_is_named_and_a_present_one_called(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, ...], client: str
) -> None:
    words = ("launch", *kind, "quickstart", "--name", "test-run", *CPU)
    if shutil.which(client) is None:
        ended = agentrl(*words)
        assert ended.code == 2
        assert f"the client {client} is not installed" in " ".join(ended.err.split())
    log = stand_ins(workplace, **{client: 'exit "$(cat "{log}.code")"'})
    monkeypatch.setenv("PATH", f"{log.parent / 'bin'}:{os.environ['PATH']}")
    Path(f"{log}.code").write_text("0")
    assert agentrl(*words).code == 0
    assert log.read_text().startswith(f"{client} ")
    Path(f"{log}.code").write_text("9")
    ended = agentrl(*words)
    assert ended.code == 1
    assert f"{client} did not accept the job" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("trainer.processes=9", "trainer.lanes=1", "--nodes", "1", "--gpus-per-node", "8"),
            "the run needs more GPUs than the nodes have",
        ),
        (
            ("engine={type: vllm, tensor_parallel: 4}", "--gpus-per-node", "2"),
            "expected 5 GPUs, 4 of them on one node",
        ),
        (("engine={type: vllm}", "--nodes", "2"), "engine.transport shared_memory works on one machine only"),
        (("--name", "7"), "the name of a job begins with a letter"),
    ],
)
def test_jobs_that_cannot_run_are_refused(agentrl: Cli, workplace: Path, words: tuple[str, ...], said: str) -> None:
    ended = agentrl("launch", "slurm", "quickstart", *words, "--dry-run")
    assert ended.code == 2
    assert said in " ".join(ended.err.split())
    assert not Path("launch").exists()


def test_a_task_with_gpus_needs_their_name(agentrl: Cli, workplace: Path) -> None:
    ended = agentrl("launch", "skypilot", "quickstart", "--dry-run")
    assert ended.code == 2
    assert "--accelerator, such as H100" in " ".join(ended.err.split())
