"""Checks that need the run's model, tools or roles, for the start of a run and for a dry run.

They run before the run's folder is created, so a failed check leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.builders.episodes import build_loop
from agentrl.builders.group_extras import check_extra_rollouts
from agentrl.builders.models import build_renderer, check_rendering, check_tokens
from agentrl.builders.pairs import check_pair_tokens
from agentrl.builders.roles import build_roles, check_roles
from agentrl.builders.scratch import ignore
from agentrl.builders.tools import build_tools
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import SCRATCH, Config
from agentrl.config.derived import per_environment_configs
from agentrl.env.lookup import resolve_environment
from agentrl.observe.model_folder import find_model
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer
from agentrl.render.tokens import read_chat_template
from agentrl.rollout.roles.environment_roles import roles_of_environment
from agentrl.tool import Tool
from agentrl.training.chat_file import check_chats, read_chats

SFT, DPO, REWARD_MODEL = "sft", "dpo", "reward-model"
"""Kinds of runs that train on fixed data."""


def check_start(config: Config, *, kind: str, fetch: bool = True, say: Callable[[str], None] = ignore) -> None:
    """Check for errors that would otherwise end the run after its start.

    Args:
        config: Config of the run, with its agent loop.
        kind: Kind of run: `SFT`, `DPO`, `REWARD_MODEL`, or any other value for reinforcement learning.
        fetch: Download a model that is not on this machine; otherwise its template is not checked.
        say: Called with messages for the user before the run starts.

    Raises:
        UsageError: a role, a tool, a model or a file is invalid.
        TemplateError: the chat template does not support the agent loop or the conversations.
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
        UsageError: a role is invalid, a tool is unknown, or a tool has a name that the agent loop reserves.
    """
    check_roles(config)
    for part in per_environment_configs(config):
        agent = part.config.agent
        loop = build_loop(agent, resolve_environment(part.config.sole_environment.name).answer_format)
        roles = build_roles(agent, loop, roles_of_environment(part.config))
        tools = [*build_tools(agent), *(tool for role in roles for tool in role.tools or ())]
        loop.check_tool_names([*(tool.name for tool in tools if isinstance(tool, Tool)), *agent.called_roles])


def check_model(config: Config) -> None:
    """Check that the chat template of a model supports the agent loop.

    Raises:
        UsageError: the model has no tokenizer, or does not accept the environment's images.
        TemplateError: the chat template does not support the agent loop.
    """
    renderer = start_renderer(config)
    if renderer is not None:
        check_rendering(config, renderer)


def start_renderer(config: Config, *, fetch: bool = True) -> Renderer | None:
    """Return the renderer of a run's initial model; ``None`` if the model does not exist on this machine yet."""
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
