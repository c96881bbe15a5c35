"""Lenient reader of tools' JSON schemas: references, declared types, checks of values, and descriptions in words.

Schemas come from external programs, so no function here raises an exception for any schema. Unsupported keywords
(``pattern``, ``minimum``, ``if``, …) are left to the tool.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urljoin

DEEPEST = 32
"""Maximum depth of schemas, because references may form a cycle."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_MAX_KEY_CHARS = 64
MAX_SHOWN_CHARS = 80
"""Maximum number of characters of a value in a message."""
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "array": "a list",
    "object": "a JSON object",
    "null": "null",
}
_LITERAL_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "string": ("str", "text", "varchar", "char"),
    "integer": ("int", "uint", "long", "short", "bigint", "unsigned"),
    "number": ("float", "double", "decimal", "real", "num"),
    "boolean": ("bool",),
    "array": ("list", "tuple", "set", "sequence", "arr"),
    "object": ("dict", "dictionary", "map", "mapping", "struct", "obj"),
    "null": ("none", "nonetype"),
}
"""JSON types with their names in other languages."""
_TYPES = {name: json_type for json_type, others in _SPELLINGS.items() for name in (json_type, *others)}
_TYPE_NAME = re.compile(r"(?:typing\.|unsigned )?([a-z]+)(?:8|16|32|64|128)?(?:[\[(<].*)?", re.DOTALL)
"""Pattern of a type's name with optional additions: a size in bits, or the types of its parts."""


def property_schema(key: str, root: Mapping[str, Any]) -> Any:
    """Return the schema of one property with resolved references; ``True`` if it is not declared."""
    return _property(key, root, root, 0)


def _property(key: str, schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return True
    declared = as_mapping(schema.get("properties"))
    if key in declared:
        return resolve(declared[key], root)
    for part in (part for word in ("allOf", "anyOf", "oneOf") for part in as_list(schema.get(word))):
        found = _property(key, part, root, depth + 1)
        if found is not True:
            return found
    matching = _matching(key, schema)
    if matching:
        return resolve(matching[0], root)
    others = schema.get("additionalProperties")
    return resolve(others, root) if isinstance(others, Mapping) else True


def _matching(key: str, schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas in ``patternProperties`` whose patterns match a key; invalid patterns match nothing."""
    found = []
    for pattern, part in as_mapping(schema.get("patternProperties")).items():
        with contextlib.suppress(re.error, RecursionError, OverflowError, TypeError):
            if _is_quick(pattern) and re.search(pattern, key[:_MAX_KEY_CHARS]):
                found.append(part)
    return found


def _is_quick(pattern: str) -> bool:
    """Return True if a pattern repeats no group; repeated groups could take exponential time."""
    return re.search(r"\)[*+{]", pattern) is None


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema with its own reference resolved; references to other documents are ignored."""
    for _ in range(DEEPEST):
        word = next((word for word in _REFERENCES if isinstance(schema, Mapping) and word in schema), None)
        if word is None:
            return schema
        target = _find_reference(schema[word], root)
        others = {key: value for key, value in schema.items() if key != word}
        schema = {**target, **others} if isinstance(target, Mapping) else (target if target is False else others)
    return True


def _find_reference(reference: Any, root: Mapping[str, Any]) -> Any:
    """Resolve a JSON pointer, an anchor or an ``$id`` in `root`; return ``None`` if it does not exist."""
    if not isinstance(reference, str):
        return None
    address, _, pointer = reference.partition("#")
    found: Any = root if not address else _find_named(("$id", "id"), address, root)
    pointer = unquote(pointer)
    if pointer and not pointer.startswith("/"):
        return _find_named(("$anchor", "$dynamicAnchor"), pointer, found)
    return follow_pointer(pointer, found)


def follow_pointer(pointer: str, root: Any) -> Any:
    """Resolve a JSON pointer such as ``/$defs/Item`` in `root`; return ``None`` if it does not exist."""
    found = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def _find_named(words: Sequence[str], name: str, root: Any) -> Any:
    """Return the schema with a name, which is `root` or one of its definitions; an ``$id`` may be relative."""
    base = root.get("$id") if isinstance(root, Mapping) else None
    base = base.rstrip("#") if isinstance(base, str) else ""
    wanted = {name, _join_url(base, name)}
    definitions = [as_mapping(root).get(word) for word in ("$defs", "definitions")]
    for part in (root, *(part for parts in definitions for part in as_mapping(parts).values())):
        own = next(
            (part[word] for word in words if isinstance(part, Mapping) and isinstance(part.get(word), str)), None
        )
        if own is not None and {own.rstrip("#"), _join_url(base, own.rstrip("#"))} & wanted:
            return part
    return None


def _join_url(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError:
        return address


def declared_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; empty if it does not state types."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return frozenset()
    found = _own_types(schema)
    for part in as_list(schema.get("allOf")):
        others = declared_types(part, root, depth + 1)
        found = _both(found, others) if found and others else found | others
    for word in ("anyOf", "oneOf"):
        choices = [declared_types(part, root, depth + 1) for part in as_list(schema.get(word))]
        union = frozenset[str]().union(*choices)
        found = (_both(found, union) or found) if found and union else found | union
    return found


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    found = _named_types(schema.get("type"))
    if not found:
        options = literals(schema)
        found = {_type_of(option) for option in options} if options is not None else set()
    if not found and schema.keys() & {"properties", "patternProperties", "additionalProperties"}:
        found = {"object"}
    if not found and ("items" in schema or "prefixItems" in schema):
        found = {"array"}
    if found and schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def _named_types(declared: Any) -> set[str]:
    """Return the JSON types in ``type``, in any common spelling; none if one of them is unknown."""
    names = declared if isinstance(declared, list | tuple) else [declared]
    found = {_json_type(name) for name in names}
    return {name for name in found if name is not None} if None not in found else set()


def _json_type(name: Any) -> str | None:
    spelled = _TYPE_NAME.fullmatch(name.strip().lower()) if isinstance(name, str) else None
    return _TYPES.get(spelled[1]) if spelled else None


def _both(some: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    common = some & others
    if "integer" in some | others and "number" in some | others:
        common |= {"integer"}
    return common


def literals(schema: Any) -> Sequence[Any] | None:
    """Return the values that ``enum`` or ``const`` allow; ``None`` if the schema has neither."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) else None


def _type_of(value: Any) -> str:
    return next((name for kind, name in _LITERAL_TYPES if isinstance(value, kind)), "null")


def accepts_null(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return True if a schema allows null, or declares no type."""
    types = declared_types(schema, root)
    return "null" in types or not (types or "type" in as_mapping(resolve(schema, root)))


def is_of_type(value: Any, types: frozenset[str]) -> bool:
    """Return True if a JSON value has one of the types; a whole number is a number, and 3.0 is a whole number."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return bool(types & {"integer", "number"})
    if isinstance(value, float):
        return "number" in types or ("integer" in types and value.is_integer())
    return _type_of(value) in types


def fits(value: Any, schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Return True if a tool with this schema accepts the value.

    The check is as lenient as the tools (`agentrl.tool.schema.Arguments.read`): numbers may be text and vice versa,
    lists and objects may be JSON text, and null stands for a missing optional argument.
    """
    schema = resolve(schema, root)
    if schema is False:
        return False
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return True
    own = {key: part for key, part in schema.items() if key not in ("allOf", "anyOf", "oneOf")}
    types = _own_types(own)
    if types and not is_of_type(value, types) and not _can_become(value, types):
        return False
    options = literals(own)
    if options is not None and not any(_is_same(value, option) for option in options):
        return False
    if not all(fits(value, part, root, depth + 1) for part in as_list(schema.get("allOf"))):
        return False
    for word in ("anyOf", "oneOf"):
        choices = as_list(schema.get(word))
        if choices and not any(fits(value, part, root, depth + 1) for part in choices):
            return False
    if isinstance(value, Mapping):
        return next(_object_misfits(value, schema, root, depth), None) is None
    items = schema.get("items")
    return not isinstance(value, list) or items is None or all(fits(item, items, root, depth + 1) for item in value)


def misfits(arguments: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Explain why a tool with these parameters rejects arguments; empty if no single argument is the reason.

    >>> misfits({"size": "big"}, {"properties": {"name": {}, "size": {"type": "integer"}}, "required": ["name"]})
    'name is missing, size is not a whole number'
    """
    schema = resolve(root, root)
    return ", ".join(_object_misfits(arguments, schema, root, 0)) if isinstance(schema, Mapping) else ""


def _object_misfits(
    value: Mapping[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> Iterator[str]:
    declared, required = as_mapping(schema.get("properties")), as_list(schema.get("required"))
    for key in required:
        if isinstance(key, str) and key not in value:
            yield f"{key} is missing"
    others = schema.get("additionalProperties", True)
    for key, part in value.items():
        if part in (None, "null") and key in declared and key not in required:
            continue
        if not all(fits(part, one, root, depth + 1) for one in _schemas_of(key, schema, others)):
            own = as_mapping(resolve(declared.get(key), root))
            options = literals(own)
            kinds = sorted(_WORDS.get(name, name) for name in _own_types(own))
            wanted = " or ".join(kinds) if options is None else f"one of {', '.join(map(shorten_json, options))}"
            yield f"{key} is not {wanted or 'valid'}" if key in declared else f"there is no argument {key}"


def _schemas_of(key: str, schema: Mapping[str, Any], others: Any) -> Sequence[Any]:
    """Return the schemas of a key of an object; `others` if the object's schema does not mention the key."""
    declared = as_mapping(schema.get("properties"))
    return [*([declared[key]] if key in declared else []), *_matching(key, schema)] or [others]


def _can_become(value: Any, types: frozenset[str]) -> bool:
    """Return True if tools can convert the value to one of the types."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "string" in types
    if not isinstance(value, str):
        return False
    try:
        return is_of_type(json.loads(value.strip().lower() if "boolean" in types else value), types - {"string"})
    except (ValueError, RecursionError):
        return False


def _is_same(value: Any, option: Any) -> bool:
    if isinstance(value, str) != isinstance(option, str) and not isinstance(value, list | dict):
        return str(value) == str(option)
    return bool(value == option) and isinstance(value, bool) == isinstance(option, bool)


def describe(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Describe the values that a schema allows in words: ``a whole number or null``."""
    if "$ref" in schema:
        return describe(resolve(schema, root) or {"type": "object"}, {})
    if "enum" in schema:
        return "one of " + ", ".join(map(shorten_json, schema["enum"]))
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(describe(part, root) for part in schema[word]))
    return _WORDS.get(schema.get("type", ""), "anything")


def shorten_json(value: Any) -> str:
    """Write a value as JSON, shortened to `MAX_SHOWN_CHARS` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return an object unchanged, and an empty object for any other value."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> Sequence[Any]:
    """Return a list unchanged, and an empty list for any other value."""
    return value if isinstance(value, list | tuple) else ()
