"""Clicks on generated pages; tests of the browser are skipped without Chromium."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator

import pytest
from agentrl.envs.web_clicks.chromium import NAMES, SHARED
from agentrl.envs.web_clicks.environment import HEIGHT, WIDTH, WebClicks
from agentrl.envs.web_clicks.pages import MIN_SIZE, PageKind, make_page
from PIL import Image

from agentrl.env.lookup import resolve_environment
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import ImagePart, TextPart, text_of

needs_chromium = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="Chromium is not installed")
_NAME = re.compile(r'data-name="([^"]+)"')
_PLACE = re.compile(r'data-role="(\w+)"[^>]*style="left:(-?\d+)px;top:(-?\d+)px')


@pytest.fixture
def world() -> Iterator[WebClicks]:
    made = WebClicks()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[None]:
    yield
    SHARED.close()


@pytest.mark.parametrize("kind", PageKind)
@pytest.mark.parametrize("size", [(WIDTH, HEIGHT), MIN_SIZE])
def test_pages_are_made_from_seeds_and_fit_their_size(kind: PageKind, size: tuple[int, int]) -> None:
    documents = set()
    for seed in range(60):
        page = make_page(kind, seed, *size)
        assert make_page(kind, seed, *size).document == page.document
        documents.add((page.goal, page.document))
        for role, left, top in _PLACE.findall(page.document):
            assert 0 <= int(left) < size[0] - 20, role
            assert 0 <= int(top) < size[1] - 20, role
        names = _NAME.findall(page.document)
        assert len(set(names)) == len(names), "a goal names one element"
    assert len(documents) == 60


def test_missing_chromium_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"web_clicks needs Chromium.*apt-get install chromium"):
        WebClicks()
    assert resolve_environment("web_clicks").shows_images({})
    assert not resolve_environment("web_clicks").shows_images({"observation": "text"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kinds": ["buton"]}, "unknown kind of page.*button"),
        ({"kinds": []}, "no kind of page"),
        ({"width": 100}, r"size of web_clicks' page is not valid: got 100 x 252"),
        ({"observation": "sound"}, "unknown observation of web_clicks"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        WebClicks(**options)  # type: ignore[arg-type]


@needs_chromium
@pytest.mark.slow
def test_a_screenshot_and_a_goal_are_shown_and_a_wrong_button_ends_without_a_reward(world: WebClicks) -> None:
    world.kinds = (PageKind.BUTTON,)
    (goal, image), info = world.reset(seed=3)
    assert isinstance(goal, TextPart)
    assert isinstance(image, ImagePart)
    assert str(info["goal"]) in goal.text
    assert Image.open(io.BytesIO(image.data)).size == (WIDTH, HEIGHT)
    buttons = {element.name: element for element in world.elements}
    assert [str(element) for element in world.elements] == image.alternative.splitlines()
    wrong = next(element for name, element in buttons.items() if name not in world.task.goal)
    for action in ("left", f"click({WIDTH}, 5)", "click(1, 2) click(3, 4)", "click(5.5, 6)", "click(-5, 6)"):
        shown, reward, terminated, truncated, info = world.step(action)
        assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
        assert "That is not a click on the page" in text_of(shown)
    *_, terminated, _, info = world.step(f"click({wrong.x}, {wrong.y})")
    assert (terminated, info["success"], info["valid"]) == (True, False, True)
    first, _ = world.reset(seed=3)
    assert first == (goal, image)
    found = buttons[world.task.final]
    assert world.step(f"I press it: click({found.x}, {found.y})")[1:3] == (1.0, True)


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("kind", PageKind)
def test_the_expert_solves_each_kind(world: WebClicks, kind: PageKind) -> None:
    world.kinds = (kind,)
    for seed in range(2):
        observation, _ = world.reset(seed=seed)
        expert, over, reward, keys = world.expert(), False, 0.0, set()
        while not over:
            keys.add(world.state_key())
            observation, reward, terminated, truncated, _ = world.step(expert.act(observation))
            over = terminated or truncated
        assert reward == 1.0
        assert len(keys) >= 1 + (kind not in (PageKind.BUTTON, PageKind.SHAPE, PageKind.TABS))


@needs_chromium
@pytest.mark.slow
def test_an_episode_whose_browser_ends_fails_and_the_next_one_starts_another(world: WebClicks) -> None:
    world.reset(seed=1)
    SHARED.close()
    with pytest.raises(EnvironmentFailure, match="browser of this episode has exited"):
        world.step("click(1, 1)")
    observation, _ = world.reset(seed=1)
    assert len(observation) == 2
