"""Registry of names for environments, tools, loops and algorithms in a config.

A name is looked up, in this order, among the objects that this process registered with `register`, in the tables of
installed plugins, and, if it has the form ``module:attr``, by import. A plugin is a package with an entry point in the
group ``agentrl.plugins`` that points to a table:

    PLUGINS = {"environment": {"household": "agentrl.envs.household:SPEC"}}

Tables contain only strings; a module is imported when its name is first used. The shipped catalogue and the core's
parts (`PLUGINS`) are registered in the same way. An `Extra` is an optional package that is imported only where it is
used.
"""

from __future__ import annotations

import difflib
import enum
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import AgentRLError, UnknownNameError, UsageError, described_error, did_you_mean, raised_in

ENTRY_POINT_GROUP = "agentrl.plugins"


class Kind(enum.StrEnum):
    """Kind of a registered object."""

    ENVIRONMENT = "environment"
    TOOL = "tool"
    SANDBOX = "sandbox"
    AGENT_LOOP = "agent_loop"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    LOSS = "loss"
    FILTER = "filter"
    SHAPING = "shaping"
    TOOL_PARSER = "tool_parser"
    TRACKER = "tracker"


ALGORITHM_PARTS = (Kind.ADVANTAGE, Kind.LOSS, Kind.FILTER, Kind.SHAPING)
"""Kinds that users may confuse: GRPO is an advantage, PPO a loss."""

SOURCE_SUFFIX = ".py"
"""Suffix of a module that is given as a file, as in ``./my_game.py:MyGame``."""

SESSION = "python:"
"""Prefix of the names of objects that exist only in this Python session."""

_registered: dict[Kind, dict[str, Any]] = {kind: {} for kind in Kind}
_session: dict[Kind, dict[str, Any]] = {kind: {} for kind in Kind}


def register(kind: Kind, name: str, target: Any) -> None:
    """Register `target` under a name in this process; a ``module:attr`` string is imported when used.

    Raises:
        UsageError: the name is taken.
    """
    taken = _registered[kind].get(name, _plugin_tables()[kind].get(name))
    if taken is not None and taken is not target and taken != target:
        raise UsageError(f"{kind} name {name!r} is taken", got=target, expected="another name")
    _registered[kind][name] = target


def unregister(kind: Kind, name: str) -> None:
    """Remove a name given by `register`; unknown names are ignored."""
    _registered[kind].pop(name, None)


def name_of(kind: Kind, target: Any) -> str:
    """Return the name of an object of a Python program for a config.

    It is ``module:attr`` if the object can be imported; otherwise, as in a notebook or a script, a name of this session
    (`SESSION`). The session keeps the latest object of a name, so that a cell can be run again.
    """
    anchor = getattr(target, "target", target)  # the function of a tool
    module, path = getattr(anchor, "__module__", None), getattr(anchor, "__qualname__", "")
    if path and module != "__main__" and _importable(module, path) is target:
        return f"{module}:{path}"
    name = SESSION + str(getattr(target, "name", None) or getattr(anchor, "__name__", type(target).__name__))
    _session[kind][name] = target
    return name


def _importable(module: str | None, path: str) -> Any:
    try:
        return functools.reduce(getattr, path.split("."), sys.modules[str(module)])
    except (AttributeError, KeyError):
        return None


def names(kind: Kind) -> list[str]:
    """Return all known names of a kind, sorted."""
    return sorted({*_registered[kind], *_plugin_tables()[kind]})


def lookup(kind: Kind, name: str) -> Any:
    """Return the object with a name.

    Raises:
        UnknownNameError: no such name; the message gives the nearest ones.
        UsageError: the name's module cannot be imported.
    """
    if name.startswith(SESSION):
        return _of_session(kind, name)
    target = _registered[kind].get(name, _plugin_tables()[kind].get(name))
    if target is None and ":" in name:
        target = name
    if target is None:
        near = difflib.get_close_matches(name.lower(), names(kind), n=3, cutoff=0.5)
        known = f"one of {', '.join(near or names(kind)) or 'none registered'}, or module:attr"
        raise UnknownNameError(
            f"unknown {kind.replace('_', ' ')}",
            got=repr(name),
            expected=known,
            hint=_hint(kind, name),
        )
    return load(target) if isinstance(target, str) else target


def _of_session(kind: Kind, name: str) -> Any:
    if name in _session[kind]:
        return _session[kind][name]
    raise UnknownNameError(
        f"the {kind.replace('_', ' ')} {name.removeprefix(SESSION)} was an object of another Python session",
        got=repr(name),
        expected="the same object in this session",
        hint="pass it again, as in agentrl.resume(RUN, reward=…), or move it to a module and name it module:attr",
    )


def _hint(kind: Kind, name: str) -> str | None:
    """Return a hint for an unknown name, which may be that of another part of an algorithm."""
    others = [other for other in ALGORITHM_PARTS if kind in ALGORITHM_PARTS and name in names(other)]
    if others:
        return f"{'an' if others[0][0] in 'aeiou' else 'a'} {others[0]} has this name"
    module, _, attribute = name.rpartition(".")
    if name.endswith(SOURCE_SUFFIX):
        return f"add the name of the object in the file: {name}:NAME"
    if near := did_you_mean(name, names(kind)):
        return near
    return f"did you mean {module}:{attribute}?" if module.replace(".", "").isidentifier() else None


def load(reference: str) -> Any:
    """Import ``module:attr``.

    Raises:
        UsageError: the module or the attribute is missing.
    """
    module_name, _, attribute = reference.partition(":")
    module = load_module(module_name)
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        hint = did_you_mean(attribute, dir(module))
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        found = f"{getattr(module, '__file__', None) or module_name} defines {', '.join(own[:8]) or 'nothing'}"
        raise UsageError(f"{module_name} has no {attribute!r}", hint=hint or found) from error


def load_module(name: str) -> ModuleType:
    """Import a module by its dotted name, or by the path of its file, as in ``./games/my_game.py``.

    Raises:
        UsageError: the module is missing, needs a missing package, or raises an error.
    """
    if name.endswith(SOURCE_SUFFIX):
        return _load_file(Path(name).expanduser())
    if "/" in name or not name.strip("."):
        expected = f"a module such as my_game, or a file that ends with {SOURCE_SUFFIX}"
        raise UsageError(f"{name!r} is not the name of a module", expected=expected)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name and not name.startswith(f"{error.name}."):
            raise UsageError(f"{name} needs a package that is not installed", got=f"no {error.name}") from error
        raise UsageError(
            f"cannot import {name}",
            got=f"no module {error.name}",
            expected="an importable module",
            hint="run from the folder that contains the module, or install it",
        ) from error
    except SystemExit as error:
        raise UsageError(f"{name} exits the program when it is imported", got=f"sys.exit({error})") from error
    except AgentRLError:
        raise
    except Exception as error:  # raised by the user's code
        where = None if isinstance(error, SyntaxError) else raised_in(error)
        raise UsageError(f"{name} cannot be imported", got=described_error(error), hint=where) from error


def _load_file(file: Path) -> ModuleType:
    """Import a file under its own name, by which other processes also find it."""
    if not file.is_file():
        raise UsageError(f"no file {file}", got=f"the current folder {Path.cwd()}", expected="a Python file")
    if not file.stem.isidentifier():
        raise UsageError(f"{file} cannot be imported", got=f"the name {file.stem}", expected="letters, digits and _")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = load_module(file.stem)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != file.resolve():
        raise UsageError(
            f"{file} has the name of another module",
            got=f"{file.stem} from {found or 'Python itself'}",
            expected="a unique name",
            hint="rename the file",
        )
    return module


@functools.cache
def _plugin_tables() -> Mapping[Kind, dict[str, str]]:
    tables: dict[Kind, dict[str, str]] = {kind: {} for kind in Kind}
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        for kind, table in entry_point.load().items():
            for name, reference in table.items():
                if tables[Kind(kind)].setdefault(name, reference) != reference:
                    raise UsageError(
                        f"two plugins register {kind} {name!r}",
                        got=f"{tables[Kind(kind)][name]} and {reference}",
                        expected="one",
                    )
    return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """One of agentrl's extras."""

    name: str
    """Name in ``pip install "agentrl[NAME]"``."""
    module: str
    """Top-level module that the extra installs."""

    @property
    def is_installed(self) -> bool:
        """True if the module can be found; imports nothing."""
        return importlib.util.find_spec(self.module) is not None

    def load(self, module: str | None = None) -> ModuleType:
        """Import a module of the extra by its dotted name; default: its top-level module.

        Raises:
            UsageError: the extra is not installed, or one of its dependencies is missing.
        """
        try:
            return importlib.import_module(module or self.module)
        except ImportError as error:
            raise UsageError(
                f"the extra {self.name} is not installed",
                got=error,
                expected=f"the package {self.module}",
                hint=f'install it: pip install "agentrl[{self.name}]"',
            ) from error


PLUGINS: dict[str, dict[str, str]] = {
    "advantage": {
        "grpo": "agentrl.algorithms.advantages:grpo",
        "dr_grpo": "agentrl.algorithms.advantages:dr_grpo",
        "grpo_batch_std": "agentrl.algorithms.advantages:grpo_batch_std",
        "prpo": "agentrl.algorithms.advantages:prpo",
        "rloo": "agentrl.algorithms.advantages:rloo",
        "tree": "agentrl.algorithms.tree_advantages:tree",
        "opo": "agentrl.algorithms.advantages:opo",
        "gpg": "agentrl.algorithms.advantages:gpg",
        "maxrl": "agentrl.algorithms.advantages:maxrl",
        "grpo_passk": "agentrl.algorithms.advantages:grpo_passk",
        "gdpo": "agentrl.algorithms.advantages:gdpo",
        "gigpo": "agentrl.algorithms.advantages:gigpo",
        "hgpo": "agentrl.algorithms.advantages:hgpo",
        "turn_rloo": "agentrl.algorithms.advantages:turn_rloo",
        "graphgpo": "agentrl.algorithms.advantages:graphgpo",
        "turn_discounted": "agentrl.algorithms.advantages:turn_discounted",
        "reinforce": "agentrl.algorithms.advantages:reinforce",
        "reinforce++": "agentrl.algorithms.advantages:reinforce_plus_plus",
        "trr++": "agentrl.algorithms.advantages:trr_plus_plus",
        "reinforce++_baseline": "agentrl.algorithms.advantages:reinforce_plus_plus_baseline",
        "remax": "agentrl.algorithms.advantages:remax",
        "gae": "agentrl.algorithms.critic_advantages:gae",
        "gae_turn": "agentrl.algorithms.critic_advantages:gae_turn",
        "bi_level": "agentrl.algorithms.critic_advantages:bi_level",
        "vapo": "agentrl.algorithms.critic_advantages:vapo",
        "dqo": "agentrl.algorithms.critic_advantages:dqo",
        "prime": "agentrl.algorithms.advantages:prime",
        "otb": "agentrl.algorithms.advantages:otb",
        "rae": "agentrl.algorithms.running_baselines:rae",
        "spo": "agentrl.algorithms.running_baselines:spo",
    },
    "agent_loop": {"live": "agentrl.rollout.live:LiveSessions"},
    "tracker": {
        "tensorboard": "agentrl.observe.trackers:TensorBoardTracker",
        "wandb": "agentrl.observe.experiment_trackers:WandbTracker",
        "mlflow": "agentrl.observe.experiment_trackers:MLflowTracker",
        "swanlab": "agentrl.observe.experiment_trackers:SwanLabTracker",
        "trackio": "agentrl.observe.experiment_trackers:TrackioTracker",
        "trace": "agentrl.observe.trace_trackers:TraceFileTracker",
        "opentelemetry": "agentrl.observe.trace_trackers:OpenTelemetryTracker",
    },
    "tool_parser": {
        "apertus": "agentrl.render.tool_parsers.json_calls:parse_apertus",
        "deepseek_v3": "agentrl.render.tool_parsers.deepseek:parse_v3",
        "deepseek_v31": "agentrl.render.tool_parsers.deepseek:parse_v31",
        "deepseek_v32": "agentrl.render.tool_parsers.xml_calls:parse_deepseek_v32",
        "deepseek_v4": "agentrl.render.tool_parsers.xml_calls:parse_deepseek_v4",
        "gemma4": "agentrl.render.tool_parsers.gemma:parse_gemma4",
        "glm": "agentrl.render.tool_parsers.xml_calls:parse_glm",
        "harmony": "agentrl.render.tool_parsers.harmony:parse",
        "hermes": "agentrl.render.tool_parsers.json_calls:parse_hermes",
        "kimi_k2": "agentrl.render.tool_parsers.deepseek:parse_kimi_k2",
        "lfm2": "agentrl.render.tool_parsers.pythonic:parse_lfm2",
        "llama3_json": "agentrl.render.tool_parsers.json_calls:parse_llama3_json",
        "minimax_m2": "agentrl.render.tool_parsers.xml_calls:parse_minimax_m2",
        "mistral": "agentrl.render.tool_parsers.json_calls:parse_mistral",
        "pythonic": "agentrl.render.tool_parsers.pythonic:parse",
        "qwen3_coder": "agentrl.render.tool_parsers.xml_calls:parse_qwen3_coder",
        "seed_oss": "agentrl.render.tool_parsers.xml_calls:parse_seed_oss",
    },
    "sandbox": {
        "local": "agentrl.sandbox.local:LocalSandbox",
        "docker": "agentrl.sandbox.docker:DockerSandbox",
        "http": "agentrl.sandbox.http:HttpSandbox",
    },
    "reward": {
        "environment": "agentrl.reward:EnvironmentReward",
        "solved": "agentrl.reward.answers:solved",
        "boxed": "agentrl.reward.answers:boxed",
        "answer_f1": "agentrl.reward.answers:answer_f1",
        "think_answer_format": "agentrl.reward.formats:think_answer_format",
        "tag_count_format": "agentrl.reward.formats:tag_count_format",
        "agent_format": "agentrl.reward.formats:agent_format",
        "tool_call_count": "agentrl.reward.formats:tool_call_count",
        "tool_error_ratio": "agentrl.reward.formats:tool_error_ratio",
        "answer_tag_ratio": "agentrl.reward.formats:answer_tag_ratio",
        "repetition": "agentrl.reward.texts:repetition",
        "language_consistency": "agentrl.reward.texts:language_consistency",
        "recall": "agentrl.reward.texts:recall",
        "ndcg": "agentrl.reward.texts:ndcg",
        "mrr": "agentrl.reward.texts:mrr",
        "retool": "agentrl.reward.formats:retool",
        "tinyzero": "agentrl.reward.formats:tinyzero",
        "code_r1": "agentrl.reward.formats:code_r1",
        "search_r1": "agentrl.reward.formats:search_r1",
        "deepresearcher": "agentrl.reward.formats:deepresearcher",
        "gui_r1": "agentrl.reward.formats:gui_r1",
        "vision_sr1": "agentrl.reward.formats:vision_sr1",
    },
    "loss": {
        "ppo": "agentrl.algorithms.policy_losses:ppo",
        "dapo": "agentrl.algorithms.policy_losses:dapo",
        "gspo": "agentrl.algorithms.policy_losses:gspo",
        "luspo": "agentrl.algorithms.policy_losses:luspo",
        "ppo_turn": "agentrl.algorithms.policy_losses:ppo_turn",
        "vespo": "agentrl.algorithms.policy_losses:vespo",
        "cispo": "agentrl.algorithms.policy_losses:cispo",
        "sapo": "agentrl.algorithms.policy_losses:sapo",
        "gmpo": "agentrl.algorithms.policy_losses:gmpo",
        "reinforce": "agentrl.algorithms.policy_losses:reinforce",
        "gpg": "agentrl.algorithms.policy_losses:reinforce",
        "decoupled_ppo": "agentrl.algorithms.policy_losses:decoupled_ppo",
        "vapo": "agentrl.algorithms.policy_losses:vapo",
        "kl_cov": "agentrl.algorithms.policy_losses:kl_cov",
        "clip_cov": "agentrl.algorithms.policy_losses:clip_cov",
        "dppo": "agentrl.algorithms.policy_losses:dppo",
        "dppo_binary_kl": "agentrl.algorithms.policy_losses:dppo_binary_kl",
        "m2po": "agentrl.algorithms.policy_losses:m2po",
        "topr": "agentrl.algorithms.off_policy_losses:topr",
        "dqo": "agentrl.algorithms.off_policy_losses:dqo",
        "kimi": "agentrl.algorithms.off_policy_losses:kimi",
        "luffy": "agentrl.algorithms.policy_losses:luffy",
        "rl_plus": "agentrl.algorithms.policy_losses:rl_plus",
        "pacs": "agentrl.algorithms.group_losses:pacs",
        "gvpo": "agentrl.algorithms.group_losses:gvpo",
        "flowrl": "agentrl.algorithms.group_losses:flowrl",
        "online_dpo": "agentrl.algorithms.group_losses:online_dpo",
        "online_spin": "agentrl.algorithms.group_losses:online_spin",
        "sppo": "agentrl.algorithms.off_policy_losses:sppo",
        "sft": "agentrl.algorithms.off_policy_losses:sft",
        "distill": "agentrl.algorithms.off_policy_losses:distill",
        "distill_top_k": "agentrl.algorithms.off_policy_losses:distill_top_k",
        "dpo": "agentrl.algorithms.off_policy_losses:dpo",
        "spin": "agentrl.algorithms.off_policy_losses:spin",
        "prime": "agentrl.algorithms.off_policy_losses:prime_reward_model",
        "value": "agentrl.algorithms.critic_advantages:value",
    },
    "filter": {
        "k1": "agentrl.algorithms.correction:k1",
        "k2": "agentrl.algorithms.correction:k2",
        "k3": "agentrl.algorithms.correction:k3",
        "off_policy_sequence": "agentrl.algorithms.correction:off_policy_sequence",
        "geometric": "agentrl.algorithms.correction:geometric",
        "top_entropy": "agentrl.algorithms.correction:top_entropy",
    },
    "shaping": {
        "invalid": "agentrl.algorithms.rewards:invalid_penalty",
        "repaired": "agentrl.algorithms.rewards:repair_penalty",
        "unfinished": "agentrl.algorithms.rewards:unfinished_penalty",
        "format": "agentrl.algorithms.rewards:format_reward",
        "length": "agentrl.algorithms.rewards:length",
        "cosine": "agentrl.algorithms.rewards:cosine",
        "group_length": "agentrl.algorithms.rewards:group_length",
        "overlong": "agentrl.algorithms.rewards:overlong",
        "clip": "agentrl.algorithms.rewards:clip",
        "win_rate": "agentrl.algorithms.rewards:win_rate",
        "kl": "agentrl.algorithms.rewards:RewardKL",
        "distill": "agentrl.algorithms.rewards:TeacherKL",
        "ares": "agentrl.algorithms.entropy_shaping:EntropyShaping",
        "pf_ppo": "agentrl.algorithms.rewards:pf_ppo",
    },
}
