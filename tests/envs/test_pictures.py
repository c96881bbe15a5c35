from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from agentrl.envs.frozen_lake import SPEC as LAKE
from agentrl.envs.pictures import FIELD
from agentrl.envs.puzzles.maze import SPEC as MAZE
from agentrl.envs.puzzles.sokoban import SPEC as SOKOBAN
from PIL import Image

from agentrl.env import EnvironmentSpec
from agentrl.errors import UsageError
from agentrl.message import Content, ImagePart, TextPart, text_of
from agentrl.registry import Kind, lookup
from agentrl.testing import check_env

DRAWN = pytest.mark.parametrize("spec", [LAKE, SOKOBAN, MAZE], ids=lambda spec: spec.name)


def image_of(content: Content) -> ImagePart:
    (image,) = [part for part in content if isinstance(part, ImagePart)]
    return image


def make(spec: EnvironmentSpec, **options: Any) -> Any:
    return spec.make(**{**spec.options, **options})


@DRAWN
@pytest.mark.slow
def test_an_environment_with_pictures_keeps_every_rule(spec: EnvironmentSpec) -> None:
    report = check_env(spec, options={"observation": "image"}, episodes=3)
    assert report.passed, str(report)


@DRAWN
def test_pictures_stand_for_the_text_and_nothing_else_changes(spec: EnvironmentSpec) -> None:
    drawn, told = make(spec, observation="image"), make(spec)
    shown, text = drawn.reset(seed=3)[0], told.reset(seed=3)[0]
    assert shown[0].text.startswith("In the picture ")
    for action in ["left", "down", "no action", "right"]:
        assert image_of(shown).alternative == text[-len(image_of(shown).alternative) :]
        assert drawn.state_key() == told.state_key()
        (shown, *seen), (text, *known) = drawn.step(action), told.step(action)
        assert seen == known
        assert text_of(shown) == text
        if seen[1] or seen[2]:
            break


@DRAWN
def test_a_picture_has_one_field_per_letter_and_equal_bytes_for_equal_fields(spec: EnvironmentSpec) -> None:
    first, again, other = (make(spec, observation="image").reset(seed=seed)[0] for seed in (1, 1, 2))
    assert image_of(first).data == image_of(again).data != image_of(other).data
    rows = image_of(first).alternative.replace(" ", "").splitlines()
    pixels = np.asarray(Image.open(io.BytesIO(image_of(first).data)).convert("RGB"))
    assert pixels.shape == (FIELD * len(rows), FIELD * len(rows[0]), 3)
    looks = {}
    for y, row in enumerate(rows):
        for x, letter in enumerate(row):
            cell = pixels[y * FIELD : (y + 1) * FIELD, x * FIELD : (x + 1) * FIELD]
            assert (looks.setdefault(letter, cell) == cell).all()
    assert len({cell.tobytes() for cell in looks.values()}) == len(looks)


@DRAWN
def test_expert_solves_tasks_with_picture_observations(spec: EnvironmentSpec) -> None:
    env = make(spec, observation="image")
    observation, info = env.reset(seed=5)
    expert, done = env.expert(), False
    while not done:
        observation, _, terminated, truncated, info = env.step(expert.act(observation))
        done = terminated or truncated
    assert info["success"]


def test_what_is_said_comes_before_the_picture() -> None:
    env = make(LAKE, observation="image")
    env.reset(seed=0)
    observation = env.step("fly")[0]
    assert [type(part) for part in observation] == [TextPart, ImagePart]
    assert observation[0].text == (
        "'fly' is not an action, so nothing happened. An action is left or down or right or up, for example: left\n"
    )
    assert [type(part) for part in env.step("left")[0]] == [ImagePart]


def test_spec_reports_the_options_that_show_images() -> None:
    assert SOKOBAN.shows_images({"observation": "image"})
    assert not SOKOBAN.shows_images({})
    assert not lookup(Kind.ENVIRONMENT, "household").shows_images({})


def test_an_unknown_form_and_a_puzzle_without_pictures_are_rejected() -> None:
    with pytest.raises(UsageError, match="unknown observation of frozen_lake: got 'video', expected text or image"):
        make(LAKE, observation="video")
    with pytest.raises(UsageError, match="unknown observation of wordle: got 'image', expected text"):
        make(lookup(Kind.ENVIRONMENT, "wordle"), observation="image")
