"""ALFWorld's game files in the household engine: reading, splits, filters, episodes, errors."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.household.alfworld.data import OFFICIAL_SIZES, SPLITS, VARIABLE, Games, find_games
from agentrl.envs.household.alfworld.environment import AlfworldEnv, make_alfworld
from agentrl.envs.household.alfworld.game_file import load_house
from agentrl.envs.household.alfworld.generate import write_games
from agentrl.envs.household.alfworld.oddities import make_odd
from agentrl.envs.household.alfworld.problem import read_house
from agentrl.envs.household.alfworld.spec import SPEC
from agentrl.envs.household.alfworld.tasks import AlfworldTasks
from agentrl.envs.household.alfworld.writing import problem_of, write_game
from agentrl.envs.household.engine import World
from agentrl.envs.household.generator import generate
from agentrl.envs.household.goals import TaskType
from agentrl.envs.household.scenes import Size
from agentrl.envs.household.state import House
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cli import main
from agentrl.env import Isolation
from agentrl.errors import UsageError

PROBLEM = """
;; as the published problems are laid out: kinds as objects, distances, things that no rule is about
(define (problem plan_trial)
    (:domain alfred)
    (:metric minimize (totalCost))
    (:objects
        agent1 - agent
        Mug - object
        MugType - otype
        SinkBasinType - rtype
        Mug_bar__plus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00 - object
        Mug_bar__minus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00 - object
        loc_bar__minus_1_bar_2_bar_0_bar_30 - location
        )
    (:init
        (= (totalCost) 0)
        (canContain SinkBasinType MugType)
        (canContain CabinetType MugType)
        (receptacleType Sink_bar__plus_00_bar__plus_01_bar_SinkBasin SinkBasinType)
        (receptacleType Cabinet_bar__plus_00_bar__plus_01 CabinetType)
        (receptacleType Cabinet_bar__plus_00_bar__plus_02 CabinetType)
        (openable Cabinet_bar__plus_00_bar__plus_01)
        (objectType Mug_bar__plus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00 MugType)
        (objectType Mug_bar__minus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00 MugType)
        (objectType Window_bar__plus_00_bar__plus_01 WindowType)
        (isReceptacleObject Mug_bar__plus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00)
        (pickupable Mug_bar__plus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00)
        (cleanable Mug_bar__plus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00)
        (atLocation agent1 loc_bar_0_bar_0_bar_0_bar_30)
        (inReceptacle Mug_bar__plus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00
            Cabinet_bar__plus_00_bar__plus_02)
        (inReceptacle Mug_bar__minus_00_dot_10_bar__plus_00_dot_95_bar__minus_01_dot_00
            Sink_bar__plus_00_bar__plus_01_bar_SinkBasin)
        (= (distance loc_bar_1 loc_bar_2) 11)
        (receptacleAtLocation Sink_bar__plus_00_bar__plus_01_bar_SinkBasin loc_bar__minus_1_bar_2_bar_0_bar_30)
        (receptacleAtLocation Cabinet_bar__plus_00_bar__plus_01 loc_bar_3_bar_3_bar_0_bar_30)
        (receptacleAtLocation Cabinet_bar__plus_00_bar__plus_02 loc_bar_3_bar_3_bar_0_bar_30)
        (objectAtLocation Window_bar__plus_00_bar__plus_01 loc_bar_9_bar_9_bar_0_bar_30)
        (objectAtLocation Cabinet_bar__plus_00_bar__plus_01 loc_bar_3_bar_3_bar_0_bar_30)
        )
    (:goal
        (and
            (exists (?r - receptacle)
                (exists (?o - object)
                    (and
                        (cleanable ?o)
                        (objectType ?o MugType)
                        (receptacleType ?r CabinetType)
                        (isClean ?o)
                        (inReceptacle ?o ?r)
                    )
                )
            )
        )
    )
)
"""

POSSIBLE = [(1, task_type) for task_type in TaskType if task_type is not TaskType.LOOK] + [(201, TaskType.LOOK)]
houses = st.builds(
    lambda possible, seed, size: generate(*possible, seed, size),
    st.sampled_from(POSSIBLE),
    st.integers(0, 2**31),
    st.sampled_from(Size),
)


@pytest.fixture
def house() -> House:
    return generate(3, TaskType.HEAT, 5, Size.TINY)


def change(file: Path, **values: Any) -> Path:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return file


def test_a_problem_of_the_published_layout_is_read() -> None:
    house = read_house(PROBLEM, goal_text="clean some mug and put it in cabinet", scene=7)
    assert house.receptacles == ("cabinet 2", "cabinet 1", "sinkbasin 1")
    assert house.objects == ("mug 2", "mug 1", "window 1")
    assert (house.goal.task_type, house.goal.object_type, house.goal.target_type) == (TaskType.CLEAN, "mug", "cabinet")
    world = World(house)
    assert world.introduction().endswith(
        "you see a cabinet 2, a cabinet 1, and a sinkbasin 1.\n\nYour task is to: clean some mug and put it in cabinet."
    )
    assert world.step("go to cabinet 1") == "You arrive at cabinet 1. On the cabinet 1, you see a mug 1."
    assert [command for command in world.admissible() if "cabinet 2" in command] == [
        "examine cabinet 2",
        "open cabinet 2",
    ]
    assert world.step("take mug 1 from cabinet 1") == "You pick up the mug 1 from the cabinet 1."
    assert world.step("go to sinkbasin 1") == "You arrive at sinkbasin 1. On the sinkbasin 1, you see a mug 2."
    assert world.step("clean mug 1 with sinkbasin 1") == "You clean the mug 1 using the sinkbasin 1."
    assert world.step("examine mug 1") == "This is a normal mug 1. In it, you see nothing."
    assert world.step("go to cabinet 2") == "You arrive at cabinet 2. The cabinet 2 is closed."
    assert not world.solved
    assert world.step("move mug 1 to cabinet 1") == "You move the mug 1 to the cabinet 1."
    assert world.solved


@given(made=houses, odd=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back(made: House, odd: bool) -> None:
    house = make_odd(made, 0) if odd else made
    read = read_house(problem_of(house), goal_text=house.facts().goal_text, scene=house.scene)
    accepts = {kind: things for kind, things in house.facts().accepts.items() if things}
    assert read.facts() == replace(house.facts(), accepts=accepts)
    assert read == replace(house, places=(), stated=read.stated, goal=read.goal)
    assert read.goal == replace(house.goal, template=0)
    assert House.from_plain(json.loads(json.dumps(read.to_plain()))) == read


def test_the_splits_are_those_of_the_folder_and_share_nothing(alfworld_data: Path) -> None:
    ids = {split: [task.options["game"] for task in AlfworldTasks(split)] for split in SPLITS}
    assert all(len(games) == 12 and games == sorted(games) for games in ids.values())
    assert all(game.startswith(f"{split}/") for split, games in ids.items() for game in games)
    heat = AlfworldTasks("train", task_types=["pick_heat_then_place_in_recep"])
    assert 0 < len(heat) < 12
    assert {heat[index].type for index in range(len(heat))} == {"pick_heat_then_place_in_recep"}


def test_games_are_left_out_as_the_original_leaves_them_out(
    tmp_path: Path, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "json_2.1.1" / "train"
    kept = write_game(root / "pick-Mug-None-Shelf-3" / "trial_1", house)
    write_game(root / "pick_and_place_with_movable_recep-Mug-Plate-Shelf-3" / "trial_1", house)
    write_game(root / "pick-AppleSliced-None-Shelf-3" / "trial_1", house)
    change(write_game(root / "pick-Mug-None-Shelf-3" / "trial_2", house), solvable=False)
    change(write_game(root / "pick-Mug-None-Shelf-3" / "trial_3", house), solvable=None)
    change(write_game(root / "a" / "trial_1", house).with_name("traj_data.json"), task_type="look_at_obj")
    write_game(root / "b" / "trial_1", house).with_name("traj_data.json").unlink()
    write_game(root / "c" / "trial_1", house).unlink()
    with caplog.at_level(logging.WARNING):
        (found,) = find_games(tmp_path, "train")
    assert tmp_path / "json_2.1.1" / found.game / "game.tw-pddl" == kept
    assert f"1 games here, {OFFICIAL_SIZES['train']} in the published data" in caplog.text


def test_missing_data_error_has_the_download_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match="alfworld-download") as caught:
        AlfworldTasks("valid_unseen")
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(UsageError, match="no split of this name"):
        AlfworldTasks("test")


def test_show_describes_the_environment_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(SystemExit, match="0"):
        main(["env", "show", "alfworld"])
    assert "alfworld-download" in capsys.readouterr().out


@pytest.mark.parametrize("game", ["train/none/trial_1", "../../elsewhere", "", "/etc", 17])
def test_an_unknown_game_is_rejected(game: Any) -> None:
    with pytest.raises(UsageError, match="this ALFWorld game does not exist"):
        AlfworldEnv().reset(options={"game": game})
    with pytest.raises(UsageError, match="cannot reset with these options"):
        AlfworldEnv().reset(options={"scene": 3})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"grammar": '"Your task is to: x." "put {o} in/on {r}"'}, "old ALFWorld"),
        ({"grammar": '"move {o} to {r}"'}, "states no goal"),
        ({"pddl_problem": "(define (:init (atLocation a l)) (:goal (and (opened ?r))))"}, "this kind of goal"),
        ({"pddl_problem": None}, "this kind of goal|is not an ALFWorld game"),
    ],
)
def test_a_game_that_would_be_played_differently_is_rejected(
    tmp_path: Path, house: House, values: dict[str, Any], words: str
) -> None:
    file = change(write_game(tmp_path / "trial", house), **values)
    with pytest.raises(UsageError, match=words):
        load_house(file)


def test_games_may_lie_behind_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, house: House) -> None:
    write_game(tmp_path / "disk" / "valid_seen" / "look_at" / "trial", house)
    (tmp_path / "data" / "json_2.1.1").mkdir(parents=True)
    (tmp_path / "data" / "json_2.1.1" / "valid_seen").symlink_to(tmp_path / "disk" / "valid_seen")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "data"))
    (row,) = Games().rows("valid_seen")
    assert AlfworldEnv().reset(options={"game": row.game})[0].startswith("-= Welcome")


def test_what_is_no_game_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "game.tw-pddl").write_text("[]")
    with pytest.raises(UsageError, match="is not an ALFWorld game"):
        load_house(tmp_path / "game.tw-pddl")


def test_the_goal_is_worded_as_in_the_file(tmp_path: Path, house: House) -> None:
    file = write_game(tmp_path / "trial", house)
    said = 'Heat it. Say \\"done\\"'
    grammar = json.loads(file.read_text())["grammar"].replace(house.goal.text, said)
    read = load_house(change(file, grammar=grammar))
    assert World(read).introduction().endswith('Your task is to: Heat it. Say "done".')
    assert read.goal.object_type == house.goal.object_type


def test_a_game_that_is_done_from_the_start_ends_with_its_first_step(tmp_path: Path, house: House) -> None:
    thing = house.object_types.index(house.goal.object_type)
    done = replace(
        house,
        goal=replace(house.goal, task_type=TaskType.PLACE, target_type=house.receptacle_types[house.places[thing]]),
    )
    write_game(tmp_path / "json_2.1.1" / "train" / "done-1" / "trial", done)
    env = AlfworldEnv(data=str(tmp_path))
    assert env.reset(options={"game": "train/done-1/trial"})[1]["success"]
    saved = env.snapshot()
    assert env.step("look")[1:4] == (1.0, True, False)
    env.restore(saved)
    assert env.step("dance")[1:4] == (1.0, True, False)


def test_a_seed_draws_a_training_game() -> None:
    env = AlfworldEnv(task_types=["look_at_obj_in_light"])
    drawn = {env.reset(seed=seed)[0] for seed in range(20)}
    assert len(drawn) > 1
    assert env.reset(seed=3)[0] == env.reset(seed=3)[0]
    assert env.reset(seed=4)[1]["task_type"] == "look_at_obj_in_light"


def test_the_original_engine_must_be_installed_and_runs_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(UsageError, match=r"agentrl\[alfworld\]"):
        make_alfworld(engine="original")
    with pytest.raises(UsageError, match="unknown alfworld engine"):
        make_alfworld(engine="orignal")
    assert SPEC.isolation_under({}) is Isolation.INLINE
    assert SPEC.isolation_under({"engine": "original"}) is Isolation.PROCESS


def test_generated_games_have_all_types_and_the_odd_ones_are_odd(tmp_path: Path) -> None:
    ids = write_games(tmp_path, 24, odd=True)
    rows = Games(str(tmp_path)).rows("train")
    assert sorted(ids) == [row.game for row in rows]
    assert {row.task_type for row in rows} == set(TaskType)
    read = [load_house(Games(str(tmp_path)).path(game)) for game in ids]
    assert any(len(places) > 1 for house in read for places in house.facts().places)
    assert any(house.facts().insides != ((),) * len(house.objects) for house in read)
    assert any(house.facts().start >= 0 for house in read)
