"""The types that a JSON schema allows for a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def json_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Names of JSON types, from ``type``, ``nullable``, ``anyOf`` and ``oneOf``; empty when the schema does not say."""
    declared = schema.get("type", ())
    types = {declared} if isinstance(declared, str) else set(declared)
    if types and schema.get("nullable"):
        types.add("null")
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= json_types(choice)
    return frozenset(types)
