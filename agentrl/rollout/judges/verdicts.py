"""Formats of a judge's answers: instructions, the JSON schema for guided decoding, and a strict parser.

The whole answer is parsed. If it does not have the format, the parser raises `UnreadableAnswer`, and the judge is asked
again with the text of this error.
"""

from __future__ import annotations

import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ValidationError

from agentrl.config.judge import NAME, JudgeConfig
from agentrl.errors import ConfigError, did_you_mean
from agentrl.registry import load

EXAMPLE = "agent.judge.verdict={reason: string, score: number 0..10}"
REASON_CHARS = 400
"""Maximum number of characters of a reason; fewer if the answer may have few tokens."""
_TYPE = re.compile(r"(number|integer)\s+(-?\d+(?:\.\d+)?)\s*\.\.\s*(-?\d+(?:\.\d+)?)|(boolean)|(string)(?:\s+(\d+))?")
SCORE_PATTERN = (
    r"(?i)(?<![^\W_][-_])(?<![^\W_])score(?:\s*\([^)\n]*\))?[\W_]{0,20}?[:=：]"
    r"(?:[\W_]{0,20}?([-−]?\d+(?:\.\d+)?)(?![.,]?\d|[^\W_]))?"
)
"""The group is empty if no plain number follows: such an answer must not be read as an earlier "Score: 10" in it."""
_SCALE = re.compile(r"[\s*_`]*(?:(?:/|out of|of)\s*(\d+(?:\.\d+)?)|(%)|(?:-|–|to)\s*\d)", re.IGNORECASE)
"""What follows a score that is a number of a scale, a percentage or the beginning of a range."""
BOUNDS = frozenset({"minimum", "maximum", "maxLength", "minLength", "minItems", "maxItems", "multipleOf", "pattern"})
"""Keywords of JSON schemas that OpenAI's and Anthropic's structured outputs reject in part."""
_KNOWN = frozenset({"type", "minimum", "maximum", "maxLength", "enum", "title", "description"})


class UnreadableAnswer(Exception):
    """Answer that cannot be parsed; the message tells the judge why."""


class VerdictFormat(ABC):
    """Required format of an answer."""

    instructions: str
    """Instructions appended to the question; may be empty."""
    schema: Mapping[str, Any] | None
    """JSON schema of the answer; ``None`` for free text."""

    @abstractmethod
    def read(self, answer: str) -> Mapping[str, Any]:
        """Parse an answer into its fields; raise `UnreadableAnswer` if it does not have the format."""


class ScoreFormat(VerdictFormat):
    """Free text with a score; the last match of a pattern is the score."""

    schema = None
    instructions = ""

    def __init__(self, pattern: str | None, low: float, high: float) -> None:
        self._pattern, self._low, self._high = re.compile(SCORE_PATTERN if pattern is None else pattern), low, high

    def read(self, answer: str) -> Mapping[str, Any]:
        """Return the score."""
        matches = list(self._pattern.finditer(_without_thoughts(answer)))
        try:
            score = float(matches[-1].group(1)) if matches and self._has_scale(matches[-1]) else None
        except (TypeError, ValueError):
            score = None
        if score is None or not self._low <= score <= self._high:
            raise UnreadableAnswer(
                "Your answer has no score that can be read. End your answer with one line of the form "
                f'"Score: N", with N from {self._low:g} to {self._high:g}.'
            )
        return {"score": score}

    def _has_scale(self, match: re.Match[str]) -> bool:
        """Return True unless the answer says that its score has another scale, as in ``4/5``, or is a range."""
        follows = _SCALE.match(match.string, match.end(1))
        if follows is None:
            return True
        highest = 100.0 if follows[2] else float(follows[1] or "nan")
        return highest == self._high


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictField:
    """Field of a typed answer."""

    name: str
    kind: Literal["number", "integer", "boolean", "string"]
    low: float = -math.inf
    high: float = math.inf
    longest: int | None = None
    """Maximum number of characters of a text in the instructions; a longer text is accepted."""
    choices: tuple[str, ...] = ()
    """Allowed values of a string; empty for any text."""
    meaning: str = ""

    @property
    def is_scored(self) -> bool:
        """True for a number between bounds or a boolean."""
        return self.kind == "boolean" or (math.isfinite(self.low) and math.isfinite(self.high))

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the field."""
        found: dict[str, Any] = {"type": self.kind}
        bounds = {"minimum": self.low, "maximum": self.high}
        found |= {name: _plain(bound) for name, bound in bounds.items() if math.isfinite(bound)}
        if self.longest is not None:
            found["maxLength"] = self.longest
        if self.choices:
            found["enum"] = list(self.choices)
        return found

    @property
    def words(self) -> str:
        """Description of the field for the judge."""
        if self.choices:
            kind = "one of " + ", ".join(map(json.dumps, self.choices))
        elif self.kind == "boolean":
            kind = "true or false"
        elif self.kind == "string":
            kind = "text" if self.longest is None else f"text of at most {self.longest} characters"
        else:
            kind = f"{'a whole number' if self.kind == 'integer' else 'a number'}{_range_words(self.low, self.high)}"
        return f'"{self.name}": {kind}' + (f" ({self.meaning})" if self.meaning else "")

    def check(self, value: Any) -> None:
        """Check a value; raise `UnreadableAnswer` if it does not fit the field."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_within = is_number and self.low <= value <= self.high and abs(value) <= sys.float_info.max
        fits = {
            "boolean": isinstance(value, bool),
            "string": isinstance(value, str) and (not self.choices or value in self.choices),
            "number": is_within,
            "integer": is_within and value == int(value),
        }
        if not fits[self.kind]:
            raise UnreadableAnswer(f"{json.dumps(value)[:80]} is not a valid value for {self.words}.")

    def normalize(self, value: Any) -> float:
        """Scale a value to between 0 and 1."""
        return float(value) if self.kind == "boolean" else (value - self.low) / (self.high - self.low)


def _plain(bound: float) -> float | int:
    return int(bound) if float(bound).is_integer() else bound


def _range_words(low: float, high: float) -> str:
    if math.isfinite(low) and math.isfinite(high):
        return f" from {low:g} to {high:g}"
    return f" of at least {low:g}" if math.isfinite(low) else f" of at most {high:g}" if math.isfinite(high) else ""


class FieldsFormat(VerdictFormat):
    """JSON object with exactly these fields, in this order."""

    def __init__(self, fields: Sequence[VerdictField]) -> None:
        self.fields = {field.name: field for field in fields}
        self.schema = {
            "type": "object",
            "properties": {field.name: field.schema for field in fields},
            "required": [field.name for field in fields],
            "additionalProperties": False,
        }
        rows = "\n".join(f"- {field.words}" for field in fields)
        self.instructions = f"Answer with one JSON object and nothing else. Its fields, in this order:\n{rows}"

    def read(self, answer: str) -> Mapping[str, Any]:
        """Return the fields."""
        found = read_object(answer)
        if missing := [name for name in self.fields if name not in found]:
            raise UnreadableAnswer(f"Your answer lacks {', '.join(missing)}.")
        if unknown := [name for name in found if name not in self.fields]:
            raise UnreadableAnswer(f"Your answer has a field {unknown[0][:80]!r}, which is not allowed.")
        for name, field in self.fields.items():
            field.check(found[name])
        return found


class PydanticFormat(VerdictFormat):
    """JSON object that a pydantic model accepts, including its validators."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model
        self.schema = model.model_json_schema()
        self.fields = {field.name: field for field in _fields_of_schema(self.schema, strict=False)}
        schema = json.dumps(self.schema, ensure_ascii=False)
        self.instructions = f"Answer with one JSON object that fits this JSON schema, and nothing else:\n{schema}"

    def read(self, answer: str) -> Mapping[str, Any]:
        """Return the fields."""
        found = read_object(answer)
        try:
            checked = self._model.model_validate_json(json.dumps(found), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the object"
            raise UnreadableAnswer(f"Your answer does not fit the schema: {key}: {first['msg']}.") from error
        dumped = checked.model_dump(by_alias=True)
        for name, field in self.fields.items():
            if field.is_scored:
                field.check(dumped.get(name))
        return dumped


def reason_field(config: JudgeConfig) -> VerdictField | None:
    """Return the field of the judge's reasons, if any; its maximum length leaves tokens for the other fields."""
    if not config.reasons:
        return None
    longest = min(REASON_CHARS, 2 * config.max_tokens)
    return VerdictField(name="reason", kind="string", longest=longest, meaning="why, before you decide")


class RankingFormat(VerdictFormat):
    """JSON object with a ranking of all attempts, the best one first."""

    def __init__(self, count: int, reason: VerdictField | None) -> None:
        self._count = count
        labels = list(range(1, count + 1))
        ranking = {"type": "array", "items": {"type": "integer", "enum": labels}, "minItems": count, "maxItems": count}
        properties = {**({} if reason is None else {reason.name: reason.schema}), "ranking": ranking}
        self.schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        first = "" if reason is None else f"- {reason.words}\n"
        self.instructions = (
            "Answer with one JSON object and nothing else. Its fields, in this order:\n"
            f'{first}- "ranking": the numbers of all {count} attempts, from the best to the worst, each once'
        )

    def read(self, answer: str) -> Mapping[str, Any]:
        """Return the ranking."""
        found = read_object(answer)
        ranking = found.get("ranking")
        numbers = ranking if isinstance(ranking, list) else []
        if any(type(number) is not int for number in numbers) or sorted(numbers) != list(range(1, self._count + 1)):
            wrong = f'{json.dumps(ranking)[:80]} is not a valid "ranking"'
            raise UnreadableAnswer(f"{wrong}: it must contain each number from 1 to {self._count} once.")
        return found


def without_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema without the bounds of its values.

    >>> without_bounds({"type": "object", "properties": {"pattern": {"type": "string", "maxLength": 9}}})
    {'type': 'object', 'properties': {'pattern': {'type': 'string'}}}
    """
    plain = {name: value for name, value in schema.items() if name not in BOUNDS}
    for name, value in plain.items():
        if name in ("properties", "$defs"):
            plain[name] = {key: without_bounds(inner) for key, inner in value.items()}
        elif name in ("anyOf", "allOf", "oneOf", "prefixItems"):
            plain[name] = [without_bounds(inner) for inner in value]
        elif name == "items" and isinstance(value, Mapping):
            plain[name] = without_bounds(value)
    return plain


def read_object(answer: str) -> dict[str, Any]:
    """Parse an answer that is one JSON object; thinking before it and a Markdown fence around it are allowed.

    Raises:
        UnreadableAnswer: it is something else, has a duplicate key, or has a number that is not finite.
    """
    text = _without_thoughts(answer).strip()
    if fenced := re.fullmatch(r"```(?:json)?\s*\n(.*?)\s*```", text, flags=re.DOTALL | re.IGNORECASE):
        text = fenced[1]
    try:  # models write line breaks in texts
        found = json.loads(text, strict=False, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except ValueError as error:  # also for a number of thousands of digits
        raise UnreadableAnswer(f"Your answer is not one JSON object: {str(error)[:200]}.") from error
    except RecursionError as error:
        raise UnreadableAnswer("Your answer is nested too deeply.") from error
    if not isinstance(found, dict):
        raise UnreadableAnswer("Your answer is JSON, but not an object.")
    return found


def _without_thoughts(answer: str) -> str:
    """Remove thinking from the beginning; its first tag may be part of the prompt, and its last one may be missing."""
    text = answer.lstrip()
    if text.startswith("<think>") or ("</think>" in text and not text.startswith(("{", "```"))):
        return text.partition("</think>")[2]
    return answer


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadableAnswer("Your answer has a field twice.")
    return found


def _no_constant(name: str) -> NoReturn:
    raise UnreadableAnswer(f"Your answer has {name}, which is not valid JSON.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldWeights:
    """Weights of the fields in the reward: the weighted mean of fields with positive weights, minus penalties.

    With x_i the value of field i between 0 and 1, the reward is sum_i w_i x_i / sum_{w_i > 0} w_i. It is between
    `lowest`, which is 0 without negative weights, and 1.
    """

    fields: Mapping[str, VerdictField]
    weights: Mapping[str, float]
    gates: frozenset[str] = frozenset()
    """Fields that must have the value 1, or else the reward is the lowest."""

    @property
    def lowest(self) -> float:
        """Lowest possible reward."""
        return math.fsum(w for w in self.weights.values() if w < 0) / self._positive

    @property
    def _positive(self) -> float:
        return math.fsum(w for w in self.weights.values() if w > 0)

    def parts(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the values of the fields with weights, between 0 and 1."""
        return {name: self.fields[name].normalize(values[name]) for name in self.weights}

    def reward(self, parts: Mapping[str, float]) -> float:
        """Return the reward of values from `parts`."""
        if any(parts[name] < 1 for name in self.gates):
            return self.lowest
        return math.fsum(weight * parts[name] for name, weight in self.weights.items()) / self._positive


def configured_format(config: JudgeConfig) -> FieldsFormat | PydanticFormat:
    """Return the format that ``agent.judge.verdict`` describes.

    Raises:
        ConfigError: it does not describe a format that can be parsed.
        UsageError: the class does not exist.
    """
    verdict = config.verdict
    if isinstance(verdict, str):
        return PydanticFormat(_model(verdict))
    if not verdict:
        raise ConfigError("agent.judge.verdict has no fields", got=verdict, expected=EXAMPLE)
    if isinstance(verdict.get("properties"), dict):
        return FieldsFormat(_fields_of_schema(verdict, strict=True))
    return FieldsFormat([_field(name, words) for name, words in verdict.items()])


def verdict_weights(config: JudgeConfig, answer_format: FieldsFormat | PydanticFormat) -> FieldWeights:
    """Return the weights of a verdict's fields in the reward.

    Raises:
        ConfigError: ``agent.judge.reward`` does not name a field that is a boolean or a number between bounds.
    """
    scored = [field.name for field in answer_format.fields.values() if field.is_scored]
    given = config.reward
    if given is None:
        if len(scored) != 1:
            raise ConfigError(
                "agent.judge.reward must name the field of the verdict that is the reward",
                got=f"{len(scored)} fields that are numbers between bounds or booleans"
                + (f": {', '.join(scored)}" if scored else ""),
                expected="agent.judge.reward=NAME, or {NAME: WEIGHT, …}",
            )
        given = scored[0]
    weights = {given: 1.0} if isinstance(given, str) else dict(given)
    for name, weight in weights.items():
        if name not in scored:
            raise ConfigError(
                f"agent.judge.reward names {name!r}",
                got="a field without bounds"
                if name in answer_format.fields
                else "a name that is not a field of the verdict",
                expected=f"one of {', '.join(scored)}" if scored else "a number between bounds, such as number 0..10",
                hint=did_you_mean(name, scored),
            )
        if not math.isfinite(weight) or weight == 0:
            raise ConfigError(
                f"invalid weight of {name} in agent.judge.reward", got=weight, expected="a finite number other than 0"
            )
    if not any(weight > 0 for weight in weights.values()):
        raise ConfigError(
            "agent.judge.reward has no weight above 0", got=weights, expected="at least one weight above 0"
        )
    return FieldWeights(fields=answer_format.fields, weights=weights)


def _field(name: str, words: Any) -> VerdictField:
    found = _TYPE.fullmatch(words.strip()) if isinstance(words, str) else None
    if found is None or not re.match(NAME, name):
        raise ConfigError(
            f"agent.judge.verdict does not describe field {name}",
            got=repr(words),
            expected="number 0..10, integer 1..5, boolean, string, or string 200 for at most 200 characters",
        )
    if found[4] or found[5]:
        longest = None if found[6] is None else int(found[6])
        return VerdictField(name=name, kind="boolean" if found[4] else "string", longest=longest)
    low, high = float(found[2]), float(found[3])
    if low >= high:
        raise ConfigError(f"field {name} of agent.judge.verdict has no range", got=words, expected="number 0..10")
    return VerdictField(name=name, kind="integer" if found[1] == "integer" else "number", low=low, high=high)


def _fields_of_schema(schema: Mapping[str, Any], *, strict: bool) -> list[VerdictField]:
    """Return the fields of an object's schema; complex fields raise an error, or are skipped if not `strict`."""
    found = []
    required = schema.get("required", [])
    for name, part in schema["properties"].items():
        kind = part.get("type") if isinstance(part, Mapping) else None
        plain = kind in ("number", "integer", "boolean", "string") and part.keys() <= _KNOWN and name in required
        if not plain and strict:
            raise ConfigError(
                f"field {name} of the schema in agent.judge.verdict is not supported",
                got=json.dumps(part) + ("" if name in required else ", not required"),
                expected="a required number, integer, boolean or string with only minimum, maximum, maxLength or enum",
                hint="use a pydantic model for anything else: agent.judge.verdict=module:Class",
            )
        if kind in ("number", "integer", "boolean", "string"):
            found.append(_field_of_schema(name, part))
    return found


def _field_of_schema(name: str, part: Mapping[str, Any]) -> VerdictField:
    low, high = part.get("minimum", -math.inf), part.get("maximum", math.inf)
    if part["type"] in ("number", "integer") and low >= high:
        raise ConfigError(f"field {name} of agent.judge.verdict has no range", got=f"{low} to {high}")
    choices = tuple(str(choice) for choice in part.get("enum", ())) if part["type"] == "string" else ()
    return VerdictField(
        name=name,
        kind=part["type"],
        low=low,
        high=high,
        longest=part.get("maxLength"),
        choices=choices,
        meaning=part.get("description", ""),
    )


def _model(name: str) -> type[BaseModel]:
    found = load(name) if ":" in name else None
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise ConfigError(
            "agent.judge.verdict is not a pydantic model",
            got=f"{name}, {'which is ' + type(found).__name__ if ':' in name else 'which does not name a class'}",
            expected=f"module:Class of a pydantic model, the path of a .json file, or {EXAMPLE}",
        )
    return found
