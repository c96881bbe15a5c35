"""An environment's name as users write it: ``name`` or ``name/split``."""

from __future__ import annotations

import re
from typing import NamedTuple

GYMNASIUM_ID = re.compile(r"(?:(?P<namespace>[\w-]+)/)?(?P<name>[\w.-]+)-v\d+")

ADDRESS = re.compile(r"https?://.+")
"""The address of an environment server."""


class EnvironmentName(NamedTuple):
    """What stands before and after the last slash."""

    name: str
    split: str | None


def parse_env_name(text: str) -> EnvironmentName:
    """Take ``name/split`` apart; the slash of a Gymnasium id stays in the name, and so does one that ends an address.

    >>> parse_env_name("household/valid_unseen")
    EnvironmentName(name='household', split='valid_unseen')
    >>> parse_env_name("agentrl/Household-v0").split, parse_env_name("agentrl/Household-v0/valid").split
    (None, 'valid')
    >>> parse_env_name("http://127.0.0.1:8100/valid_unseen")
    EnvironmentName(name='http://127.0.0.1:8100', split='valid_unseen')
    >>> parse_env_name("http://worlds").split, parse_env_name("http://worlds/below/").name
    (None, 'http://worlds/below')
    """
    name, slash, split = text.rpartition("/")
    if ADDRESS.fullmatch(text) and (name.endswith("/") or not split):
        return EnvironmentName(text.rstrip("/"), None)
    if not slash or ":" in split or GYMNASIUM_ID.fullmatch(split):
        return EnvironmentName(text, None)
    return EnvironmentName(name, split)
