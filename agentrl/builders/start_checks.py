"""Checks of a start that need the run's model, tools or roles. The start of a run and its dry run make the same ones.

They come before the run's folder is made: what they refuse leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.builders.chat_file import check_chats, read_chats
from agentrl.builders.environments import roles_of_environment
from agentrl.builders.episodes import build_loop
from agentrl.builders.group_extras import check_extra_rollouts
from agentrl.builders.models import SCRATCH, build_renderer, check_rendering, check_tokens, load_tokenizer
from agentrl.builders.pairs import check_pair_tokens
from agentrl.builders.roles import build_roles, check_roles
from agentrl.builders.scratch import ignore
from agentrl.builders.tools import build_tools
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.env_lookup import resolve_environment
from agentrl.observe.model_folder import find_model
from agentrl.render.renderer import Renderer
from agentrl.render.tokens import read_chat_template
from agentrl.tool import Tool

SFT, DPO, REWARD_MODEL = "sft", "dpo", "reward-model"
"""Kinds of runs that only learn."""


def check_start(config: Config, *, kind: str, fetch: bool = True, say: Callable[[str], None] = ignore) -> None:
    """Check what a run would refuse once it has begun.

    Args:
        config: The run, with the agent loop that it will play.
        kind: What the run does: `SFT`, `DPO`, `REWARD_MODEL`, or anything else for reinforcement learning.
        fetch: Whether a model that is not on this machine is fetched for the checks; else its template is not checked.
        say: Called with what the user should know before the run begins.

    Raises:
        UsageError: A role, a tool, a model or a file that does not fit.
        TemplateError: The chat template does not fit the agent loop or the conversations.
    """
    if kind == REWARD_MODEL:
        return
    if kind == DPO:
        if config.model.path != SCRATCH:
            check_pair_tokens(config.preferences or PreferencesConfig(), find_model(config.model.path))
        return
    learns_chats = kind == SFT and config.sft.data is not None
    if not learns_chats:
        check_agents(config)
        if kind != SFT:
            check_extra_rollouts(config)
    renderer = start_renderer(config, fetch=fetch)
    if renderer is None:
        return
    if learns_chats:
        check_chats(read_chats(str(config.sft.data)), renderer)
        return
    check_rendering(config, renderer, say=say)
    if kind != SFT and fetch:
        check_tokens(config, config.model.path)


def check_agents(config: Config) -> None:
    """Check roles, their tools, and the names of all tools.

    Raises:
        UsageError: A role that cannot be played, an unknown tool, or a tool whose name the agent loop needs.
    """
    check_roles(config)
    for part in per_environment_configs(config):
        agent = part.config.agent
        loop = build_loop(agent, resolve_environment(part.config.sole_environment.name).answer_format)
        roles = build_roles(agent, loop, roles_of_environment(part.config))
        tools = [*build_tools(agent), *(tool for role in roles for tool in role.tools or ())]
        loop.check_tool_names([*(tool.name for tool in tools if isinstance(tool, Tool)), *agent.called_roles])


def check_model(config: Config) -> None:
    """Check that the chat template of a model fits the agent loop that is to be played.

    Raises:
        UsageError: The model has no tokenizer, or reads no images where the environment shows some.
        TemplateError: The chat template does not fit the agent loop.
    """
    renderer = start_renderer(config)
    if renderer is not None:
        check_rendering(config, renderer)


def start_renderer(config: Config, *, fetch: bool = True) -> Renderer | None:
    """Return the renderer of the model that a run starts from; ``None`` if it is yet to be made, or to be fetched."""
    path = config.model.path
    if path == SCRATCH:
        return None
    path = find_model(path)
    if not fetch and not Path(path).is_dir():
        return None
    tokenizer = load_tokenizer(path)
    if config.model.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.model.chat_template)
    return build_renderer(config, path, tokenizer)
