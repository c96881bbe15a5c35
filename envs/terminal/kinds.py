"""Kinds of generated tasks: files, an instruction, checks of the final state, and commands that solve the task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

NAMES = ["ada", "ben", "cleo", "dora", "emil", "finn", "gina", "hugo", "ida", "jan", "kim", "lena"]
FRUIT = ["apple", "pear", "plum", "cherry", "quince", "fig", "lemon"]
TOPICS = ["red", "green", "blue", "north", "south", "east", "west"]


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
    level = random.choice(("ERROR", "WARN", "INFO"))
    lines = [
        f"{hour:02d}:{random.randint(0, 59):02d} {random.choice(('ERROR', 'WARN', 'INFO', 'DEBUG'))}"
        f" {random.choice(FRUIT)} {random.randint(1, 99)}"
        for hour in range(24)
        for _ in range(random.randint(1, 3))
    ]
    count = sum(f" {level} " in line for line in lines)
    return Errand(
        kind="count lines",
        instruction=f"Count the lines of level {level} in logs/app.log, and write the number to count.txt.",
        files={"logs/app.log": _text(lines)},
        commands=[f"grep -c ' {level} ' logs/app.log > count.txt"],
        checks=[Check(what="the number", path="count.txt", text=str(count))],
    )


def sum_column(random: Random) -> Errand:
    """Add up a column of a table."""
    column = random.choice(("price", "count"))
    rows = [(random.choice(FRUIT), random.randint(1, 90), random.randint(1, 9)) for _ in range(random.randint(8, 20))]
    total = sum(price if column == "price" else count for _, price, count in rows)
    place = 2 if column == "price" else 3
    return Errand(
        kind="add up",
        instruction=f"Add up the column {column} of orders.csv, and write the sum to total.txt.",
        files={"orders.csv": _text(["fruit,price,count", *(f"{a},{b},{c}" for a, b, c in rows)])},
        commands=[f"awk -F, 'NR > 1 {{ sum += ${place} }} END {{ print sum }}' orders.csv > total.txt"],
        checks=[Check(what="the sum", path="total.txt", text=str(total))],
    )


def rename_files(random: Random) -> Errand:
    """Change the extension of files."""
    names = random.sample(NAMES, random.randint(3, 6))
    old, new = random.choice((("txt", "md"), ("htm", "html"), ("jpeg", "jpg")))
    stays = random.choice([name for name in NAMES if name not in names])
    files = {f"notes/{name}.{old}": f"{name} {random.randint(1, 999)}\n" for name in names}
    moved = [
        check
        for path, text in files.items()
        for check in (
            Check(what=f"{path} is gone", path=path),
            Check(what=f"the new {path}", path=path.removesuffix(old) + new, text=text),
        )
    ]
    kept = Check(what="another file stays", path=f"notes/{stays}.dat", text="keep me")
    return Errand(
        kind="rename",
        instruction=f"In the folder notes, rename all files that end in .{old} so that they end in .{new}.",
        files={**files, f"notes/{stays}.dat": "keep me\n"},
        commands=[f'cd notes && for f in *.{old}; do mv "$f" "${{f%.{old}}}.{new}"; done'],
        checks=[*moved, kept],
    )


def unique_names(random: Random) -> Errand:
    """Merge lists of names."""
    lists = {f"lists/{topic}.txt": random.choices(NAMES, k=random.randint(4, 9)) for topic in random.sample(TOPICS, 3)}
    names = sorted({name for found in lists.values() for name in found})
    return Errand(
        kind="merge",
        instruction="Write all names in the files of the folder lists to names.txt, sorted: each once, one per line.",
        files={path: _text(found) for path, found in lists.items()},
        commands=["cat lists/*.txt | sort -u > names.txt"],
        checks=[Check(what="the names", path="names.txt", text=_text(names))],
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
    least = random.randint(30, 60)
    kept = {name: age for name, age in sorted(people.items()) if age >= least}
    program = (
        "import csv, json\n"
        f"rows = {{r['name']: int(r['age']) for r in csv.DictReader(open('people.csv')) if int(r['age']) >= {least}}}\n"
        "json.dump(rows, open('people.json', 'w'), sort_keys=True)"
    )
    return Errand(
        kind="convert",
        instruction=(
            f"Convert people.csv to people.json: a JSON object from name to age (a number), on one line, with sorted"
            f" keys and a space after each colon and comma. Include only people who are at least {least} years old."
        ),
        files={"people.csv": _text(["name,age", *(f"{name},{age}" for name, age in people.items())])},
        commands=[f"python3 - <<'END'\n{program}\nEND"],
        checks=[Check(what="the object", path="people.json", text=json.dumps(kept))],
    )


def write_script(random: Random) -> Errand:
    """Write a script that is then run on hidden input."""
    what, code, compute = random.choice(
        (
            ("the largest", "sort -n | tail -n 1", max),
            ("the smallest", "sort -n | head -n 1", min),
            ("the sum of", "awk '{ s += $1 } END { print s }'", sum),
        )
    )
    samples = [[random.randint(-99, 999) for _ in range(random.randint(2, 8))] for _ in range(3)]
    name = random.choice(TOPICS)
    checks = [
        Check(what="hidden input", command=f"sh ./{name}.sh", stdin=_text(map(str, sample)), text=str(compute(sample)))
        for sample in samples
    ]
    return Errand(
        kind="script",
        instruction=(
            f"Write a shell script {name}.sh that reads whole numbers from standard input, one per line, and prints"
            f" {what} all of them."
        ),
        files={"README": "The script goes here.\n"},
        commands=[f"cat > {name}.sh <<'END'\n{code}\nEND"],
        checks=checks,
    )


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
