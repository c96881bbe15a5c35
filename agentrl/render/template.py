"""A tokenizer's chat template as a function from messages to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.errors import TemplateError
from agentrl.message import ImagePart, Message, TextPart, user

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ToolSchema = Mapping[str, Any]
"""A tool as chat templates read it: ``{"type": "function", "function": {...}}``."""


class ChatTemplate:
    """Renders messages as text.

    Args:
        tokenizer: Its chat template is used.
        options: Variables that the template reads, such as ``enable_thinking``.
        images: Whether the model reads images: the template is then given the parts of a message's content.
        reasoning_key: Under which name the template looks for a message's thinking.
        opening: Put before the template.

    Raises:
        TemplateError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        options: Mapping[str, Any],
        *,
        images: bool = False,
        reasoning_key: str = "reasoning_content",
        opening: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._reasoning_key = reasoning_key
        self._options = dict(options)
        if not isinstance(tokenizer.chat_template, str):
            raise TemplateError(
                "the tokenizer has no chat template",
                got=type(tokenizer.chat_template).__name__,
                expected="one template in tokenizer.chat_template",
                hint="use the model's instruction-tuned variant, or set tokenizer.chat_template",
            )
        self.source: str = tokenizer.chat_template
        self._whole = opening + self.source
        self._has_system_role = self._accepts_system()

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, with the header of the next answer if `generation_prompt`.

        Raises:
            TemplateError: the template refuses these messages.
        """
        if not self._has_system_role:
            messages = fold_system(messages)
        return self._apply(messages, tools, generation_prompt)

    def _apply(self, messages: Sequence[Message], tools: Sequence[ToolSchema], generation_prompt: bool) -> str:
        rows = [_row(message, images=self._images) for message in messages]
        for row in rows:
            if "reasoning_content" in row:
                row[self._reasoning_key] = row.pop("reasoning_content")
        try:
            text: str = self._tokenizer.apply_chat_template(
                rows,
                chat_template=self._whole,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options,
            )
        except Exception as error:
            raise TemplateError(
                f"the chat template refuses messages with roles {', '.join(m.role for m in messages)}",
                got=f"{type(error).__name__}: {error}",
                hint="use an agent loop whose messages the model's template knows (react_text needs only user turns)",
            ) from error
        return text

    def _accepts_system(self) -> bool:
        probe = Message(role="system", content="@@SYSTEM@@")
        try:
            return "@@SYSTEM@@" in self._apply([probe, user("x")], (), generation_prompt=True)
        except TemplateError:
            return False


def fold_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Put a leading system message at the head of the first user message, for templates without a system role."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return messages
    opening, content = f"{messages[0].text}\n\n", messages[1].content
    joined = opening + content if isinstance(content, str) else (TextPart(text=opening), *content)
    return [replace(messages[1], content=joined), *messages[2:]]


def _row(message: Message, *, images: bool) -> dict[str, Any]:
    if isinstance(message.content, str):
        return message.to_template()
    row = replace(message, content=message.text).to_template()
    if not any(isinstance(part, ImagePart) for part in message.content):
        return row
    if not images:
        raise TemplateError(
            "a message holds an image, and the model reads text only",
            expected="text",
            hint="give the environment text observations, or train a vision-language model (docs/concepts/vision.md)",
        )
    parts = [
        {"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"} for p in message.content
    ]
    return {**row, "content": parts}
