import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def play_sessions() -> Callable[..., Any]:
    """Play sessions on an engine."""

    async def play(engine, request_of, *, sessions=6, turns=3, vocabulary=64, **params):
        """Play multi-turn sessions of different lengths at once: per session, the prompt and answer of each turn."""

        async def session(number):
            generator = random.Random(number)
            ids = [generator.randrange(vocabulary) for _ in range(3 + 9 * number)]
            played = []
            for turn in range(turns):
                name = f"{number}.{turn}"
                settings = {"max_tokens": generator.randint(3, 12), "seed": 100 * number + turn, **params}
                answer = await engine.generate(request_of(ids, name, str(number), **settings))
                played.append((ids, answer))
                ids = [*ids, *answer.token_ids, *(generator.randrange(vocabulary) for _ in range(7))]
            await engine.end_session(str(number))
            return played

        return await asyncio.gather(*map(session, range(sessions)))

    return play
