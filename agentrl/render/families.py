"""Data of model families: their ends of turns, thinking and tool calls.

A family is recognized by its chat template. The text after an answer always comes from the template itself (see
`agentrl.render.renderer`); these data define which tokens count as an end of turn when the *model* writes them, and the
notations of thinking and tool calls. `tests/render` has golden renderings of each family; the table in
``docs/concepts/model-families.md`` describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_FIXED_DAY = "{%- macro strftime_now(form) -%}2024-07-26{%- endmacro -%}"
_DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_END_OF_SENTENCE = "<｜end▁of▁sentence｜>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """Marks around the thinking at the start of an answer."""

    open: str
    close: str
    form: str
    """Text of the thinking up to the answer itself, with ``{}`` for the thought."""
    key: str = "reasoning_content"
    """Field of a message in which the family's chat templates look for its thinking."""
    always: bool = False
    """True if the templates cannot switch thinking off."""

    def write(self, thought: str, header: str) -> str:
        """Return the text of a thought that the model writes after the template's `header`."""
        text = self.form.replace("{}", thought)
        known = next((n for n in range(len(text), 0, -1) if header.endswith(text[:n])), 0)
        return text[known:]

    def in_form_of(self, shown: str, *, header: str, thought: str, text: str) -> ThinkingMarks:
        """Return the marks in the form in which a template shows a thought and a text after `header`.

        These marks, if the template omits the thought.
        """
        start = header[: header.rindex(self.open)] if header.rstrip().endswith(self.open) else header
        before, _, after = shown.partition(thought)
        between, is_shown, _ = after.partition(text)
        if not is_shown or not before.startswith(start) or self.open not in before or self.close not in between:
            return self
        return replace(self, form=f"{before[len(start) :]}{{}}{between}")


THINK_TAGS = ThinkingMarks(open="<think>", close="</think>", form="<think>\n{}\n</think>\n\n")
"""Marks of Qwen3 and of unknown templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties that the models of one family share."""

    name: str
    template_marks: tuple[str, ...]
    """Texts that all occur in the family's chat templates; the first matching family is used."""
    end_of_turn: tuple[str, ...]
    """Tokens that end an answer; the template writes the first one."""
    after_end: str = ""
    """Text of the template between the end of a turn and the next message."""
    ends_open_messages: bool = False
    """True if the template writes no end of turn: the token that ends an answer is the head of the next message."""
    answer_end: str | None = None
    """Token that ends the model's answers; ``None`` if it is the template's."""
    call_end: str | None = None
    """Token that ends the model's answers with tool calls; ``None`` if it is the same as for other answers."""
    call_mark: str = ""
    """Text that identifies an answer with tool calls."""
    continues_after: tuple[str, ...] = ()
    """Tokens of `end_of_turn` at which sampling does not stop, because they also end parts of an answer."""
    stop_tokens: tuple[str, ...] = ()
    """Further tokens at which sampling stops; they do not end the turn."""
    markup: tuple[str, ...] = ()
    """Special tokens of thinking and tool calls, which are kept in an answer's text."""
    thinking: ThinkingMarks = THINK_TAGS
    tool_parser: str | None = None
    """Registry name of the parser for the family's tool calls."""
    call_id: str = "call_{number}"
    """Format of call ids in messages that the model did not write, with ``name``, ``number`` (from 1 on)
    and ``index`` (from 0 on)."""
    results_follow_calls: bool = False
    """True if the template shows a tool's result correctly only after its call."""
    text_after_results: bool = False
    """True if the template shows the text of an answer with calls after their results."""
    marks_answers: bool = False
    """True if the model writes a header before a plain answer."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template that make a prompt independent of the current date."""
    template_opening: str = ""
    """Text before the template with the same purpose, for templates that call a function for the date."""
    thinking_option: str = "enable_thinking"
    """Variable of the template that switches thinking on and off."""


_BARE_THINK_TAGS = replace(THINK_TAGS, form="<think>{}</think>")

FAMILIES = (
    Family(
        name="gpt_oss",
        template_marks=("<|start|>", "<|channel|>", "<|message|>"),
        end_of_turn=("<|end|>", "<|return|>", "<|call|>"),
        answer_end="<|return|>",
        call_end="<|call|>",
        call_mark="to=functions.",
        continues_after=("<|end|>",),
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
        name="deepseek_v4",
        template_marks=("｜DSML｜", "tool_calls>"),
        end_of_turn=(_END_OF_SENTENCE,),
        thinking=_BARE_THINK_TAGS,
        tool_parser="deepseek_v4",
        results_follow_calls=True,
        thinking_option="thinking",
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
        name="seed_oss",
        template_marks=("<seed:bos>", "<seed:tool_call>"),
        end_of_turn=("<seed:eos>",),
        markup=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        thinking=ThinkingMarks(
            open="<seed:think>", close="</seed:think>", form="<seed:think>{}</seed:think>\n", always=True
        ),
        tool_parser="seed_oss",
    ),
    Family(
        name="apertus",
        template_marks=("<|tools_prefix|>", "<|assistant_end|>"),
        end_of_turn=("<|assistant_end|>", "<|tools_suffix|>"),
        call_end="<|tools_suffix|>",
        call_mark="<|tools_prefix|>",
        stop_tokens=("</s>",),
        markup=("<|tools_prefix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        thinking=ThinkingMarks(
            open="<|inner_prefix|>", close="<|inner_suffix|>", form="<|inner_prefix|>{}<|inner_suffix|>"
        ),
        tool_parser="apertus",
        results_follow_calls=True,
        template_opening=_FIXED_DAY,
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
        name="lfm2",
        template_marks=("<|im_start|>", "List of tools: "),
        end_of_turn=("<|im_end|>",),
        after_end="\n",
        stop_tokens=("<|endoftext|>",),
        markup=("<|tool_call_start|>", "<|tool_call_end|>"),
        thinking=replace(_BARE_THINK_TAGS, key="thinking"),
        tool_parser="lfm2",
        template_opening=_FIXED_DAY,
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
        name="gemma4",
        template_marks=("<|turn>", "<turn|>", "<|tool_call>"),
        end_of_turn=("<turn|>", "<|tool_response>"),
        ends_open_messages=True,
        call_end="<|tool_response>",
        call_mark="<|tool_call>",
        stop_tokens=("<eos>",),
        markup=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        thinking=ThinkingMarks(open="<|channel>thought", close="<channel|>", form="<|channel>thought\n{}\n<channel|>"),
        tool_parser="gemma4",
        results_follow_calls=True,
        text_after_results=True,
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
    """Return the first family whose marks all occur in a chat template, or `UNKNOWN`."""
    return next((f for f in FAMILIES if all(mark in chat_template for mark in f.template_marks)), UNKNOWN)
