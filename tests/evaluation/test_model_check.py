"""Check of a model: the settings that it tries, its progress, and the first answers that it counts."""

from __future__ import annotations

import pytest

from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.evaluation import model_check
from agentrl.evaluation.model_check import (
    GOOD,
    TEXT_LOOP,
    TOOL_LOOP,
    AnswerShare,
    CheckProgress,
    _recommend,
    first_answer,
    settings_to_try,
    shown_duration,
)
from agentrl.rollout.loop_choice import PlaySettings
from agentrl.trajectory import TokenSequence, Trajectory, Turn


def settings(shots: int) -> PlaySettings:
    return PlaySettings(loop="react_text", shots=shots)


def share(shots: int, usable: float) -> AnswerShare:
    return AnswerShare(
        settings=settings(shots),
        answers=8,
        usable=usable,
        repaired=0.0,
        accepted=0.0,
        prompt_tokens=0.0,
        tokens_per_s=0.0,
        unusable=[],
    )


def test_progress_names_the_settings_their_number_and_the_time_that_is_left() -> None:
    lines: list[str] = []
    clock = iter([0.0, 20.0, 100.0, 140.0, 200.0])
    progress = CheckProgress([settings(n) for n in range(5)], lines.append, clock=lambda: next(clock))
    progress.begin(settings(0))
    progress.end(share(0, 0.5))
    progress.begin(settings(1))
    progress.end(share(1, 0.95))
    progress.begin(settings(4))  # those between were not necessary
    progress.refuse(UsageError("the environment has no expert"))
    assert lines == [
        "settings 1 of at most 5: agent.loop=react_text",
        "settings 1 of at most 5: 50% of 8 first answers usable (20 s)",
        "settings 2 of at most 5: agent.loop=react_text agent.few_shot_turns=1 (at most about 80 s left)",
        "settings 2 of at most 5: 95% of 8 first answers usable (40 s)",
        "settings 3 of at most 3: agent.loop=react_text agent.few_shot_turns=4 (at most about 30 s left)",
        "settings 3 of at most 3: not tried: the environment has no expert",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (89.4, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert shown_duration(seconds) == text


def test_the_cheapest_settings_of_a_loop_come_first() -> None:
    config = load_config(None, ["environment=guess_number"])
    assert [str(one) for one in settings_to_try(config, TOOL_LOOP)][:3] == [
        "agent.loop=tool_calling",
        "agent.loop=tool_calling 'agent.options={\"prefill\": true}'",
        "agent.loop=tool_calling agent.few_shot_turns=1",
    ]
    assert [one.shots for one in settings_to_try(config, TEXT_LOOP)] == [0, 0, 1, 1, 3, 3]
    own_format = load_config(None, ["environment=search_qa"])
    assert [one.shots for one in settings_to_try(own_format, TEXT_LOOP)] == [0, 1, 3]


def test_the_first_answer_of_an_episode() -> None:
    found = Trajectory(id="a", task_id="a", environment="e", seed=0, group_id="g")
    assert first_answer(found) == (None, [])
    sequence = TokenSequence()
    sequence.extend_sampled([7, 8, 9], logprobs=[-1.0] * 3, versions=[0] * 3)
    sequence.turns.extend([Turn(index=0, start=0, end=2), Turn(index=1, start=2, end=3)])
    found.sequences.extend([TokenSequence(), sequence])
    turn, ids = first_answer(found)
    assert turn is sequence.turns[0]
    assert ids == [7, 8]


@pytest.mark.parametrize(
    ("tools", "text", "shots"),
    [(GOOD, 1.0, 1), (GOOD - 0.01, 1.0, 2), (0.5, 0.25, 1), (None, 0.25, 2), (0.0, 0.0, None)],
)
def test_tool_calls_are_recommended_if_nearly_all_are_usable(
    tools: float | None, text: float, shots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[object] = []
    monkeypatch.setattr(model_check, "save_recommendation", lambda config, found: saved.append(found))
    best = {TEXT_LOOP: share(2, text)} | ({} if tools is None else {TOOL_LOOP: share(1, tools)})
    found = _recommend(load_config(None, ["environment=guess_number"]), best)
    assert (None if found is None else found.settings.shots) == shots
    assert saved == ([] if found is None else [found])
