"""Config sources: YAML text with the line of every key, and overrides ``key.sub=value``."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from agentrl.env.lookup import parse_env_name
from agentrl.errors import ConfigError, UsageError

KeyPath: TypeAlias = tuple[str, ...]
_log = logging.getLogger(__name__)
MAIN_KEYS: Mapping[str, str] = {
    "run": "name",
    "model": "path",
    "environment": "name",
    "agent": "loop",
    "engine": "type",
    "algorithm": "advantage",
    "cluster": "type",
}
"""Key that is set by a section given as one word: ``engine=local`` is ``engine.type=local``."""
_REPLACED: Mapping[str, tuple[str, ...] | None] = {
    "engine": None,
    "environment": None,
    "model": ("scratch",),
    "agent": ("options",),
}
"""Keys that are dropped when an override selects another engine, environment, model or loop (``None``: all)."""
ANNOUNCED = ("engine", "environment", "agent")
"""Sections for which a warning names the dropped settings."""
_RIVALS: Mapping[str, str] = {"environment": "environments", "environments": "environment"}
"""Sections that exclude each other: an override of one removes the other."""
PROMPTS = "prompts"
"""Environment whose tasks are the prompts of a file."""
_DROPPED = object()
"""Value of a key that a later override removes with its section."""
_READERS: Mapping[str, str] = {
    "trainer": "agentrl train",
    "sft": "agentrl sft",
    "preferences": "agentrl dpo or agentrl reward-model",
}
"""Commands by the section from which they read their learning rate, its schedule, and their length."""
_SCHEDULE = ("learning_rate", "warmup_steps", "schedule", "epochs", "steps")
_ONLY_WITH_ROLLOUTS = frozenset(
    {
        *("algorithm", "curriculum", "schedules", "evaluation.every", "checkpoint.every", "checkpoint.background"),
        *(f"trainer.{name}" for name in ("tasks_per_step", "mini_batches", "mini_batch_rows", "max_kl", "critic")),
        "trainer.process_reward",
    }
)
"""Sections and keys that `agentrl sft`, `agentrl dpo` and `agentrl reward-model` do not read."""
LOOP_OF_PROMPTS = "agent.loop=single_turn"
"""Override of the loop for this environment."""


SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Safe loader; on libyaml if PyYAML was built with it, which is several times as fast."""


class _Loader(SAFE_LOADER):  # type: ignore[misc]
    """Safe YAML loader without YAML's surprises.

    Only ``true`` and ``false`` are booleans (``off`` is text), and ``1e-3`` is a number. Dates, times (``1:30``, which
    YAML 1.1 reads as 90) and numbers with a leading zero (``010``, which it reads as 8) are text.
    """


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in rules
        if tag.removeprefix("tag:yaml.org,2002:") not in ("bool", "float", "int", "timestamp")
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF|nan|NaN))$"),
    list("-+.0123456789"),
)


_UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""Errors of PyYAML; the others are those of a date that does not exist, and of a value that contains itself."""


def _describe(error: Exception, text: str) -> str:
    """Describe an error of PyYAML with its line, if the text has several; without a position, in its own words."""
    mark, lines = getattr(error, "problem_mark", None), text.splitlines()
    if mark is None:
        return " ".join(str(error).split())
    if mark.line >= len(lines):
        return f"{getattr(error, 'problem', None) or error} at the end"
    line = lines[mark.line]
    has_tab = "\t" in line[: len(line) - len(line.lstrip())]
    problem = "a tab, where YAML allows only spaces" if has_tab else getattr(error, "problem", None) or error
    where = f"line {mark.line + 1}, " if len(lines) > 1 else ""
    return f"{problem} in {where}column {mark.column + 1}"


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+|0b[01_]+)$"),
    list("-+0123456789"),
)


@dataclass(frozen=True, slots=True)
class YamlSource:
    """Data of a YAML text, and the line of each key."""

    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def take(self, key: str) -> YamlSource | None:
        """Remove the section `key`, whose keys are sections themselves, and return it; ``None`` if it is missing.

        Raises:
            ConfigError: the section is not a mapping.
        """
        if key not in self.data:
            return None
        section = self.data.pop(key)
        if not isinstance(section, dict):
            raise ConfigError(f"{key} is not a section with keys", got=repr(section), expected="sections of a config")
        return YamlSource(section, {path[1:]: line for path, line in self.lines.items() if path[0] == key})


def parse_source(text: str, name: str) -> YamlSource:
    """Parse a config file's text.

    Args:
        text: YAML with a mapping at the top.
        name: The file's name, for messages.

    Raises:
        ConfigError: not YAML, not a mapping, or a duplicate key.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        data: Any = None if root is None else loader.construct_document(root)
        lines: dict[KeyPath, int] = {}
        _collect_lines(root, (), lines, name)
    except _UNREADABLE as error:
        raise ConfigError(f"{name} is not valid YAML", got=_describe(error, text)) from error
    if root is None:
        return YamlSource({})
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{name} is not a config",
            got=f"a YAML {type(root).__name__.removesuffix('Node').lower()}",
            expected="sections such as 'environment:'",
        )
    return YamlSource(data, lines)


def _collect_lines(node: yaml.Node | None, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    """Collect the lines of all keys; those of list items are under the item's number."""
    for number, value in enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ():
        _collect_lines(value, (*path, str(number)), lines, name)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"{name} line {line}: {'.'.join(here)} is given twice", expected="one value")
        lines[here] = line
        _collect_lines(value, here, lines, name)


@dataclass(frozen=True, slots=True)
class Override:
    """One ``key=value``, or one key of a config file that overrides another file."""

    origin: str
    """Source, for messages: ``override 'trainer.steps=50'``, ``my.yaml line 4``."""
    path: KeyPath
    value: Any


def parse_override(text: str) -> Override:
    """Parse ``key.sub=value``; the value is YAML.

    Raises:
        ConfigError: no equals sign, or a value that is not valid YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r} is not valid", expected="key=value, for example trainer.steps=50")
    if key.lstrip().startswith(("+", "~")):
        bare = key.strip().lstrip("+~")
        raise ConfigError(f"override {text!r} is not valid", expected=f"{bare}={value}", hint="see agentrl config show")
    path = tuple(key.strip().split("."))
    parsed = parse_value(value, path, f"override {text!r}")
    if key.strip() == "environment" and value.strip().endswith(":"):  # a module without a class, and no mapping
        parsed = value.strip()
    return Override(f"override {text!r}", path, parsed)


def parse_value(text: str, path: KeyPath, origin: str) -> Any:
    """Parse the YAML value of a key.

    Args:
        text: The value.
        path: The key, for messages.
        origin: Where it comes from, for messages: ``override 'trainer.steps=50'``.

    Raises:
        ConfigError: not valid YAML, or a repeated key.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        _collect_lines(root, path, {}, origin)
        return None if root is None else loader.construct_document(root)
    except _UNREADABLE as error:
        raise ConfigError(f"the value of {origin} is not valid YAML", got=_describe(error, text)) from error


def warn_repeated(texts: Sequence[str]) -> None:
    """Log a warning for each key that several of the overrides ``key=value`` set to different values.

    The last one counts, so that a script can add its caller's overrides to its own.

    Raises:
        ConfigError: as `parse_override`.
    """
    given: dict[KeyPath, tuple[str, Any]] = {}
    for text in (text for text in texts if text != LOOP_OF_PROMPTS):  # a default for a file of prompts
        path, value = (override := parse_override(text)).path, override.value
        value = expand(path[0], value) if len(path) == 1 else value
        merges = len(path) == 1 and isinstance(value, dict)
        new = dict(_leaves(path, value))
        for old in [old for old in given if _is_replaced(old, path, new, merges=merges)]:
            before, previous = given.pop(old)
            if new.get(old, previous if merges else _DROPPED) != previous:
                _log.warning("%s is given twice: %s, and then %s, which counts", ".".join(old), before, text)
        given |= {key: (text, value) for key, value in new.items()}


def warn_ignored(texts: Sequence[str], *, reads: str) -> None:
    """Log a warning for each override of a learning rate or another setting that only other commands read.

    Args:
        texts: Overrides ``key=value``.
        reads: Section from which this command reads them: ``trainer``, ``sft`` or ``preferences``.

    Raises:
        ConfigError: as `parse_override`.
    """
    overrides = [parse_override(text) for text in texts]
    for path, _ in (leaf for override in overrides for leaf in _leaves(override.path, override.value)):
        section, name = path[0], ".".join(path[1:])
        is_unread = reads != "trainer" and not _ONLY_WITH_ROLLOUTS.isdisjoint((section, ".".join(path[:2])))
        if is_unread:
            _log.warning("%s is ignored, because only agentrl train reads it: remove it", ".".join(path))
        if is_unread or section == reads or section not in _READERS or (section == "trainer" and name not in _SCHEDULE):
            continue
        length = "steps" if reads == "trainer" else "epochs"
        instead = f"set {reads}.{length if name in ('steps', 'epochs') else name}" if name in _SCHEDULE else "remove it"
        _log.warning("%s is ignored, because only %s reads it: %s", ".".join(path), _READERS[section], instead)


def _is_replaced(old: KeyPath, path: KeyPath, new: Mapping[KeyPath, Any], *, merges: bool) -> bool:
    """Return True if an override of `path`, with these keys and values, replaces the value of a key."""
    return old in new or (not merges and old[: len(path)] == path) or any(key[: len(old)] == old for key in new)


def text_override(key: str, text: object) -> str:
    """Return the override of a key by a text, in quotes where YAML would read something else: ``my #1 model``, ``12``.

    A mapping in braces stays one.

    >>> text_override("model", "a/b"), text_override("model", "my #1 model"), text_override("model", "{path: a}")
    ('model=a/b', 'model="my #1 model"', 'model={path: a}')
    """
    text = str(text)
    plain = f"{key}={text}"
    if text.startswith("{"):
        return plain
    try:
        is_same = parse_override(plain).value == text
    except ConfigError:
        is_same = False
    return plain if is_same else f"{key}={json.dumps(text)}"


def option_words(key: str, value: object) -> list[str]:
    """Return the override for an option of a command or function, if it is given; only engines are read as YAML.

    >>> option_words("model", "my #1 model"), option_words("trainer.steps", 5), option_words("engine", None)
    (['model="my #1 model"'], ['trainer.steps=5'], [])
    """
    if isinstance(value, str | Path) and key not in ("engine", "engine.gpus"):
        return [text_override(key, value)]
    return [] if value is None else [f"{key}={value}"]


def overrides_of(source: YamlSource, name: str) -> list[Override]:
    """Return the keys of a config file as overrides of earlier files; the main key of each section comes first.

    Args:
        source: The file.
        name: Its name, for messages.
    """
    return [
        Override(f"{name} line {source.lines[path[:1]]}", path, value)
        for section, data in expand_all(source.data).items()
        for path, value in _leaves((section,), data)
    ]


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if not isinstance(value, dict) or not value or path == ("environments",):
        yield path, value
        return
    first = MAIN_KEYS.get(path[0]) if len(path) == 1 else None
    for key in sorted(value, key=lambda key: key != first):
        yield from _leaves((*path, key), value[key])


def expand(section: str, value: Any) -> Any:
    """Convert a section given as one word to a mapping; return anything else unchanged."""
    if section == "environments":
        return _expand_labelled(value)
    if not isinstance(value, str) or section not in MAIN_KEYS:
        return value
    if section == "environment":
        name, split = parse_env_name(value)
        return {"name": name} if split is None else {"name": name, "split": split}
    return {MAIN_KEYS[section]: value}


def _expand_labelled(value: Any) -> Any:
    """Convert each environment to a mapping; the names in a list become the labels."""
    if isinstance(value, list):
        return _label_by_name(value)
    if not isinstance(value, dict):
        return value
    return {str(label): {} if entry is None else expand("environment", entry) for label, entry in value.items()}


def _label_by_name(names: list[Any]) -> dict[str, Any]:
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "environments is a list that holds more than names",
            got=repr(next(name for name in names if not isinstance(name, str))),
            expected="settings under labels",
            hint="environments: {my_label: {name: household, weight: 2}}",
        )
    found: dict[str, Any] = {}
    for text in names:
        entry = expand("environment", text)
        if entry["name"] in found:
            raise ConfigError(
                f"environments names {entry['name']} twice",
                expected="a label for each",
                hint=f"environments: {{one: {{name: {entry['name']}}}, another: {{name: {entry['name']}}}}}",
            )
        found[entry["name"]] = entry
    return found


def expand_all(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert every section that is given as one word to a mapping."""
    return {section: expand(section, value) for section, value in data.items()}


def apply(data: dict[str, Any], override: Override) -> None:
    """Apply one override to `data`, in place; null sections on the path become mappings.

    Raises:
        ConfigError: the path leads through a value that is not a section.
    """
    section, *rest = override.path
    value = override.value
    if not rest:
        value = expand(section, value)
    if section in _RIVALS and value and rest in ([], [MAIN_KEYS.get(section)]):
        data.pop(_RIVALS[section], None)
    if section == "environments" and not rest:  # replaces all environments instead of adding some
        data[section] = value
        return
    if rest == [MAIN_KEYS.get(section)] or (not rest and isinstance(value, dict)):
        _merge(data, section, value if not rest else {rest[0]: value})
        return
    node = data
    for key in override.path[:-1]:
        if node.get(key) is None:  # missing, or null as in a run's config.yaml
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ConfigError(f"{override.origin} sets a key of {key}, which is not a section", got=repr(node))
    node[override.path[-1]] = value


def _merge(data: dict[str, Any], section: str, new: dict[str, Any]) -> None:
    old = data.get(section)
    main = MAIN_KEYS.get(section)
    if not isinstance(old, dict):
        old = {}
    elif section in _REPLACED and main in new and _main_value(section, old, new[main]) != new[main]:
        dropped = _REPLACED[section]
        old = {} if dropped is None else {key: value for key, value in old.items() if key not in dropped}
    data[section] = {**old, **new}


def _main_value(section: str, values: dict[str, Any], otherwise: Any) -> Any:
    """Return the value of a section's main key; by default, an engine is local and an agent's loop is `otherwise`."""
    return values.get(MAIN_KEYS[section], {"engine": "local", "agent": otherwise}.get(section))


def task_words(tasks: str | None, *, has_environment: bool) -> list[str]:
    """Return the overrides for ``--tasks FILE``.

    With an environment, on the command line or in a config, the file holds its tasks; otherwise it holds prompts that
    are each answered once.
    """
    if tasks is None:
        return []
    if tasks.isdecimal() and not Path(tasks).exists():
        raise UsageError(
            "--tasks is a file of tasks here",
            got=tasks,
            expected="a path",
            hint="the number of episodes is set by the steps, tasks and group size of the run, for example: "
            f"trainer.steps=1 trainer.tasks_per_step={tasks}",
        )
    return prompts_words(tasks) if not has_environment else [f"environment.tasks={json.dumps(tasks)}"]


def prompts_words(file: str, split: str = "train") -> list[str]:
    """Return the overrides of a run whose tasks are the prompts of a file, each answered once."""
    return [prompts_environment(file, split), LOOP_OF_PROMPTS]


def prompts_environment(file: str, split: str) -> str:
    """Return the override that makes the prompts of a file the tasks of a split."""
    return f"environment={json.dumps({'name': PROMPTS, 'split': split, 'options': {'files': {split: file}}})}"


def reward_words(rewards: Sequence[str] | None) -> list[str]:
    """Return the override for ``--reward NAME`` and ``--reward NAME=WEIGHT``.

    >>> reward_words(["my:exact", "my:brief=0.2"])
    ['agent.reward=["my:exact", {"name": "my:brief", "weight": 0.2}]']

    Raises:
        ConfigError: a weight that is not a number.
    """
    return [f"agent.reward={json.dumps([_reward(word) for word in rewards])}"] if rewards else []


def _reward(word: str) -> str | dict[str, Any]:
    name, equals, weight = word.partition("=")
    if not equals:
        return name
    try:
        return {"name": name, "weight": float(weight)}
    except ValueError:
        raise ConfigError(
            f"the weight in --reward {word} is not a number",
            got=repr(weight),
            expected="NAME=WEIGHT, such as my:brief=0.2",
        ) from None
