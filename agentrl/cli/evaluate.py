"""`agentrl eval`: measure a policy on fixed tasks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from agentrl.cli.arguments import Rewards, config_words
from agentrl.cli.evaluations import play_request
from agentrl.cli.help_pages import examples
from agentrl.cli.reports import write_evaluation_report
from agentrl.cli.start_folder import READ, OptionsHere, in_start_folder
from agentrl.config import shipped_configs
from agentrl.config.estimate import evaluation_size
from agentrl.config.overrides import reward_words, warn_repeated
from agentrl.errors import AgentRLError, Outcome, UsageError
from agentrl.evaluation.diagnosis.finding import Finding, finding_lines
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.report import tables
from agentrl.evaluation.result import EvaluationResult
from agentrl.evaluation.session import (
    FinishedEvaluation,
    describe_request,
    make_request,
)
from agentrl.evaluation.settings import evaluation_config
from agentrl.observe.console import note, out, shown_path
from agentrl.observe.files import check_writable, replace_file
from agentrl.observe.run_folder import find_run
from agentrl.rollout.task_source import limited_by_tasks

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl eval runs/latest",
        "agentrl eval quickstart --model runs/latest --tasks 64",
        "agentrl eval --env household/valid_unseen --policy expert --tasks 50",
        "agentrl eval --env household/valid_unseen --model runs/latest --samples 4 --report",
        "agentrl eval --env household/valid_unseen --model Qwen/Qwen2.5-0.5B-Instruct --temperature 0.7",
        "agentrl eval --env household/valid_unseen --model runs/latest --engine vllm",
        "agentrl eval --env math_problems --model runs/latest --program '{python} my_agent.py'",
        "agentrl eval --env guess_number --engine openai --url http://127.0.0.1:8000/v1 --model my-model",
        configs=shipped_configs(),
    )
)
def evaluate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG|RUN] [KEY=VALUE]...", help="Config file, shipped config or run folder, then overrides."
        ),
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment and split; default: those of the run.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or name, run, or checkpoint.")] = None,
    policy: Annotated[PolicyKind, typer.Option(help="Policy that plays.")] = PolicyKind.ENGINE,
    engine: Annotated[str | None, typer.Option(help="local, vllm, sglang, scripted or openai.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of a running server or service.")] = None,
    tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of tasks; default: evaluation.tasks of the run or config, otherwise 100."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Episodes per task; default: evaluation.samples of the run or config.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Evaluate on the prompts of this file, each answered once.")
    ] = None,
    program: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Your own agent program, which uses the policy as its model.")
    ] = None,
    reward: Rewards = None,
    seed: Annotated[int, typer.Option(help="Seed for task selection and sampling.")] = 0,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum number of concurrent episodes.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Play all episodes again, instead of reusing finished ones.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Write a report with example episodes.")] = False,
) -> None:
    """Measure a policy on fixed tasks, with confidence intervals.

    Finished episodes are kept: the same command resumes a stopped evaluation. A change of the model, code, data or
    settings starts a new evaluation.
    """
    if json_file is not None:
        check_writable(json_file)
    chosen = config_words(words or [])
    warn_repeated(chosen.overrides)
    source = chosen.source
    if isinstance(source, str) and Path(source).is_dir():  # a run or a model
        if model is not None:
            raise UsageError("two models were given", got=f"{source} and --model {model}", expected="one of them")
        source, model = None, source
    own = find_run(model) if source is None and model is not None and url is None else None
    folder = None if own is None else own.path
    given = OptionsHere(folder)
    model, prompts, program = given.path(model), given.path(prompts), given.command(program)
    env, reward, json_file = given.name(env), given.names(reward), given.output(json_file)
    with in_start_folder(folder, READ):
        config = evaluation_config(
            source=source,
            env=env,
            model=model,
            policy=policy,
            engine=engine,
            url=url,
            temperature=temperature,
            concurrency=concurrency,
            prompts=prompts,
            overrides=[*_program_words(program), *reward_words(reward), *chosen.overrides],
        )
        request = make_request(config, policy=policy, model=model, tasks=tasks, samples=samples, seed=seed, fresh=fresh)
        if policy is PolicyKind.ENGINE:
            note(evaluation_size(limited_by_tasks(config), request.n_tasks, request.samples))
        note(describe_request(request))
        _finish(play_request(request), json_file, with_report=report)


def _finish(finished: FinishedEvaluation, json_file: Path | None, *, with_report: bool) -> None:
    """Print and write the result; raise an error if no episode was measured."""
    failure = _failure_of_all(finished.result)
    _print_finished(finished, failure)
    if json_file is not None:
        replace_file(json_file, (json.dumps(finished.result.to_json(), indent=2) + "\n").encode())
        note(f"wrote {shown_path(json_file)}")
    if with_report:
        files = write_evaluation_report(finished)
        note(f"wrote {files.markdown} and {files.html}")
    if failure is not None:
        raise failure


def _print_finished(finished: FinishedEvaluation, failure: AgentRLError | None) -> None:
    """Print the result, its problems except the one that `failure` describes, and the folder of the episodes."""
    _print_result(finished.result)
    told = "" if failure is None else str(failure)
    for line in finding_lines([problem for problem in finished.result.problems if not _is_told(problem, told)]):
        note(line)
    if finished.result.reused:
        note("reused episodes: code, data, settings and model did not change; --fresh plays them again")
    if (advice := finished.result.advice_on_success) is not None:
        note(advice)
    folder = shown_path(finished.folder)
    note(f"episodes are kept in {folder}; read them: agentrl view {shlex.quote(str(folder))}")


def _program_words(program: str | None) -> list[str]:
    if program is None:
        return []
    return ["agent.loop=external", f"agent.options={json.dumps({'command': program})}"]


def _print_result(result: EvaluationResult) -> None:
    for found in tables({"": result}):
        table = Table("", Column(overflow="fold"), title=found.title, title_justify="left", box=None, pad_edge=False)
        table.show_header = False
        for row in found.rows:
            table.add_row(*row)
        out.print(table)
        out.print()


def _failure_of_all(result: EvaluationResult) -> AgentRLError | None:
    """Return the most frequent failure as an error if all episodes failed, so that nothing was measured."""
    if result.failures < len(result.episodes):
        return None
    outcome, _ = max(result.outcomes.items(), key=lambda found: found[1])
    example = next(e.trajectory for e in result.episodes if e.trajectory.outcome is outcome)
    done = "scored" if outcome is Outcome.REWARD_ERROR else "played"
    return AgentRLError(
        f"no episode could be {done} ({outcome}): {example.error}",
        hint=_next_step(outcome, result.panel.environment, str(example.error)),
    )


def _is_told(problem: Finding, error: str) -> bool:
    """Return True if an error describes a problem, with its kind and its line."""
    return f"({problem.kind})" in error and (problem.file is None or f"{problem.file} line {problem.line}" in error)


def _next_step(outcome: Outcome, environment: str, error: str) -> str | None:
    """Return a hint for episodes that all failed in the same way; ``None`` if the error contains it."""
    if "agentrl env check" in error:
        return None
    if outcome is Outcome.ENVIRONMENT_ERROR and not error.startswith("agent loop "):
        return f"fix the error in the message, and run: agentrl env check {shlex.quote(environment)}"
    if outcome in (Outcome.ENVIRONMENT_ERROR, Outcome.REWARD_ERROR):
        return "fix the error in the message; the same command then plays these episodes"
    if outcome is Outcome.ENGINE_ERROR:
        return "see the engine's message for the cause; it is not in the environment"
    return "see the warnings above"
