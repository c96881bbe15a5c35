"""A program that brings tools for a model whose chat template leaves them out."""

import openai
import pytest
from support.chat_templates import LLAMA3_FIRST
from support.tokenizers import build_tokenizer

from agentrl.render.renderer import Renderer

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def renderer():
    tokenizer = build_tokenizer("llama3", vocab_size=350)
    tokenizer.chat_template = LLAMA3_FIRST
    return Renderer(tokenizer)


async def test_tools_are_refused_in_words_and_a_request_without_them_is_answered(played):
    async def play(gateway, session):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0) as client:
            ask = client.chat.completions.create
            messages = [{"role": "user", "content": "one"}]
            with pytest.raises(openai.BadRequestError, match=r"does not show tools.*model\.chat_template=llama3"):
                await ask(model="policy", messages=messages, tools=[LOOK])
            reply = await ask(model="policy", messages=messages)
            assert reply.choices[0].message.content == "it is so"

    trajectory, _ = await played(play, "it is so")
    assert len(trajectory.turns) == 1
