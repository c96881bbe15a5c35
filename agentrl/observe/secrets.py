"""Secrets in settings and commands, which must not reach trackers, reports and model cards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
"""Text in place of a secret."""
_KINDS = r"(?:api|access|auth|bearer|hf|hub|private|refresh|secret|session)[_-]?"
_NAMES = rf"(?:(?:[\w-]*[_-])?(?:{_KINDS}(?:key|token)|passw(?:or)?d|secret|credentials?|authorization)|token)"
_NAME = re.compile(rf"-*{_NAMES}", re.IGNORECASE)
_NAMED = re.compile(  # name=secret, name: secret, --name secret
    rf"(?<![\w-])((?:{_NAMES}[\"']?\s*[:=]\s*|--{_NAMES}[\s=,]+)[\"']?(?:Bearer\s+)?)([^\s\"',{{}}\[\]]+)",
    re.IGNORECASE,
)
_FORMS = re.compile(
    r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)"  # user:password@ of an address
    r"|\b(?:sk|pk|rk)-[\w-]{16,}|\bhf_\w{16,}|\bgh[oprsu]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abprs]-[\w-]{10,}|\bAKIA[A-Z0-9]{16}\b|\bAIza[\w-]{30,}"
)


def hide_secrets(value: Any, name: str = "") -> Any:
    """Replace the secrets in a setting by `HIDDEN`: texts under the name of a secret, and texts in the form of one.

    >>> hide_secrets({"api_key": "abc", "max_tokens": 5, "url": "https://me:abc@host/v1"})
    {'api_key': '(hidden)', 'max_tokens': 5, 'url': 'https://(hidden)@host/v1'}
    >>> hide_secrets(["--api-key", "abc", "--port", "8000"])
    ['--api-key', '(hidden)', '--port', '8000']
    """
    if isinstance(value, Mapping):
        return {key: hide_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        before = [name, *(one if isinstance(one, str) and one.startswith("-") else name for one in value)]
        return [hide_secrets(inner, option) for option, inner in zip(before, value, strict=False)]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _NAME.fullmatch(name) else hide_in_text(value)


def hide_in_text(text: str) -> str:
    """Replace the secrets in a command or another text.

    >>> hide_in_text("agentrl train my.yaml 'environment.options={api_key: abc, size: 3}' --token abc")
    "agentrl train my.yaml 'environment.options={api_key: (hidden), size: 3}' --token (hidden)"
    """
    return _FORMS.sub(HIDDEN, _NAMED.sub(rf"\1{HIDDEN}", text))
