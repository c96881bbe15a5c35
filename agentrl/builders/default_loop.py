"""Choice of the agent loop if the user chose none: as `agentrl model check` recommended, or by the chat template."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agentrl.config.config import SCRATCH, Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.environment import AgentConfig
from agentrl.config.section import Section
from agentrl.env import AnyEnv, optional_part
from agentrl.env.lookup import resolve_environment
from agentrl.errors import TemplateError
from agentrl.models.identity import weights
from agentrl.observe.files import replace_file, writing
from agentrl.observe.model_folder import find_model, models_folder
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer
from agentrl.render.tokens import find_chat_template, read_chat_template
from agentrl.rollout.environment_probe import EnvironmentTimeout, probe_environment

TOOL_LOOP = "tool_calling"
TEXT_LOOP = "react_text"
"""The agent loop of a model that cannot call tools."""
BEGUN_ACTION = {"format": "action_tag", "prefill": "<action>"}
"""Options of the text loop: even a small model completes a form that is begun for it."""
END_OF_ACTION = "</action>"
CHATML, CHATML_TOKENS = "chatml", ("<|im_start|>", "<|im_end|>")
"""The shipped chat template with tools, and the special tokens that it needs."""
CHECKS = ".checks"
"""Folder of the results of `agentrl model check`, next to the models that were added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """Settings of how a model plays: a loop, its options, examples in the prompt.

    >>> print(PlaySettings(loop="react_text", shots=2))
    agent.loop=react_text agent.few_shot_turns=2
    """

    loop: str
    options: dict[str, Any] = field(default_factory=dict)
    shots: int = 0
    stop: tuple[str, ...] = ()
    """Texts at which sampling stops."""

    @property
    def overrides(self) -> list[str]:
        """The settings as words of the command line, without quotes."""
        return [
            f"agent.loop={self.loop}",
            *([f"agent.options={json.dumps(self.options)}"] if self.options else []),
            *([f"agent.few_shot_turns={self.shots}"] if self.shots else []),
            *([f"sampling.stop={json.dumps(list(self.stop))}"] if self.stop else []),
        ]

    def __str__(self) -> str:
        return " ".join(shlex.quote(word) for word in self.overrides)

    def applied(self, config: Config) -> Config:
        """Return the config with these settings, except for shots and stop texts that the user chose."""
        agent: dict[str, Any] = {"loop": self.loop, "options": self.options}
        if "few_shot_turns" not in config.agent.model_fields_set:
            agent["few_shot_turns"] = self.shots
        changes: dict[str, Section] = {"agent": config.agent.model_copy(update=agent)}
        if self.stop and not config.sampling.stop:
            changes["sampling"] = config.sampling.model_copy(update={"stop": self.stop})
        return config.model_copy(update=changes)


def begun_action(shots: int = 0) -> PlaySettings:
    """Return the settings under which an answer in text begins with ``<action>``."""
    return PlaySettings(loop=TEXT_LOOP, options=dict(BEGUN_ACTION), shots=shots, stop=(END_OF_ACTION,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Settings that `agentrl model check` found best for a model and an environment."""

    settings: PlaySettings
    usable: float
    """Share of first answers that the loop could read."""
    answers: int
    date: str


def select_default_loop(config: Config, *, say: Callable[[str], None]) -> Config:
    """Choose the agent loop and, for a ChatML model that cannot show the user's tools, the chat template.

    If the user chose no loop and asked for no tools, the settings that `agentrl model check` recommended for the model
    and the environment come first; without them, a model whose chat template has no tool calls acts in text. If the
    user asked for tools, a ChatML model gets the shipped template that shows them.

    Args:
        config: The config of a model whose files are on this machine.
        say: Called with what was chosen, and why.

    Raises:
        UsageError: the model has no tokenizer, or an environment hangs.
    """
    if config.model.path == SCRATCH or not config.has_environment:
        return config
    if not _leaves_loop_open(config):
        return _with_tool_template(config, say)
    found = None if config.environments else find_recommendation(config)
    if found is not None:
        kept = (
            ", except for agent.few_shot_turns, which you set"
            if "few_shot_turns" in config.agent.model_fields_set
            else ""
        )
        say(
            f"model check found {found.usable:.0%} of {found.answers} first answers usable on {found.date} with "
            f"{found.settings}: these settings are taken{kept}; set agent.loop to choose another way"
        )
        return found.settings.applied(config)
    if calls_tools(config):
        return config
    if any(brings_tools(part.config) for part in per_environment_configs(config)):
        return _with_chatml(config, say)  # it could not act in text
    specs = [resolve_environment(part.config.sole_environment.name) for part in per_environment_configs(config)]
    settings = (
        begun_action() if len(specs) == 1 and not specs[0].answer_format else PlaySettings(loop=TEXT_LOOP, options={})
    )
    say(f"the model's chat template has no tool calls, so its actions are text: {settings}; set agent.loop to choose")
    return settings.applied(config)


def _with_tool_template(config: Config, say: Callable[[str], None]) -> Config:
    """Fit a model without tool calls to the tools, or to the option of text loops, that the user asked for."""
    if {"loop", "tool_parser"} & config.agent.model_fields_set or calls_tools(config):
        return config
    if config.agent.tools:
        return _with_chatml(config, say)
    if "format" in config.agent.options:
        say(f"the model's chat template has no tool calls: agent.loop={TEXT_LOOP}; set agent.loop to choose")
        return config.model_copy(update={"agent": config.agent.model_copy(update={"loop": TEXT_LOOP})})
    return config


def _with_chatml(config: Config, say: Callable[[str], None]) -> Config:
    """Take the shipped ChatML template if the user chose none and the tokenizer knows its tokens."""
    if config.model.chat_template is not None:
        return config
    if not set(CHATML_TOKENS) <= load_tokenizer(find_model(config.model.path)).get_added_vocab().keys():
        return config
    say(
        f"the model's chat template does not show tools: model.chat_template={CHATML} takes its place; set "
        "model.chat_template to choose"
    )
    model = config.model.model_copy(update={"chat_template": find_chat_template(CHATML)})
    return config.model_copy(update={"model": model})


def brings_tools(config: Config) -> bool:
    """Return True for an environment that is acted on through tools of its own, without actions as text.

    Raises:
        EnvironmentTimeout: it hangs.
    """
    environment = config.sole_environment
    spec = resolve_environment(environment.name)
    try:
        return probe_environment(
            spec,
            environment.options,
            _acts_through_tools,
            isolation=environment.isolation,
            deadline_s=environment.reset_timeout_s,
        )
    except EnvironmentTimeout:
        raise
    except Exception:  # of the user's code; the start of a run says what is wrong
        return False


def _acts_through_tools(env: AnyEnv) -> bool:
    return bool(optional_part(env, "tools")) and not optional_part(env, "action_hint")


def calls_tools(config: Config) -> bool:
    """Return True if the model's chat template shows tools and has calls in a known form, or there is none to ask."""
    tokenizer = load_tokenizer(find_model(config.model.path))
    if config.model.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.model.chat_template)
    if not tokenizer.chat_template:
        return True
    try:
        Renderer(tokenizer).require_tools()
    except TemplateError:
        return False
    return True


def _leaves_loop_open(config: Config) -> bool:
    if config.agent.model_fields_set & {"loop", "options", "tool_parser"}:
        return False
    agents = [config.agent, *(part.config.agent for part in per_environment_configs(config))]
    default = AgentConfig.model_fields["loop"].default
    return any(agent.loop == default for agent in agents) and not any(agent.tools or agent.roles for agent in agents)


def save_recommendation(config: Config, found: Recommendation) -> Path:
    """Store a recommendation for the config's model and environment; return the file.

    Raises:
        UsageError: the file cannot be written.
    """
    file = _file(config)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, orjson.dumps(asdict(found), option=orjson.OPT_INDENT_2))
    return file


def find_recommendation(config: Config) -> Recommendation | None:
    """Return what `agentrl model check` found for the config's model and environment; ``None`` if it never ran."""
    try:
        record = json.loads(_file(config).read_bytes())
        settings = record["settings"]
        return Recommendation(
            settings=PlaySettings(
                loop=settings["loop"],
                options=settings["options"],
                shots=settings["shots"],
                stop=tuple(settings["stop"]),
            ),
            usable=record["usable"],
            answers=record["answers"],
            date=record["date"],
        )
    except (OSError, ValueError, KeyError, TypeError):  # none, or one of another version
        return None


def _file(config: Config) -> Path:
    """Return the file of the model (content of its files, chat template) and the environment with its options."""
    environment = config.sole_environment
    identity = {
        "model": weights(find_model(config.model.path), config),
        "chat_template": config.model.chat_template and read_chat_template(config.model.chat_template),
        "environment": environment.name,
        "options": environment.options,
    }
    digest = hashlib.blake2b(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()
    return models_folder() / CHECKS / f"{digest}.json"
