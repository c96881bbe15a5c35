"""Document of one episode: its turns by sequence, as messages where they are stored, otherwise from its tokens.

A turn is an answer and the messages that follow it until the next answer: tool results, observations, remarks of the
runtime. The messages before a sequence's first answer belong to its first turn.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from agentrl.message import Content, ImagePart, Message
from agentrl.observe.trajectory_index import EpisodeRow
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn
from agentrl.viewer.decoding import TokenDecoder
from agentrl.viewer.episode_list import row_document

REMARK = "Your last answer "
"""Prefix of the agent loops' messages about answers that could not be parsed."""
SMALL_IMAGE = 32 * 1024
"""Maximum bytes of an image inside the document; larger ones have a URL of their own."""
MAX_LOG_CHARS = 200_000
"""Maximum number of characters of a program's log."""
_KINDS = {"system": "system", "user": "observation", "tool": "tool_result", "assistant": "assistant"}
_THOUGHT = re.compile(r"\A\s*<think(?:ing)?>(.*?)(?:</think(?:ing)?>|\Z)\s*", re.DOTALL)
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_ROLE = re.compile(r"\W*(system|developer|user|assistant|model|tool|ipython|observation)\W*\n?", re.IGNORECASE)


Parts = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Places:
    """URLs of images that are too large to be embedded."""

    address: str
    """Address of the episode's images, which ends with a slash."""

    def of(self, image: ImagePart) -> str:
        """Return a ``data:`` URL or an address."""
        if len(image.data) <= SMALL_IMAGE and image.media_type.startswith("image/"):
            return image.data_url
        return f"{self.address}{image.checksum}"


def episode_document(
    row: EpisodeRow, trajectory: Trajectory, decoder: TokenDecoder | None, *, run: str, images: str
) -> dict[str, Any]:
    """Return the document of an episode.

    Args:
        row: Its row in the index.
        trajectory: The episode, with its messages if there are any.
        decoder: Decoder of its tokens.
        run: Path of its run, for the command that repeats it.
        images: Address of its images, which ends with a slash.
    """
    if not row.complete:
        trajectory = _with_turns(trajectory)
    places = _Places(images)
    parts = _parts_by_turn(trajectory, decoder, places)
    numbers = {id(sequence): number for number, sequence in enumerate(trajectory.sequences)}
    sequences = [
        {
            "role": sequence.turns[0].role if sequence.turns else None,
            "parent": None if sequence.parent is None else numbers.get(id(sequence.parent)),
            "shared": sequence.shared,
            "tokens": len(sequence),
            "turns": [_turn_document(turn, sequence, trajectory, parts.get(turn.index, [])) for turn in sequence.turns],
        }
        for sequence in trajectory.sequences
    ]
    branch = trajectory.branches_from
    return {
        "row": row_document(row),
        "sequences": sequences,
        "log": trajectory.log[-MAX_LOG_CHARS:],
        "error": trajectory.error,
        "replay": f"agentrl replay {shlex.quote(run)} {shlex.quote(trajectory.id)}",
        "chat": chat_messages(trajectory, decoder),
        "branches_from": None if branch is None else {"parent": branch.parent, "turn": branch.turn},
        "seed": trajectory.seed,
        "reward_components": trajectory.reward_components,
        "reward_sources": trajectory.reward_sources if trajectory.reward is not None else {},
        "metrics": trajectory.metrics,
    }


def _with_turns(trajectory: Trajectory) -> Trajectory:
    """Return a running episode with its turns, whose table the store writes only at the end."""
    sequences, index = [], 0
    for sequence in trajectory.sequences:
        answered = np.isin(sequence.sources, (Source.SAMPLED, Source.FORCED, Source.MISTAKE))
        edges = np.flatnonzero(np.diff(np.concatenate([[False], answered, [False]]).astype(np.int8))).tolist()
        turns = []
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if start >= sequence.shared:
                turns.append(Turn(index=index, start=start, end=end))
                index += 1
        sequences.append(sequence.with_turns(turns))
    return replace(trajectory, sequences=sequences)


def find_image(trajectory: Trajectory, checksum: str) -> ImagePart | None:
    """Return an image of an episode by its checksum."""
    images = [placed.image for sequence in trajectory.sequences for placed in sequence.images]
    everything = (*images, *trajectory.episode_messages.images())
    return next((image for image in everything if image.checksum == checksum), None)


def _turn_document(turn: Turn, sequence: TokenSequence, trajectory: Trajectory, parts: list[Any]) -> dict[str, Any]:
    timings = turn.timings
    sampled = sequence.versions[turn.start : turn.end]
    sampled = sampled[sampled >= 0]
    is_last = turn.index == len(trajectory.turns) - 1
    return {
        "number": turn.index,
        "role": turn.role,
        "start": turn.start,
        "end": turn.end,
        "parts": parts,
        "timings": {
            "queue": timings.queue,
            "prefill": timings.prefill,
            "decode": timings.decode,
            "tool": timings.tool,
            "environment": timings.env,
            "scoring": timings.scoring,
            "started": timings.started,
        },
        "version": int(sampled.max()) if sampled.size else None,
        "oldest_version": int(sampled.min()) if sampled.size else None,
        "finish_reason": turn.stop_reason,
        "reward": turn.reward,
        "invalid": not turn.valid,
        "error": trajectory.error if is_last else None,
        "adapter": turn.adapter,
        "repaired_calls": turn.repaired_calls,
    }


def _part(kind: str, text: str = "", **others: Any) -> dict[str, Any]:
    return {"kind": kind, "text": text, "name": None, "arguments": None, "data": None, "invalid": False, **others}


def _parts_by_turn(trajectory: Trajectory, decoder: TokenDecoder | None, places: _Places) -> dict[int, Parts]:
    """Return the parts of each turn, by its number."""
    if trajectory.conversations and len(trajectory.answers) == len(trajectory.turns):
        return _from_messages(trajectory, places)
    if trajectory.transcript:
        return _from_transcript(trajectory)
    return _from_tokens(trajectory, decoder, places)


def _from_messages(trajectory: Trajectory, places: _Places) -> dict[int, Parts]:
    turns = trajectory.turns
    numbers = {id(answer): number for number, answer in enumerate(trajectory.answers)}
    found: dict[int, Parts] = {}
    for position, messages in enumerate(trajectory.conversations):
        repeated = max((_common(messages, earlier) for earlier in trajectory.conversations[:position]), default=0)
        current: Turn | None = None
        before: Parts = []
        for place, message in enumerate(messages):
            number = numbers.get(id(message))
            if number is not None:
                current = turns[number]
                if current.index not in found:  # a rewritten conversation repeats earlier answers
                    found[current.index] = [*before, *_answer_parts(message, current)]
                before = []
            elif place >= repeated:
                parts = _message_parts(message, current, places)
                (before if current is None else found[current.index]).extend(parts)
        if before and turns:  # no answer followed
            found.setdefault(turns[-1].index, []).extend(before)
    return found


def _common(messages: Sequence[Message], others: Sequence[Message]) -> int:
    """Return the number of equal messages at the beginnings of two conversations."""
    pairs = zip(messages, others, strict=False)
    shared = min(len(messages), len(others))
    return next((place for place, (one, other) in enumerate(pairs) if one is not other and one != other), shared)


def _answer_parts(answer: Message, turn: Turn) -> Iterator[dict[str, Any]]:
    text, thought = answer.text, answer.reasoning
    if thought is None and (inside := _THOUGHT.match(text)):
        thought, text = inside[1], text[inside.end() :]
    if thought:
        yield _part("thinking", thought.strip())
    if text.strip() or not answer.tool_calls:
        yield _part("assistant", text, invalid=not turn.valid)
    for call in answer.tool_calls:
        yield _part("tool_call", name=call.name, arguments=dict(call.arguments), invalid=not turn.valid)


def _message_parts(message: Message, turn: Turn | None, places: _Places) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message before the first answer, or after that of a turn."""
    kind = _KINDS.get(message.role, "observation")
    if kind == "observation" and turn is None:
        kind = "user"
    elif kind == "observation" and turn is not None and not turn.valid and message.text.startswith(REMARK):
        kind = "remark"
    yield from _content_parts(kind, message.content, message.name, places)


def _content_parts(kind: str, content: Content, name: str | None, places: _Places) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        yield _part(kind, content, name=name)
        return
    for part in content:
        if isinstance(part, ImagePart):
            yield _part("image", part.alternative, name=name, data=places.of(part))
        elif part.text:
            yield _part(kind, part.text, name=name)


def _from_transcript(trajectory: Trajectory) -> dict[int, Parts]:
    """Return the parts of an episode that was stored as text."""
    found: dict[int, Parts] = {}
    for messages in trajectory.transcript:
        current: int | None = None
        before: Parts = []
        for message in messages:
            if message.turn is not None:
                current = message.turn
                found.setdefault(current, []).extend([*before, *_text_answer(message.text, is_valid=True)])
                before = []
                continue
            kind = _KINDS.get(message.role, "observation")
            part = _part("user" if kind == "observation" and current is None else kind, message.text)
            (before if current is None else found[current]).append(part)
        if before:
            found.setdefault(0, []).extend(before)
    return found


def _text_answer(text: str, *, is_valid: bool) -> Iterator[dict[str, Any]]:
    """Split the text of an answer into thinking, text and tool calls in the most common notation."""
    if thought := _THOUGHT.match(text):
        yield _part("thinking", thought[1].strip())
        text = text[thought.end() :]
    end = 0
    for start, inside, after in _tag_spans(text):
        try:
            call = orjson.loads(inside)
            name, arguments = str(call["name"]), call.get("arguments")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if before := text[end:start].strip():
            yield _part("assistant", before, invalid=not is_valid)
        yield _part("tool_call", name=name, arguments=arguments, invalid=not is_valid)
        end = after
    if (rest := text[end:]).strip() or not end:
        yield _part("assistant", rest, invalid=not is_valid)


def _tag_spans(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield the text between the tags of calls, with the positions at which the tags begin and end.

    A regular expression would take quadratic time for a hostile answer that opens many tags.
    """
    after = 0
    while (end := text.find(_CALL_END, after)) >= 0:
        start = text.rfind(_CALL, after, end)
        after = end + len(_CALL_END)
        if start >= 0:
            yield start, text[start + len(_CALL) : end], after


def _from_tokens(trajectory: Trajectory, decoder: TokenDecoder | None, places: _Places) -> dict[int, Parts]:
    """Return the parts of an episode that was stored without messages."""
    found: dict[int, Parts] = {}
    for sequence in trajectory.sequences:
        ids, position, previous = sequence.ids_list(), sequence.shared, None
        for turn in sequence.turns:
            context = _context_parts(sequence, position, turn.start, decoder, places, is_prompt=previous is None)
            found.setdefault(turn.index if previous is None else previous, []).extend(context)
            if turn.end > turn.start:
                answer = _decode(ids[turn.start : turn.end], decoder)
                found.setdefault(turn.index, []).extend(_text_answer(answer, is_valid=turn.valid))
            position, previous = turn.end, turn.index
        if previous is not None:
            found[previous] += _context_parts(sequence, position, len(ids), decoder, places, is_prompt=False)
    return found


def _context_parts(
    sequence: TokenSequence, start: int, end: int, decoder: TokenDecoder | None, places: _Places, *, is_prompt: bool
) -> Parts:
    """Return the messages in tokens that were not sampled; a role after a special token starts a message."""
    special = frozenset() if decoder is None else decoder.special
    images = {placed.start: placed for placed in sequence.images}
    kind, parts = "user" if is_prompt else "observation", Parts()
    ids, position, piece, follows_special = sequence.ids_list(), start, list[int](), False
    while position <= end:
        placed = images.get(position) if position < end else None
        if piece and (position == end or placed is not None or ids[position] in special):
            text = _decode(piece, decoder)
            if follows_special and (role := _ROLE.match(text)):
                kind, text = _kind_of(role[1].lower(), is_prompt=is_prompt), text[role.end() :]
            if text.strip():
                parts.append(_part(kind, text.strip("\n")))
            piece = []
        if placed is not None:
            parts.append(_part("image", placed.image.alternative, data=places.of(placed.image)))
            position, follows_special = placed.end, False
            continue
        if position < end:
            follows_special = ids[position] in special or (follows_special and bool(piece))
            piece += [] if ids[position] in special else [ids[position]]
        position += 1
    return parts


def _kind_of(role: str, *, is_prompt: bool) -> str:
    kinds = {"system": "system", "developer": "system", "tool": "tool_result", "ipython": "tool_result"}
    if role in ("assistant", "model"):
        return "assistant"
    return kinds.get(role, "user" if is_prompt else "observation")


def _decode(ids: Sequence[int], decoder: TokenDecoder | None) -> str:
    """Return the text of ids without special tokens, or the ids themselves if there is no decoder."""
    if decoder is None:
        return " ".join(map(str, ids))
    return decoder.text([number for number in ids if number not in decoder.special])


def chat_messages(trajectory: Trajectory, decoder: TokenDecoder | None) -> list[dict[str, Any]]:
    """Return the latest conversation as chat messages."""
    if trajectory.conversations:
        return [_without_images(message) for message in trajectory.conversations[-1]]
    if trajectory.transcript:
        return [{"role": message.role, "content": message.text} for message in trajectory.transcript[-1]]
    parts = _from_tokens(trajectory, decoder, _Places(""))
    roles = {"system": "system", "assistant": "assistant", "tool_result": "tool"}
    return [
        {"role": roles.get(part["kind"], "user"), "content": part["text"]}
        for turn in sorted(parts)
        for part in parts[turn]
        if part["kind"] in ("system", "user", "observation", "assistant", "tool_result", "remark")
    ]


def _without_images(message: Message) -> dict[str, Any]:
    """Return a message with the descriptions of its images."""
    written = message.to_template()
    if not isinstance(message.content, str):
        written["content"] = "\n".join(
            f"[image: {part.alternative}]" if isinstance(part, ImagePart) else part.text for part in message.content
        )
    return written
