"""Products, goals and their order: WebShop's files and the generated catalogue."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from agentrl.envs.manifests import load_manifest
from agentrl.envs.webshop import json_rows
from agentrl.envs.webshop import shop as shop_module
from agentrl.envs.webshop.analysis import term_of, words_of
from agentrl.envs.webshop.cache import cache_folder, made_folder
from agentrl.envs.webshop.generator import FAMILY, generate_products
from agentrl.envs.webshop.goals import GoalKind, Goals, make_goals, price_limit, purchase_price
from agentrl.envs.webshop.json_rows import read_json_members, read_json_rows
from agentrl.envs.webshop.manifest import build_manifest
from agentrl.envs.webshop.official import products_of, read_products
from agentrl.envs.webshop.options import GENERATED_PRODUCTS, parse_options
from agentrl.envs.webshop.records import Product
from agentrl.envs.webshop.reward import ALIKE, token_set_ratio
from agentrl.envs.webshop.shop import CatalogueSource, open_shop
from agentrl.envs.webshop.tables import Texts
from agentrl.envs.webshop.tasks import SPLITS, WebShopTasks, goal_number, split_goals
from agentrl.envs.webshop.vocabulary import load_vocabulary
from support.waiting import PATIENCE_S

from agentrl.errors import UsageError


def test_rows_are_read_as_webshop_reads_them(official_folder: Path) -> None:
    lotion, other, shoes = read_products(official_folder, None)
    assert (lotion.query, lotion.prices, lotion.price_tag) == ("body lotions", (12.5,), "$12.5")
    assert lotion.options == {"size": ("6.76 fl oz", "1 fl oz")}
    assert (lotion.attributes, lotion.image) == (("long lasting", "dry skin"), "http://pictures/1.jpg")
    assert (other.prices, other.bullets, other.options) == ((3.0, 4.25), ("One text",), {})
    assert other.attributes == ("DUMMY_ATTR",)
    assert (shoes.prices, shoes.price_tag) == ((100.0,), "$100.0")
    assert shoes.options == {"color": ("red | white", "features"), "fit": ("wide", "m [40]")}
    assert [product.asin for product in read_products(official_folder, 1)] == [lotion.asin]


def test_a_product_survives_its_plain_form(official_folder: Path) -> None:
    for product in read_products(official_folder, None):
        assert Product.from_plain(orjson.loads(orjson.dumps(product.to_plain()))) == product


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_rows_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(json_rows, "CHUNK", chunk)
    rows = [{"a": "] ,[{é"}, {}, {"b": [1.5, {"c": None}]}]
    for number, text in enumerate((json.dumps(rows), json.dumps(rows, indent=2, ensure_ascii=False), " [ ] ")):
        file = tmp_path / f"{number}.json"
        file.write_text(text, encoding="utf-8")
        assert list(read_json_rows(file)) == json.loads(text)
    named = {"a": rows, 'b"': {}, "c": []}
    for text in (json.dumps(named), json.dumps(named, indent=1), "{ }"):
        (tmp_path / "named.json").write_text(text)
        assert dict(read_json_members(tmp_path / "named.json")) == json.loads(text)


@pytest.mark.parametrize("text", ["", "{}", '[{"a": 1}', '[{"a": 1} {"b": 2}]', '[{"a": 1}, 3]', '[{"a": '])
def test_a_file_that_is_no_array_of_objects_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UsageError, match="expected a JSON array of objects"):
        list(read_json_rows(tmp_path / "rows.json"))


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1', '{"a" 1}', '{"a": 1 "b": 2}', '{"a": '])
def test_a_file_that_is_no_object_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UsageError, match="expected a JSON object"):
        list(read_json_members(tmp_path / "rows.json"))


def test_a_few_products_are_read_without_the_rest(
    official_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "CHUNK", 64)
    (tmp_path / "items_shuffle.json").write_text(
        (official_folder / "items_shuffle.json").read_text()[:-1] + ", what follows is broken"
    )
    (tmp_path / "items_human_ins.json").write_text((official_folder / "items_human_ins.json").read_text())
    few = list(read_products(tmp_path, 2))
    assert [(product.asin, len(product.human)) for product in few] == [("B000AAAAA1", 2), ("B000AAAAA2", 1)]
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_products(tmp_path, None))


def test_every_module_that_shapes_the_tables_is_in_their_key() -> None:
    folder, waiting, found = Path(shop_module.__file__).parent, ["shop"], set[str]()
    while waiting:
        module = waiting.pop()
        if module not in found | {"cache"}:  # where the tables are, not what they hold
            found.add(module)
            waiting += re.findall(r"^from \.(\w+) import", (folder / f"{module}.py").read_text(), re.MULTILINE)
    assert found == set(shop_module.SHAPING)


def test_another_version_of_the_code_makes_other_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    source = CatalogueSource(data=None, products=80)
    key = source.key
    monkeypatch.setattr(shop_module, "_code", lambda: "another")
    assert source.key != key


def test_a_folder_without_the_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no goals in"):
        list(read_products(tmp_path, None))
    (tmp_path / "items_human_ins.json").write_text('{"B0": []}')
    with pytest.raises(UsageError, match=r"expected a file items_shuffle"):
        list(read_products(tmp_path, None))
    with pytest.raises(UsageError, match="data folder does not exist"):
        parse_options(data=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"category": None}, None),
        ({"asin": 7}, "a product of WebShop's files has no id"),
        ({"query": None}, "product B0 of WebShop's files cannot be read: got AttributeError"),
        ({"name": ...}, "product B0 of WebShop's files cannot be read: got KeyError: 'name'"),
    ],
)
def test_a_row_of_another_form_is_named(change: dict[str, Any], message: str | None) -> None:
    fields = ["name", "full_description", "small_description", "category", "query", "product_category"]
    row = {"asin": "B0", **dict.fromkeys(fields, "words"), **change}
    row = {name: value for name, value in row.items() if value is not ...}
    if message is None:
        assert len(list(products_of([row], {}, {}))) == 1
        return
    with pytest.raises(UsageError, match=message):
        list(products_of([row], {}, {}))


@pytest.mark.parametrize("text", ["<html>", "[]", "", '{"B0": {'])
def test_annotations_that_are_no_object_are_named(official_folder: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(official_folder, tmp_path / "data")
    (tmp_path / "data" / "items_human_ins.json").write_text(text)
    with pytest.raises(UsageError, match=r"items_human_ins\.json cannot be read.*a JSON object"):
        list(read_products(tmp_path / "data", None))


def test_a_broken_table_names_its_file_and_the_cure(tmp_path: Path) -> None:
    Texts.save(tmp_path, "words", [b"one", b"two"])
    for content in (b"", (tmp_path / "words.bytes.npy").read_bytes()[:-2]):
        (tmp_path / "words.bytes.npy").write_bytes(content)
        with pytest.raises(UsageError, match=rf"words\.bytes\.npy cannot be read.*[Dd]elete {tmp_path}"):
            Texts(tmp_path, "words")


def test_human_goals_are_annotations_that_have_attributes(official_folder: Path) -> None:
    shop = open_shop(CatalogueSource(data=official_folder, products=None))
    goals = shop.goals(GoalKind.HUMAN)
    told = {shop.goal(goals, i).asin: shop.goal(goals, i) for i in range(len(goals))}
    assert len(goals) == 2
    lotion = told["B000AAAAA1"]
    assert lotion.instruction.startswith("i want lotion, and price lower than ")
    assert lotion.attributes == ("dry skin",)
    assert [tuple(option) for option in lotion.options] == [(None, "1 fl oz")]
    assert lotion.weight == 1.0


def test_synthetic_goals_are_all_choices_of_options(official_folder: Path) -> None:
    shop = open_shop(CatalogueSource(data=official_folder, products=None))
    goals = shop.goals(GoalKind.SYNTHETIC)
    told = [shop.goal(goals, i) for i in range(len(goals))]
    shoes = {goal.instruction.partition(", and price")[0] for goal in told if goal.asin == "B000AAAAA3"}
    assert shoes == {
        f"find me shoes with color: {color}, and fit: {fit}"
        for color in ("red | white", "features")
        for fit in ("wide", "m [40]")
    }
    lotion = next(goal for goal in told if goal.asin == "B000AAAAA1")
    assert lotion.options[0].name == "size"
    assert lotion.weight == pytest.approx(1 / 2)  # two goals ask for "long lasting"
    assert {goal.price_upper for goal in told if goal.asin == "B000AAAAA3"} <= {120.0, 130.0, 140.0}


def test_goals_are_shuffled_as_webshop_shuffles_them(product: Callable[..., Product], tmp_path: Path) -> None:
    annotated = [(f"i want {i}", ("a",), ()) for i in range(5)]
    products = [Product.from_plain({**product(asin=f"B{i}").to_plain(), "human": [annotated[i]]}) for i in range(5)]
    make_goals(products, GoalKind.HUMAN, tmp_path)
    goals = Goals(GoalKind.HUMAN, tmp_path)
    assert goals.products.tolist() == [2, 0, 3, 4, 1]  # as random.seed(233) and random.shuffle leave 0 to 4


def test_prices_depend_on_the_product_only(product: Callable[..., Product]) -> None:
    ranged = product(prices=(10.0, 20.0))
    assert 10 <= purchase_price(ranged) <= 20
    assert purchase_price(ranged) == purchase_price(product(prices=(10.0, 20.0), title="other"))
    assert purchase_price(ranged) != purchase_price(product(prices=(10.0, 20.0), asin="B000000002"))
    limits = {price_limit(product(prices=(25.0,), asin=f"B{i}"), 0) for i in range(100)}
    assert limits == {40.0, 50.0, 60.0}  # the larger of two of 30, 40, 50, 60
    assert price_limit(product(prices=(985.0,)), 0) == 1_000_000.0
    assert price_limit(product(prices=(965.0,)), 0) in {980.0, 990.0}


def test_official_splits_are_the_published_ones() -> None:
    assert split_goals("test", 12087) == range(500)
    assert split_goals("valid", 12087) == range(500, 1500)
    assert split_goals("train", 12087) == range(1500, 12087)
    assert goal_number("train-0", 6910) == 1500


@pytest.mark.parametrize("goals", [6, 10, 100, 2999, 3000, 12087])
def test_splits_share_no_goal(goals: int) -> None:
    ranges = [split_goals(split, goals) for split in SPLITS]
    assert sorted(number for numbers in ranges for number in numbers) == list(range(goals))


def test_no_two_splits_of_the_generated_catalogue_want_the_same_product() -> None:
    options = parse_options(products=300)
    shop = open_shop(CatalogueSource(data=None, products=300))
    goals = shop.goals(GoalKind.HUMAN)
    wanted = [{shop.goal(goals, task.seed).asin for task in WebShopTasks(split, options)} for split in SPLITS]
    assert sum(map(len, wanted)) == len(set.union(*wanted)) == len(goals)


@pytest.mark.parametrize("task_id", ["test-500000", "train", "trial-3", "valid--1"])
def test_unknown_tasks_are_rejected(task_id: str) -> None:
    with pytest.raises(UsageError, match="no such webshop task"):
        goal_number(task_id, 5381)
    with pytest.raises(UsageError, match="no split of this name"):
        split_goals("trial", 10)


def test_other_words_of_instructions_do_not_occur_in_titles() -> None:
    words = load_vocabulary()
    types = {kind.name: kind.also for kind in words.types}
    for category, attributes in words.attributes.items():
        titles = terms(*attributes, *words.lines, *(kind.name for kind in words.types if kind.category == category))
        assert not terms(*(other for others in attributes.values() for other in others)) & titles
    assert not terms(*(other for others in types.values() for other in others)) & terms(*types)


def terms(*texts: str) -> set[str]:
    found = (term_of(word) for text in texts for word in words_of(text))
    return {term for term in found if term is not None}


def test_no_two_phrases_of_the_vocabulary_can_be_mistaken() -> None:
    words = load_vocabulary()
    for sayings in [
        {kind.name: kind.also for kind in words.types},
        *words.attributes.values(),
        *words.options.values(),
    ]:
        phrases = [phrase for text, others in sayings.items() for phrase in (text, *others)]
        assert len(phrases) == len(set(phrases))
    for attributes in words.attributes.values():
        assert not [pair for pair in itertools.combinations(attributes, 2) if token_set_ratio(*pair) > ALIKE]


def test_an_overpriced_copy_is_no_goal_and_may_cost_too_much() -> None:
    catalogue = list(generate_products(7 * 40))
    for number in range(0, len(catalogue), FAMILY):
        family = catalogue[number : number + FAMILY]
        (copy,) = (product for product in family if not product.human)
        (original,) = (product for product in family if product.human and same_but_for_the_price(copy, product))
        assert max(copy.prices) > max(price_limit(original, 0), original.prices[0] + 30)


def same_but_for_the_price(one: Product, other: Product) -> bool:
    return (one.title, one.options, one.attributes) == (other.title, other.options, other.attributes)


@pytest.mark.slow
def test_manifest_equals_the_code() -> None:
    manifest = load_manifest("agentrl.envs.webshop")
    assert manifest == build_manifest()
    assert manifest["products"] == GENERATED_PRODUCTS >= 5000
    assert len(manifest["categories"]) == 5


def test_a_folder_is_made_once_and_never_seen_half_made(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        assert not (tmp_path / "made").exists()
        (folder / "file").write_text("whole")

    assert (made_folder(tmp_path / "made", make) / "file").read_text() == "whole"
    made_folder(tmp_path / "made", lambda _: pytest.fail("built again"))
    with pytest.raises(ZeroDivisionError):
        made_folder(tmp_path / "broken", lambda _: 1 / 0)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_folder_that_another_process_made_first_is_used(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "file").write_text("ours")
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "file").write_text("theirs")

    assert (made_folder(tmp_path / "made", make) / "file").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_unwritable_cache_error_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written.*AGENTRL_CACHE to a writable folder"):
        made_folder(tmp_path / "file" / "made", lambda _: None)
    monkeypatch.delenv("AGENTRL_CACHE")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    with pytest.raises(UsageError, match=r"no home folder.*AGENTRL_CACHE to a writable folder"):
        cache_folder()


SCRIPT = """
from agentrl.envs.webshop.shop import CatalogueSource, open_shop
shop = open_shop(CatalogueSource(data=None, products=80))
print([shop.product(int(row)).title for row in shop.search(["lotion"], "")[:3]])
"""


@pytest.mark.slow
def test_processes_that_make_a_shop_at_once_see_the_same() -> None:
    command = [sys.executable, "-c", SCRIPT]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate(timeout=PATIENCE_S)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert first == second
    assert first.count("Body Lotion") == 3
