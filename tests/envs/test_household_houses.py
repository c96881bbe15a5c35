"""Scenes, generated houses, splits and the expert."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable

import pytest
from agentrl.envs.household.engine import World
from agentrl.envs.household.environment import HouseholdEnv
from agentrl.envs.household.expert import HouseholdExpert
from agentrl.envs.household.generator import generate
from agentrl.envs.household.goals import TaskType
from agentrl.envs.household.manifest import HASHED_TASKS, build_manifest, first_observation
from agentrl.envs.household.options import MAX_STEPS, parse_options
from agentrl.envs.household.scenes import EXTENTS, HELD_OUT, MAX_SEARCH_COST, Size, layout_of, room_of, scenes
from agentrl.envs.household.spec import SPEC
from agentrl.envs.household.state import House
from agentrl.envs.household.tasks import SPLITS, UNSEEN, HouseholdTasks, row_of, rows_of, scenes_of
from agentrl.envs.household.texts import introduction, room_view
from agentrl.envs.household.vocabulary import CONTENTS, LAMP, LAMP_STANDS, Room
from agentrl.envs.manifests import load_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import UsageError

ALL_SCENES = [scene for room in Room for scene in scenes(room)]
POSSIBLE = [(scene, task_type) for task_type in TaskType for scene in ALL_SCENES if room_of(scene) in task_type.rooms]
houses = st.builds(
    lambda possible, seed, size: generate(*possible, seed, size),
    st.sampled_from(POSSIBLE),
    st.integers(0, 2**31),
    st.sampled_from(Size),
)


@pytest.mark.parametrize("size", Size)
def test_no_two_scenes_of_a_room_have_the_same_furniture(size: Size) -> None:
    for room in Room:
        assert len({layout_of(scene, size).types for scene in scenes(room)}) == 30


@pytest.mark.parametrize("size", Size)
def test_furniture_keeps_to_its_size_and_can_be_searched_in_time(size: Size) -> None:
    for scene in ALL_SCENES:
        layout = layout_of(scene, size)
        low, high = EXTENTS[size].receptacles[layout.room]
        assert low <= len(layout.types) <= high
        assert layout.search_cost <= MAX_SEARCH_COST
        assert list(layout.types) == sorted(layout.types)


def test_some_neighbours_share_a_pose() -> None:
    poses = [layout_of(scene, Size.FULL).poses for scene in ALL_SCENES]
    shared = sum(count for layout in poses for count in Counter(layout).values() if count > 1)
    assert 0.1 < shared / sum(map(len, poses)) < 0.25


@given(houses)
@settings(max_examples=150, deadline=None)
def test_everything_lies_where_it_can_and_the_task_is_still_to_do(house: House) -> None:
    for kind, place in zip(house.object_types, house.places, strict=True):
        receptacle = house.receptacle_types[place]
        assert receptacle in LAMP_STANDS if kind == LAMP else kind in CONTENTS[receptacle]
    assert list(house.object_types) == sorted(house.object_types)
    assert len(set(house.objects)) == len(house.objects)
    assert max(Counter(house.object_types).values()) <= 3
    assert not World(house).solved


@given(houses)
@settings(max_examples=200, deadline=None)
def test_the_expert_solves_every_house_through_its_text(house: House) -> None:
    world, expert = World(house), HouseholdExpert()
    observation = world.introduction()
    for _ in range(MAX_STEPS):
        if world.solved:
            break
        observation = world.step(expert.act(observation)) or "Nothing happens."
    assert world.solved, house.goal.text


@given(houses, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_experts_mistakes_change_nothing(house: House, rng: random.Random) -> None:
    world, expert = World(house), HouseholdExpert()
    observation = world.introduction()
    made = 0
    while not world.solved:
        action = expert.act(observation)
        if (mistake := expert.mistake(rng)) is not None:
            before = world.state.to_plain()
            assert world.step(mistake) is None
            assert world.state.to_plain() == before
            made += 1
        observation = world.step(action) or "Nothing happens."
    assert made > 0
    assert HouseholdExpert().mistake(rng) is None


@pytest.mark.parametrize("put_syntax", ["move", "put"])
@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen", "test_unseen"])
@pytest.mark.parametrize("size", Size)
def test_the_expert_solves_the_evaluation_splits(size: Size, split: str, put_syntax: str) -> None:
    env = HouseholdEnv(size=size, put_syntax=put_syntax)
    steps = []
    for row in rows_of(split)[:140]:
        observation, _ = env.reset(options={"task_id": row.task_id})
        expert, terminated, truncated, taken = env.expert(), False, False, 0
        while not (terminated or truncated):
            observation, reward, terminated, truncated, info = env.step(expert.act(observation))
            taken += 1
        assert (reward, terminated, info["success"], info["task_type"]) == (1.0, True, True, row.task_type.value)
        steps.append(taken)
    assert sum(steps) / len(steps) < {"tiny": 8, "small": 8.5, "medium": 9, "full": 10}[size]


def test_expert_without_a_goal_or_path_raises() -> None:
    with pytest.raises(UsageError, match="states no household goal"):
        HouseholdExpert().act("Welcome.")
    with pytest.raises(UsageError, match="reads text only"):
        HouseholdExpert().act(())
    expert = HouseholdExpert()
    assert expert.act(introduction(room_view(["bed 1", "desk 1"]), "put a book in bed")) == "go to desk 1"
    assert expert.act("You arrive at desk 1. On the desk 1, you see nothing.") == "go to bed 1"
    with pytest.raises(UsageError, match="searched everywhere"):
        expert.act("You arrive at bed 1. On the bed 1, you see nothing.")


@pytest.mark.parametrize(
    ("split", "counts"),
    [("valid_seen", [35, 13, 27, 16, 25, 24]), ("valid_unseen", [24, 18, 31, 23, 21, 17])],
)
def test_evaluation_splits_have_the_numbers_of_the_original(split: str, counts: list[int]) -> None:
    by_type = Counter(row.task_type for row in rows_of(split))
    assert [by_type[task_type] for task_type in TaskType] == counts


def test_the_test_split_is_ten_times_the_unseen_validation_split() -> None:
    test, valid = (Counter(row.task_type for row in rows_of(split)) for split in ("test_unseen", "valid_unseen"))
    assert test == {task_type: 10 * count for task_type, count in valid.items()}
    assert len(rows_of("test_unseen")) == 1340


@pytest.mark.parametrize(("room", "tasks"), [("kitchen", 697), ("living", 193), ("bedroom", 193), ("bathroom", 257)])
def test_the_test_split_stays_large_in_one_room(room: str, tasks: int) -> None:
    assert len(HouseholdTasks("test_unseen", parse_options(rooms=[room]))) == tasks


def test_any_range_of_tasks_has_the_proportions_of_its_split() -> None:
    whole, part = (Counter(row.task_type for row in rows) for rows in (rows_of("train"), rows_of("train")[:100]))
    for task_type in TaskType:
        assert abs(part[task_type] - 100 * whole[task_type] / len(rows_of("train"))) <= 2


def test_unseen_rooms_are_in_no_other_split() -> None:
    used = {split: {row.scene for row in rows_of(split)} for split in SPLITS}
    held_out = {scene for room in Room for scene in HELD_OUT[room]}
    assert used["valid_unseen"] == used["test_unseen"] == held_out
    assert held_out >= {10, 219, 308, 424}
    assert used["train"] == set(ALL_SCENES) - held_out
    assert used["valid_seen"] <= used["train"]
    for size in Size:
        furniture = {split: {layout_of(scene, size).types for scene in used[split]} for split in SPLITS}
        assert not any(furniture[split] & furniture["train"] for split in UNSEEN)


def test_no_task_is_in_two_splits() -> None:
    seeds = [{row.seed for row in rows_of(split)} for split in SPLITS]
    assert sum(map(len, seeds)) == len(set.union(*seeds)) == sum(len(rows_of(split)) for split in SPLITS)
    unseen = set(map(first_observation, rows_of("valid_unseen")))
    assert not unseen & set(map(first_observation, rows_of("train")[:2000]))


@pytest.mark.parametrize("size", Size)
def test_no_house_is_in_both_unseen_splits_or_twice_in_one(size: Size) -> None:
    rows = [row for split in UNSEEN for row in rows_of(split)]
    houses_seen = {json.dumps(generate(row.scene, row.task_type, row.seed, size).to_plain()) for row in rows}
    assert len(houses_seen) == len(rows) == 134 + 1340


def test_the_manifest_writes_out_only_splits_that_are_hashed_whole() -> None:
    for described in load_manifest("agentrl.envs.household")["splits"].values():
        assert described["hashed_tasks"] == min(described["tasks"], HASHED_TASKS)
        assert ("rows" in described) == (described["hashed_tasks"] == described["tasks"])


def test_the_shipped_manifest_is_what_the_code_makes() -> None:
    assert build_manifest() == load_manifest("agentrl.envs.household")


def test_task_types_and_rooms_choose_tasks() -> None:
    options = parse_options(task_types=["look_at_obj_in_light", "pick_heat_then_place_in_recep"], rooms=["bedroom"])
    tasks = HouseholdTasks("valid_unseen", options)
    assert {tasks[i].type for i in range(len(tasks))} == {"look_at_obj_in_light"}
    assert {room_of(row.scene) for row in tasks.rows} == {Room.BEDROOM}


def test_a_task_names_its_row() -> None:
    task = SPEC.tasks("valid_unseen", size="tiny")[17]
    row = row_of(task.id)
    assert (task.id, task.environment, task.seed) == ("valid_unseen-17", "household", row.seed)
    assert row.scene in scenes_of("valid_unseen", row.task_type)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rows_of("test"), "no split of this name: got test"),
        (lambda: row_of("valid_unseen-134"), "no such household task.*valid_unseen-133"),
        (lambda: row_of("nonsense"), "no such household task"),
        (lambda: generate(1, TaskType.LOOK, 0, Size.TINY), "scene 1 allows no look_at_obj_in_light task"),
        (lambda: parse_options(size="tyni"), "unknown household size.*Did you mean 'tiny'"),
        (lambda: parse_options(rooms="kitchen"), "household room is not a list"),
        (lambda: parse_options(rooms=["bathroom"], task_types=["look_at_obj_in_light"]), "allow none of these"),
        (lambda: parse_options(max_steps=0), "max_steps is too small"),
    ],
)
def test_wrong_requests_say_what_is_wrong(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
