"""Loop and chat template of a model: the choice if the user chose none, and the check that they fit each other.

The choice is the one that `agentrl model check` recommended for the model and the environment, or else depends on the
chat template.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agentrl.agent_loop import AgentLoop
from agentrl.config.config import SCRATCH, Config
from agentrl.config.derived import SOLE, EnvironmentConfigs, agent_loop_class, make_agent_loop, per_environment_configs
from agentrl.config.environment import AgentConfig
from agentrl.env import AnyEnv, optional_part
from agentrl.env.lookup import resolve_environment
from agentrl.errors import TemplateError, UsageError
from agentrl.message import Role
from agentrl.models.identity import weights
from agentrl.models.vision import MODEL_TYPES
from agentrl.observe.files import replace_file, writing
from agentrl.observe.model_folder import find_model, models_folder
from agentrl.render.call_form import PROBE_TOOL
from agentrl.render.chat_template import find_chat_template, read_chat_template
from agentrl.render.renderer import Renderer
from agentrl.render.template_check import RewrittenHistory, check_calls_shown, check_template, find_omitted_text
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.environment_probe import EnvironmentTimeout, probe_environment

DEFAULT_LOOP: str = AgentConfig.model_fields["loop"].default
"""Agent loop of a config that chooses none."""
CHATML, CHATML_TOKENS = "chatml", ("<|im_start|>", "<|im_end|>")
"""The shipped chat template with tools, and the special tokens that it needs."""
CHECKS = ".checks"
"""Folder of the results of `agentrl model check`, next to the models that were added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """Settings with which a model plays: a loop, its options, and examples in the prompt.

    >>> print(PlaySettings(loop="react_text", shots=2))
    agent.loop=react_text agent.few_shot_turns=2
    """

    loop: str
    options: dict[str, Any] = field(default_factory=dict)
    shots: int = 0

    @property
    def overrides(self) -> list[str]:
        """The settings as words of the command line, without quotes."""
        return [
            f"agent.loop={self.loop}",
            *([f"agent.options={json.dumps(self.options)}"] if self.options else []),
            *([f"agent.few_shot_turns={self.shots}"] if self.shots else []),
        ]

    def __str__(self) -> str:
        return " ".join(shlex.quote(word) for word in self.overrides)

    def apply_to(self, config: Config, label: str = SOLE) -> Config:
        """Return the config with these settings, except for examples that the user chose."""
        changes: dict[str, Any] = {"loop": self.loop, "options": self.options}
        if not sets_shots(config, label):
            changes["few_shot_turns"] = self.shots
        if label == SOLE:
            return config.model_copy(update={"agent": config.agent.model_copy(update=changes)})
        entry = config.environments[label]
        changed = entry.model_copy(update={"agent": entry.agent.model_copy(update=changes)})
        return config.model_copy(update={"environments": {**config.environments, label: changed}})


def sets_shots(config: Config, label: str) -> bool:
    """Return True if the user chose the number of examples in an environment's prompts."""
    own = label != SOLE and config.environments[label].agent.few_shot_turns is not None
    return own or "few_shot_turns" in config.agent.model_fields_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Settings that `agentrl model check` found best for a model and an environment."""

    settings: PlaySettings
    usable: float
    """Share of first answers that the loop could read."""
    answers: int
    date: str


def select_default_loop(config: Config, *, say: Callable[[str], None]) -> Config:
    """Choose the agent loop of each environment and, for a ChatML model that cannot show tools, the chat template.

    An environment for which the user chose no loop and asked for no tools gets the settings that `agentrl model check`
    recommended for the model and this environment. Without a recommendation, a model whose chat template has no tool
    calls acts in text, with the default loop's `AgentLoop.text_loop`. If an environment needs tools, a ChatML model
    gets the shipped template that shows them, and no loop changes.

    Args:
        config: The config of a model whose files are on this machine.
        say: Called with what was chosen, and why.

    Raises:
        UsageError: the model has no tokenizer, or an environment hangs.
    """
    if config.model.path == SCRATCH or not config.has_environment:
        return config
    chosen, rest = config, []
    for part in per_environment_configs(config):
        if _chooses(config, part, "loop", "tool_parser"):
            continue
        found = find_recommendation(part.config) if _leaves_loop_open(config, part) else None
        if found is None:
            rest.append(part)
        else:
            say(f"{_name(part)}{_describe(found, config, part)}")
            chosen = found.settings.apply_to(chosen, part.label)
    if not rest or calls_tools(config):
        return chosen
    if any(_needs_tools(config, part) for part in rest):
        return _with_chatml(chosen, say)  # some could not act in text
    for part in rest:
        chosen = _as_text(chosen, part, say)
    return chosen


def show_tools(config: Config, *, say: Callable[[str], None]) -> Config:
    """Choose the chat template for clients that may bring tools; see `select_default_loop`.

    Args:
        config: The config of a model whose files are on this machine.
        say: Called with what was chosen, and why.

    Raises:
        UsageError: the model has no tokenizer.
    """
    if config.model.path == SCRATCH or "tool_parser" in config.agent.model_fields_set or calls_tools(config):
        return config
    return _with_chatml(config, say)


def _name(part: EnvironmentConfigs) -> str:
    return f"{part.label}: " if part.label else ""


def _key(part: EnvironmentConfigs) -> str:
    return f"environments.{part.label}.agent.loop" if part.label else "agent.loop"


def _describe(found: Recommendation, config: Config, part: EnvironmentConfigs) -> str:
    kept = ", except for agent.few_shot_turns, which you set" if sets_shots(config, part.label) else ""
    return (
        f"model check found {found.usable:.0%} of {found.answers} first answers usable on {found.date} with "
        f"{found.settings}: using these settings{kept}; set {_key(part)} to choose others"
    )


def _needs_tools(config: Config, part: EnvironmentConfigs) -> bool:
    """Return True if an environment is played with tools: its own, or those that the user chose."""
    if _leaves_loop_open(config, part):
        return brings_tools(part.config)
    return bool(part.config.agent.tools)


def _as_text(config: Config, part: EnvironmentConfigs, say: Callable[[str], None]) -> Config:
    """Return the config with a text loop, for a model without tool calls."""
    agent, loop = part.config.agent, agent_loop_class(part.config.agent.loop).text_loop
    if loop is None or agent.roles:
        return config
    if _chooses(config, part, "options"):
        if "format" not in agent.options:
            return config
        say(f"{_name(part)}the model's chat template has no tool calls: agent.loop={loop}; set {_key(part)} to choose")
        return PlaySettings(loop=loop, options=agent.options, shots=agent.few_shot_turns).apply_to(config, part.label)
    form = answer_forms(loop, part.config)[-1]
    settings = PlaySettings(loop=loop, options=dict(form))
    say(
        f"{_name(part)}the model's chat template has no tool calls, so its actions are text: {settings}; "
        f"set {_key(part)} to choose"
    )
    return settings.apply_to(config, part.label)


def answer_forms(loop: str, config: Config) -> Sequence[Mapping[str, Any]]:
    """Return the options of a loop that may help a model to answer in the environment's format, the plainest first."""
    return agent_loop_class(loop).answer_forms(resolve_environment(config.sole_environment.name).answer_format)


def _with_chatml(config: Config, say: Callable[[str], None]) -> Config:
    """Use the shipped ChatML template if the user chose none and the tokenizer has its tokens."""
    if config.model.chat_template is not None:
        return config
    if not set(CHATML_TOKENS) <= load_tokenizer(find_model(config.model.path)).get_added_vocab().keys():
        return config
    say(
        f"the model's chat template does not show tools: using model.chat_template={CHATML} instead; set "
        "model.chat_template to choose"
    )
    model = config.model.model_copy(update={"chat_template": find_chat_template(CHATML)})
    return config.model_copy(update={"model": model})


def brings_tools(config: Config) -> bool:
    """Return True for an environment with tools of its own and without actions as text.

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
    except Exception:  # the user's code failed; the start of the run reports it
        return False


def _acts_through_tools(env: AnyEnv) -> bool:
    return bool(optional_part(env, "tools")) and not optional_part(env, "action_hint")


def calls_tools(config: Config) -> bool:
    """Return True if the model has no chat template, or one that renders tools, and calls in a known format."""
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


def _leaves_loop_open(config: Config, part: EnvironmentConfigs) -> bool:
    agent = part.config.agent
    is_chosen = _chooses(config, part, "loop", "options", "tool_parser")
    return not is_chosen and agent.loop == DEFAULT_LOOP and not agent.tools and not agent.roles


def _chooses(config: Config, part: EnvironmentConfigs, *keys: str) -> bool:
    """Return True if the user set one of the keys of ``agent``, for all environments or this one."""
    own = config.environments[part.label].agent if part.label else None
    return bool(config.agent.model_fields_set & set(keys)) or any(getattr(own, key, None) is not None for key in keys)


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
        return Recommendation(
            settings=PlaySettings(**record["settings"]),
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


_COST_OF_FORKS = (
    "A turn after that starts a new sequence, whose prompt is computed again: an episode of N turns may cost up to N "
    "times the tokens. A template that only appends (model.chat_template) or the loop step_independent costs less. "
    "With agent.rewritten_history=refuse, the run does not start."
)


def check_rendering(config: Config, renderer: Renderer, *, say: Callable[[str], None] = lambda _: None) -> None:
    """Check that the chat template can be rendered turn by turn, before anything is sampled.

    If it rewrites history and the config allows forked conversations, the renderer detects rewrites, and `say` is
    called with a message about the cost.

    Raises:
        TemplateError: the template rewrites history (the error shows both renderings), or the loop calls tools and the
            template does not support them.
        UsageError: the environment shows images, but the model reads text only.
    """
    if renderer.enable_thinking and not renderer.thinks:
        say(
            "agent.enable_thinking is true, but the chat template has no thoughts that agentrl can tell from the text "
            f"(family {renderer.family.name}): what the model thinks stays in its answers"
        )
    for part in per_environment_configs(config):
        environment = part.config.sole_environment
        spec = resolve_environment(environment.name)
        if renderer.images is None and spec.shows_images(environment.options):
            raise UsageError(
                f"environment {spec.name} shows images, but the model reads text only",
                got=config.model.path,
                expected=f"a vision-language model ({', '.join(MODEL_TYPES)})",
                hint="or let the environment show text",
            )
        loop = make_agent_loop(part.config.agent.loop, part.config.agent.options)
        tools = [PROBE_TOOL] if loop.offers_tools else []
        if loop.offers_tools:
            renderer.require_tools()
        if not loop.follow_ups:
            continue
        roles = _roles_of_follow_ups(loop, renderer)
        try:
            check_template(renderer, roles=roles, tools=tools)
        except RewrittenHistory as error:
            if config.agent.rewritten_history == "refuse":
                raise
            renderer.rewrites_history = True
            say(f"{error.what}: conversations fork at these turns. {_COST_OF_FORKS}")
        if "tool" in roles and (omitted := find_omitted_text(renderer)) and not renderer.omits_text_beside_calls:
            if config.agent.rewritten_history == "refuse":
                raise omitted
            renderer.omits_text_beside_calls = True
            say(f"{omitted.what}: conversations fork after such answers, or {omitted.hint}. {_COST_OF_FORKS}")


def _roles_of_follow_ups(loop: AgentLoop, renderer: Renderer) -> Sequence[Role]:
    """Return the roles that follow answers, without tool results if the template cannot render optional tool calls."""
    if loop.offers_tools or "tool" not in loop.follow_ups:
        return loop.follow_ups
    try:
        check_calls_shown(renderer)
    except TemplateError:
        return [role for role in loop.follow_ups if role != "tool"]
    return loop.follow_ups
