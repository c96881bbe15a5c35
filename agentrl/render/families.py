"""Model families: how each one ends a turn, thinks and calls tools, as data.

A family is recognised by its chat template. What follows an answer is always taken from the template itself (see
`agentrl.render.renderer`); the data here say which tokens count as an end of turn when the *model* writes them, and
how it thinks and calls tools. `tests/render` holds golden renderings for each family; the table in
``docs/concepts/model-families.md`` says what each does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """Marks around the thinking at the front of an answer."""

    open: str
    close: str
    form: str
    """What the model writes to think, with ``{}`` for the thought, up to the answer itself."""
    key: str = "reasoning_content"
    """Under which name the family's chat templates look for a message's thinking."""
    always: bool = False
    """The templates have no switch for it."""

    def written(self, thought: str, header: str) -> str:
        """Return the text with which the model thinks `thought`, once the template has written `header`."""
        text = self.form.format(thought)
        known = next((n for n in range(len(text), 0, -1) if header.endswith(text[:n])), 0)
        return text[known:]


THINK_TAGS = ThinkingMarks(open="<think>", close="</think>", form="<think>\n{}\n</think>\n\n")
"""Of Qwen3, and of every template that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties that the models of one family share."""

    name: str
    template_marks: tuple[str, ...]
    """Texts that all occur in the family's chat templates; the first family that fits is taken."""
    end_of_turn: tuple[str, ...]
    """Tokens that close an answer; the first is the one that the template writes."""
    after_end: str = ""
    """What the template writes between the end of a turn and the next message."""
    ends_open_messages: bool = False
    """The template writes no end of turn: the token at which an answer stops is the head of the next message."""
    answer_end: str | None = None
    """The token with which the model ends an answer, where the template writes another one."""
    call_end: str | None = None
    """The token with which the model ends an answer that calls tools, where that is another one."""
    call_mark: str = ""
    """What tells such an answer from others."""
    goes_on_after: tuple[str, ...] = ()
    """Tokens of `end_of_turn` at which sampling does not stop: they end parts of an answer, too."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens besides `end_of_turn` at which sampling stops; they do not close the turn."""
    markup: tuple[str, ...] = ()
    """Special tokens with which the family thinks and calls tools: they stay in an answer's text."""
    thinking: ThinkingMarks = THINK_TAGS
    tool_parser: str | None = None
    """Registry name of the family's way to write tool calls."""
    call_id: str = "call_{number}"
    """The id of a call in a message that the model did not write; knows ``name``, ``number`` (from 1 on)
    and ``index`` (from 0 on)."""
    results_follow_calls: bool = False
    """The template shows a tool's result rightly only after the call that it answers."""
    marks_answers: bool = False
    """A plain answer is more than its text: the model writes a header before it."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables passed to the template so that a prompt does not depend on the day it is rendered."""
    template_opening: str = ""
    """Put before the template to the same end, where it asks for the day itself."""
    thinking_option: str = "enable_thinking"
    """The template's variable that switches thinking on and off."""


_FIXED_DAY = "{%- macro strftime_now(form) -%}2024-07-26{%- endmacro -%}"
_DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_BARE_THINK_TAGS = replace(THINK_TAGS, form="<think>{}</think>")
_END_OF_SENTENCE = "<｜end▁of▁sentence｜>"

FAMILIES = (
    Family(
        name="gpt_oss",
        template_marks=("<|start|>", "<|channel|>", "<|message|>"),
        end_of_turn=("<|end|>", "<|return|>", "<|call|>"),
        answer_end="<|return|>",
        call_end="<|call|>",
        call_mark="to=functions.",
        goes_on_after=("<|end|>",),
        stop_tokens=("<|endoftext|>",),
        markup=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        thinking=ThinkingMarks(
            open="<|channel|>analysis<|message|>",
            close="<|end|>",
            form="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
            key="thinking",
            always=True,
        ),
        tool_parser="harmony",
        results_follow_calls=True,
        marks_answers=True,
        template_opening=_FIXED_DAY,
    ),
    Family(
        name="deepseek_v3.2",
        template_marks=("｜DSML｜",),
        end_of_turn=(_END_OF_SENTENCE,),
        thinking=_BARE_THINK_TAGS,
        tool_parser="deepseek_v32",
        results_follow_calls=True,
        thinking_option="thinking",
    ),
    Family(
        name="deepseek_v3",
        template_marks=("<｜tool▁calls▁begin｜>", "```json"),
        end_of_turn=(_END_OF_SENTENCE,),
        markup=_DEEPSEEK_CALLS,
        tool_parser="deepseek_v3",
    ),
    Family(
        name="deepseek_v3.1",
        template_marks=("<｜tool▁calls▁begin｜>",),
        end_of_turn=(_END_OF_SENTENCE,),
        markup=_DEEPSEEK_CALLS,
        thinking=_BARE_THINK_TAGS,
        tool_parser="deepseek_v31",
        thinking_option="thinking",
    ),
    Family(
        name="kimi_k2",
        template_marks=("<|im_middle|>",),
        end_of_turn=("<|im_end|>",),
        stop_tokens=("[EOS]",),
        markup=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        thinking=replace(_BARE_THINK_TAGS, always=True),
        tool_parser="kimi_k2",
        call_id="functions.{name}:{index}",
        results_follow_calls=True,
    ),
    Family(
        name="glm",
        template_marks=("[gMASK]", "<|observation|>"),
        end_of_turn=("<|user|>", "<|observation|>"),
        ends_open_messages=True,
        call_end="<|observation|>",
        call_mark="<tool_call>",
        stop_tokens=("<|endoftext|>",),
        thinking=replace(THINK_TAGS, form="\n<think>{}</think>\n"),
        tool_parser="glm",
    ),
    Family(
        name="minimax_m2",
        template_marks=("]~b]", "<minimax:tool_call>"),
        end_of_turn=("[e~[",),
        after_end="\n",
        tool_parser="minimax_m2",
    ),
    Family(
        name="mistral",
        template_marks=("[INST]", "[/INST]"),
        end_of_turn=("</s>",),
        markup=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        thinking=ThinkingMarks(open="[THINK]", close="[/THINK]", form="[THINK]{}[/THINK]"),
        tool_parser="mistral",
        call_id="call{number:05d}",
    ),
    Family(
        name="llama4_json",
        template_marks=("<|header_start|>", "<|eot|>", '"parameters": '),
        end_of_turn=("<|eot|>", "<|eom|>"),
        stop_tokens=("<|end_of_text|>",),
        tool_parser="llama3_json",
        template_options={"date_string": "26 Jul 2024"},
    ),
    Family(
        name="llama4",
        template_marks=("<|header_start|>", "<|eot|>"),
        end_of_turn=("<|eot|>", "<|eom|>"),
        stop_tokens=("<|end_of_text|>",),
        markup=("<|python_start|>", "<|python_end|>"),
        tool_parser="pythonic",
        template_options={"date_string": "26 Jul 2024"},
    ),
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


UNKNOWN = Family(name="unknown", template_marks=(), end_of_turn=())


def detect_family(chat_template: str) -> Family:
    """Return the family whose marks all occur in a chat template, or `UNKNOWN`."""
    return next((f for f in FAMILIES if all(mark in chat_template for mark in f.template_marks)), UNKNOWN)
