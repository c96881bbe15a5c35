"""Stored episodes in formats that other programs read: conversations, pairs of better and worse ones, data sets.

format         a row
-------------  -----------------------------------------------------------------------------------------------------
chat           a conversation in the format of chat services, with the episode's reward, success, task and step
sft-jsonl      ``{"messages": […], "tools": […]}`` as `agentrl sft --data` reads it; unusable answers have weight 0
preferences    ``{"prompt": […], "chosen": […], "rejected": […]}`` as `agentrl dpo --from FILE` reads it
hf-dataset     the rows of ``chat`` as Parquet, in a folder that ``datasets.load_dataset`` reads
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.message import Content, ImagePart, Message, TextPart
from agentrl.message.data_file import ToolSchema
from agentrl.observe.trajectory_store import StoredTrajectory
from agentrl.training.preferences import Pair, make_pairs
from agentrl.trajectory import Trajectory


class ExportFormat(enum.StrEnum):
    """Formats of exported episodes."""

    CHAT = "chat"
    PREFERENCES = "preferences"
    SFT = "sft-jsonl"
    DATASET = "hf-dataset"


@dataclass(slots=True, kw_only=True)
class ExportedRows:
    """Rows of an export, and the reasons for leaving out conversations."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def chat_rows(episodes: Iterable[StoredTrajectory]) -> ExportedRows:
    """Return a row for each conversation of the episodes, whose messages must have been restored."""
    found = ExportedRows()
    for stored in episodes:
        for messages in _conversations(stored.trajectory, found):
            found.rows.append({"messages": [message_row(message) for message in messages], **_facts(stored)})
    return found


def _facts(stored: StoredTrajectory) -> dict[str, Any]:
    trajectory = stored.trajectory
    return {
        "id": trajectory.id,
        "environment": trajectory.environment,
        "task_id": trajectory.task_id,
        "task_type": trajectory.task_type,
        "step": stored.step,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "outcome": None if trajectory.outcome is None else trajectory.outcome.value,
    }


def sft_rows(episodes: Iterable[StoredTrajectory], tools: Mapping[str, ToolSchema]) -> ExportedRows:
    """Return a row for each conversation that can be trained on.

    Args:
        episodes: Episodes with their messages.
        tools: Schemas of the run's tools by name; conversations that call others are left out.
    """
    found = ExportedRows()
    for stored in episodes:
        invalid = _invalid_answers(stored.trajectory)
        for messages in _conversations(stored.trajectory, found):
            if (row := _sft_row(messages, tools, invalid, found)) is not None:
                found.rows.append(row)
    return found


def _sft_row(
    messages: Sequence[Message], tools: Mapping[str, ToolSchema], invalid: set[int], found: ExportedRows
) -> dict[str, Any] | None:
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    kept = messages[: last + 1]
    if (reason := _fault(kept, tools)) is None and not _has_learned_answer(kept, invalid):
        reason = "without a usable answer"
    if reason is not None:
        found.left_out[reason] += 1
        return None
    rows = [message_row(message) | ({"weight": 0} if id(message) in invalid else {}) for message in kept]
    return {"messages": rows, **({"tools": list(tools.values())} if tools else {})}


def _has_learned_answer(messages: Sequence[Message], invalid: set[int]) -> bool:
    return any(message.role == "assistant" and id(message) not in invalid for message in messages)


def _fault(messages: Sequence[Message], tools: Mapping[str, ToolSchema]) -> str | None:
    """Return the reason why a conversation cannot be trained on as text; ``None`` if it can."""
    called = {call.name for message in messages for call in message.tool_calls}
    if any(isinstance(part, ImagePart) for message in messages for part in _parts(message.content)):
        return "with images"
    if unknown := sorted(called - tools.keys()):
        return f"with calls of {', '.join(unknown)}, whose schema the run does not store"
    answers = [message for message in messages if message.role == "assistant"]
    if not answers or any(not (one.content or one.tool_calls or one.reasoning) for one in answers):
        return "with an empty answer"
    return None


def _parts(content: Content) -> Sequence[object]:
    return () if isinstance(content, str) else content


def _invalid_answers(trajectory: Trajectory) -> set[int]:
    """Return the identities of the answers that could not be used as actions, if turns and answers match.

    The answers of roles that are not trained, such as a user's, are not stored.
    """
    turns, answers = trajectory.turns, trajectory.answers
    if len(turns) != len(answers):
        sampled = {t.index for s in trajectory.sequences for t in s.turns if s.loss_mask[t.start : t.end].any()}
        turns = [turn for turn in turns if turn.index in sampled]
    if len(turns) != len(answers):
        return set()
    return {id(answer) for turn, answer in zip(turns, answers, strict=True) if not turn.valid}


def preference_rows(
    episodes: Iterable[StoredTrajectory], tools: Mapping[str, ToolSchema], *, per_task: int
) -> ExportedRows:
    """Return a row for each pair of a better and a worse episode of a task.

    Raises:
        UsageError: no pair was found.
    """
    found = ExportedRows()
    trajectories = [stored.trajectory for stored in episodes]
    for pair in make_pairs(trajectories, by="rewards", per_task=per_task):
        if (row := _preference_row(pair, tools, found)) is not None:
            found.rows.append(row)
    return found


def _preference_row(pair: Pair, tools: Mapping[str, ToolSchema], found: ExportedRows) -> dict[str, Any] | None:
    both = [list(_conversations(trajectory, found)) for trajectory in (pair.better, pair.worse)]
    if any(len(conversations) != 1 for conversations in both):
        found.left_out["with several conversations"] += 1
        return None
    (chosen,), (rejected,) = both
    for messages in (chosen, rejected):
        if (reason := _fault(messages, tools)) is not None:
            found.left_out[reason] += 1
            return None
    start = next(i for i, message in enumerate(chosen) if message.role == "assistant")
    if chosen[:start] != rejected[:start]:
        found.left_out["with different prompts"] += 1
        return None
    return {
        "prompt": [message_row(message) for message in chosen[:start]],
        "chosen": [message_row(message) for message in chosen[start:]],
        "rejected": [message_row(message) for message in rejected[start:]],
        **({"tools": list(tools.values())} if tools else {}),
        "chosen_reward": pair.better.reward,
        "rejected_reward": pair.worse.reward,
        "task_id": pair.better.task_id,
    }


def _conversations(trajectory: Trajectory, found: ExportedRows) -> Iterator[Sequence[Message]]:
    if not trajectory.conversations:
        found.left_out["stored without messages"] += 1
    yield from trajectory.conversations


def message_row(message: Message) -> dict[str, Any]:
    """Return a message in the format of chat services."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), default=str)},
        }
        for call in message.tool_calls
    ]
    optional = {"reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id, "name": message.name}
    return {
        "role": message.role,
        "content": _content_row(message.content),
        **({"tool_calls": calls} if calls else {}),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _content_row(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": part.data_url}}
        for part in content
    ]
