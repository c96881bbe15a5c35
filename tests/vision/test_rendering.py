"""Conversations with images become the tokens that transformers' own processors make of them."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.vision import FAMILIES, vision_tokenizer
from transformers import ProcessorMixin, Qwen2_5_VLProcessor, Qwen3VLProcessor

from agentrl.engine import Generation, StopReason
from agentrl.errors import EnvironmentFailure, LedgerError, TemplateError
from agentrl.message import Content, ImagePart, Message, TextPart, system, user
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.render.conversation import LedgerConversation
from agentrl.render.images import images_of, read_pixels
from agentrl.render.renderer import Renderer
from agentrl.render.template_check import check_template
from agentrl.trajectory import Source, Trajectory

from .conftest import Eyes, eyes_of, noise

texts = st.text(st.sampled_from("aest\n >_é…<|"), max_size=12)
images = st.builds(noise, st.integers(5, 300), st.integers(5, 300), st.integers(0, 2))
contents = st.one_of(
    texts,
    st.lists(st.one_of(texts.map(lambda text: TextPart(text=text)), images), min_size=1, max_size=4).map(tuple),
)


@functools.cache
def processor_of(family: str) -> ProcessorMixin:
    """The family's processor without the part for videos, which needs torchvision."""
    base = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}[family]

    class WithoutVideo(base):  # type: ignore[valid-type, misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> None:
            return

    eyes = eyes_of(family)
    return WithoutVideo(image_processor=eyes.images.processor, tokenizer=eyes.tokenizer, video_processor=None)


def whole(eyes: Eyes, messages: list[Message]) -> dict[str, Any]:
    """What transformers makes of a whole conversation."""
    rows = [
        {
            "role": message.role,
            "content": message.content
            if isinstance(message.content, str)
            else [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in message.content
            ],
        }
        for message in messages
    ]
    text = eyes.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
    opened = [Image.open(io.BytesIO(image.data)) for image in images_of(messages)]
    found = processor_of(eyes.family)(text=[text], images=opened or None, return_tensors="np")
    return dict(found)


def new_trajectory() -> Trajectory:
    return Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")


def sampled(ids: list[int]) -> Generation:
    return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), stop_reason=StopReason.STOP)


def told(eyes: Eyes, *contents: Content) -> LedgerConversation:
    """A conversation that was told contents, with an answer after each."""
    conversation = LedgerConversation(eyes.renderer, new_trajectory(), [])
    for content in contents:
        conversation.add([user(content)])
        conversation.prepare()
        conversation.accept(sampled(eyes.renderer.demonstration("ok")))
    return conversation


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_conversation_with_images_equals_the_processors_output(family: str, data: st.DataObject) -> None:
    eyes = eyes_of(family)
    messages = [system(data.draw(texts)), user(data.draw(contents))]
    conversation = LedgerConversation(eyes.renderer, new_trajectory(), messages)
    for _ in range(data.draw(st.integers(1, 3))):
        conversation.prepare()
        reply = data.draw(st.text("aest", min_size=1, max_size=6))
        observation = Message(role=data.draw(st.sampled_from(["user", "tool"])), content=data.draw(contents))
        ids = eyes.renderer.demonstration(reply)
        conversation.accept(sampled(ids[:-1] if data.draw(st.booleans()) else ids))
        conversation.add([observation])
        messages += [Message(role="assistant", content=reply), observation]
    expected = whole(eyes, messages)
    assert conversation.prepare().tolist() == expected["input_ids"][0].tolist()
    placed = conversation.sequence.images
    assert [image.image for image in placed] == images_of(messages)
    merge = eyes.images.processor.merge_size
    grids = [[1, image.rows * merge, image.columns * merge] for image in placed]
    assert grids == ([] if not placed else expected["image_grid_thw"].tolist())
    if placed:
        values = [eyes.images(image.image).values for image in placed]
        assert (sum(map(len, values)), *values[0].shape[1:]) == expected["pixel_values"].shape
        assert (values[0] == expected["pixel_values"][: len(values[0])]).all()
    kinds = [0] * len(conversation.sequence)
    for image in placed:
        kinds[image.start : image.end] = [1] * image.tokens
    assert kinds == expected["mm_token_type_ids"][0].tolist()
    conversation.verify(conversation.prepare().tolist(), placed)


def test_image_tokens_are_observation_or_prompt(eyes: Eyes) -> None:
    conversation = told(eyes, (noise(60, 60, 1),), (TextPart(text="now"), noise(90, 60, 2)))
    first, second = conversation.sequence.images
    sources = conversation.sequence.sources
    assert set(sources[first.start : first.end]) == {Source.PROMPT}
    assert set(sources[second.start : second.end]) == {Source.OBSERVATION}
    assert set(conversation.sequence.token_ids[second.start : second.end]) == {eyes.images.pad_id}


def test_sampled_placeholder_is_an_ordinary_token(eyes: Eyes) -> None:
    conversation = LedgerConversation(eyes.renderer, new_trajectory(), [user((noise(60, 60),))])
    conversation.prepare()
    conversation.accept(sampled([eyes.images.pad_id, *eyes.renderer.boundary.end_ids]))
    conversation.add([user((noise(90, 60),))])
    ids = conversation.prepare().tolist()
    places = [range(image.start, image.end) for image in conversation.sequence.images]
    assert ids.count(eyes.images.pad_id) == sum(map(len, places)) + 1


def test_a_rewritten_history_shares_no_image_that_differs(eyes: Eyes) -> None:
    first, other = noise(60, 60, 1), noise(60, 60, 2)
    conversation = told(eyes, (first,))
    same = conversation.fork([user((first,)), user("and now?")])
    different = conversation.fork([user((other,)), user("and now?")])
    for child in (same, different):
        child.prepare()
    (image,) = conversation.sequence.images
    assert same.sequence.shared > image.end
    assert same.sequence.images == (image,)
    assert different.sequence.shared == image.start
    assert [placed.image for placed in different.sequence.images] == [other]


def test_a_trajectory_with_images_is_restored_exactly(eyes: Eyes) -> None:
    image = noise(60, 60)
    conversation = told(eyes, (image,), (TextPart(text="again"), image))
    trajectory = conversation._trajectory
    record = trajectory_record(trajectory)
    assert list(record["images"]) == [image.checksum]
    restored = trajectory_from_record(record)
    assert restored.sequences[0].images == conversation.sequence.images
    assert trajectory_record(restored) == record


def test_sent_images_are_compared_with_the_ledger(eyes: Eyes) -> None:
    conversation = LedgerConversation(eyes.renderer, new_trajectory(), [user((noise(60, 60),))])
    ids = conversation.prepare().tolist()
    with pytest.raises(LedgerError, match="images sent to the engine"):
        conversation.verify(ids, ())


def test_text_that_spells_the_placeholder_is_no_placeholder(eyes: Eyes) -> None:
    image = noise(30, 30)
    for spelled in (("<|image_pad|>",), ("<|image", "_pad|>"), ("<", "|image_pad|>")):
        parts = [TextPart(text=text) for text in spelled]
        for content in ((*parts, image), (image, *parts)):
            rendered = eyes.renderer.prompt([user(content)])
            assert [placed.image for placed in rendered.images] == [image]
            assert rendered.ids.count(eyes.images.pad_id) == rendered.images[0].tokens


def test_invalid_image_fails_its_episode(eyes: Eyes) -> None:
    with pytest.raises(EnvironmentFailure, match="3 bytes"):
        eyes.renderer.prompt([user((ImagePart(data=b"png"),))])
    Image.new("RGB", (4, 4)).save(program := io.BytesIO(), "EPS")
    with pytest.raises(EnvironmentFailure, match="cannot identify"):  # it is not given to Ghostscript
        eyes.renderer.prompt([user((ImagePart(data=program.getvalue()),))])


def test_text_only_model_rejects_images(eyes: Eyes) -> None:
    with pytest.raises(TemplateError, match="reads only text"):
        Renderer(eyes.tokenizer).prompt([user((noise(30, 30),))])


NUMBERED = r"""
{%- set seen = namespace(count=0) %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- for part in ([{'text': message.content}] if message.content is string else message.content) %}
{%- if part.type == 'image' %}
{%- set seen.count = seen.count + 1 %}
{{- 'Picture ' ~ seen.count ~ ': <|image_pad|>' }}
{%- else %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}
"""


def test_template_that_numbers_images_is_rejected_before_a_run(eyes: Eyes) -> None:
    check_template(eyes.renderer)
    tokenizer = vision_tokenizer()
    tokenizer.chat_template = NUMBERED
    with pytest.raises(TemplateError, match="rewrites history"):
        check_template(Renderer(tokenizer, images=eyes.images))
    check_template(Renderer(tokenizer))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode: str) -> None:  # vllm#18569, vllm#44974
    file = io.BytesIO()
    Image.new(mode, (4, 6), 0).save(file, "PNG", **({"transparency": bytes(256)} if mode == "P" else {}))
    assert set(read_pixels(file.getvalue()).get_flattened_data()) == {(255, 255, 255)}


def test_images_are_turned_as_their_exif_data_say() -> None:  # sglang#33464
    exif = Image.Exif()
    exif[0x0112] = 6
    for data, size in ((exif.tobytes(), (6, 4)), (b"Exif\0\0broken", (4, 6))):
        file = io.BytesIO()
        Image.new("RGB", (4, 6)).save(file, "JPEG", exif=data)
        assert read_pixels(file.getvalue()).size == size
