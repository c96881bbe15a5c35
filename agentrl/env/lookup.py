"""Lookup of an environment by its name.

============================== ==========================================================================
``household``                  a registry name
``agentrl/Household-v0``       a Gymnasium id; under ``agentrl/`` it is the registry name in CamelCase
``my_game:GuessNumber-v0``     a Gymnasium id that ``import my_game`` registers
``my_game:GuessNumber``        an environment class (also of TRL's kind) or an `EnvironmentSpec` in a module
``./my_game.py:GuessNumber``   a class or a spec in a file
``http://127.0.0.1:8100``      an environment that `agentrl env serve` serves at this address
============================== ==========================================================================

A name may end with a split, as in ``household/valid``, which `parse_env_name` separates. Environments without an
`EnvironmentSpec` get a plain one: tasks are seeds (`SeedTasks`), code runs in threads, and the registry's entry
``gymnasium`` converts numbers to text.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, namespace

from agentrl import registry
from agentrl.env.contract import AnyEnv, AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import UnknownNameError, UsageError, shorten
from agentrl.registry import Kind
from agentrl.remote.client import remote_spec
from agentrl.task import SeedTasks, seed_tasks

GYMNASIUM_ID = re.compile(r"(?:(?P<namespace>[\w-]+)/)?(?P<name>[\w.-]+)-v(?P<version>\d+)")

ADDRESS = re.compile(r"https?://.+")
"""Address of an environment server."""
GYMNASIUM_PLUGINS = "gymnasium.envs"
"""Entry-point group of packages that register environments, which Gymnasium itself ignores since 1.0."""
OWN_NAMESPACE = "agentrl"
ADAPTER = "gymnasium"
"""Registry name of the adapter that creates Gymnasium environments, and converts numbers to text."""
TRL_ADAPTER = "agentrl.envs.adapters.trl:make"
"""Function that creates an environment from a class for TRL."""
_OWN = ("reset", "close", "get_reward")
"""Public methods of a class for TRL that are not tools."""


class EnvironmentName(NamedTuple):
    """Name of an environment, with an optional split."""

    name: str
    split: str | None


def parse_env_name(text: str) -> EnvironmentName:
    """Split ``name/split``; the slash of a Gymnasium id belongs to the name, and one that ends an address is dropped.

    >>> parse_env_name("household/valid_unseen")
    EnvironmentName(name='household', split='valid_unseen')
    >>> parse_env_name("agentrl/Household-v0").split, parse_env_name("agentrl/Household-v0/valid").split
    (None, 'valid')
    >>> parse_env_name("http://127.0.0.1:8100/valid_unseen")
    EnvironmentName(name='http://127.0.0.1:8100', split='valid_unseen')
    >>> parse_env_name("http://example.com").split, parse_env_name("http://example.com/envs/").name
    (None, 'http://example.com/envs')
    """
    name, slash, split = text.rpartition("/")
    if ADDRESS.fullmatch(text) and (name.endswith("/") or not split):
        return EnvironmentName(text.rstrip("/"), None)
    if not slash or ":" in split or split.endswith(registry.SOURCE_SUFFIX) or GYMNASIUM_ID.fullmatch(split):
        return EnvironmentName(text, None)
    return EnvironmentName(name, split)


def resolve_environment(name: str) -> EnvironmentSpec:
    """Return the spec of the environment with a name (without a split).

    Raises:
        UnknownNameError: no such environment; the message gives the nearest names.
        UsageError: a module cannot be imported, the name is not an environment's, or no server answers.
    """
    if ADDRESS.fullmatch(name):
        return remote_spec(name.rstrip("/"))
    if name in registry.names(Kind.ENVIRONMENT) or name.startswith(registry.SESSION):
        return _spec_of(name, registry.lookup(Kind.ENVIRONMENT, name))
    if ":" in name:
        return _resolve_in_module(name)
    if name.endswith(registry.SOURCE_SUFFIX):
        there = environments_of(name)
        expected = " or ".join(f"{name}:{one}" for one in there) or f"{name}:CLASS"
        raise UnknownNameError("a file is not the name of an environment", got=repr(name), expected=expected)
    if GYMNASIUM_ID.fullmatch(name):
        own = _registry_name(name)
        return _own_version(name, resolve_environment(own)) if own else _gymnasium_spec(name, name)
    raise _unknown(name)


def spec_of(target: object) -> EnvironmentSpec:
    """Return the spec of an environment's class, of a function that creates one, or of a spec.

    Raises:
        UsageError: the target is none of these.
    """
    module, own = getattr(target, "__module__", None), getattr(target, "__qualname__", type(target).__name__)
    return _spec_of(f"{module}:{own}" if module else shorten(target), target)


def check_split(spec: EnvironmentSpec, split: str) -> str:
    """Return `split` if the environment has it.

    Raises:
        UnknownNameError: no such split.
    """
    if split in spec.splits:
        return split
    near = difflib.get_close_matches(split, spec.splits, n=1)
    raise UnknownNameError(
        f"environment {spec.name} has no split of this name",
        got=repr(split),
        expected=f"one of {', '.join(spec.splits)}",
        hint=f"did you mean {spec.name}/{near[0]}?" if near else None,
    )


def make_gymnasium(env: str | EnvSpec | Callable[..., AnyEnv], **options: Any) -> AnyEnv:
    """Create an environment with text in and out, from its Gymnasium id or registration, its class or a function.

    An id with its module, and a registration, also work in worker processes, which have not imported the module yet.

    Raises:
        UsageError: it cannot be created, or its observations or actions have no text form.
    """
    adapter: EnvironmentSpec = registry.lookup(Kind.ENVIRONMENT, ADAPTER)
    return adapter.make(env_id=env, **options)


def make_from_trl(kind: type, methods: Sequence[str], **options: Any) -> AnyEnv:
    """Create an environment from a class for TRL's GRPOTrainer, whose methods are tools.

    Raises:
        UsageError: a method has no docstring, or arguments that cannot be described to a policy.
    """
    make: Callable[..., AnyEnv] = registry.load(TRL_ADAPTER)
    return make(kind, methods, **options)


def _resolve_in_module(name: str) -> EnvironmentSpec:
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise UsageError(
            f"{name!r} has no name after the module", expected=f"{module_name}:EnvId, or {module_name}:attribute"
        )
    if not GYMNASIUM_ID.fullmatch(attribute):
        return _spec_of(name, registry.load(name))
    module = registry.load_module(module_name)
    return _gymnasium_spec(name, attribute, importable=f"{module.__name__}:{attribute}")


def _gymnasium_spec(name: str, env_id: str, *, importable: str | None = None) -> EnvironmentSpec:
    if env_id not in gymnasium.registry:
        _load_gymnasium_plugins()
    registered: EnvSpec | None = gymnasium.registry.get(env_id)
    if registered is None:
        raise _unknown(name)
    creator = registered.entry_point
    return _plain_spec(
        name,
        functools.partial(make_gymnasium, importable or registered),
        about=_load_creator(creator),
        max_turns=registered.max_episode_steps,
        success_threshold=registered.reward_threshold,
    )


def _spec_of(name: str, target: object) -> EnvironmentSpec:
    if isinstance(target, EnvironmentSpec):
        return target
    if inspect.isclass(target) and issubclass(target, gymnasium.Env):
        return _plain_spec(name, functools.partial(make_gymnasium, target), about=target)
    if inspect.isclass(target) and issubclass(target, AsyncEnv):
        return _plain_spec(name, target, about=target)
    if is_trl_environment(target):
        made = _plain_spec(name, functools.partial(make_from_trl, target, tool_methods(target)), about=target)
        rewards = made.reward_range if _has_reward(target) else (0.0, 0.0)
        return replace(made, reset_columns=True, reward_range=rewards)
    if isinstance(target, gymnasium.Env | AsyncEnv):
        raise UsageError(
            f"{name} is a single environment, but every episode needs its own",
            got=f"an object of the class {type(target).__name__}",
            expected="the class, or a function that creates an environment",
        )
    if callable(target) and not inspect.isclass(target):
        return _plain_spec(name, functools.partial(make_gymnasium, target), about=target)
    is_class = inspect.isclass(target)
    raise UsageError(
        f"{name} is not an environment",
        got="a class without these bases or tools" if is_class else type(target).__name__,
        expected="an EnvironmentSpec, a class derived from gymnasium.Env or agentrl.AsyncEnv, a class with reset() and "
        "tools as other methods, or a function that creates an environment",
        hint="derive it from gymnasium.Env: docs/concepts/environment.md" if hasattr(target, "step") else None,
    )


def _instructions(target: object) -> str:
    """Return the attribute ``instructions`` of an environment's class."""
    found = getattr(target, "instructions", "")
    if isinstance(found, property):
        raise UsageError(
            "instructions are read from the environment's class, before an environment is created",
            got=f"a property of {target}",
            expected="a class attribute: instructions = '…'",
        )
    if found is None or callable(found):  # a tool of this name, for example
        return ""
    if not isinstance(found, str):
        raise UsageError(
            f"the instructions of {getattr(target, '__name__', target)} are not valid",
            got=f"{type(found).__name__} {shorten(found)}",
            expected="text",
        )
    return inspect.cleandoc(found)


def _load_creator(creator: object) -> object:
    """Import a Gymnasium entry point; return it unchanged if the import fails, which `make` will report."""
    if isinstance(creator, str):
        with contextlib.suppress(ImportError, AttributeError):
            return load_env_creator(creator)
    return creator


def _plain_spec(
    name: str,
    make: Callable[..., AnyEnv],
    *,
    about: object,
    max_turns: int | None = None,
    success_threshold: float | None = None,
) -> EnvironmentSpec:
    return EnvironmentSpec(
        name=name,
        make=make,
        tasks=functools.partial(seed_tasks, name),
        splits=SeedTasks.SPLITS,
        description=_first_paragraph(about),
        instructions=_instructions(about),
        max_turns=max_turns,
        success_threshold=success_threshold,
        isolation=Isolation.THREAD,
    )


def _own_version(env_id: str, spec: EnvironmentSpec) -> EnvironmentSpec:
    """Return the spec if the id has the installed version.

    Raises:
        UsageError: the id has another version, with other tasks or rewards.
    """
    base, _, version = env_id.rpartition("-v")
    if int(version) == spec.version:
        return spec
    raise UsageError(
        f"this version of {spec.name} is not installed",
        got=env_id,
        expected=f"{base}-v{spec.version}",
        hint="its default tasks or rewards have changed between the versions, so results cannot be compared",
    )


def _registry_name(env_id: str) -> str | None:
    found = GYMNASIUM_ID.fullmatch(env_id)
    if found is None or found["namespace"] != OWN_NAMESPACE:
        return None
    wanted = found["name"].lower()
    return next((name for name in registry.names(Kind.ENVIRONMENT) if name.replace("_", "") == wanted), None)


@functools.cache
def _load_gymnasium_plugins() -> tuple[str, ...]:
    """Call the entry points of installed packages that register environments.

    Returns:
        Errors with package names; they are reported only if a name is not found.
    """
    broken = []
    for entry_point in importlib.metadata.entry_points(group=GYMNASIUM_PLUGINS):
        with namespace(entry_point.name):  # an exception must not leave this block: it would stay active
            try:
                entry_point.load()()
            except Exception as error:  # a broken package may raise anything
                package = entry_point.dist.name if entry_point.dist is not None else entry_point.value
                broken.append(f"{package} ({type(error).__name__}: {error})")
    return tuple(broken)


def _unknown(name: str) -> UnknownNameError:
    broken = _load_gymnasium_plugins()
    module, _, attribute = name.rpartition(":")
    if module:
        return _unknown_in_module(module, attribute)
    known = registry.names(Kind.ENVIRONMENT)
    candidates = {key.lower(): key for key in [*gymnasium.registry, *known]}
    near = [candidates[key] for key in difflib.get_close_matches(name.lower(), candidates, n=3, cutoff=0.6)]
    hint = f"did you mean {' or '.join(near)}?" if near else None
    if hint is None and name.isidentifier() and importlib.util.find_spec(name) is not None:
        hint = f"for an environment in the module {name}, write {name}:EnvId"
    module, _, attribute = name.rpartition(".")
    if module.isidentifier() and importlib.util.find_spec(module) is not None:
        hint = f"did you mean {module}:{attribute}?"
    if broken and GYMNASIUM_ID.fullmatch(name):
        failed = f"these packages could not register their environments: {', '.join(broken)}"
        hint = failed if hint is None else f"{hint} Also, {failed}"
    return UnknownNameError(
        "unknown environment",
        got=repr(name),
        expected="a name from agentrl env list, a registered Gymnasium id, module:EnvId, file.py:Class, or a server's "
        "address",
        hint=hint,
    )


def _unknown_in_module(module: str, attribute: str) -> UnknownNameError:
    there = environments_of(module)
    near = difflib.get_close_matches(attribute.lower(), [name.lower() for name in there], n=1, cutoff=0.5)
    closest = next((name for name in there if near and name.lower() == near[0]), None)
    return UnknownNameError(
        f"the module {module} has no such environment",
        got=repr(attribute),
        expected=f"one of {', '.join(there)}" if there else "an id that it registers: gymnasium.register(id, Class)",
        hint=f"did you mean {module}:{closest}?" if closest else None,
    )


def environments_of(module: str) -> list[str]:
    """Return the ids that a module registers with Gymnasium, then its environment classes and specs."""
    loaded = registry.load_module(module)
    module = loaded.__name__  # differs from a file's path
    ids = [env_id for env_id, spec in gymnasium.registry.items() if _module_of(spec.entry_point) == module]
    own = [
        name
        for name, value in vars(loaded).items()
        if isinstance(value, EnvironmentSpec)
        or (inspect.isclass(value) and issubclass(value, gymnasium.Env | AsyncEnv) and value.__module__ == module)
    ]
    return [*ids, *own]


def _module_of(entry_point: object) -> str | None:
    return entry_point.partition(":")[0] if isinstance(entry_point, str) else getattr(entry_point, "__module__", None)


def _first_paragraph(documented: object) -> str:
    """Return the first paragraph of an object's docstring, but not that of a base class."""
    text = documented.__doc__ if inspect.isroutine(documented) else getattr(documented, "__dict__", {}).get("__doc__")
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def is_trl_environment(target: object) -> TypeGuard[type[Any]]:
    """Return True for a class with a ``reset`` and tools that is not an environment of another kind.

    A class with ``step`` is not one: it takes actions.
    """
    if not inspect.isclass(target) or issubclass(target, gymnasium.Env) or hasattr(target, "step"):
        return False
    return inspect.isfunction(inspect.getattr_static(target, "reset", None)) and bool(tool_methods(target))


def _has_reward(kind: type) -> bool:
    """Return False if no code of a class for TRL mentions a reward, so that only a reward function can give one."""
    names = {name for base in kind.__mro__ for name in (*vars(base), *_annotated_names(base))}
    functions = (inspect.unwrap(part) for base in kind.__mro__ for part in vars(base).values() if callable(part))
    codes = (part.__code__ for part in functions if inspect.isfunction(part))
    return bool(names & {"reward", "get_reward"}) or any(_mentions(code, "reward") for code in codes)


def _annotated_names(kind: type) -> Iterable[str]:
    """Return the names that a class annotates itself, whether their types are known or not."""
    if sys.version_info >= (3, 14):  # annotations are evaluated when they are read
        from annotationlib import Format, get_annotations

        return get_annotations(kind, format=Format.FORWARDREF)
    return inspect.get_annotations(kind)


def _mentions(code: types.CodeType, name: str) -> bool:
    """Return True if code, or a function in it, has an attribute, a variable or a text of this name."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return name in (*code.co_names, *code.co_consts) or any(_mentions(part, name) for part in inner)


def tool_methods(kind: type) -> list[str]:
    """List the methods of a class that are tools, in the order of their definition; inherited ones come last."""
    names = dict.fromkeys(name for base in kind.__mro__ for name in vars(base))
    return [
        name
        for name in names
        if not name.startswith("_") and name not in _OWN and inspect.isfunction(inspect.getattr_static(kind, name))
    ]
