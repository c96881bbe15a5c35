"""Random sessions: whatever a client does, what is recorded is what the engine was sent."""

import random

import aiohttp
import pytest
from support.gateway_client import DIALECTS, RandomClient

SESSIONS, TURNS = 25, 8
ANSWERS = (
    "it is so",
    "",
    "<think>hm",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    'first\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    '\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": ',
    " ünï ✓ ",
)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_random_sessions_are_recorded_exactly(played, dialect):
    draw = random.Random(dialect)
    answers = [draw.choice(ANSWERS) for _ in range(211)]
    for seed in range(SESSIONS):

        async def play(gateway, session, seed=seed):
            async with aiohttp.ClientSession() as http:
                client = RandomClient(http, gateway.url_of(session), session.key, dialect, seed)
                await client.play(TURNS)
                assert session.requests == client.answers

        trajectory, script = await played(play, *answers[seed:], *answers[:seed])
        script.check(trajectory)
        assert trajectory.sampled_tokens == sum(turn.end - turn.start for turn in trajectory.turns)
        own = sum(len(sequence) - sequence.shared for sequence in trajectory.sequences)
        assert own < sum(len(sequence) for sequence in trajectory.sequences) or len(trajectory.sequences) == 1
