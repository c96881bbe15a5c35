"""The tasks: repositories with one mistake or two. Each split has its own repositories."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import CodeType
from typing import Any

from ..programs.judging import Case
from ..task_ids import TEST, TRAIN, VALID, NumberedTasks, check_split, parse_task_id
from .libraries import LIBRARIES, Library
from .mutations import Mutation, mutations, with_mistakes

ENVIRONMENT = "repo_fix"
PACKAGES = {TRAIN: ("shop", "textkit", "grids", "spans", "school", "clock"), VALID: ("stock",), TEST: ("codes",)}
SHOWN, HIDDEN = 4, 12
"""Number of cases of each function in the repository's tests, and of hidden ones."""
PAIRS = 60
"""Maximum number of tasks with two mistakes per repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A repository with mistakes."""

    library: Library
    source: str
    """The module with the mistakes."""
    failing: tuple[str, ...]
    """Functions whose tests fail."""
    count: int
    """Number of mistakes."""

    @property
    def type(self) -> str:
        """Number of mistakes in words."""
        return "one mistake" if self.count == 1 else "two mistakes"


class RepoTasks(NumberedTasks):
    """The tasks of a split.

    Args:
        split: Name of the split.
        mistakes: Number of mistakes in each repository: 1 or 2, or 0 for both kinds of repositories.

    Raises:
        UsageError: the split does not exist.
    """

    def __init__(self, split: str, mistakes: int = 0) -> None:
        known = enumerate(faults_of(check_split(split, ENVIRONMENT)))
        super().__init__(ENVIRONMENT, split, [n for n, fault in known if mistakes in (0, fault.count)])

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        return {"type": fault_of(task_id).type}


def fault_of(task_id: str) -> Fault:
    """Return the repository of a task id such as ``valid-17``.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, lambda split: len(faults_of(split)))
    return faults_of(split)[number]


@functools.cache
def faults_of(split: str) -> Sequence[Fault]:
    """Return all faults of a split, in pseudo-random order."""
    found = [fault for library in LIBRARIES if library.package in PACKAGES[split] for fault in _faults(library)]
    Random(f"repo_fix {split}").shuffle(found)
    return found


def _faults(library: Library) -> list[Fault]:
    """Return the single mistakes that the tests of their function detect, and pairs of them in two functions."""
    known = cases_of(library)
    noticed = [one for one in mutations(library.source) if _is_noticed(library, one, known[one.function])]
    pairs = [pair for pair in itertools.combinations(noticed, 2) if pair[0].function != pair[1].function]
    chosen = Random(f"repo_fix pairs {library.package}").sample(pairs, min(PAIRS, len(pairs)))
    return [_fault(library, mistakes, known) for mistakes in [*((one,) for one in noticed), *chosen]]


def _is_noticed(library: Library, mistake: Mutation, cases: Sequence[Case]) -> bool:
    module = _module(library, [mistake])
    wrong = [not _is_right(module, case) for case in cases]
    return any(wrong[:SHOWN]) and any(wrong[SHOWN:])


def _fault(library: Library, mistakes: Sequence[Mutation], known: Mapping[str, Sequence[Case]]) -> Fault:
    module = _module(library, mistakes)
    failing = [n for n, cases in known.items() if not all(_is_right(module, case) for case in cases[:SHOWN])]
    source = with_mistakes(library.source, mistakes)
    return Fault(library=library, source=source, failing=tuple(failing), count=len(mistakes))


def share_right(fault: Fault) -> float:
    """Return the share of the hidden cases that the module with the mistakes already passes."""
    module: dict[str, Any] = {}
    exec(_compile(fault.source), module)
    hidden = [case for cases in cases_of(fault.library).values() for case in cases[SHOWN:]]
    return sum(_is_right(module, case) for case in hidden) / len(hidden)


def _is_right(module: Mapping[str, Callable[..., Any]], case: Case) -> bool:
    try:
        return bool(module[case.call](*copy.deepcopy(case.arguments)) == case.value)
    except Exception:  # a mistake may raise anything
        return False


@functools.lru_cache(maxsize=64)
def _cases(package: str) -> Mapping[str, tuple[Case, ...]]:
    library = next(one for one in LIBRARIES if one.package == package)
    module = _module(library)
    return {name: _draw_cases(library, name, module[name]) for name in library.calls}


def cases_of(library: Library) -> Mapping[str, tuple[Case, ...]]:
    """Return the cases by function: first those of the repository's tests, then the hidden ones; all differ."""
    return _cases(library.package)


def _draw_cases(library: Library, name: str, function: Callable[..., Any]) -> tuple[Case, ...]:
    random, found = Random(f"repo_fix {library.package} {name}"), dict[str, Case]()
    for _ in range(2000):
        arguments = library.calls[name](random)
        module = f"{library.package}.{library.module}"
        value = function(*copy.deepcopy(arguments))
        found.setdefault(repr(arguments), Case(call=name, arguments=arguments, value=value, module=module))
        if len(found) == SHOWN + HIDDEN:
            break
    return tuple(found.values())


def _module(library: Library, mistakes: Sequence[Mutation] = ()) -> dict[str, Any]:
    """Return the functions of a library, with mistakes in some of them."""
    space: dict[str, Any] = {}
    exec(_compile(library.source), space)
    for mistake in mistakes:
        exec(_compile(mistake.code), space)
    return space


@functools.lru_cache(maxsize=1024)
def _compile(source: str) -> CodeType:
    return compile(source, "<repository>", "exec")
