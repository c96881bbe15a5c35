"""A shop: its catalogue, search index and goals, on disk and mapped into memory, shared within a process."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from .cache import cache_folder, made_folder
from .generator import GENERATOR, generate_products
from .goals import GoalKind, Goals, make_goals
from .official import HUMAN, PRODUCTS, SYNTHETIC, find_file, read_products
from .records import Goal, Product
from .search_index import HITS, IndexBuilder, SearchIndex
from .tables import Groups, Rows, Texts

BY_CHANCE, BY_ATTRIBUTE, BY_CATEGORY, BY_QUERY = "<r>", "<a>", "<c>", "<q>"
"""First keywords of special searches."""
SHAPING = (
    *("analysis", "generator", "goals", "json_rows", "official", "porter", "records", "search_index", "shop", "tables"),
    *("vocabulary",),
)
"""Modules that determine the tables on disk; tables of another version of these modules are rebuilt."""
_SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueSource:
    """Source of a catalogue."""

    data: Path | None
    """Folder with WebShop's files; ``None`` for the generated catalogue."""
    products: int | None
    """Maximum number of products; ``None`` for all products of the files."""

    @property
    def key(self) -> str:
        """Checksum of the catalogue; files count by size, modification time, and first and last MiB."""
        digest = hashlib.blake2b(repr((_code(), self.products)).encode(), digest_size=12)
        if self.data is None:
            digest.update(GENERATOR)
        else:
            for pattern in (PRODUCTS, SYNTHETIC, HUMAN):
                if any(self.data.glob(pattern)):
                    digest.update(_fingerprint(find_file(self.data, pattern)))
        return digest.hexdigest()

    def read(self) -> Iterator[Product]:
        """Yield the products."""
        if self.data is not None:
            return read_products(self.data, self.products)
        return generate_products(self.products or 0)


@functools.cache
def _code() -> str:
    """Return a checksum of the code that determines the tables."""
    folder, digest = importlib.resources.files(__package__), hashlib.blake2b(digest_size=12)
    for module in SHAPING:
        digest.update(folder.joinpath(f"{module}.py").read_bytes())
    return digest.hexdigest()


def _fingerprint(path: Path) -> bytes:
    facts = path.stat()
    with path.open("rb") as file:
        first = file.read(_SAMPLED_BYTES)
        file.seek(max(facts.st_size - _SAMPLED_BYTES, 0))
        return repr((path.name, facts.st_size, facts.st_mtime_ns)).encode() + first + file.read()


class Shop:
    """Constant data of a shop: products and search index.

    Args:
        folder: Folder of the tables that `make_shop` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._products = Texts(folder, "products")
        self._by_asin = Groups(folder, "asins")
        self._by_attribute = Groups(folder, "attributes")
        self._by_category = Groups(folder, "categories")
        self._by_query = Groups(folder, "queries")
        self._index = SearchIndex(folder)
        self.product = functools.lru_cache(maxsize=1024)(self._read)
        self._found = functools.lru_cache(maxsize=2048)(self._index.search)

    def __len__(self) -> int:
        return len(self._products)

    def _read(self, number: int) -> Product:
        return Product.from_plain(orjson.loads(self._products[number]))

    def products(self) -> Iterator[Product]:
        """Return an iterator over all products, which are not cached."""
        return map(self._read, range(len(self)))

    def product_of(self, asin: str) -> Product:
        """Return the product with an id.

        Raises:
            KeyError: the product does not exist.
        """
        members = self._by_asin.members(asin)
        if not len(members):
            raise KeyError(asin)
        return self.product(int(members[0]))

    def search(self, keywords: Sequence[str], draw: str) -> Rows:
        """Return the numbers of the found products, in order.

        The first keyword may be special: ``<r>`` finds random products, ``<a>`` those with an attribute, ``<c>`` of a
        category, ``<q>`` of a query. The last three find all such products; a plain search finds the best 50.

        Args:
            keywords: The words.
            draw: Seed of a random search.
        """
        first, rest = keywords[0], " ".join(keywords[1:]).strip()
        if first == BY_CHANCE:
            drawn = random.Random(draw).sample(range(len(self)), min(HITS, len(self)))
            return np.array(drawn, np.int32)
        if first == BY_ATTRIBUTE:
            return self._by_attribute.members(rest)
        if first == BY_CATEGORY:
            return self._by_category.members(keywords[1].strip() if len(keywords) > 1 else "")
        if first == BY_QUERY:
            return self._by_query.members(rest)
        return self._found(" ".join(keywords))

    def goals(self, kind: GoalKind) -> Goals:
        """Return the goals of a kind, in WebShop's order."""
        folder = made_folder(self._folder / f"goals-{kind}", lambda made: make_goals(self.products(), kind, made))
        return Goals(kind, folder)

    def goal(self, goals: Goals, index: int) -> Goal:
        """Return one of the goals."""
        return goals.goal(index, self.product(int(goals.products[index])))


def search_text(product: Product) -> str:
    """Return the searchable text of a product: title, description, first bullet, options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.title, product.description, *(product.bullets[:1] or ("",)), options])


def make_shop(products: Iterable[Product], folder: Path) -> None:
    """Write the tables of a shop; `Shop` reads them."""
    index = IndexBuilder()
    groups: dict[str, dict[str, list[int]]] = {name: {} for name in ("asins", "attributes", "categories", "queries")}

    def lines() -> Iterator[bytes]:
        for number, product in enumerate(products):
            index.add(search_text(product))
            for name, keys in _keys(product).items():
                for key in keys:
                    groups[name].setdefault(key, []).append(number)
            yield orjson.dumps(product.to_plain())

    Texts.save(folder, "products", lines())
    index.save(folder)
    for name, members in groups.items():
        Groups.save(folder, name, members)


def _keys(product: Product) -> dict[str, Iterable[str]]:
    return {
        "asins": [product.asin],
        "attributes": dict.fromkeys(product.attributes),
        "categories": [product.category],
        "queries": [product.query],
    }


@functools.lru_cache(maxsize=4)
def open_shop(source: CatalogueSource) -> Shop:
    """Return the shop of a catalogue; its tables are built unless they are in the cache folder."""
    folder = made_folder(cache_folder() / source.key, lambda made: make_shop(source.read(), made))
    return Shop(folder)
