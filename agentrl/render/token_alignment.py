"""Alignment of two tokenizations of one text: the smallest groups of tokens that end at the same bytes.

A group consists of tokens of both sides that cover the same part of the text, and cannot be split. The tokens
``don | 't!`` and ``do | n't | !`` end together only at the end of the text, so they are one group:

>>> align([3, 6], [(2, 2), (5, 5), (6, 6)])
([0, 0], [0, 0, 0])

The tokens ``do | n't | !`` and ``don't | !`` are two groups:

>>> align([2, 5, 6], [(5, 5), (6, 6)])
([0, 0, 1], [0, 1])
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

NO_GROUP = -1
"""Group of a token that has none."""

End: TypeAlias = int | None
"""Number of bytes up to the end of a token; ``None`` if it is not known, for some tokens that end within a character.
"""
Ends: TypeAlias = tuple[int, int] | None
"""First and last possible `End` of a token: they differ if a tokenizer drops the white space after it."""


def align(own: Sequence[End], other: Sequence[Ends]) -> tuple[list[int], list[int]]:
    """Number the groups of two tokenizations of a text from 0 on, and return the group of each token.

    A token without characters belongs to the group after it, or to the last group at the end of the text. Tokens after
    the last common end have no group: those of a cut character, or white space that the other tokenizer drops.
    """
    own_groups, other_groups = [NO_GROUP] * len(own), [NO_GROUP] * len(other)
    own_start = other_start = i = j = count = 0
    while i < len(own) and j < len(other):
        end, ends = own[i], other[j]
        if end is None or (ends is not None and end < ends[0]):
            i += 1
        elif ends is None or end > ends[1]:
            j += 1
        else:
            i, j = i + 1, j + 1
            own_groups[own_start:i] = [count] * (i - own_start)
            other_groups[other_start:j] = [count] * (j - other_start)
            own_start, other_start, count = i, j, count + 1
    if count:
        last_own, last_other = own[own_start - 1], other[other_start - 1]
        for at in range(own_start, len(own)):
            own_groups[at] = count - 1 if own[at] == last_own else NO_GROUP
        for at in range(other_start, len(other)):
            other_groups[at] = count - 1 if other[at] == last_other else NO_GROUP
    return own_groups, other_groups


def ends_of_parts(parts: Sequence[str | None], sizes: Sequence[int | None]) -> list[End]:
    """Return the end of each token.

    Args:
        parts: Text that each token completes; ``None`` within a character (`TextEncoder.decode_parts`).
        sizes: Number of bytes of each token, which is used within characters; ``None`` if it is not known.

    >>> ends_of_parts(["a", None, "\u00e9", ""], [1, 1, 1, 0])
    [1, 2, 3, 3]
    >>> ends_of_parts(["a", None, "\u00e9", ""], [1, None, 1, 0])
    [1, None, 3, 3]
    """
    found: list[End] = []
    end = opened = 0
    for number, part in enumerate(parts):
        found.append(None)
        if part is None:
            continue
        length, within = len(part.encode()), sizes[opened : number + 1]
        known = [size for size in within if size is not None]
        if len(known) == len(within) and sum(known) == length:
            found[opened:] = [end + size for size in accumulate(known)]
        end, opened = end + length, number + 1
        found[number] = end
    return found


def ends_of_offsets(offsets: Sequence[tuple[int, int]], text: str) -> tuple[list[Ends], list[bool]]:
    """Return the ends of each token, given the characters of `text` that a tokenizer says it covers.

    Returns:
        The ends, and True for each token before which the tokenizer left out more than white space, such as characters
        that it does not know.

    >>> ends_of_offsets([(0, 1), (2, 3), (2, 3)], "a \u00e9 ")
    ([(1, 2), None, (4, 5)], [False, False, False])
    """
    found: list[Ends] = []
    omits: list[bool] = []
    size = [0, *accumulate(len(character.encode()) for character in text)]
    reached = 0
    for (start, end), (following, _) in pairwise([*offsets, (len(text), len(text))]):
        omits.append(bool(text[reached:start].strip()))
        reached = max(reached, end)
        found.append((size[reached], size[following]) if following >= reached else None)
    return found, omits
