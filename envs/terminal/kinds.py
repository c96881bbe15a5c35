"""Kinds of generated tasks: files, an instruction, checks of the final state, and commands that solve the task.

Names of files and details vary, so that no fixed list of commands solves more than a few tasks of a kind.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

NAMES = ["ada", "ben", "cleo", "dora", "emil", "finn", "gina", "hugo", "ida", "jan", "kim", "lena"]
FRUIT = ["apple", "pear", "plum", "cherry", "quince", "fig", "lemon"]
TOPICS = ["red", "green", "blue", "north", "south", "east", "west"]
LEVELS = ("ERROR", "WARN", "INFO", "DEBUG")
COLUMNS = ("price", "count", "weight", "discount")
EXTENSIONS = ("txt", "md", "htm", "html", "jpeg", "jpg", "log", "old")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Condition on the final state. Only the command and its input enter a sandbox."""

    what: str
    """Description, for reports."""
    path: str | None = None
    """File whose text is compared, apart from whitespace at its ends and the ends of its lines."""
    text: str | None = None
    """Expected content of the file, or output of the command; ``None`` if the file must not exist."""
    command: str | None = None
    """Command to run in a fresh copy of the working folder, instead of reading a file."""
    stdin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A generated task."""

    kind: str
    instruction: str
    files: Mapping[str, str]
    commands: Sequence[str]
    """Commands of one solution."""
    checks: Sequence[Check] = field(default_factory=tuple)


def count_errors(random: Random) -> Errand:
    """Count lines of a log."""
    level = random.choice(LEVELS)
    log, result = f"logs/{random.choice(TOPICS)}-{random.choice(NAMES)}.log", f"{random.choice(FRUIT)}.txt"
    lines = [
        f"{hour:02d}:{random.randint(0, 59):02d} {random.choice(LEVELS)} {random.choice(FRUIT)} {random.randint(1, 99)}"
        for hour in range(24)
        for _ in range(random.randint(1, 3))
    ]
    count = sum(f" {level} " in line for line in lines)
    return Errand(
        kind="count lines",
        instruction=f"Count the lines of level {level} in {log}, and write the number to {result}.",
        files={log: _text(lines)},
        commands=[f"grep -c ' {level} ' {log} > {result}"],
        checks=[Check(what="the number", path=result, text=str(count))],
    )


def sum_column(random: Random) -> Errand:
    """Add up a column of a table."""
    column, table, result = random.choice(COLUMNS), f"{random.choice(NAMES)}.csv", f"{random.choice(TOPICS)}.txt"
    rows = [[random.randint(1, 90) for _ in COLUMNS] for _ in range(random.randint(8, 20))]
    place = COLUMNS.index(column)
    total = sum(row[place] for row in rows)
    lines = [",".join([random.choice(FRUIT), *map(str, row)]) for row in rows]
    return Errand(
        kind="add up",
        instruction=f"Add up the column {column} of {table}, and write the sum to {result}.",
        files={table: _text([",".join(["fruit", *COLUMNS]), *lines])},
        commands=[f"awk -F, 'NR > 1 {{ sum += ${place + 2} }} END {{ print sum }}' {table} > {result}"],
        checks=[Check(what="the sum", path=result, text=str(total))],
    )


def rename_files(random: Random) -> Errand:
    """Change the extension of files."""
    names = random.sample(NAMES, random.randint(3, 6))
    (old, new), folder = random.sample(EXTENSIONS, 2), random.choice(TOPICS)
    stays = random.choice([name for name in NAMES if name not in names])
    files = {f"{folder}/{name}.{old}": f"{name} {random.randint(1, 999)}\n" for name in names}
    moved = [
        check
        for path, text in files.items()
        for check in (
            Check(what=f"{path} is gone", path=path),
            Check(what=f"the new {path}", path=path.removesuffix(old) + new, text=text),
        )
    ]
    kept = Check(what="another file stays", path=f"{folder}/{stays}.dat", text="keep me")
    return Errand(
        kind="rename",
        instruction=f"In the folder {folder}, rename all files that end in .{old} so that they end in .{new}.",
        files={**files, f"{folder}/{stays}.dat": "keep me\n"},
        commands=[f'cd {folder} && for f in *.{old}; do mv "$f" "${{f%.{old}}}.{new}"; done'],
        checks=[*moved, kept],
    )


def unique_names(random: Random) -> Errand:
    """Merge lists of names."""
    folder, result = random.choice(TOPICS), f"{random.choice(FRUIT)}.txt"
    paths = [f"{folder}/{fruit}.txt" for fruit in random.sample(FRUIT, 3)]
    lists = {path: random.choices(NAMES, k=random.randint(4, 9)) for path in paths}
    which, option, wanted = random.choice(
        (
            ("all names", "", range(1, 99)),
            ("the names that occur only once", " -u", range(1, 2)),
            ("the names that occur several times", " -d", range(2, 99)),
        )
    )
    order, flag = random.choice((("alphabetical", ""), ("reverse alphabetical", " -r")))
    counts = Counter(name for found in lists.values() for name in found)
    names = sorted((name for name, count in counts.items() if count in wanted), reverse=bool(flag))
    return Errand(
        kind="merge",
        instruction=(
            f"Write {which} in all files of the folder {folder} together to {result}, in {order} order: each once, one"
            " per line."
        ),
        files={path: _text(found) for path, found in lists.items()},
        commands=[f"cat {folder}/*.txt | sort{flag} | uniq{option} > {result}"],
        checks=[Check(what="the names", path=result, text=_text(names))],
    )


def replace_word(random: Random) -> Errand:
    """Replace a value in all configuration files of a tree."""
    old, new = random.sample(range(1000, 9999), 2)
    paths = [
        f"{topic}/{name}.conf" for topic, name in zip(random.sample(TOPICS, 4), random.sample(NAMES, 4), strict=True)
    ]
    ports = {path: random.choice((old, old, random.randint(1, 999))) for path in paths} | {paths[0]: old}
    files = {path: f"name = {path[:3]}\nport = {port}\nlimit = {old}\n" for path, port in ports.items()}
    after = {path: text.replace(f"port = {old}", f"port = {new}") for path, text in files.items()}
    return Errand(
        kind="replace",
        instruction=f"In all files that end in .conf, change the port {old} to {new}. Leave other settings alone.",
        files=files,
        commands=[f"find . -name '*.conf' -exec sed -i 's/^port = {old}$/port = {new}/' {{}} +"],
        checks=[Check(what=path, path=path, text=text) for path, text in after.items()],
    )


def find_file(random: Random) -> Errand:
    """Find the file that contains a word."""
    paths = [f"{a}/{b}/{c}.txt" for a in TOPICS[:3] for b in random.sample(TOPICS, 2) for c in random.sample(NAMES, 2)]
    hidden, word = random.choice(paths), f"{random.choice(FRUIT)}-{random.randint(100, 999)}"
    files = {path: f"{random.choice(FRUIT)}-{random.randint(1000, 9999)}\n" for path in paths}
    return Errand(
        kind="find",
        instruction=f"One file in the folder tree contains {word}. Write its path, starting with tree/, to where.txt.",
        files={f"tree/{path}": f"{text}{word}\n" if path == hidden else text for path, text in files.items()},
        commands=[f"grep -rlwF -- '{word}' tree > where.txt"],
        checks=[Check(what="the path", path="where.txt", text=f"tree/{hidden}")],
    )


def table_to_json(random: Random) -> Errand:
    """Turn a table into JSON."""
    people = {name: random.randint(18, 90) for name in random.sample(NAMES, random.randint(3, 7))}
    least, table = random.randint(30, 60), random.choice(TOPICS)
    kept = {name: age for name, age in sorted(people.items()) if age >= least}
    program = (
        "import csv, json\n"
        f"rows = csv.DictReader(open('{table}.csv'))\n"
        f"rows = {{row['name']: int(row['age']) for row in rows if int(row['age']) >= {least}}}\n"
        f"json.dump(rows, open('{table}.json', 'w'), sort_keys=True)"
    )
    return Errand(
        kind="convert",
        instruction=(
            f"Convert {table}.csv to {table}.json: a JSON object from name to age (a number), on one line, with sorted"
            f" keys and a space after each colon and comma. Include only people who are at least {least} years old."
        ),
        files={f"{table}.csv": _text(["name,age", *(f"{name},{age}" for name, age in people.items())])},
        commands=[f"python3 - <<'END'\n{program}\nEND"],
        checks=[Check(what="the object", path=f"{table}.json", text=json.dumps(kept))],
    )


def write_script(random: Random) -> Errand:
    """Write a script that is then run on hidden input."""
    what, code, compute = random.choice(
        (
            ("the largest of them", "sort -n | tail -n 1", max),
            ("the smallest of them", "sort -n | head -n 1", min),
            ("the last of them", "tail -n 1", lambda sample: sample[-1]),
            ("their sum", "awk '{ s += $1 } END { print s }'", sum),
            ("how many there are", "awk 'END { print NR }'", len),
            ("how many of them are negative", "awk '$1 < 0 { n++ } END { print n + 0 }'", _count_negative),
        )
    )
    samples = [[random.randint(-99, 999) for _ in range(random.randint(2, 8))] for _ in range(3)]
    name = f"{random.choice(TOPICS)}-{random.choice(NAMES)}"
    checks = [
        Check(what="hidden input", command=f"sh ./{name}.sh", stdin=_text(map(str, sample)), text=str(compute(sample)))
        for sample in samples
    ]
    return Errand(
        kind="script",
        instruction=(
            f"Write a shell script {name}.sh that reads whole numbers from standard input, one per line, and prints"
            f" {what}."
        ),
        files={"README": "The script goes here.\n"},
        commands=[f"cat > {name}.sh <<'END'\n{code}\nEND"],
        checks=checks,
    )


def _count_negative(sample: Sequence[int]) -> int:
    return sum(number < 0 for number in sample)


KINDS: tuple[Callable[[Random], Errand], ...] = (
    count_errors,
    sum_column,
    rename_files,
    unique_names,
    replace_word,
    find_file,
    table_to_json,
    write_script,
)


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
