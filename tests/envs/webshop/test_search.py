"""Search: terms, BM25 against its formula, what is found and in which order, special keywords, tables on disk."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from agentrl.envs.webshop.analysis import term_of, words_of
from agentrl.envs.webshop.porter import stem
from agentrl.envs.webshop.records import Product
from agentrl.envs.webshop.search_index import HITS, IndexBuilder, SearchIndex, rounded_lengths
from agentrl.envs.webshop.shop import Shop, make_shop, search_text
from agentrl.envs.webshop.tables import Groups, Texts
from hypothesis import given, settings
from hypothesis import strategies as st

STEMS = orjson.loads((Path(__file__).parent / "data" / "stems.json").read_bytes())
"""Words, and what another implementation of Porter's stemmer makes of them (NLTK's, with Martin's extensions)."""


def test_stems_are_porters() -> None:
    assert len(STEMS) == 300
    assert {word: stem(word) for word in STEMS} == STEMS


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyzé'0", min_size=1, max_size=12))
def test_every_word_has_a_stem_that_is_not_longer(word: str) -> None:
    assert 0 < len(stem(word)) <= len(word)


def test_terms() -> None:
    text = "The Women's wide-leg T-Shirts (6.76 fl oz), 1,000 pcs_x; it's 3.5mm & SOFTER!"
    terms = [term_of(word) for word in words_of(text)]
    expected = "women wide leg t shirt 6.76 fl oz 1,000 pcs_x 3.5mm softer"
    assert [term for term in terms if term] == expected.split()
    assert terms.count(None) == 2  # "the" and "it's"


def build(folder: Path, texts: list[str]) -> SearchIndex:
    builder = IndexBuilder()
    for text in texts:
        builder.add(text)
    builder.save(folder)
    return SearchIndex(folder)


def counted_terms(text: str) -> Counter[str]:
    return Counter(filter(None, map(term_of, words_of(text))))


def scores_by_formula(documents: list[Counter[str]], query: str) -> list[float]:
    lengths = rounded_lengths(np.array([sum(document.values()) for document in documents], np.int32)).tolist()
    mean = sum(sum(document.values()) for document in documents) / len(documents)
    scores = [0.0] * len(documents)
    for term, times in counted_terms(query).items():
        having = sum(term in document for document in documents)
        rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
        for i, document in enumerate(documents):
            count = document[term]
            scores[i] += times * rarity * count / (count + 0.9 * (1 - 0.4 + 0.4 * lengths[i] / mean)) if count else 0
    return scores


@pytest.mark.slow
def test_scores_are_bm25(tmp_path: Path) -> None:
    rng = random.Random(3)
    words = [f"word{i}" for i in range(60)]
    texts = [" ".join(rng.choices(words, weights=range(60, 0, -1), k=rng.randint(1, 90))) for _ in range(200)]
    index, documents = build(tmp_path, texts), [counted_terms(text) for text in texts]
    for _ in range(100):
        query = " ".join(rng.choices(words, k=rng.randint(1, 6)))
        scores = scores_by_formula(documents, query)
        found = index.search(query).tolist()
        assert len(found) == min(HITS, sum(score > 0 for score in scores))
        told = [scores[row] for row in found]
        assert told == pytest.approx(sorted(scores, reverse=True)[: len(told)], rel=1e-5)


def test_equals_are_found_in_the_catalogues_order_and_nothing_where_no_word_is_known(tmp_path: Path) -> None:
    index = build(tmp_path, ["red shoe", "blue shoe", "", "red shoe", "the", *["green lamp"] * 60])
    assert index.search("shoes red").tolist() == [0, 3, 1]
    assert index.search("lamps").tolist() == list(range(5, 55))
    assert index.search("the sofa").tolist() == index.search("").tolist() == []


def test_blocks_of_documents_make_the_same_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"lotion {'cream ' * (i % 5)} number{i % 7}" for i in range(100)]
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    build(tmp_path / "one", texts)
    monkeypatch.setattr("agentrl.envs.webshop.search_index._TOKENS_PER_BLOCK", 10)
    build(tmp_path / "many", texts)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()


@pytest.fixture(scope="module")
def small_shop(product: Callable[..., Product], tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("shop")
    attributes = ("long lasting", "dry skin")
    products = [
        product(asin=f"B{i:09}", attributes=attributes[: i % 3], category="ab"[i % 2], query=f"q {i % 4}")
        for i in range(120)
    ]
    make_shop(products, folder)
    return Shop(folder)


def test_special_keywords_find_groups_of_any_size(small_shop: Shop) -> None:
    search = small_shop.search
    assert search(["<a>", "dry", "skin"], "").tolist() == list(range(2, 120, 3))
    assert search(["<c>", "b", "ignored"], "").tolist() == list(range(1, 120, 2))
    assert search(["<q>", "q", "3"], "").tolist() == list(range(3, 120, 4))
    for keywords in (["<c>"], ["<a>", "none"], ["<q>"]):
        assert search(keywords, "").tolist() == []


def test_products_by_chance_depend_on_the_draw_only(small_shop: Shop) -> None:
    first = small_shop.search(["<r>"], "17/1").tolist()
    assert len(set(first)) == HITS
    assert first == small_shop.search(["<r>", "x"], "17/1").tolist() != small_shop.search(["<r>"], "17/2").tolist()


def test_products_are_found_by_id(small_shop: Shop) -> None:
    assert small_shop.product_of("B000000007").asin == "B000000007"
    with pytest.raises(KeyError):
        small_shop.product_of("B")


def test_search_knows_title_description_first_bullet_and_options(product: Callable[..., Product]) -> None:
    made = product(title="A", description="B", bullets=("C", "D"), options={"size": ("s", "m"), "color": ("red",)})
    assert search_text(made) == "A B C size: s, m, and color: red"
    assert search_text(product(title="A", description="B")) == "A B  "


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=6), unique=True))
@pytest.mark.slow
def test_tables_round_trip(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tables")
    ordered = sorted(texts, key=str.encode)
    Texts.save(folder, "texts", map(str.encode, ordered))
    table = Texts(folder, "texts")
    assert [text.decode() for text in table] == ordered
    assert [table.find(text) for text in ordered] == list(range(len(ordered)))
    assert table.find("longer than any") is None
    groups = {text: range(i) for i, text in enumerate(texts)}
    Groups.save(folder, "groups", groups)
    read = Groups(folder, "groups")
    assert {text: read.members(text).tolist() for text in texts} == {
        text: [*members] for text, members in groups.items()
    }
    assert read.members("longer than any").tolist() == []
