"""What can be said of an answer while it is sampled: the text and the thinking that no later token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.agent_loop import AnswerSoFar
from agentrl.render.answers import without_beginning_of
from agentrl.render.renderer import Renderer
from agentrl.render.tokens import ToolSchema

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Ends a text whose last character is not whole yet."""


class AnswerProgress:
    """Reads the tokens of one answer as they come.

    Args:
        renderer: Of the model.
        tools: Those that were offered: with any, text is held back from where a call may begin.
        stop: Texts that end the answer: what may be the beginning of one is held back, and nothing is read after one.
        prompt_tokens: Length of the prompt.
        tell: Called when there is more to say.
    """

    def __init__(
        self,
        renderer: Renderer,
        tools: Sequence[ToolSchema],
        stop: Sequence[str],
        prompt_tokens: int,
        tell: Callable[[AnswerSoFar], None],
    ) -> None:
        self._renderer, self._tools, self._stop, self._tell = renderer, tools, stop, tell
        self._prompt_tokens = prompt_tokens
        self._ids: list[int] = []
        self._text = ""
        self._read_from = 0
        self._read_to = 0
        self._said: tuple[str, str] = ("", "")

    def take(self, ids: Sequence[int]) -> None:
        """Read more tokens."""
        if any(end in self._text for end in self._stop):
            return
        self._ids += ids
        self._decode()
        reasoning, text = self._renderer.read_beginning(self._text, self._tools)
        said = reasoning, without_beginning_of(self._stop, text)
        if said != self._said:
            self._said = said
            self._tell(AnswerSoFar(prompt_tokens=self._prompt_tokens, reasoning=said[0], text=said[1]))

    def _decode(self) -> None:
        """Decode what is new, after the tokens before it: some tokenizers begin a text with another space."""
        before = self._renderer.plain_text(self._ids[self._read_from : self._read_to])
        text = self._renderer.plain_text(self._ids[self._read_from :])
        if len(text) > len(before) and not text.endswith(REPLACEMENT):
            self._text += text[len(before) :]
            self._read_from, self._read_to = self._read_to, len(self._ids)
