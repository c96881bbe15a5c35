"""Sampled tokens of an answer: the text so far, the position of a stop string, and the text of each token."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from agentrl.agent_loop import AnswerSoFar, TokenLogprob
from agentrl.render.answers import without_beginning_of
from agentrl.render.chat_template import ToolSchema
from agentrl.render.renderer import Renderer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Last character of a text that ends with an incomplete character."""
RECENT = 8
"""Number of tokens that are decoded together to find the text of the last one, because some tokenizers decode the first
token of a text differently."""


class AnswerProgress:
    """Reader of the tokens of one answer during sampling.

    Args:
        renderer: Renderer of the model.
        tools: Offered tools; with tools, text is held back from the first possible beginning of a call.
        stop: Texts that end the answer; a possible beginning of one is held back, and nothing is read after one.
        prompt_tokens: Number of tokens of the prompt.
        tell: Called with the first tokens, and when the answer has grown.
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
        self._reported: tuple[str, str] | None = None

    def take(self, ids: Sequence[int]) -> None:
        """Read more tokens."""
        if any(end in self._text for end in self._stop):
            return
        self._ids += ids
        self._decode()
        reasoning, text = self._renderer.read_beginning(self._text, self._tools)
        text = without_beginning_of(self._stop, text)
        if (reasoning, text) != self._reported:
            self._reported = (reasoning, text)
            self._tell(AnswerSoFar(prompt_tokens=self._prompt_tokens, reasoning=reasoning, text=text))

    def _decode(self) -> None:
        """Decode new tokens together with those before them: some tokenizers drop the space at the start of a text."""
        before = self._renderer.plain_text(self._ids[self._read_from : self._read_to])
        text = self._renderer.plain_text(self._ids[self._read_from :])
        if len(text) > len(before) and not text.endswith(REPLACEMENT):
            self._text += text[len(before) :]
            self._read_from, self._read_to = self._read_to, len(self._ids)


def find_stop(ids: Sequence[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return the number of tokens up to the end of the first stop string; ``None`` if the answer contains none."""

    def is_complete(tokens: int) -> bool:
        text = decode(ids[:tokens])
        return any(end in text for end in stop)

    if not is_complete(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids)), True, key=is_complete)


def content_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], content: str, decode: Callable[[Sequence[int]], str]
) -> tuple[TokenLogprob, ...]:
    """Return the sampled tokens of an answer's content, without thinking, calls and stop tokens.

    Args:
        ids: Token ids of the whole answer, ``[num_tokens]``.
        logprobs: Log-probabilities of these tokens, ``[num_tokens]``.
        content: Text of the content; its last occurrence in the answer counts.
        decode: Decodes token ids to text.
    """
    pieces = []
    for end in range(1, len(ids) + 1):
        recent = ids[max(0, end - RECENT) : end]
        before, after = (decode(part).rstrip(REPLACEMENT) for part in (recent[:-1], recent))
        pieces.append(after[len(before) :])
    if content.endswith(REPLACEMENT):  # the answer was cut within a character
        cut = max((end for end, one in enumerate(ids) if decode([one]).endswith(REPLACEMENT)), default=len(ids) - 1)
        pieces[cut] += content[len(content.rstrip(REPLACEMENT)) :]
    start = "".join(pieces).rfind(content) if content else -1
    if start < 0:
        return ()
    ends = list(itertools.accumulate(map(len, pieces)))
    last = bisect.bisect_left(ends, start + len(content))
    rows = zip(ends[: last + 1], pieces, logprobs, strict=False)
    return tuple(TokenLogprob(text=piece, logprob=logprob) for end, piece, logprob in rows if end + (not piece) > start)
