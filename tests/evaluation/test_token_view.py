"""The token view of a ledger."""

from __future__ import annotations

import html
import math
import re

from agentrl.cli.token_text import episode_text
from agentrl.errors import Outcome
from agentrl.evaluation.token_view import page_html, segments, trajectory_html, turn_words
from agentrl.message import ImagePart
from agentrl.message.image import PlacedImage
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

TEXTS = {0: "<s>", 1: "You see ", 2: "a <b>bold</b> box.\n", 3: "open", 4: " it", 5: "\n", 6: "Done."}


def ledger() -> TokenSequence:
    sequence = TokenSequence()
    sequence.extend([0], Source.TEMPLATE)
    sequence.extend([1, 2], Source.PROMPT)
    sequence.extend_sampled([3, 4], logprobs=[math.log(0.5), math.log(0.001)], versions=[7, 7])
    sequence.turns.append(Turn(index=0, start=3, end=5, reward=1.0))
    sequence.extend([5], Source.TEMPLATE)
    sequence.extend([6], Source.OBSERVATION)
    return sequence


def episode() -> Trajectory:
    return Trajectory(
        id="t",
        task_id="put <x>",
        environment="world",
        seed=0,
        group_id="g",
        sequences=[ledger()],
        outcome=Outcome.FINISHED,
        reward=1.0,
        success=True,
    )


def test_segments_follow_sources_and_end_turns() -> None:
    found = segments(ledger(), TEXTS.__getitem__)
    assert [(s.source, len(s.cells)) for s in found] == [
        (Source.TEMPLATE, 1),
        (Source.PROMPT, 2),
        (Source.SAMPLED, 2),
        (Source.TEMPLATE, 1),
        (Source.OBSERVATION, 1),
    ]
    assert [s.turn.index if s.turn else None for s in found] == [None, None, 0, None, None]


def test_what_went_wrong_with_a_turn_is_shown() -> None:
    turn = Turn(index=1, start=0, end=1, reward=0.5, repaired_calls=2)
    assert turn_words(turn) == "turn 2 · reward 0.5 · repaired call"
    assert turn_words(Turn(index=0, start=0, end=1, valid=False)) == "turn 1 · invalid"


def test_two_turns_in_a_row_are_two_segments() -> None:
    sequence = TokenSequence()
    sequence.extend_sampled([3, 4], logprobs=[-1.0, -1.0], versions=[0, 0])
    sequence.turns += [Turn(index=0, start=0, end=1), Turn(index=1, start=1, end=2)]
    assert [s.turn.index for s in segments(sequence, TEXTS.__getitem__) if s.turn] == [0, 1]


def test_sampled_tokens_show_probability_and_version() -> None:
    sampled = segments(ledger(), TEXTS.__getitem__)[2].cells
    assert sampled[0].hint == "token 3, id 3, log-probability -0.693 (p = 50.0%), version 7"
    assert round(sampled[0].surprise, 4) == 0.1505  # log 2 / log 100
    assert sampled[1].surprise == 1.0
    assert segments(ledger(), TEXTS.__getitem__)[1].cells[0].surprise == 0.0


def test_html_holds_every_token_once_escaped() -> None:
    page = trajectory_html(episode(), TEXTS.__getitem__)
    shown = re.findall(r'<span class="(\w+)[^>]*title="[^"]*">(.*?)</span>', page, flags=re.DOTALL)
    assert [html.unescape(text).replace("↵", "") for _, text in shown] == [TEXTS[i] for i in range(7)]
    assert [name for name, _ in shown] == [
        "template",
        "prompt",
        "prompt",
        "sampled",
        "sampled",
        "template",
        "observation",
    ]
    assert "<b>bold</b>" not in page
    assert "put &lt;x&gt;" in page


def test_a_page_is_self_contained() -> None:
    page = page_html("Episodes", [episode()], TEXTS.__getitem__)
    assert page.startswith("<!doctype html>")
    assert "sampled by the policy" in page
    assert not re.search(r"(src|href)=", page)


def test_an_image_stands_once_at_its_place() -> None:
    found = episode()
    sequence = found.sequences[0]
    sequence.extend([0, 0, 0, 0, 6], Source.OBSERVATION)
    picture = ImagePart(data=b"png", alternative="P <F>")
    sequence.place(PlacedImage(start=7, rows=2, columns=2, image=picture))
    page = trajectory_html(found, TEXTS.__getitem__)
    assert page.count("<img ") == page.count(picture.data_url) == 1
    assert 'alt="P &lt;F&gt;"' in page
    assert page.count("tokens 7 to 10, 2 rows of 2") == 4
    assert html.escape(TEXTS[0]) in page.split("<img ")[0]
    assert html.escape(TEXTS[0]) not in page.split("<img ")[1]
    assert "Done.[image]\nP <F>\nDone." in episode_text(found, TEXTS.__getitem__).plain
