"""`agentrl launch`: write the files of a job for Slurm, KubeRay or SkyPilot, and submit it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from agentrl.builders.checks import check_training
from agentrl.cli.arguments import Words, config_words, read_config
from agentrl.cli.help_pages import examples
from agentrl.config import shipped_configs
from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import note
from agentrl.runs.job_files import (
    MOUNTED_RUNS,
    Job,
    JobFile,
    KubeRayOptions,
    SkyPilotOptions,
    SlurmOptions,
    job_name,
    kuberay_files,
    make_job,
    skypilot_files,
    slurm_files,
)

app = typer.Typer(no_args_is_help=True)

INSTALLATION = {
    "sbatch": "run the command on a login node of the Slurm cluster",
    "kubectl": "install it: https://kubernetes.io/docs/tasks/tools, and KubeRay's operator in the cluster",
    "sky": 'install it: pip install "skypilot[kubernetes]", or with the name of your cloud',
}
"""Next step for each missing client."""

Name: TypeAlias = Annotated[
    str | None, typer.Option(help="Name of the job and of the run's folder; default: run.name, or the config's name.")
]
Out: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Folder for the files; default: launch/NAME.")
]
Nodes: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Number of nodes; default: as many as the run's GPUs need.")
]
Gpus: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="GPUs of each node; default: as many as the run needs, at most 8.")
]
Cpus: TypeAlias = Annotated[int | None, typer.Option(min=1, help="CPU cores of each node.")]
Setup: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="COMMAND", help="Shell command on every node before the run; may be repeated."),
]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Write the files, but do not submit them.")]


@app.command(
    epilog=examples(
        "agentrl launch slurm household/grpo --time 12:00:00 --dry-run",
        "agentrl launch slurm my_run.yaml --nodes 2 --partition gpu --setup 'source .venv/bin/activate'",
        "agentrl launch slurm quickstart model.device=cpu --cpus-per-node 8",
        configs=shipped_configs(),
    )
)
def slurm(
    words: Words = None,
    name: Name = None,
    out: Out = None,
    nodes: Nodes = None,
    gpus_per_node: Gpus = None,
    cpus_per_node: Cpus = None,
    time: Annotated[str, typer.Option(help="Time limit: HH:MM:SS or D-HH:MM:SS.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Partition (queue).")] = None,
    account: Annotated[str | None, typer.Option(help="Account that is charged.")] = None,
    setup: Setup = None,
    dry_run: DryRun = False,
) -> None:
    """Train on a Slurm cluster; the job continues after its time limit and after node failures.

    The current folder, the files and the run's folder must be on storage that all nodes share.
    """
    job = _job(words, name, None, nodes, gpus_per_node, cpus_per_node, setup)
    folder = _folder(out, job)
    files = slurm_files(job, SlurmOptions(time=time, partition=partition, account=account), folder)
    _launch(folder, files, ["sbatch", str(folder / "job.sbatch")], dry_run=dry_run)


@app.command(
    epilog=examples(
        "agentrl launch kuberay household/grpo --image registry.example.com/agentrl --claim runs --dry-run",
        "agentrl launch kuberay my_run.yaml --image agentrl:gpu --claim runs --nodes 2 --memory 200Gi",
        configs=shipped_configs(),
    )
)
def kuberay(
    image: Annotated[str, typer.Option(help="Image with agentrl, Ray and the engine; see the Dockerfile.")],
    claim: Annotated[str, typer.Option(help="Persistent volume claim for the runs, mounted by all pods.")],
    words: Words = None,
    name: Name = None,
    out: Out = None,
    nodes: Nodes = None,
    gpus_per_node: Gpus = None,
    cpus_per_node: Cpus = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each pod, such as 200Gi.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the job.")] = None,
    setup: Setup = None,
    dry_run: DryRun = False,
) -> None:
    """Train on Kubernetes, as a RayJob of KubeRay; a failed job is started again and resumes."""
    job = _job(words, name, MOUNTED_RUNS, nodes, gpus_per_node, cpus_per_node, setup, needs_ray=True)
    folder = _folder(out, job)
    options = KubeRayOptions(image=image, claim=claim, namespace=namespace, memory=memory)
    command = ["kubectl", "apply", "--filename", str(folder / "rayjob.yaml")]
    _launch(folder, kuberay_files(job, options), command, dry_run=dry_run)


@app.command(
    epilog=examples(
        "agentrl launch skypilot household/grpo --accelerator H100 --bucket s3://my-runs --dry-run",
        "agentrl launch skypilot my_run.yaml --accelerator A100 --nodes 2 --setup 'pip install \"agentrl[ray,vllm]\"'",
        configs=shipped_configs(),
    )
)
def skypilot(
    words: Words = None,
    name: Name = None,
    out: Out = None,
    nodes: Nodes = None,
    gpus_per_node: Gpus = None,
    cpus_per_node: Cpus = None,
    accelerator: Annotated[str | None, typer.Option(help="Name of the GPU, such as H100.")] = None,
    bucket: Annotated[
        str | None,
        typer.Option(help="Bucket for the runs, such as s3://my-runs; without one, they are lost when the job ends."),
    ] = None,
    infra: Annotated[str | None, typer.Option(help="Cloud, region or Kubernetes context: aws/us-east-1.")] = None,
    workdir: Annotated[Path | None, typer.Option(help="Folder to copy to the nodes, with your own modules.")] = None,
    setup: Setup = None,
    dry_run: DryRun = False,
) -> None:
    """Train on a cloud, as a managed job of SkyPilot; a job that loses its nodes is started again and resumes."""
    job = _job(words, name, MOUNTED_RUNS, nodes, gpus_per_node, cpus_per_node, setup)
    folder = _folder(out, job)
    path = None if workdir is None else workdir.absolute()
    options = SkyPilotOptions(accelerator=accelerator, bucket=bucket, infra=infra, workdir=path)
    command = ["sky", "jobs", "launch", "--yes", "--name", job.name, str(folder / "task.yaml")]
    _launch(folder, skypilot_files(job, options, folder), command, dry_run=dry_run)


def _job(
    words: Sequence[str] | None,
    name: str | None,
    directory: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    cpus_per_node: int | None,
    setup: Sequence[str] | None,
    *,
    needs_ray: bool = False,
) -> Job:
    config = read_config(words)
    check_training(config)
    source = config_words(words or []).source
    stem = source[0] if isinstance(source, list) else source or config.sole_environment.name
    return make_job(
        config,
        name=name or config.run.name or job_name(stem.removesuffix(".yaml")),
        directory=directory or str(Path(config.run.directory).absolute()),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        setup=setup or [],
        needs_ray=needs_ray,
    )


def _folder(out: Path | None, job: Job) -> Path:
    return (out or Path("launch") / job.name).absolute()


def _launch(folder: Path, files: Sequence[JobFile], command: Sequence[str], *, dry_run: bool) -> None:
    """Write the files, and submit them with the launcher's own client.

    Raises:
        UsageError: the client is not installed, or the folder cannot be written.
        AgentRLError: the client failed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            (folder / file.name).write_text(file.text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {folder}", got=error, hint="choose another folder: --out FOLDER") from error
    for file in files:
        note(f"wrote {folder / file.name}")
    if dry_run:
        note(f"submit it with: {shlex.join(command)}")
        return
    client = command[0]
    if shutil.which(client) is None:
        raise UsageError(
            f"the client {client} is not installed, so the job is not submitted",
            got=f"the files in {folder}",
            expected=f"{client} in PATH",
            hint=INSTALLATION[client],
        )
    if code := subprocess.run(command, check=False).returncode:
        raise AgentRLError(
            f"{client} did not accept the job", got=f"exit code {code} of {shlex.join(command)}", hint="see its output"
        )
