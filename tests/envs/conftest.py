from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from agentrl.envs.household.alfworld.data import SPLITS, VARIABLE
from agentrl.envs.household.alfworld.generate import write_games
from agentrl.envs.household.goals import Goal, parse_goal
from agentrl.envs.household.state import House, number_names
from agentrl.envs.household.vocabulary import LAMP

KITCHEN = ["cabinet"] * 8 + ["countertop"] + ["drawer"] * 8 + ["fridge", "microwave", "shelf", "shelf", "sinkbasin"]

HouseBuilder = Callable[..., House]


@pytest.fixture(scope="session", autouse=True)
def alfworld_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder of ALFWorld with a dozen games in each split, where the environment looks for one."""
    folder = tmp_path_factory.mktemp("alfworld")
    for split in SPLITS:
        write_games(folder, 12, split=split)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        yield folder


@pytest.fixture(scope="session")
def build_house() -> HouseBuilder:
    """Builds a house by hand: things by the name of the receptacle that they are in, in the order of lists."""

    def build(
        goal: str,
        things: Mapping[str, Sequence[str]],
        receptacles: Sequence[str] = KITCHEN,
        shared: Mapping[str, str] | None = None,
    ) -> House:
        names = number_names(sorted(receptacles))
        poses = [names.index((shared or {}).get(name, name)) for name in names]
        placed = [(kind, names.index(place)) for place, kinds in things.items() for kind in kinds]
        placed.sort(key=lambda thing: thing[0])
        parsed = parse_goal(goal)
        assert isinstance(parsed, Goal)
        return House(
            scene=0,
            receptacles=names,
            receptacle_types=tuple(sorted(receptacles)),
            poses=tuple(poses),
            objects=number_names([kind for kind, _ in placed]),
            object_types=tuple(kind for kind, _ in placed),
            places=tuple(place for _, place in placed),
            goal=parsed,
        )

    return build


@pytest.fixture
def kitchen(build_house: HouseBuilder) -> House:
    """The kitchen of the transcript: a sink full of things, a closed fridge with two tomatoes."""
    return build_house(
        "put a hot potato in fridge",
        {
            "sinkbasin 1": ["fork", "fork", "potato", "potato"],
            "fridge 1": ["tomato", "tomato"],
            "countertop 1": ["potato", "potato", "knife", "bread", "mug"],
            "drawer 4": ["spoon"],
        },
        shared={"drawer 3": "drawer 4"},
    )


@pytest.fixture
def study(build_house: HouseBuilder) -> House:
    """A room with a lamp."""
    return build_house(
        "look at book under the desklamp",
        {"desk 1": [LAMP, "pen"], "bed 1": ["book"]},
        receptacles=["bed", "desk", "drawer", "drawer"],
    )
