"""Log-probabilities of the local engine are those of one forward pass with the processor's inputs."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import GenerateRequest, Generation, SamplingParams
from agentrl.errors import UsageError
from agentrl.message import TextPart, user
from agentrl.message.image import PlacedImage, rope_positions
from agentrl.render.conversation import LedgerConversation
from agentrl.serving.local import LocalEngine
from agentrl.trajectory import TokenSequence, Trajectory

from .conftest import Eyes, noise, processor_inputs

TOLERANCE = 1e-4


def engine_of(eyes: Eyes, **settings: int) -> LocalEngine:
    config = LocalEngineConfig(**{"max_num_seqs": 8, "cache_tokens": 8192, "max_context": 1024, **settings})
    return LocalEngine(eyes.model, config, reader=eyes.images)


def request(
    ids: list[int], images: tuple[PlacedImage, ...], session: str, *, seed: int = 0, max_tokens: int = 6
) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    name = f"{session}/{len(ids)}"
    return GenerateRequest(prompt_ids=ids, params=params, session_id=session, request_id=name, images=images)


async def talk(eyes: Eyes, engine: LocalEngine, number: int, turns: int = 3) -> tuple[TokenSequence, list[Generation]]:
    """A conversation with one or two images a turn, of sizes of its own."""
    trajectory = Trajectory(id=str(number), task_id="t", environment="e", seed=0, group_id="g")
    conversation = LedgerConversation(eyes.renderer, trajectory, [])
    generations = []
    for turn in range(turns):
        images = [noise(40 + 30 * turn, 60 + 20 * number, seed=10 * number + turn + i) for i in range(1 + turn % 2)]
        conversation.add([user((TextPart(text=f"turn {turn} "), *images))])
        ids = conversation.prepare().tolist()
        answer = await engine.generate(
            request(ids, conversation.sequence.images, f"talk {number}", seed=number + 100 * turn)
        )
        conversation.accept(answer)
        generations.append(answer)
    return conversation.sequence, generations


@torch.no_grad()
def full_pass(eyes: Eyes, model: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by transformers' own forward pass: [sampled]."""
    ids = sequence.ids_list()
    assert ids.count(eyes.images.pad_id) == sum(image.tokens for image in sequence.images)
    inputs = processor_inputs(eyes, ids, [placed.image for placed in sequence.images])
    logits = model(input_ids=torch.tensor([ids]), **inputs).logits[0]
    wanted = torch.from_numpy(sequence.loss_mask).nonzero()[:, 0]
    return torch.log_softmax(logits[wanted - 1], dim=-1)[range(len(wanted)), torch.tensor(ids)[wanted]]


@pytest.mark.parametrize("prefill_tokens", [2048, 7])
@pytest.mark.capability("local", "images")
async def test_logprobs_equal_a_full_pass(eyes: Eyes, prefill_tokens: int) -> None:
    engine = engine_of(eyes, prefill_tokens=prefill_tokens)
    try:
        talks = await asyncio.gather(*(talk(eyes, engine, number) for number in range(3)))
    finally:
        await engine.close()
    for sequence, generations in talks:
        expected = full_pass(eyes, eyes.model, sequence)
        got = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
        assert (got - expected).abs().max() < TOLERANCE
        assert all(generation.cached_tokens > 0 for generation in generations[1:])


async def test_text_and_images_run_together(eyes: Eyes) -> None:
    engine = engine_of(eyes)
    text = eyes.renderer.prompt([user("hello")])
    try:
        (sequence, _), alone = await asyncio.gather(
            talk(eyes, engine, 1), engine.generate(request(text.ids, (), "text", max_tokens=40))
        )
    finally:
        await engine.close()
    got = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
    assert (got - full_pass(eyes, eyes.model, sequence)).abs().max() < TOLERANCE
    ids = text.ids + alone.token_ids
    with torch.no_grad():
        logits = eyes.model(input_ids=torch.tensor([ids])).logits[0, len(text.ids) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)[range(len(alone.token_ids)), torch.tensor(alone.token_ids)]
    assert (torch.tensor(alone.logprobs) - expected).abs().max() < TOLERANCE


async def test_a_session_keeps_nothing_of_another_image(eyes: Eyes) -> None:
    engine = engine_of(eyes)
    first, other = (eyes.renderer.prompt([user((noise(60, 60, seed), TextPart(text="?")))]) for seed in (1, 2))
    assert first.ids == other.ids
    try:
        await engine.generate(request(first.ids, first.images, "shared"))
        changed = await engine.generate(request(other.ids, other.images, "shared", seed=1))
        fresh = await engine.generate(request(other.ids, other.images, "fresh", seed=1))
        again = await engine.generate(request(other.ids, other.images, "shared", seed=2))
    finally:
        await engine.close()
    assert changed.cached_tokens == first.images[0].start
    assert changed.token_ids == fresh.token_ids
    assert torch.allclose(torch.tensor(changed.logprobs), torch.tensor(fresh.logprobs), atol=TOLERANCE)
    assert again.cached_tokens == len(other.ids) - 1


async def test_a_placeholder_that_was_sampled_is_text(eyes: Eyes) -> None:
    """The prompt of a second turn holds a sampled placeholder: its position and embedding are those of text."""
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")
    conversation = LedgerConversation(eyes.renderer, trajectory, [user((noise(60, 90),))])
    conversation.prepare()
    pad = eyes.images.pad_id
    conversation.sequence.extend_sampled([pad, pad], logprobs=[0.0, 0.0], versions=[0, 0])
    ids, images = conversation.sequence.ids_list(), conversation.sequence.images
    positions = rope_positions(images, 0, len(ids))
    assert (positions[:, -1] == positions[:, -2] + 1).all()
    engine = engine_of(eyes)
    try:
        whole = await engine.generate(request(ids, images, "a", seed=4))
        parts = await engine_in_parts(eyes, ids, images)
    finally:
        await engine.close()
    assert whole.token_ids == parts.token_ids
    assert torch.allclose(torch.tensor(whole.logprobs), torch.tensor(parts.logprobs), atol=TOLERANCE)


async def engine_in_parts(eyes: Eyes, ids: list[int], images: tuple[PlacedImage, ...]) -> Generation:
    engine = engine_of(eyes, prefill_tokens=5)
    try:
        return await engine.generate(request(ids, images, "a", seed=4))
    finally:
        await engine.close()


async def test_text_only_engine_rejects_images(eyes: Eyes) -> None:
    engine = LocalEngine(eyes.model, LocalEngineConfig(cache_tokens=4096, max_context=1024))
    prompt = eyes.renderer.prompt([user((noise(30, 30),))])
    try:
        with pytest.raises(UsageError, match="contains images"):
            await engine.generate(request(prompt.ids, prompt.images, "s"))
    finally:
        await engine.close()


def test_positions_equal_the_models(eyes: Eyes) -> None:
    rendered = eyes.renderer.prompt(
        [user((noise(90, 40), TextPart(text="and"), noise(20, 200), noise(150, 150), TextPart(text="what now?")))]
    )
    inputs = processor_inputs(eyes, rendered.ids, [placed.image for placed in rendered.images])
    expected, _ = eyes.model.model.get_rope_index(
        torch.tensor([rendered.ids]), inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    length = len(rendered.ids)
    assert rope_positions(rendered.images, 0, length).tolist() == expected[:, 0].tolist()
    for start, end in ((0, 5), (5, 20), (17, length), (length - 1, length), (0, 0)):
        assert rope_positions(rendered.images, start, end).tolist() == expected[:, 0, start:end].tolist()
