"""What environments return: texts of subclasses, NumPy's bools, and names that records cannot have."""

import enum

import numpy as np
import orjson
import pytest

from agentrl.message import TextPart
from agentrl.rollout.env_returns import WrongReturn, check_reset, check_state_key, check_step


class Kind(enum.StrEnum):
    HARD = "hard"


TEXTS = [np.str_("hard"), Kind.HARD, "hard"]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_subclasses_become_plain_texts(text):
    info = {"task_type": text, "reward_components": {text: np.float32(1)}, "other": text}
    for checked in (check_reset(("o", info))[1], check_step(("o", 1.0, True, False, info)).info):
        assert orjson.dumps({checked["task_type"]: checked["reward_components"]}) == b'{"hard":{"hard":1.0}}'
        assert checked["other"] is text


def test_keys_of_states_are_texts_and_none_is_no_key():
    assert [check_state_key(key) for key in ("a", np.str_("a"), 3, (1, "b"))] == ["a", "a", "3", "(1, 'b')"]
    assert check_state_key(None) is None  # not the text "None", which would make all states equal


@pytest.mark.parametrize("value", [np.bool_(True), True, np.int64(1), np.float16(1)])
def test_rewards_and_components_may_be_bools_of_numpy(value):
    checked = check_step(("o", value, np.bool_(True), False, {"reward_components": {"solved": value}}))
    assert (checked.reward, checked.info["reward_components"]) == (1.0, {"solved": 1.0})
    assert type(checked.reward) is float


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"reward_components": {1: 0.5}}, "a name in reward_components of info is invalid: got int 1, expected text"),
        ({"reward_components": {None: 0.5}}, "got NoneType None, expected text"),
        ({"reward_components": {"a\ud800": 0.5}}, "expected text without lone surrogates"),
        ({"reward_components": {"a": None}}, "reward component a is invalid: got NoneType None"),
        ({"task_type": "a\ud800"}, "task_type of info is invalid.*expected text without lone surrogates"),
    ],
)
def test_names_that_a_record_cannot_have_fail_the_episode_only(info, words):
    with pytest.raises(WrongReturn, match=words):
        check_step(("o", 1.0, False, False, info))


def test_parts_of_an_observation_have_texts():
    with pytest.raises(WrongReturn, match="observation of step is invalid"):
        check_step(((TextPart(text=5),), 1.0, False, False, {}))
