"""Detection of the library that a reward function was written for, by the names of its parameters.

>>> library_of(inspect.signature(lambda completions, solution, **columns: [0.0]))
'trl'
>>> library_of(inspect.signature(lambda state: 0.0))
'verifiers'
>>> library_of(inspect.signature(lambda response, ground_truth: 0.0)) is None
True
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Literal

Library = Literal["agentrl", "trl", "verl", "verl_batch", "verifiers"]

MARKERS: Mapping[Library, frozenset[str]] = {
    "trl": frozenset({"completions", "prompts", "completion_ids", "trainer_state", "log_metric", "log_extra"}),
    "verl_batch": frozenset({"solution_strs", "data_sources", "extra_infos"}),
    "verl": frozenset({"solution_str", "data_source", "extra_info"}),
    "verifiers": frozenset({"completion", "prompt", "answer", "state", "info", "parser"}),
}
"""Parameters that identify functions for a library; the first library with a match wins."""
OWN = (("trajectory", "Trajectory"), ("task", "Task"))
"""Name and annotation of each parameter of agentrl's own functions."""
EXPECTED = (
    "def reward(trajectory, task) -> float, or the parameters of a function for TRL (completions), verl (solution_str) "
    "or verifiers (completion, answer, info, state, prompt, parser)"
)

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def library_of(signature: inspect.Signature) -> Library | None:
    """Return the library that a function with this signature was written for; ``None`` if the signature does not say.

    The first two parameters of agentrl's own functions are named or annotated as in `OWN`; an unused one may be called
    ``_``. Parameters that can only be passed by position, such as ``*args``, also indicate agentrl: the other libraries
    pass arguments by name.
    """
    if _is_own(signature):
        return "agentrl"
    names = set(signature.parameters)
    return next((library for library, markers in MARKERS.items() if names & markers), None)


def is_reversed(signature: inspect.Signature) -> bool:
    """Return True if the function takes a task first and a trajectory second."""
    first = [parameter for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL][:2]
    return len(first) == 2 and all(map(_matches, first, OWN[::-1]))


def _is_own(signature: inspect.Signature) -> bool:
    parameters = list(signature.parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds and not any(parameter.kind in _POSITIONAL for parameter in parameters):
        return inspect.Parameter.VAR_KEYWORD not in kinds  # with **kwargs, it may wrap a function for any library
    first = [parameter for parameter in parameters if parameter.kind in _POSITIONAL][:2]
    return len(first) == 2 and all(map(_fits, first, OWN))


def _fits(parameter: inspect.Parameter, own: tuple[str, str]) -> bool:
    is_unnamed = not parameter.name.strip("_0123456789")
    return is_unnamed or parameter.kind is inspect.Parameter.POSITIONAL_ONLY or _matches(parameter, own)


def _matches(parameter: inspect.Parameter, own: tuple[str, str]) -> bool:
    name, annotation = own
    given = parameter.annotation
    words = given if isinstance(given, str) else getattr(given, "__name__", str(given))
    return parameter.name.strip("_") == name or re.search(rf"\b{annotation}\b", words) is not None
