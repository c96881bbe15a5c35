"""Model families: how each one ends a turn, as data.

A family is recognised by its chat template. What follows an answer is always taken from the template itself (see
`agentrl.render.renderer`); the data here say which tokens count as an end of turn when the *model* writes them, and
how it thinks and calls tools. `tests/render` holds golden renderings for each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is common to the models of one family."""

    name: str
    template_marks: tuple[str, ...]
    """Texts that all occur in the family's chat templates; the first family that fits is taken."""
    end_of_turn: tuple[str, ...]
    """Tokens that close an answer; the first is the one that the template writes."""
    after_end: str
    """What the template writes between the end of a turn and the next message."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens besides `end_of_turn` at which sampling stops; they do not close the turn."""
    tool_parser: str | None = None
    """Registry name of the family's way to write tool calls."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables passed to the template so that a prompt does not depend on the day it is rendered."""


FAMILIES = (
    Family(
        name="qwen3_coder",
        template_marks=("<|im_start|>", "<function="),
        end_of_turn=("<|im_end|>",),
        after_end="\n",
        stop_tokens=("<|endoftext|>",),
        tool_parser="qwen3_coder",
    ),
    Family(
        name="qwen3",
        template_marks=("<|im_start|>", "<tool_call>", "</think>"),
        end_of_turn=("<|im_end|>",),
        after_end="\n",
        stop_tokens=("<|endoftext|>",),
        tool_parser="hermes",
    ),
    Family(
        name="qwen2.5",
        template_marks=("<|im_start|>", "<tool_call>"),
        end_of_turn=("<|im_end|>",),
        after_end="\n",
        stop_tokens=("<|endoftext|>",),
        tool_parser="hermes",
    ),
    Family(
        name="llama3",
        template_marks=("<|start_header_id|>", "<|eot_id|>"),
        end_of_turn=("<|eot_id|>", "<|eom_id|>"),
        after_end="",
        stop_tokens=("<|end_of_text|>",),
        tool_parser="llama3_json",
        template_options={"date_string": "26 Jul 2024"},
    ),
    Family(
        name="gemma",
        template_marks=("<start_of_turn>", "<end_of_turn>"),
        end_of_turn=("<end_of_turn>",),
        after_end="\n",
        stop_tokens=("<eos>",),
    ),
    Family(
        name="chatml",
        template_marks=("<|im_start|>", "<|im_end|>"),
        end_of_turn=("<|im_end|>",),
        after_end="\n",
        stop_tokens=("<|endoftext|>",),
    ),
)


def detect_family(chat_template: str) -> Family | None:
    """The family whose marks all occur in a chat template; ``None`` when it is none of them."""
    return next((f for f in FAMILIES if all(mark in chat_template for mark in f.template_marks)), None)
