"""Where a turn of the policy ends, and what the template writes there."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import TemplateError
from agentrl.render.encoding import TextEncoder
from agentrl.render.families import Family


@dataclass(frozen=True, slots=True)
class TurnBoundary:
    """The rule by which answers and what follows them are joined."""

    end_id: int
    """The token that the template writes at the end of an answer."""
    end_ids: frozenset[int]
    """Tokens that close an answer when the model writes them; the template's own is then left out."""
    stop_ids: frozenset[int]
    """Tokens at which sampling stops."""
    opens_message: bool = False
    """The end of an answer is the head of the next message: it is left out only where it is that message's own."""

    def is_written(self, last_id: int | None, following: int) -> bool:
        """Whether an answer that ends with `last_id` has its end already, which `following` would write again."""
        return last_id == following if self.opens_message else last_id in self.end_ids


def find_boundary(after_answer: str, encoder: TextEncoder, family: Family | None) -> TurnBoundary:
    """The boundary rule: the family's where the template follows it, else derived from the template.

    Args:
        after_answer: What the template writes after an answer, up to and with the next answer's header.
        encoder: The model's tokenizer.
        family: The family found in the template, if any.

    Raises:
        TemplateError: The text after an answer does not begin with a token of its own.
    """
    first = encoder.encode(after_answer)[:1]
    if family is not None and family.ends_open_messages and (heads := _ids(encoder, family.end_of_turn)):
        (end,) = _ids(encoder, family.end_of_turn[:1])
        return TurnBoundary(end, heads, heads | _ids(encoder, family.stop_tokens), opens_message=True)
    if family is not None and after_answer.startswith(family.end_of_turn[0] + family.after_end):
        ends = _ids(encoder, family.end_of_turn)
        if first and first[0] in ends:
            stops = ends - _ids(encoder, family.goes_on_after)
            return TurnBoundary(first[0], ends, stops | _ids(encoder, family.stop_tokens))
    if not first or not encoder.is_added(first[0]):
        raise TemplateError(
            "nothing in the chat template tells where an answer ends",
            got=repr(after_answer[:60]),
            expected="a special token right after the assistant's content, such as <|im_end|>",
            hint="add the token that ends a turn to the tokenizer as a special token, and to its chat template",
        )
    return TurnBoundary(first[0], frozenset(first), frozenset(first))


def _ids(encoder: TextEncoder, tokens: tuple[str, ...]) -> frozenset[int]:
    return frozenset(i for token in tokens if (i := encoder.added_id(token)) is not None)
