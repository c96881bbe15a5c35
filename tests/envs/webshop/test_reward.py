"""The reward: the written cases, other implementations' values, and a second implementation made of tables."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
import pytest
from agentrl.envs.webshop import nouns
from agentrl.envs.webshop.environment import WebShopEnv
from agentrl.envs.webshop.nouns import NounTagger, find_tagger, nouns_by_rule
from agentrl.envs.webshop.records import Goal, Product
from agentrl.envs.webshop.reward import ALIKE, is_same_value, judge, match_type, token_set_ratio
from agentrl.envs.webshop.vocabulary import load_vocabulary

from agentrl.errors import UsageError

DATA = Path(__file__).parent / "data"
RATIOS = orjson.loads((DATA / "ratios.json").read_bytes())
"""Two texts each, and what thefuzz says of them: token_set_ratio."""


def test_text_similarity_equals_thefuzz() -> None:
    assert len(RATIOS) == 200
    for one, other, by_set in RATIOS:
        assert token_set_ratio(one, other) == by_set


def score(product: Product, goal: Goal, chosen: dict[str, str] | None = None, **options: Any) -> float:
    price = options.pop("price", 10.0)
    return judge(product, goal, price=price, chosen=chosen or {}, nouns=nouns_by_rule, **options).reward


@pytest.mark.parametrize(
    ("chosen", "wanted", "compat", "strict"),
    [
        ({"size": "6.76 fl oz"}, ("size", "6.76 fl oz"), True, True),
        ({"color": "dark green"}, ("color", "dark red"), True, False),  # both are "dark"
        ({"color": "dark blue"}, ("color", "dark red"), False, False),  # "blue" comes before "dark"
        ({"color": "red"}, ("color", "red wine"), True, False),
        ({"color": "red wine"}, ("color", "red"), True, False),
        ({"finish": "titanium"}, ("color", "tan"), True, False),
        ({"color": "tan"}, "titanium", True, False),
        ({"fit": "large"}, ("size", "large"), True, False),  # whatever the option's name
        ({"size": "large"}, ("size", "x-large"), True, False),
        ({"size": "small"}, ("size", "large"), False, False),
        ({}, ("size", "large"), False, False),
        ({"size": "large", "color": "blue"}, "blue", True, True),
        ({"color": "navy blue"}, "blue", True, False),
        ({"volume": "12 fl oz"}, "1 fl oz", True, False),
        ({"size": "xx-large"}, "x-large", True, False),
    ],
)
def test_options(product: Any, goal: Any, chosen: dict[str, str], wanted: Any, compat: bool, strict: bool) -> None:
    wish = goal([wanted], attributes=("long lasting",))
    bought = product(attributes=("long lasting",))
    assert (score(bought, wish, chosen) == 1.0) == compat
    assert (score(bought, wish, chosen, compat=False) == 1.0) == strict


SAME = [
    ("1 fl oz", "1 Fl. Oz."),
    ("32gb", "32 GB"),
    ("1,000 ml", "1000 ml"),
    ("2.50 mm", "2.5 mm"),
    ("16 ounces", "16 ounce"),
    ("light grey", "gray, light"),
    ("3' x 5'", "3'x5'"),
    ("5 x 7", "5x7"),
    ("rot & weiß", "Weiß rot"),
    ("x-large", "X Large"),
    ("★", "★ "),
]
DIFFERENT = [
    ("1 fl oz", "12 fl oz"),
    ("1.2 fl oz", "12 fl oz"),
    ("1.5 ft", "5.1 ft"),
    ("x-large", "xx-large"),
    ("xlarge", "xxlarge"),
    ("large", "x-large"),
    ("xl", "xxl"),
    ("queen size storage bed with drawers, small", "queen size storage bed with drawers, large"),
    ("1000 mg", "1000 g"),
    ("1000 cm", "1000 mm"),
    ("2 pack of 12", "12 pack of 2"),
    ("3' x 5'", '3" x 5"'),
    ("3' x 5'", "5' x 3'"),
    ("-2.00 diopters", "2.00 diopters"),
    ("unscented", "scented"),
    ("xs", "x"),
    ("", "large"),
    ("★", "☆"),
]


@pytest.mark.parametrize(("one", "other"), [*SAME, *DIFFERENT])
def test_numbers_and_sizes_of_option_values_must_be_the_same(product: Any, goal: Any, one: str, other: str) -> None:
    same = (one, other) in SAME
    assert is_same_value(one, other) == is_same_value(other, one) == same
    bought, wish = product(attributes=("long lasting",)), goal([("size", one)], attributes=("long lasting",))
    assert (score(bought, wish, {"size": other}, compat=False) == 1) == same


def test_no_two_values_of_a_generated_option_are_the_same() -> None:
    for values in load_vocabulary().options.values():
        assert all(is_same_value(value, value) for value in values)
        assert not [pair for pair in itertools.combinations(values, 2) if is_same_value(*pair)]


@pytest.mark.parametrize(
    ("place", "met"),
    [
        ({"attributes": ("essential oil",)}, True),
        ({"attributes": ("oils, essential", "x")}, True),
        ({"attributes": ("essence",)}, False),
        ({"title": "Zenia ESSENTIAL OILS lotion"}, True),
        ({"bullets": ("with essential", "oils of lemon")}, True),
        ({"description": "Essential Oils"}, True),
        ({"description": "essential lemon oils"}, False),
    ],
)
def test_attributes(product: Any, goal: Any, place: dict[str, Any], met: bool) -> None:
    assert score(product(**place), goal(attributes=("essential oils",))) == (1.0 if met else 0.5)


def test_the_price_counts_like_a_wish_even_where_there_is_no_limit(product: Any, goal: Any) -> None:
    bought, wish = product(attributes=("long lasting",)), goal(price_upper=20.0)
    assert score(bought, wish, price=20.0) == 1.0
    assert score(bought, wish, price=20.01) == 0.5
    assert score(product(), goal(price_upper=1e6), price=900_000.0) == 0.5


@pytest.mark.parametrize(
    ("query", "category", "title", "wanted", "compat", "strict"),
    [
        ("body lotions", "other", "Zenia Lotion", "Zenia Lotion", 1.0, 1.0),
        ("other", "Beauty › Skin Care › Soap", "Zenia Lotion", "Zenia Lotion", 1.0, 1.0),
        ("other", "Beauty › Hair", "Zenia Lotion", "Zenia Lotion", 1.0, 1.0),
        ("other", "Beauty › Beauty", "Zenia", "Zenia a1 b1 c1 d1", 0.5, 0.5),
        ("other", "none", "Zenia", "Zenia a1 b1 c1", 1.0, 1.0),
        ("other", "none", "Zenia", "Zenia a1 b1 c1 d1 e1 f1 g1 h1 i1 j1", 0.1, 0.1),
        ("body lotions", "none", "Zenia", "Zenia a1 b1 c1 d1 e1 f1 g1 h1 i1 j1", 0.1, 1.0),
        ("body lotions", "none", "Corino", "Zenia Lotion", 0.0, 1.0),
        ("other", "none", "Corino", "Zenia Lotion", 0.0, 0.0),
        ("other", "none", "Corino", "the best 12", 0.5, 0.5),  # no nouns: as if a fifth were shared
    ],
)
def test_types(
    product: Any, goal: Any, query: str, category: str, title: str, wanted: str, compat: float, strict: float
) -> None:
    bought, wish = product(query=query, product_category=category, title=title), goal(title=wanted)
    assert match_type(bought, wish, nouns_by_rule).reward == compat
    assert match_type(bought, wish, nouns_by_rule, compat=False).reward == strict


def test_the_parts_have_webshops_names(product: Any, goal: Any) -> None:
    wish = goal(["large", "blue"], attributes=("long lasting", "dry skin"))
    verdict = judge(product(attributes=("dry skin",)), wish, price=10, chosen={"size": "large"}, nouns=nouns_by_rule)
    assert verdict.reward == 3 / 5
    assert verdict.components() == {
        "r_type": 1.0,
        "query_match": 1.0,
        "category_match": 1.0,
        "title_score": 1.0,
        "r_att": 0.5,
        "w_att": 0.4,
        "r_option": 0.5,
        "w_option": 0.4,
        "r_price": 1.0,
        "w_price": 0.2,
    }


COLOURS_WRITTEN_OUT = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream
    crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather
    indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha
    multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal
    rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise
    violet walnut wheat white wine yellow
"""
COLOUR_WORDS = COLOURS_WRITTEN_OUT.split()
"""In alphabetical order."""
NOUNS = {"zenia", "corino", "body", "lotion", "running", "shoes", "cream", "serum", "case"}
"""Of the titles below, by the rule, to which "cable" is an adjective."""


def first_colour(text: str) -> str:
    found = [colour for colour in COLOUR_WORDS if colour in text]
    return found[0] if found else text


# A second implementation, straight from the rules, with a table for the longest common subsequence.


def table_length(one: str, other: str) -> int:
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one, 1):
        for j, b in enumerate(other, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if a == b else max(table[i - 1][j], table[i][j - 1])
    return table[-1][-1]


def table_percent(one: str, other: str) -> int:
    return round(100 * (2 * table_length(one, other) / (len(one) + len(other)))) if one and other else 0


@functools.cache
def table_set_ratio(one: str, other: str) -> int:
    cleaned = [
        "".join(c if c.isalnum() or c == "_" else " " for c in text if not 128 <= ord(c) < 256).lower().split()
        for text in (one, other)
    ]
    first, second = set(cleaned[0]), set(cleaned[1])
    if not first or not second:
        return 0
    common = sorted(first & second)
    strings = [" ".join(common), *(" ".join(common + sorted(side - set(common))) for side in (first, second))]
    return max(table_percent(strings[a], strings[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def table_reward(product: Product, goal: Goal, price: float, chosen: dict[str, str]) -> float:
    def alike(one: str, other: str) -> bool:
        return table_set_ratio(one, other) > 85

    texts = [product.title.lower(), " ".join(product.bullets).lower(), product.description.lower()]
    points = 0
    for attribute in goal.attributes:
        points += any(alike(have, attribute) for have in product.attributes) or any(attribute in t for t in texts)
    for name, value in goal.options:
        wanted: str | tuple[str, str] = value if name is None else (name, value)
        for colour in COLOUR_WORDS:
            if colour in wanted:
                wanted = colour
                break
        points += any(alike(first_colour(have), str(wanted)) for have in chosen.values())
    points += price <= goal.price_upper
    paths = [{part.strip() for part in text.split("›")} for text in (product.product_category, goal.product_category)]
    have, want = ([w for w in t.lower().split() if w in NOUNS] for t in (product.title, goal.title))
    title = len(set(have) & set(want)) / len(want) if want else 0.2
    kind = 1.0 if product.query == goal.query or len(paths[0] & paths[1]) >= 2 or title > 0.2 else 0.5
    kind = {True: kind, title < 0.1: 0.1, title == 0: 0.0}[True]
    return points / (len(goal.attributes) + len(goal.options) + 1) * kind


VOCABULARY = "red wine dark light blue titanium large x-large 6.76 fl oz natural oil oils long lasting pack (2) café"
NAMES = "Zenia Corino Body Lotion Running Shoes the soft dark 12 large Cream Serum Case cable"
WORDS, TITLES = VOCABULARY.split(), NAMES.split()
QUERIES = ("body lotions", "shoes", "cables")
PATHS = ("Beauty › Skin › Lotions", "Beauty › Skin › Soap", "Beauty › Beauty", "Shoes › Skin")


def phrase(rng: random.Random, words: Sequence[str], low: int, high: int) -> str:
    return " ".join(rng.choices(words, k=rng.randint(low, high)))


@pytest.mark.slow
def test_rewards_of_ten_thousand_purchases_equal_the_tables(product: Any, goal: Any) -> None:
    rng, seen = random.Random(7), set()
    for _ in range(10_000):
        bought = product(
            title=phrase(rng, TITLES, 0, 6),
            query=rng.choice(QUERIES),
            product_category=rng.choice(PATHS),
            attributes=tuple(phrase(rng, WORDS, 1, 2) for _ in range(rng.randint(0, 3))),
            bullets=tuple(phrase(rng, WORDS, 1, 4) for _ in range(rng.randint(0, 2))),
            description=phrase(rng, WORDS, 0, 5).title(),
        )
        values = [phrase(rng, WORDS, 1, 3) for _ in range(rng.randint(0, 2))]
        wish = goal(
            [value if rng.random() < 0.5 else (rng.choice(("size", "color", "red")), value) for value in values],
            attributes=tuple(phrase(rng, WORDS, 1, 2) for _ in range(rng.randint(1, 3))),
            title=phrase(rng, TITLES, 0, 6),
            query=rng.choice(QUERIES),
            product_category=rng.choice(PATHS),
            price_upper=rng.choice((20.0, 1e6)),
        )
        pool = [*values, phrase(rng, WORDS, 1, 3)]
        chosen = {name: rng.choice(pool) for name in rng.sample(("size", "color", "scent"), rng.randint(0, 3))}
        price = rng.choice((10.0, 20.0, 30.0))
        reward = score(bought, wish, chosen, price=price)
        assert reward == table_reward(bought, wish, price, chosen)
        assert 0 <= score(bought, wish, chosen, price=price, compat=False) <= 1
        seen.add(reward)
    assert {0.0, 1.0} <= seen
    assert len(seen) > 15


SPACY_NOUNS = {title: tuple(words) for title, words in orjson.loads((DATA / "nouns.json").read_bytes())}
"""Titles, and what spaCy's en_core_web_sm 3.8.0 takes for nouns in them."""


@pytest.mark.parametrize(
    "title",
    [
        "Harlow & Finch Women's Waterproof Hiking Boots, Dark Brown, Size 8",
        "Kids' Adjustable Bike Helmet with Reflective Stickers",
        "Farmer's Choice Dried Apricots, No Added Sugar, 2 Pound",
        "Organic Green Tea Bags, Gluten Free and Sugar Free, Pack of 100",
        "women's casual loose fit linen shirt",
        "handmade ceramic coffee mug, large, blue",
    ],
)
def test_the_rule_reads_possessives_and_capitalised_adjectives_as_spacy_does(title: str) -> None:
    assert len(set(nouns_by_rule(title)) ^ set(SPACY_NOUNS[title])) <= 1
    assert "s" not in nouns_by_rule(title.replace("'", "’"))
    assert not [word for word in nouns_by_rule(title) if word.endswith("'s")]


def test_rewards_by_the_rule_seldom_differ_from_those_by_spacy(product: Any, goal: Any) -> None:
    pairs = list(itertools.permutations(SPACY_NOUNS, 2))
    differing = 0
    for bought, wanted in pairs:
        other, wish = product(title=bought, query="other", product_category="other"), goal(title=wanted)
        found = [match_type(other, wish, nouns).reward for nouns in (nouns_by_rule, SPACY_NOUNS.__getitem__)]
        differing += found[0] != found[1]
    assert differing <= 0.012 * len(pairs)


@pytest.mark.parametrize(
    ("one", "other", "percent"),
    [
        ("", "", 0),
        ("a", "", 0),
        ("!?", "★", 0),
        ("abc", "ABC!", 100),
        ("café crème", "CAF CRME", 100),  # characters 128 to 255 are dropped
        ("é", "è", 0),
        ("日本 語", "語 日本", 100),
        ("λόγος", "ΛΌΓΟΣ", 100),
        ("fl_oz", "fl oz", 80),
    ],
)
def test_similarity_of_empty_and_foreign_texts(one: str, other: str, percent: int) -> None:
    assert token_set_ratio(one, other) == token_set_ratio(other, one) == percent


def test_similarity_of_random_foreign_texts_equals_the_tables() -> None:
    rng = random.Random(3)
    characters = "abcdefg  éßñİĸﬁ日本語λς_★½٣й\u0301\u00a0\u2003-'(.7"
    for _ in range(2000):
        one, other = ("".join(rng.choices(characters, k=rng.randint(0, 25))) for _ in range(2))
        assert abs(token_set_ratio(one, other) - table_set_ratio(one, other)) <= 1  # halves may round either way
        assert (token_set_ratio(one, other) > ALIKE) == (table_set_ratio(one, other) > ALIKE)


class FakeTagger:
    def __call__(self, text: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(text=word, pos_="PROPN" if word.istitle() else "ADJ") for word in text.split()]


@pytest.fixture
def _spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("spacy")
    module.load = lambda name: {"en_core_web_sm": FakeTagger()}[name]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spacy", module)
    monkeypatch.setattr(nouns, "is_spacy_installed", lambda: True)
    nouns._spacy_tagger.cache_clear()


@pytest.mark.usefixtures("_spacy")
def test_spacy_finds_the_nouns_where_it_is_installed() -> None:
    assert find_tagger(NounTagger.SPACY)("Soft zenia Lotion") == ("soft", "lotion")
    assert find_tagger(NounTagger.RULE)("Soft zenia Lotion") == ("soft", "zenia", "lotion")


def test_official_data_requires_spacy_unless_the_rule_is_selected(
    official_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nouns, "is_spacy_installed", lambda: False)
    with pytest.raises(UsageError, match=r"spaCy cannot find nouns.*set the option nouns to rule"):
        WebShopEnv(data=str(official_folder))
    assert WebShopEnv(data=str(official_folder), nouns="rule").options.nouns is NounTagger.RULE
    assert WebShopEnv(products=80).options.nouns is NounTagger.RULE
    with pytest.raises(UsageError, match="spaCy cannot find nouns"):
        WebShopEnv(products=80, nouns="spacy")


@pytest.mark.usefixtures("_spacy")
def test_last_info_names_the_noun_tagger(official_folder: Path) -> None:
    for options, told in (({}, "spacy"), ({"nouns": "rule"}, "rule")):
        env = WebShopEnv(data=str(official_folder), **options)
        env.reset(options={"goal": 0})
        for action in ("search[lotion]", "click[b000aaaaa1]"):
            assert "nouns" not in env.step(action)[4]
        assert env.step("click[buy now]")[4]["nouns"] == told
