"""Requests with images to vLLM: one placeholder per image, and the server's expansion compared with the ledger's."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.errors import EngineError, UsageError
from agentrl.message import ImagePart
from agentrl.message.image import PlacedImage
from agentrl.serving.vllm.wire import check_expansion, encode_request, join_events, reads_images

PAD = 9
FIRST, SECOND = ImagePart(data=b"first"), ImagePart(data=b"second", media_type="image/jpeg")
IDS = [1, PAD, PAD, PAD, PAD, 2, PAD, PAD, 3]
URL = "http://127.0.0.1:1"


def request(ids: list[int] = IDS) -> GenerateRequest:
    images = (
        PlacedImage(start=1, rows=2, columns=2, image=FIRST),
        PlacedImage(start=6, rows=1, columns=2, image=SECOND),
    )
    params = SamplingParams(max_tokens=4)
    return GenerateRequest(prompt_ids=ids, params=params, session_id="s", request_id="r", images=images)


def expansion(ids: list[int] = IDS, *places: tuple[int, int]) -> dict[str, Any]:
    found = [{"offset": offset, "length": length} for offset, length in places or ((1, 4), (6, 2))]
    return {"prompt_token_ids": ids, "mm_placeholders": {"image": found}}


def test_each_image_is_sent_once_in_place_of_one_placeholder() -> None:
    body = encode_request(request(), wire_id="w", max_context=100)
    assert body["token_ids"] == [1, PAD, 2, PAD, 3]
    assert [part["url"] for part in body["content_parts"]] == [FIRST.data_url, SECOND.data_url]
    assert body["return_token_ids"]
    assert body["sampling_params"]["max_tokens"] == 4
    limited = encode_request(request(), wire_id="w", max_context=len(IDS) + 2)
    assert limited["sampling_params"]["max_tokens"] == 2  # of the expanded prompt


def test_a_placeholder_that_the_policy_sampled_is_refused() -> None:
    with pytest.raises(EngineError, match="got 3 placeholders of images, some of them sampled by the policy"):
        encode_request(request([*IDS, PAD]), wire_id="w", max_context=100)


@pytest.mark.parametrize(
    "answer",
    [
        expansion([*IDS[:4], *IDS[5:]], (1, 3), (5, 2)),  # the image has other tokens there
        expansion(IDS, (1, 4)),
        expansion(IDS, (1, 4), (5, 2)),
        expansion([7, *IDS[1:]]),
    ],
)
def test_an_expansion_that_differs_from_the_ledgers_is_refused(answer: dict[str, Any]) -> None:
    check_expansion(request(), expansion(), URL)
    with pytest.raises(UsageError, match="prepares images differently from the image processor of the model's folder"):
        check_expansion(request(), answer, URL)


def test_a_server_that_reports_no_places_is_refused() -> None:
    with pytest.raises(EngineError, match="does not report the places of images"):
        check_expansion(request(), {"choices": []}, URL)


def test_the_expansion_of_a_streamed_answer_is_that_of_its_first_event() -> None:
    choice = {"token_ids": [4], "logprobs": {"content": [{"logprob": -1.0}]}}
    events = [{"choices": [choice], **expansion()}, {"choices": [choice]}, {"choices": [], "usage": {}}]
    with pytest.raises(EngineError, match="events are not a generation"):
        join_events([{"choices": []}])
    joined = join_events(events)
    assert joined["choices"][0]["token_ids"] == [4, 4]
    check_expansion(request(), joined, URL)


@pytest.mark.parametrize(
    ("section", "reads"), [(None, False), ({"language_model_only": True}, False), ({"limit_per_prompt": {}}, True)]
)
def test_a_model_that_reads_text_only_is_known_by_its_settings(section: object, reads: bool) -> None:
    assert reads_images({"vllm_config": {"model_config": {"multimodal_config": section}}}) is reads
