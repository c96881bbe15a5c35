"""`agentrl env`: list, show, check, play and serve environments."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from agentrl.builders.models import resolve_model
from agentrl.cli.check import EnvironmentCheck, check_all, check_one
from agentrl.cli.env_tasks import Options, TaskFile, environment_options, on_tasks_of_file, probe, validate
from agentrl.cli.help_pages import examples
from agentrl.cli.play import play_in_browser, play_in_terminal, tool_line
from agentrl.cli.server import Host, Lease, Port, read_token, serve_on_stdio, serve_until_stopped, token_option
from agentrl.config import load_config
from agentrl.config.config import SCRATCH
from agentrl.env import EnvironmentSpec, optional_part
from agentrl.env.lookup import check_split, parse_env_name, resolve_environment
from agentrl.errors import AgentRLError, ConfigError, EnvironmentFailure, UsageError
from agentrl.evaluation.prompt_preview import preview_prompts
from agentrl.observe.console import note, out
from agentrl.registry import Kind, names
from agentrl.remote.server import EnvironmentServer, MCPServer, OpenEnvServer, ServerSettings
from agentrl.remote.wire import TOKEN_VARIABLE
from agentrl.rollout.env_returns import check_tools
from agentrl.rollout.environment_probe import EnvironmentTimeout, probe_environment
from agentrl.rollout.loop_choice import select_default_loop
from agentrl.runs.stop import run_until_stopped
from agentrl.testing.env_check import INTEGRITY, RULES, check_env, reward_integrity
from agentrl.testing.env_subject import CheckDepth
from agentrl.testing.report import choose_rules
from agentrl.tool import Tool

app = typer.Typer(no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        help="Registry name, Gymnasium id, module:EnvId, module:attr or a server's address, optionally with /SPLIT."
    ),
]
Checked = Annotated[str | None, typer.Argument(help="Environment, as for env show, optionally with /SPLIT.")]
Every = Annotated[bool, typer.Option("--all", help="Check every installed environment.")]
Only = Annotated[list[str] | None, typer.Option(help="Check only this rule; may be repeated.")]
Skip = Annotated[list[str] | None, typer.Option(help="Skip this rule; may be repeated.")]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write the report to this file; - prints it.")]
_DEFAULTS = ServerSettings()


class ServedProtocol(enum.StrEnum):
    """Protocols of clients that can play a served environment."""

    AGENTRL = "agentrl"
    OPENENV = "openenv"
    MCP = "mcp"


_SERVERS: Mapping[ServedProtocol, Callable[..., EnvironmentServer | OpenEnvServer | MCPServer]] = {
    ServedProtocol.AGENTRL: EnvironmentServer,
    ServedProtocol.OPENENV: OpenEnvServer,
    ServedProtocol.MCP: MCPServer,
}
_USES = {
    ServedProtocol.AGENTRL: "agentrl env play {url}",
    ServedProtocol.OPENENV: 'GenericEnvClient(base_url="{url}")',
    ServedProtocol.MCP: "connect an MCP client to {url}",
}
"""Command or instruction to connect a client to each kind of server."""


@app.command("list", epilog=examples("agentrl env list"))
def list_environments() -> None:
    """List the installed environments."""
    table = Table("name", "splits", "description", box=None, pad_edge=False)
    for name in names(Kind.ENVIRONMENT):
        spec = resolve_environment(name)
        table.add_row(name, " ".join(spec.splits), spec.description.partition(". ")[0] + _needs(spec))
    out.print(table)


def _needs(spec: EnvironmentSpec) -> str:
    return "" if spec.extra is None or spec.extra.is_installed else f" (needs agentrl[{spec.extra.name}])"


@app.command(
    epilog=examples(
        "agentrl env show household",
        "agentrl env show webshop products=1000 max_steps=30",
        "agentrl env show my_game:GuessNumber-v0",
    )
)
def show(name: Name, options: Options = None) -> None:
    """Show an environment with its options: splits, tasks, limits, known scores."""
    named = parse_env_name(name)
    spec = resolve_environment(named.name)
    given = {**spec.options, **environment_options(options)}
    splits = spec.splits_under(given) if named.split is None else [check_split(spec, named.split)]
    out.print(Text(spec.name, style="bold"))
    out.print(spec.description or "no description: its class or function has no docstring")
    table = Table(box=None, show_header=False, pad_edge=False)
    for split in splits:
        table.add_row(f"split {split}", _size(spec, split, given))
    limit = spec.turns_under(given)
    table.add_row("steps", f"at most {limit}" if limit else "no limit")
    table.add_row("return", f"{spec.reward_range[0]:g} to {spec.reward_range[1]:g}")
    table.add_row("version", str(spec.version))
    table.add_row("code runs", spec.isolation_under(given).value)
    if spec.extra is not None:
        table.add_row("needs", f"agentrl[{spec.extra.name}]" + ("" if spec.extra.is_installed else ", not installed"))
    for option, value in given.items():
        table.add_row(f"option {option}", json.dumps(value, default=str))
    for policy, score in spec.scores.items():
        table.add_row(f"success of {policy}", f"{score:.2f}")
    out.print(table)
    if told := spec.with_instructions_under(given).instructions:
        out.print(Text(f"\n{told}"))
    if tools := _own_tools(spec, given):
        out.print("\ntools:")
        for tool in tools:
            out.print(Text(tool_line(tool)))


def _own_tools(spec: EnvironmentSpec, options: Mapping[str, Any]) -> list[Tool]:
    """Return the environment's tools; none if it cannot be created on this machine.

    Raises:
        EnvironmentTimeout: it hangs.
        ConfigError: its constructor does not accept the options.
    """
    try:
        return probe_environment(spec, options, lambda env: list(check_tools(optional_part(env, "tools"))))
    except EnvironmentFailure as error:
        note(f"warning: the environment's own tools are unknown: {error}")
        return []
    except (EnvironmentTimeout, ConfigError):
        raise
    except AgentRLError:
        return []


@app.command(
    epilog=examples(
        "agentrl env prompt guess_number",
        "agentrl env prompt household --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl env prompt webshop agent.loop=react_text agent.options.format=action_tag agent.few_shot_turns=1",
        "agentrl env prompt my_game:GuessNumber-v0 agent.system_prompt=file:prompt.txt",
    )
)
def prompt(
    name: Name,
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys.")] = None,
    model: Annotated[str | None, typer.Option(help="Model whose chat template and tokenizer are used.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Number of turns.")] = 2,
) -> None:
    """Show the text that a policy reads, decoded from its tokens, with the settings of `agentrl train`.

    Prints the prompt with the tools, the expert's first turns, and the reply to an answer in the wrong format.
    """
    shortcuts = [f"environment={name}", *([] if model is None else [f"model.path={model}"])]
    config = select_default_loop(
        resolve_model(load_config(None, [*shortcuts, *(words or []), f"agent.max_turns={turns}"])), say=note
    )
    found = run_until_stopped(preview_prompts(config))
    is_scratch = config.model.path == SCRATCH
    model_name = "a scratch model's chat template; choose another with --model" if is_scratch else config.model.path
    out.print(
        f"model: {model_name}\nagent loop: {config.agent.loop} {json.dumps(config.agent.options)}", soft_wrap=True
    )
    for part in found.parts:
        size = "" if is_scratch else f", {part.tokens:,} tokens"
        out.print(Text(f"── {part.title}{size}", style="bold"))
        text = Text(part.text)
        text.highlight_words(found.special_tokens, "magenta")
        out.print(text)


def _size(spec: EnvironmentSpec, split: str, options: Mapping[str, Any]) -> str:
    """Return the number of tasks of a split, or how to get its data if that is missing."""
    try:
        return f"{len(spec.tasks_under(split, options)):,} tasks"
    except ConfigError:
        raise
    except UsageError as error:
        return str(error.hint or error)


@app.command(
    epilog=examples(
        "agentrl env check household",
        "agentrl env check my_game:GuessNumber-v0 --skip 'steps are fast enough'",
        "agentrl env check thermostat:Thermostat --tasks rows.jsonl",
        "agentrl env check --all --json -",
    )
)
def check(
    name: Checked = None,
    options: Options = None,
    tasks: TaskFile = None,
    every: Every = False,
    episodes: Annotated[int, typer.Option(min=1, help="Minimum number of tasks to play.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="Play only as much as check_env does in tests.")] = False,
    only: Only = None,
    skip: Skip = None,
    call_timeout_s: Annotated[
        float | None,
        typer.Option("--call-timeout", min=0.1, help="Seconds per call of the environment; default 30, --quick 10."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check an environment against the rules: seeding, splits, concurrency, rewards, memory, speed, leaks."""
    choose_rules(RULES, only=only or (), skip=skip or ())  # fail for a wrong name instead of skipping environments
    settings = {
        "episodes": episodes,
        "thoroughness": CheckDepth.QUICK if quick else CheckDepth.FULL,
        "only": only or (),
        "skip": skip or (),
        "call_timeout_s": call_timeout_s,
    }
    _run_check(check_env, name, options, tasks, every, json_file, settings)


@app.command(
    epilog=examples(
        "agentrl env integrity code size=tiny",
        "agentrl env integrity my_game:GuessNumber-v0 --episodes 64",
        "agentrl env integrity terminal/valid --episodes 4 --json report.json",
    )
)
def integrity(
    name: Checked = None,
    options: Options = None,
    tasks: TaskFile = None,
    every: Every = False,
    episodes: Annotated[int, typer.Option(min=1, help="Number of tasks that each policy plays.")] = 16,
    only: Only = None,
    skip: Skip = None,
    call_timeout_s: Annotated[
        float | None, typer.Option("--call-timeout", min=0.1, help="Seconds per call of the environment; default 30.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Report ways to get an environment's reward without solving its tasks.

    Looks for answers that the policy can read, rewards for play that solves nothing, words that predict the reward, and
    files in the policy's sandbox.
    """
    choose_rules(INTEGRITY, only=only or (), skip=skip or ())  # see check
    settings = {"episodes": episodes, "only": only or (), "skip": skip or (), "call_timeout_s": call_timeout_s}
    _run_check(reward_integrity, name, options, tasks, every, json_file, settings)


app.command(
    epilog=examples(
        "agentrl env validate math_problems --limit 100",
        'agentrl env validate terminal/test \'folders={"test": "tasks"}\' --concurrency 4 --records results.jsonl',
        "agentrl env validate my_game:GuessNumber-v0 --tasks tasks.jsonl --json -",
    )
)(validate)
app.command(
    epilog=examples(
        "agentrl env probe math_problems --model Qwen/Qwen2.5-0.5B-Instruct --attempts 8 --output tasks.jsonl",
        "agentrl env probe household/train --model runs/latest --limit 200 --band 0.1:0.9 --output tasks.jsonl",
        "agentrl train --env household --model runs/latest --tasks tasks.jsonl",
    )
)(probe)


def _run_check(
    check: EnvironmentCheck,
    name: str | None,
    options: list[str] | None,
    tasks: str | None,
    every: bool,
    json_file: str | None,
    settings: Mapping[str, Any],
) -> None:
    if every == (name is not None):
        raise UsageError(
            "no environment to check" if name is None else "a name and --all exclude each other",
            got=name or "nothing",
            expected="either a name, or --all",
        )
    if name is not None:
        given = environment_options(options)
        spec = None if tasks is None else on_tasks_of_file(name, given, tasks)
        check_one(check, name, json_file, spec, options=given, **settings)
    elif tasks is not None:
        raise UsageError("--tasks and --all exclude each other", got=tasks, expected="a name and --tasks, or --all")
    else:
        check_all(check, json_file, **settings)


@app.command(
    epilog=examples(
        "agentrl env play household",
        "agentrl env play guess_number --task 3",
        "agentrl env play webshop/test --web",
        "agentrl env play http://127.0.0.1:8100",
    )
)
def play(
    name: Name,
    options: Options = None,
    task: Annotated[int, typer.Option(min=0, help="Index of the task in its split.")] = 0,
    in_browser: Annotated[bool, typer.Option("--web", help="Play in a browser on this machine.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 for a free port.")] = 8089,
) -> None:
    """Play an environment yourself, in the terminal or in a browser."""
    named = parse_env_name(name)
    spec = resolve_environment(named.name)
    given = {**spec.options, **environment_options(options)}
    source = spec.tasks_under(check_split(spec, named.split or spec.splits_under(given)[0]), given)
    if task >= len(source):
        raise UsageError("no task has this number", got=task, expected=f"0 to {len(source) - 1}")
    if in_browser:
        play_in_browser(spec, spec.make_under(given), source[task], port=port)
    else:
        play_in_terminal(spec, spec.make_under(given), source[task])


@app.command(
    epilog=examples(
        "agentrl env serve household --port 8100",
        "agentrl env serve my_game:GuessNumber-v0 difficulty=3 --host 0.0.0.0 --token-file token.txt",
        "agentrl env serve search_qa --protocol openenv --port 8000",
        "agentrl env serve search_qa --protocol mcp --stdio",
        "agentrl eval --env http://127.0.0.1:8100/valid_unseen --policy expert",
    )
)
def serve(
    name: Name,
    options: Options = None,
    protocol: Annotated[
        ServedProtocol, typer.Option(help="Protocol of the clients: agentrl's own, OpenEnv, or MCP.")
    ] = ServedProtocol.AGENTRL,
    on_stdio: Annotated[
        bool, typer.Option("--stdio", help="With --protocol mcp, serve one client over standard input and output.")
    ] = False,
    host: Host = _DEFAULTS.host,
    port: Port = _DEFAULTS.port,
    token_file: Annotated[Path | None, token_option(TOKEN_VARIABLE)] = None,
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent episodes.")
    ] = _DEFAULTS.max_sessions,
    lease_s: Lease = _DEFAULTS.lease_s,
    workers: Annotated[
        int, typer.Option(min=1, help="Worker threads or processes, if the environment needs them.")
    ] = _DEFAULTS.workers,
    reset_timeout_s: Annotated[
        float, typer.Option("--reset-timeout", min=0.1, help="Seconds before a reset times out.")
    ] = _DEFAULTS.reset_timeout_s,
    step_timeout_s: Annotated[
        float, typer.Option("--step-timeout", min=0.1, help="Seconds before a step times out.")
    ] = _DEFAULTS.step_timeout_s,
) -> None:
    """Serve an environment over HTTP; stop with Ctrl-C.

    Prints the address, which other commands accept as the environment's name: env play, eval, train.
    """
    settings = ServerSettings(
        host=host,
        port=port,
        token=read_token(token_file, TOKEN_VARIABLE),
        max_sessions=max_sessions,
        lease_s=lease_s,
        workers=workers,
        reset_timeout_s=reset_timeout_s,
        step_timeout_s=step_timeout_s,
    )
    if on_stdio and protocol is not ServedProtocol.MCP:
        raise UsageError("--stdio works only with MCP", got=f"--protocol {protocol}", expected="--protocol mcp")
    named = parse_env_name(name)
    if named.split is not None:
        raise UsageError("a server offers all splits", got=name, expected=named.name, hint="its clients name the split")
    spec = resolve_environment(named.name)
    server = _SERVERS[protocol](spec, environment_options(options), settings)
    if on_stdio and isinstance(server, MCPServer):
        serve_on_stdio(server.run_on_stdio, server.close)
    else:
        usage = f"{spec.name} is served: {_USES[protocol]}"
        serve_until_stopped(server, settings, open_to_all="use this server", usage=usage)
