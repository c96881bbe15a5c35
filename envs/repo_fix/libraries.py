"""The repositories before a mistake is inserted: modules of a few functions without endless loops, and their calls.

The right value of a call is the value that the module here returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

Draw: TypeAlias = Callable[[Random], tuple[Any, ...]]
"""Function that draws the arguments of a call."""
WORDS = (
    "a",
    "red",
    "fox",
    "sees",
    "two",
    "small",
    "birds",
    "near",
    "the",
    "old",
    "mill",
    "and",
    "waits",
    "until",
    "night",
    "falls",
    "over",
    "it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A repository of one package with one module."""

    package: str
    module: str
    about: str
    source: str
    calls: Mapping[str, Draw]
    """Drawing function by name of the called function."""


def _numbers(low: int, high: int, count: int) -> Draw:
    return lambda random: tuple(random.randint(low, high) for _ in range(count))


def _list(low: int, high: int, *, least: int = 0, most: int = 8) -> Callable[[Random], list[int]]:
    return lambda random: [random.randint(low, high) for _ in range(random.randint(least, most))]


def _words(random: Random) -> str:
    return " ".join(random.choice(WORDS) for _ in range(random.randint(0, 12)))


def _orders(random: Random) -> list[list[Any]]:
    names = ("pen", "cup", "lamp", "book")
    return [[random.choice(names), random.randint(0, 5), random.randint(1, 40)] for _ in range(random.randint(0, 5))]


def _grid(random: Random) -> list[list[int]]:
    height, width = random.randint(1, 4), random.randint(1, 4)
    return [[random.randint(0, 2) for _ in range(width)] for _ in range(height)]


def _spans(random: Random) -> list[list[int]]:
    starts = [random.randint(0, 20) for _ in range(random.randint(0, 5))]
    return [[start, start + random.randint(0, 8)] for start in starts]


LIBRARIES = (
    Library(
        package="shop",
        module="cart",
        about="Totals and discounts of a shopping cart. An order is a list of name, count and price in cents.",
        source='''
def subtotal(orders):
    """The total price of all orders."""
    total = 0
    for _name, count, price in orders:
        if count > 0:
            total += count * price
    return total


def discount(amount):
    """The discount: 10 % for amounts from 100, 20 % from 200, in whole cents."""
    if amount >= 200:
        return amount * 20 // 100
    if amount >= 100:
        return amount * 10 // 100
    return 0


def total(orders, shipping):
    """The amount that the customer pays; shipping is free from 150 after the discount."""
    amount = subtotal(orders)
    amount -= discount(amount)
    if amount >= 150:
        shipping = 0
    return amount + shipping


def most_wanted(orders):
    """The name with the largest count in one order; the first one if several are equal."""
    best, most = None, 0
    for name, count, _price in orders:
        if count > most:
            best, most = name, count
    return best
''',
        calls={
            "subtotal": lambda r: (_orders(r),),
            "discount": lambda r: (r.choice((r.randint(0, 300), 100, 200, 99, 199)),),
            "total": lambda r: (_orders(r), r.randint(1, 9)),
            "most_wanted": lambda r: (_orders(r),),
        },
    ),
    Library(
        package="textkit",
        module="layout",
        about="Lays out plain text.",
        source='''
def wrap(text, width):
    """Lines of at most `width` characters; longer words stand alone."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = line + " " + word if line else word
    if line:
        lines.append(line)
    return lines


def centre(text, width):
    """The text between spaces; an odd space goes to the right."""
    missing = width - len(text)
    if missing <= 0:
        return text
    left = missing // 2
    return " " * left + text + " " * (missing - left)


def shorten(text, width):
    """The text, or its beginning and three dots within `width` characters."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."


def capitals(text):
    """Each word with a capital letter, but short words only at the beginning."""
    words = []
    for place, word in enumerate(text.split()):
        if place == 0 or len(word) > 3:
            word = word[0].upper() + word[1:]
        words.append(word)
    return " ".join(words)
''',
        calls={
            "wrap": lambda r: (_words(r), r.randint(6, 20)),
            "centre": lambda r: (_words(r)[:9], r.randint(4, 16)),
            "shorten": lambda r: (_words(r), r.randint(5, 30)),
            "capitals": lambda r: (_words(r),),
        },
    ),
    Library(
        package="grids",
        module="board",
        about="Boards of numbers, as lists of rows.",
        source='''
def transpose(board):
    """Columns as rows."""
    return [[row[place] for row in board] for place in range(len(board[0]))]


def neighbours(board, row, column):
    """The numbers above, below, left and right of a place, in this order."""
    found = []
    for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        y, x = row + down, column + right
        if 0 <= y < len(board) and 0 <= x < len(board[0]):
            found.append(board[y][x])
    return found


def count(board, number):
    """How often a number occurs on the board."""
    return sum(row.count(number) for row in board)


def diagonal(board):
    """The numbers from the upper left corner down to the right."""
    return [board[place][place] for place in range(min(len(board), len(board[0])))]


def border(board):
    """The sum of the numbers at the edge."""
    total = 0
    for y, row in enumerate(board):
        for x, number in enumerate(row):
            if y == 0 or x == 0 or y == len(board) - 1 or x == len(row) - 1:
                total += number
    return total
''',
        calls={
            "transpose": lambda r: (_grid(r),),
            "neighbours": lambda r: (_grid(r), r.randint(0, 2), r.randint(0, 2)),
            "count": lambda r: (_grid(r), r.randint(0, 2)),
            "diagonal": lambda r: (_grid(r),),
            "border": lambda r: (_grid(r),),
        },
    ),
    Library(
        package="spans",
        module="intervals",
        about="Intervals of whole numbers, as pairs of a start and an exclusive end.",
        source='''
def length(span):
    """How many numbers are in it."""
    return max(0, span[1] - span[0])


def contains(span, number):
    """Whether a number is in it."""
    return span[0] <= number < span[1]


def overlap(one, other):
    """The numbers that are in both; an empty list if there are none."""
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return [start, end] if start < end else []


def merge(spans):
    """The same numbers in as few spans as possible, sorted."""
    merged = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = [merged[-1][0], max(merged[-1][1], end)]
        else:
            merged.append([start, end])
    return merged


def gaps(spans):
    """The gaps between the merged spans."""
    merged = merge(spans)
    return [[merged[place][1], merged[place + 1][0]] for place in range(len(merged) - 1)]
''',
        calls={
            "length": lambda r: ([r.randint(0, 9), r.randint(0, 9)],),
            "contains": lambda r: ([3, 7], r.randint(1, 9)),
            "overlap": lambda r: ([r.randint(0, 6), r.randint(4, 12)], [r.randint(0, 6), r.randint(4, 12)]),
            "merge": lambda r: (_spans(r),),
            "gaps": lambda r: (_spans(r),),
        },
    ),
    Library(
        package="school",
        module="marks",
        about="Marks from 0 to 100.",
        source='''
def mean(marks):
    """The mean, rounded down; 0 without marks."""
    return sum(marks) // len(marks) if marks else 0


def letter(mark):
    """A from 90, B from 75, C from 60, D from 40, else F."""
    for least, name in ((90, "A"), (75, "B"), (60, "C"), (40, "D")):
        if mark >= least:
            return name
    return "F"


def best(marks, count):
    """The highest marks, from high to low."""
    return sorted(marks, reverse=True)[:count]


def without_lowest(marks):
    """The marks in their order without the lowest one, if there are more than two."""
    if len(marks) <= 2:
        return list(marks)
    place = marks.index(min(marks))
    return marks[:place] + marks[place + 1 :]


def passed(marks, least, share):
    """Whether at least `share` percent of the marks reach `least`."""
    reached = sum(1 for mark in marks if mark >= least)
    return reached * 100 >= share * len(marks)
''',
        calls={
            "mean": lambda r: (_list(0, 100)(r),),
            "letter": lambda r: (r.choice((r.randint(0, 100), 90, 75, 60, 40, 89, 39)),),
            "best": lambda r: (_list(0, 100)(r), r.randint(1, 4)),
            "without_lowest": lambda r: (_list(0, 100, most=5)(r),),
            "passed": lambda r: (_list(30, 70, least=1)(r), 50, r.choice((25, 50, 75))),
        },
    ),
    Library(
        package="clock",
        module="times",
        about="Times of a day as minutes since midnight.",
        source='''
def parse(text):
    """Minutes of a time like 7:05."""
    hours, minutes = text.split(":")
    return int(hours) * 60 + int(minutes)


def show(minutes):
    """A time like 7:05; a day has 1440 minutes."""
    minutes = minutes % 1440
    return str(minutes // 60) + ":" + str(minutes % 60).zfill(2)


def between(start, end):
    """Minutes from the start to the next time that is the end, past midnight if necessary."""
    return end - start if end >= start else end - start + 1440


def rounded(minutes, step):
    """The nearest multiple of `step`; the later one if two are equally near."""
    rest = minutes % step
    return minutes - rest + (step if rest * 2 >= step else 0)


def is_open(minutes, opens, closes):
    """Whether a shop is open; it may close after midnight."""
    if opens <= closes:
        return opens <= minutes < closes
    return minutes >= opens or minutes < closes
''',
        calls={
            "parse": lambda r: (f"{r.randint(0, 23)}:{r.randint(0, 59):02d}",),
            "show": lambda r: (r.randint(-100, 3000),),
            "between": lambda r: (r.choice((0, 60, 1200)), r.randint(0, 1439)),
            "rounded": lambda r: (r.randint(0, 200), r.choice((5, 10, 15))),
            "is_open": lambda r: (r.choice((540, 1080, r.randint(0, 1439))), *r.choice(((540, 1080), (1080, 120)))),
        },
    ),
    Library(
        package="stock",
        module="shelf",
        about="The contents of a shelf: a dictionary from names to counts.",
        source='''
def add(shelf, name, count):
    """The shelf with more of something; counts below 1 add nothing."""
    changed = dict(shelf)
    if count > 0:
        changed[name] = changed.get(name, 0) + count
    return changed


def take(shelf, name, count):
    """The shelf with less of something; names with no items left are removed. None if there is not enough."""
    if shelf.get(name, 0) < count:
        return None
    changed = dict(shelf)
    changed[name] -= count
    if changed[name] == 0:
        del changed[name]
    return changed


def low(shelf, least):
    """The sorted names with counts below `least`."""
    return sorted(name for name, count in shelf.items() if count < least)


def difference(one, other):
    """How much more of each name is on the first shelf; names with equal counts are left out."""
    names = sorted(set(one) | set(other))
    changes = {name: one.get(name, 0) - other.get(name, 0) for name in names}
    return {name: change for name, change in changes.items() if change != 0}
''',
        calls={
            "add": lambda r: (_shelf(r), r.choice("abc"), r.randint(-1, 4)),
            "take": lambda r: (_shelf(r), r.choice("abc"), r.randint(1, 4)),
            "low": lambda r: (_shelf(r), r.randint(1, 5)),
            "difference": lambda r: (_shelf(r), _shelf(r)),
        },
    ),
    Library(
        package="codes",
        module="checks",
        about="Check digits and simple codes.",
        source='''
def digits(number):
    """The sum of the digits."""
    return sum(int(digit) for digit in str(abs(number)))


def check_digit(number):
    """The digit that makes the weighted sum a multiple of 10; the weights are 3 and 1 in turn, from the right."""
    total = 0
    for place, digit in enumerate(reversed(str(number))):
        total += int(digit) * (3 if place % 2 == 0 else 1)
    return (10 - total % 10) % 10


def shift(text, steps):
    """Lowercase letters shifted in the alphabet; other characters stay."""
    moved = []
    for letter in text:
        if "a" <= letter <= "z":
            letter = chr((ord(letter) - 97 + steps) % 26 + 97)
        moved.append(letter)
    return "".join(moved)


def runs(text):
    """Letters with the lengths of their runs: aab gives [["a", 2], ["b", 1]]."""
    found = []
    for letter in text:
        if found and found[-1][0] == letter:
            found[-1][1] += 1
        else:
            found.append([letter, 1])
    return found
''',
        calls={
            "digits": _numbers(-9999, 9999, 1),
            "check_digit": _numbers(1, 99999, 1),
            "shift": lambda r: (_words(r)[:12], r.randint(-30, 30)),
            "runs": lambda r: ("".join(r.choice("aab ") for _ in range(r.randint(0, 8))),),
        },
    ),
)


def _shelf(random: Random) -> dict[str, int]:
    return {name: random.randint(1, 5) for name in "abc" if random.random() < 0.7}
