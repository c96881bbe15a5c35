from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
from agentrl.envs.webshop.environment import WebShopEnv
from agentrl.envs.webshop.spec import SPEC

from agentrl.errors import UsageError
from agentrl.message import ImagePart, TextPart

PICTURE = b"\xff\xd8 a picture"
SCRIPT = ("search[long lasting lotion]", "click[b000aaaaa1]", "click[features]", "click[< prev]", "click[buy now]")


@pytest.fixture
def play(official_folder: Path, tmp_path: Path) -> Any:
    """Buys the lotion, whose first image stands at an address; gives what was shown."""

    def run(address: str, **options: Any) -> list[Any]:
        folder = tmp_path / "shop"
        shutil.copytree(official_folder, folder)
        rows = [{**row, "images": [address]} for row in orjson.loads((folder / "items_shuffle.json").read_bytes())]
        (folder / "items_shuffle.json").write_bytes(orjson.dumps(rows))
        (folder / "lotion.jpg").write_bytes(PICTURE)
        env = WebShopEnv(data=str(folder), nouns="rule", max_steps=100, **options)
        goal = next(i for i in range(len(env.goals)) if env.shop.goal(env.goals, i).asin == "B000AAAAA1")
        shown = [env.reset(options={"goal": goal})[0], *(env.step(action)[0] for action in SCRIPT)]
        assert not options or all(env.observation_space.contains(content) for content in shown)
        return shown

    return run


@pytest.mark.parametrize("address", ["lotion.jpg", "file://lotion.jpg"])
def test_a_products_page_comes_with_its_picture(play: Any, address: str) -> None:
    shown = play(address, pictures=True)
    assert [len(content) for content in shown] == [1, 1, 2, 1, 2, 1]
    text, picture = shown[2]
    assert "Zenia Body Lotion" in text.text
    assert picture == ImagePart(data=PICTURE, media_type="image/jpeg")
    assert picture.alternative == "[picture of Zenia Body Lotion for Dry Skin]"


@pytest.mark.parametrize("address", ["https://example.com/lotion.jpg", "missing.jpg", "items_human_ins.json", ""])
def test_pages_without_a_picture_are_text(play: Any, address: str) -> None:
    told = play(address, pictures=True)
    assert all([type(part) for part in content] == [TextPart] for content in told)


def test_pictures_are_shown_on_demand(play: Any) -> None:
    assert all(isinstance(content, str) for content in play("lotion.jpg"))
    assert SPEC.shows_images({"pictures": True})
    assert not SPEC.shows_images({})


@pytest.mark.parametrize("options", [{}, {"data": "here", "observation": "html"}])
def test_pictures_need_files_and_text(options: dict[str, str], tmp_path: Path) -> None:
    if "data" in options:
        options = {**options, "data": str(tmp_path)}
    with pytest.raises(UsageError, match="webshop has no pictures to show with these options"):
        WebShopEnv(pictures=True, **options)
