from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from agentrl.envs.webshop.records import Goal, GoalOption, Product


@pytest.fixture(scope="session")
def product() -> Callable[..., Product]:
    """Makes a product; what is not said is ordinary."""

    def make(**changes: Any) -> Product:
        facts: dict[str, Any] = {
            "asin": "B000000001",
            "title": "Zenia Body Lotion",
            "description": "",
            "bullets": (),
            "prices": (12.5,),
            "options": {},
            "attributes": (),
            "category": "beauty",
            "query": "body lotions",
            "product_category": "Beauty › Skin Care › Lotions",
            "image": "",
            "synthetic": None,
            "human": (),
        }
        return Product(**{**facts, **changes})

    return make


@pytest.fixture(scope="session")
def goal() -> Callable[..., Goal]:
    """Makes a goal; options as pairs or as values."""

    def make(options: Any = (), **changes: Any) -> Goal:
        pairs = [(None, option) if isinstance(option, str) else option for option in options]
        facts: dict[str, Any] = {
            "asin": "B000000001",
            "title": "Zenia Body Lotion",
            "category": "beauty",
            "query": "body lotions",
            "product_category": "Beauty › Skin Care › Lotions",
            "instruction": "i need lotion",
            "attributes": ("long lasting",),
            "price_upper": 1_000_000.0,
            "weight": 1.0,
        }
        return Goal(**{**facts, **changes}, options=tuple(GoalOption(*pair) for pair in pairs))

    return make


def official_rows() -> list[dict[str, Any]]:
    """Products in WebShop's own format, with what its files have in them."""
    row = {
        "asin": "B000AAAAA1",
        "name": "Zenia Body Lotion for Dry Skin",
        "full_description": "Rich & creamy <b>lotion</b>.",
        "small_description": ["Long lasting care", " For dry skin"],
        "pricing": "$12.5",
        "customization_options": {"Size": [{"value": " 6.76 Fl Oz "}, {"value": "1 fl oz"}], "Scent": None},
        "images": ["http://pictures/1.jpg", "http://pictures/2.jpg"],
        "category": "beauty",
        "query": " Body Lotions ",
        "product_category": "Beauty › Skin Care › Lotions",
        "brand": "dropped",
    }
    others: list[dict[str, Any]] = [
        {
            "asin": "B000AAAAA2",
            "pricing": "$3 to $4.25",
            "small_description": "One text",
            "customization_options": None,
        },
        {"asin": "nan"},
        {"asin": "B000AAAAA10"},
        {"asin": "B000AAAAA1", "name": "Again"},
        {
            "asin": "B000AAAAA3",
            "name": "Corino Running Shoes",
            "full_description": "Light & fast.",
            "small_description": ["Rubber sole", ""],
            "pricing": "",
            "category": "fashion",
            "query": "shoes",
            "product_category": "Shoes › Athletic › Running",
            "customization_options": {
                "Color": [{"value": "Red/White"}, {"value": "Features"}],
                "Fit": [{"value": "Wide"}, {"value": "M [40]"}],
            },
        },
    ]
    return [row, *({**row, **changes} for changes in others)]


SYNTHETIC = {
    "B000AAAAA1": {
        "attributes": ["long lasting", "dry skin"],
        "instruction": "find me long lasting lotion",
        "instruction_attributes": ["long lasting"],
    },
    "B000AAAAA3": {
        "attributes": ["wide"],
        "instruction": "find me shoes",
        "instruction_attributes": ["wide", "rubber"],
    },
}
HUMAN = {
    "B000AAAAA1": [
        {"instruction": "i want lotion.", "instruction_attributes": ["dry skin"], "instruction_options": ["1 fl oz"]},
        {"instruction": "skipped", "instruction_attributes": [], "instruction_options": []},
    ],
    "B000AAAAA2": [{"instruction": "cheap", "instruction_attributes": ["cheap"], "instruction_options": []}],
}


@pytest.fixture(scope="session")
def official_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with WebShop's files."""
    folder = tmp_path_factory.mktemp("official")
    (folder / "items_shuffle.json").write_bytes(orjson.dumps(official_rows()))
    (folder / "items_ins_v2.json").write_bytes(orjson.dumps(SYNTHETIC))
    (folder / "items_human_ins.json").write_bytes(orjson.dumps(HUMAN))
    return folder
