"""Tests of the tables of the mutation tests: everything that they name exists."""

import yaml

from mutants.rooms import EXPLAINED, ROOMS, TREE, wilson


def test_every_room_names_sources_and_tests_that_exist():
    for room in ROOMS.values():
        assert all((TREE / path).exists() for path in (*room.sources, *room.tests, *room.left_out))


def test_every_explained_change_is_of_lines_that_exist():
    for one in yaml.safe_load(EXPLAINED.read_text()):
        lines = [line.strip() for line in (TREE / one["path"]).read_text().splitlines()]
        assert set(one["from"].splitlines()) <= set(lines), f"remove what explains a change of {one['path']}: {one}"
        assert one["why"]


def test_the_interval_of_a_share_is_wilsons():
    low, high = wilson(36, 40)
    assert (round(low, 3), round(high, 3)) == (0.769, 0.960)
    assert wilson(0, 0) == (0.0, 1.0)
