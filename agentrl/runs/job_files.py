"""Files that start a training run on a Slurm cluster, on Kubernetes (KubeRay), or on a cloud (SkyPilot).

config, overrides ─► Job: its nodes, and the config with ``run.name`` and ``cluster`` ─► files of one launcher

All launchers run the same commands: a run whose folder has a config is resumed, so that a restarted job continues. With
several nodes, Ray is started on each of them, and the run's process is on the first one.
"""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.cluster import ClusterConfig
from agentrl.config.config import Config
from agentrl.config.derived import engine_bundles, rank_bundles
from agentrl.config.load import dump_config
from agentrl.errors import ConfigError, UsageError

RAY_VERSION = "2.60.0"
"""Version of Ray for KubeRay: that of the image."""
PORT = 6379
"""Port of Ray's head."""
WARNING_S = 600
"""Seconds before the time limit at which Slurm signals the run to save a checkpoint and exit."""
MAX_GPUS = 8
"""GPUs of a node, if not given."""
MAX_NAME_CHARS = 40
"""Maximum length of a job's name: KubeRay derives longer names of at most 63 characters from it."""
CONFIG_FILE = "config.yaml"
MOUNTED_RUNS = "/runs"
"""Path of the storage with the run folders, on Kubernetes and clouds."""
MOUNTED_CONFIG = "/etc/agentrl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Run to launch, with its nodes."""

    name: str
    """Name of the job and of the run's folder: lower-case letters, digits and dashes."""
    config: Config
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    setup: Sequence[str] = ()
    """Shell commands before the run, on every node."""

    @property
    def run_folder(self) -> str:
        """Path of the run's folder on the nodes."""
        return f"{self.config.run.directory}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """File of a job."""

    name: str
    text: str


def make_job(
    config: Config,
    *,
    name: str,
    directory: str,
    nodes: int | None,
    gpus_per_node: int | None,
    cpus_per_node: int | None,
    setup: Sequence[str],
    needs_ray: bool,
) -> Job:
    """Plan the nodes of a run, and return the job with the config that it trains.

    Args:
        config: Config of the run.
        name: Name of the job; other characters than letters, digits and dashes are replaced.
        directory: ``run.directory`` on the nodes, which all of them see.
        nodes: Number of nodes; by default, as many as the ranks and engines need.
        gpus_per_node: GPUs of each node; by default, those that the run needs, at most `MAX_GPUS`; 0 for none.
        cpus_per_node: CPU cores of each node; by default, those that the run's ranks and engines request.
        setup: Shell commands before the run.
        needs_ray: The run uses Ray on one node, too.

    Raises:
        ConfigError: the run needs more GPUs than the nodes have, or its weights cannot be sent to other nodes.
    """
    needed = _required_bundles(config, has_gpus=gpus_per_node != 0 and config.model.device != "cpu")
    total, largest = sum(one.get("GPU", 0) for one in needed), max(one.get("GPU", 0) for one in needed)
    gpus = min(MAX_GPUS, math.ceil(total)) if gpus_per_node is None else gpus_per_node
    enough = max(1, math.ceil(total / gpus)) if gpus else 1
    if largest > gpus or (nodes is not None and nodes < enough):
        raise ConfigError(
            "the run needs more GPUs than the nodes have",
            got=f"{nodes or enough} nodes with {gpus} GPUs",
            expected=f"{total:g} GPUs, {largest:g} of them on one node (trainer.processes, engine.replicas)",
        )
    count = enough if nodes is None else nodes
    if count > 1 and getattr(config.engine, "transport", None) == "shared_memory":
        raise ConfigError(
            "engine.transport shared_memory works on one machine only",
            got=f"{count} nodes",
            expected="engine.transport=collective or disk",
        )
    cpus = max(1, math.ceil(sum(one.get("CPU", 0) for one in needed) / count))
    name = job_name(name)
    changes: dict[str, Any] = {"run": config.run.model_copy(update={"name": name, "directory": directory})}
    if needs_ray or count > 1:
        section = config.cluster or ClusterConfig()
        changes["cluster"] = section.model_copy(update={"address": "auto"})
    return Job(
        name=name,
        config=config.model_copy(update=changes),
        nodes=count,
        gpus_per_node=gpus,
        cpus_per_node=cpus if cpus_per_node is None else cpus_per_node,
        setup=setup,
    )


def _required_bundles(config: Config, *, has_gpus: bool) -> list[dict[str, float]]:
    section = config.cluster or ClusterConfig()
    bundles = [*rank_bundles(config, section, gpus=has_gpus), *engine_bundles(config, section, gpus=has_gpus)]
    return [dict(bundle.resources) for bundle in bundles]


def job_name(text: str) -> str:
    """Convert a text to a name that Kubernetes accepts.

    >>> job_name("household/grpo_Qwen2.5")
    'household-grpo-qwen2-5'

    Raises:
        UsageError: the text has no letter to begin with.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_NAME_CHARS].strip("-")
    if not name[:1].isalpha():
        raise UsageError("the name of a job begins with a letter", got=repr(text), hint="set one: --name my-run")
    return name


def _train_or_resume(job: Job, config_file: str, *overrides: str) -> str:
    """Return a shell function ``train`` that starts the run, or resumes it if it exists, and replaces the shell."""
    folder, added = shlex.quote(job.run_folder), "".join(f" {override}" for override in overrides)
    return (
        "train() {\n"
        f"    if [ -e {folder}/{CONFIG_FILE} ]; then\n"
        f"        exec agentrl train --resume {folder}{added}\n"
        "    else\n"
        f"        exec agentrl train {shlex.quote(config_file)}{added}\n"
        "    fi\n"
        "}"
    )


def _config_file(job: Job) -> JobFile:
    return JobFile(name=CONFIG_FILE, text=dump_config(job.config))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of sbatch."""

    time: str
    """Time limit, ``HH:MM:SS`` or ``D-HH:MM:SS``."""
    partition: str | None = None
    account: str | None = None


def slurm_files(job: Job, options: SlurmOptions, folder: Path) -> list[JobFile]:
    """Return the config and a batch script, which sees them in `folder`.

    `WARNING_S` before the time limit, the run saves a checkpoint and ends, and the job is queued again.
    """
    given = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(job.cpus_per_node),
        **({"gpus-per-node": str(job.gpus_per_node)} if job.gpus_per_node else {}),
        "time": options.time,
        **({"partition": options.partition} if options.partition else {}),
        **({"account": options.account} if options.account else {}),
        "signal": f"B:TERM@{WARNING_S}",
        "output": str(folder / "slurm-%j.log"),
        "open-mode": "append",
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in given.items()),
        "#SBATCH --requeue",
        "set -euo pipefail",
        *job.setup,
        "",
    ]
    overrides = [] if job.nodes == 1 and job.config.cluster is None else ['cluster.address="$head"']
    if overrides:
        lines += _slurm_ray(job)
    lines += [_train_or_resume(job, str(folder / CONFIG_FILE), *overrides), "", *_SLURM_END]
    return [_config_file(job), JobFile(name="job.sbatch", text="\n".join(lines) + "\n")]


def _slurm_ray(job: Job) -> list[str]:
    gpus = f" --num-gpus={job.gpus_per_node}" if job.gpus_per_node else ""
    lines = [
        "# Ray: its head on this node, the first one, and a worker on each of the others",
        'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
        f'head="$(hostname --all-ip-addresses | cut --delimiter=" " --fields=1):{PORT}"',
        'srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" ray start --head --block \\',
        f'    --node-ip-address="${{head%:*}}" --port={PORT} --num-cpus={job.cpus_per_node}{gpus} &',
        'until ray health-check --address "$head" > /dev/null 2>&1; do sleep 2; done',
    ]
    if job.nodes > 1:
        others = job.nodes - 1
        lines += [
            f'srun --overlap --nodes={others} --ntasks={others} --exclude="${{nodes[0]}}" ray start --block \\',
            f'    --address="$head" --num-cpus={job.cpus_per_node}{gpus} &',
        ]
    return [*lines, ""]


_SLURM_END = """\
warned=
train &
run=$!
trap 'warned=1; kill -TERM "$run" || true' TERM
code=0
wait "$run" || code=$?
if [ -n "$warned" ]; then  # the signal has ended the wait above, not the run
    code=0
    wait "$run" || code=$?
    if [ "$code" = 130 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
""".rstrip().splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeRayOptions:
    """Options of a RayJob."""

    image: str
    """Image with agentrl, Ray and the engine."""
    claim: str
    """Name of the persistent volume claim with the run folders; all pods mount it."""
    namespace: str | None = None
    memory: str | None = None
    """Memory of each pod, such as ``200Gi``."""
    retries: int = 3
    """Number of times that Kubernetes starts a failed job again."""


def kuberay_files(job: Job, options: KubeRayOptions) -> list[JobFile]:
    """Return the config, and a manifest of a RayJob with the ConfigMap that it mounts."""
    settings = f"{job.name}-settings"
    command = [
        "#!/bin/bash",
        "set -euo pipefail",
        *job.setup,
        _train_or_resume(job, f"{MOUNTED_CONFIG}/{CONFIG_FILE}"),
        "train",
    ]
    where = {"namespace": options.namespace} if options.namespace else {}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": settings, **where},
        "data": {CONFIG_FILE: dump_config(job.config), "run.sh": "\n".join(command) + "\n"},
    }
    worker_group = {
        "groupName": "workers",
        "replicas": job.nodes - 1,
        "minReplicas": job.nodes - 1,
        "maxReplicas": job.nodes - 1,
        "rayStartParams": {},
        "template": _pod(job, options, settings, "ray-worker"),
    }
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name, **where},
        "spec": {
            "entrypoint": f"bash {MOUNTED_CONFIG}/run.sh",
            "backoffLimit": options.retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": "0.0.0.0"},
                    "template": _pod(job, options, settings, "ray-head"),
                },
                **({"workerGroupSpecs": [worker_group]} if job.nodes > 1 else {}),
            },
        },
    }
    text = yaml.dump_all([config_map, ray_job], Dumper=_TextDumper, sort_keys=False)
    return [_config_file(job), JobFile(name="rayjob.yaml", text=text)]


def _pod(job: Job, options: KubeRayOptions, settings: str, name: str) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": str(job.cpus_per_node)}
    if options.memory:
        resources["memory"] = options.memory
    if job.gpus_per_node:
        resources["nvidia.com/gpu"] = job.gpus_per_node
    mounts = {"runs": MOUNTED_RUNS, "settings": MOUNTED_CONFIG, "memory": "/dev/shm"}
    return {
        "spec": {
            "containers": [
                {
                    "name": name,
                    "image": options.image,
                    "resources": {"limits": resources, "requests": dict(resources)},
                    "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
                }
            ],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
                {"name": "settings", "configMap": {"name": settings}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilotOptions:
    """Options of a SkyPilot task."""

    accelerator: str | None
    """Name of the GPU, such as ``H100``; ``None`` for nodes without GPUs."""
    bucket: str | None
    """Bucket with the run folders, such as ``s3://my-runs``; ``None`` to keep them on the first node."""
    infra: str | None = None
    """Cloud, region or Kubernetes context, such as ``aws/us-east-1``."""
    workdir: Path | None = None
    """Folder of this machine that is copied to the nodes, where the run starts: your own environments and files."""


def skypilot_files(job: Job, options: SkyPilotOptions, folder: Path) -> list[JobFile]:
    """Return the config and a task, which uploads the config from `folder`."""
    resources: dict[str, Any] = {"cpus": f"{job.cpus_per_node}+"}
    if options.infra:
        resources["infra"] = options.infra
    if job.gpus_per_node:
        if options.accelerator is None:
            raise UsageError(
                "the run needs GPUs",
                got="no name of a GPU",
                expected="--accelerator, such as H100 (see: sky show-gpus)",
            )
        resources["accelerators"] = f"{options.accelerator}:{job.gpus_per_node}"
    mounts: dict[str, Any] = {f"{MOUNTED_CONFIG}/{CONFIG_FILE}": str(folder / CONFIG_FILE)}
    if options.bucket:
        mounts[MOUNTED_RUNS] = {"source": options.bucket, "mode": "MOUNT"}
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        **({"workdir": str(options.workdir)} if options.workdir else {}),
        "file_mounts": mounts,
        **({"setup": "\n".join(job.setup) + "\n"} if job.setup else {}),
        "run": _skypilot_run(job),
    }
    return [_config_file(job), JobFile(name="task.yaml", text=yaml.dump(task, Dumper=_TextDumper, sort_keys=False))]


def _skypilot_run(job: Job) -> str:
    config_file = f"{MOUNTED_CONFIG}/{CONFIG_FILE}"
    if job.config.cluster is None:  # one node
        return f"set -euo pipefail\n{_train_or_resume(job, config_file)}\ntrain\n"
    gpus = f" --num-gpus={job.gpus_per_node}" if job.gpus_per_node else ""
    start = textwrap.dedent(
        f"""\
        set -euo pipefail
        head="$(head --lines=1 <<< "$SKYPILOT_NODE_IPS"):{PORT}"
        is_up() {{ ray health-check --address "$head" > /dev/null 2>&1; }}
        if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
            until is_up; do sleep 2; done
            ray start --address="$head"{gpus}
            while is_up; do sleep 5; done
            exit 0
        fi
        ray start --head --node-ip-address="${{head%:*}}" --port={PORT}{gpus}
        """
    )
    train = _train_or_resume(job, config_file, 'cluster.address="$head"')
    return f'{start}{train}\ncode=0\n(train) || code=$?\nray stop\nexit "$code"\n'


class _TextDumper(yaml.SafeDumper):
    """Dumper that writes multi-line strings as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_TextDumper.add_representer(str, _represent_text)
