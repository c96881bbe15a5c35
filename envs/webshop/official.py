"""WebShop's own files: products (``items_shuffle*.json``), and human and synthetic instructions in the other two.

Rows are read as in the original: products without a valid id and duplicates are skipped, options are in lower case.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import UsageError

from .json_rows import read_json_members, read_json_rows
from .records import Annotation, Product

PRODUCTS = "items_shuffle*.json"
SYNTHETIC = "items_ins_v2*.json"
HUMAN = "items_human_ins.json"
MAX_ASIN_CHARS = 10
DEFAULT_PRICE = 100.0
"""Price in dollars of products without one."""
DEFAULT_ATTRIBUTE = "DUMMY_ATTR"
_NO_PRICE = re.compile(r"[^\d.]")


def find_file(folder: Path, pattern: str) -> Path:
    """Return the largest file of a pattern in the folder, such as all products next to ``items_shuffle_1000.json``.

    Raises:
        UsageError: there is no such file.
    """
    found = sorted(folder.glob(pattern), key=lambda path: (path.stat().st_size, path.name))
    if not found:
        raise UsageError(
            f"no WebShop data in {folder}",
            expected=f"a file {pattern}",
            hint="download WebShop's data into that folder, or leave the option data out for the generated catalogue",
        )
    return found[-1]


def read_products(folder: Path, limit: int | None) -> Iterator[Product]:
    """Yield the products of a folder with WebShop's files.

    Args:
        folder: Folder with `PRODUCTS`, and `SYNTHETIC` or `HUMAN` or both.
        limit: Maximum number of rows; the first ones are read.

    Raises:
        UsageError: a file is missing.
    """
    if not any(any(folder.glob(pattern)) for pattern in (SYNTHETIC, HUMAN)):
        raise UsageError(f"no goals in {folder}", expected=f"a file {SYNTHETIC} or {HUMAN}")
    rows: Iterable[dict[str, Any]] = read_json_rows(find_file(folder, PRODUCTS))
    wanted = None
    if limit is not None:
        rows = list(itertools.islice(rows, limit))
        wanted = {str(row.get("asin")) for row in rows}
    yield from products_of(rows, *(_annotations(folder, pattern, wanted) for pattern in (SYNTHETIC, HUMAN)))


def _annotations(folder: Path, pattern: str, wanted: Container[str] | None) -> Mapping[str, Any]:
    """Return the annotations of a file, if it exists, by product id, for the wanted products or for all."""
    if not any(folder.glob(pattern)):
        return {}
    file = find_file(folder, pattern)
    if wanted is None:
        return _read_object(file)
    return {member.name: member.value for member in read_json_members(file) if member.name in wanted}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        read = orjson.loads(file.read_bytes())
    except (orjson.JSONDecodeError, OSError) as error:
        raise UsageError(
            f"{file} cannot be read", got=error, expected="a JSON object", hint="download it again"
        ) from error
    if not isinstance(read, dict):
        raise UsageError(f"{file} cannot be read", got=type(read).__name__, expected="a JSON object")
    return read


def products_of(
    rows: Iterable[Mapping[str, Any]], synthetic: Mapping[str, Any], human: Mapping[str, Any]
) -> Iterator[Product]:
    """Yield the products of the files' rows; annotations are by product id.

    Raises:
        UsageError: a row or an annotation does not have WebShop's format.
    """
    seen: set[str] = set()
    for row in rows:
        asin = row.get("asin")
        if not isinstance(asin, str):
            raise UsageError("a product of WebShop's files has no id", got=repr(dict(row))[:80], expected="a text asin")
        if asin == "nan" or len(asin) > MAX_ASIN_CHARS or asin in seen:
            continue
        seen.add(asin)
        try:
            product = _product(row, synthetic.get(asin, {}), human.get(asin, ()))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UsageError(
                f"product {asin} of WebShop's files cannot be read",
                got=f"{type(error).__name__}: {error}",
                expected=f"the fields of {PRODUCTS}, {SYNTHETIC} and {HUMAN}",
                hint="download the files again",
            ) from error
        yield product


def _product(row: Mapping[str, Any], synthetic: Mapping[str, Any], human: Sequence[Mapping[str, Any]]) -> Product:
    bullets = row["small_description"]
    images = row.get("images") or [""]
    return Product(
        asin=row["asin"],
        title=row["name"] or "",
        description=row["full_description"] or "",
        bullets=tuple(map(str, bullets if isinstance(bullets, list) else [bullets])),
        prices=parse_prices(row.get("pricing")),
        options=_options(row.get("customization_options") or {}),
        attributes=tuple(synthetic.get("attributes", (DEFAULT_ATTRIBUTE,))),
        category=row["category"],
        query=row["query"].lower().strip(),
        product_category=row["product_category"],
        image=images[0] or "",
        synthetic=_synthetic(synthetic),
        human=tuple(map(_human, human)),
    )


def parse_prices(text: str | None) -> tuple[float, ...]:
    """Parse a price, or the two ends of a range, in dollars.

    >>> parse_prices("$1,234.50"), parse_prices("$3 to $4.25"), parse_prices("")
    ((1234.5,), (3.0, 4.25), (100.0,))
    """
    cleaned = [_NO_PRICE.sub("", piece).rstrip(".") for piece in (text or "").split("$")[1:]]
    prices = tuple(float(piece) for piece in cleaned if piece.count(".") <= 1 and piece.strip("."))
    return prices[:2] if prices and all(map(math.isfinite, prices)) else (DEFAULT_PRICE,)


def _options(customization: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(content["value"].strip().replace("/", " | ").lower() for content in contents)
        for name, contents in customization.items()
        if contents is not None
    }


def _synthetic(annotation: Mapping[str, Any]) -> Annotation | None:
    if annotation.get("instruction") is None:
        return None
    return Annotation(annotation["instruction"], tuple(annotation.get("instruction_attributes") or ()), ())


def _human(annotation: Mapping[str, Any]) -> Annotation:
    return Annotation(
        annotation["instruction"],
        tuple(annotation["instruction_attributes"]),
        tuple(map(str, annotation["instruction_options"])),
    )
