import pytest

from agentrl.config.engines import VLLMEngineConfig
from agentrl.engine import SamplingParams, StopReason
from agentrl.errors import EngineError, UsageError
from agentrl.serving.http import decode_version, decode_versions
from agentrl.serving.vllm import launch_command
from agentrl.serving.vllm.command import RECEIVER, WORKER_PATH
from agentrl.serving.vllm.wire import (
    WORKER_EXTENSION,
    LogprobConvention,
    check_convention,
    convention_of,
    decode_answer,
    decode_load,
    encode_abort,
    encode_request,
    is_pre_truncation,
)


def _spans(*bounds):
    return [{"version": str(index), "start": start, "end": end} for index, (start, end) in enumerate(bounds)]


def _answer(token_ids, *, finish="length", spans=None, logprobs=None, cached=None):
    values = [-0.5 * (i + 1) for i in range(len(token_ids))] if logprobs is None else logprobs
    rows = [{"token_id": t, "logprob": v, "rank": 1} for t, v in zip(token_ids, values, strict=False)]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "token_ids": token_ids,
        "weight_versions": [{"version": "default", "start": 0, "end": len(token_ids)}] if spans is None else spans,
        "logprobs": {"content": rows},
    }
    details = None if cached is None else {"cached_tokens": cached}
    return {"request_id": "generate-tokens-a", "choices": [choice], "usage": {"prompt_tokens_details": details}}


def test_a_request_says_everything_and_keeps_to_the_context(request_of):
    request = request_of(
        [4, 5], "a", temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=50, stop_token_ids=frozenset({9, 3})
    )
    assert encode_request(request, wire_id="a-1", max_context=20) == {
        "token_ids": [4, 5],
        "request_id": "a-1",
        "sampling_params": {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "max_tokens": 18,
            "stop_token_ids": [3, 9],
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }
    seeded = encode_request(request_of([4], seed=0), wire_id="a-1", max_context=20)
    assert "seed" not in seeded["sampling_params"], "a seed ends vLLM's worker on the CPU when a prefill is cut in two"


def test_an_abort_names_the_request_as_the_server_does():
    assert encode_abort("a-1") == {"request_ids": ["generate-tokens-a-1"]}


def test_an_answer_with_two_versions():
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    answer = decode_answer(_answer([6, 7, 8], spans=spans, cached=16), frozenset())
    assert (answer.token_ids, answer.logprobs, answer.versions) == ([6, 7, 8], [-0.5, -1.0, -1.5], [0, 0, 8])
    assert (answer.stop_reason, answer.cached_tokens) == (StopReason.LENGTH, 16)


def test_a_stop_token_is_the_answers_last():
    assert decode_answer(_answer([6, 7, 2], finish="stop"), frozenset({2})).stop_reason is StopReason.STOP
    with pytest.raises(EngineError, match="neither a stop token nor a stop string of the request: got 2"):
        decode_answer(_answer([6, 2], finish="stop"), frozenset({3}))


def test_an_abort_before_the_first_token_has_none():
    body = _answer([], finish="abort")
    body["choices"][0] |= {"logprobs": None, "weight_versions": None}
    answer = decode_answer(body, frozenset())
    assert (answer.token_ids, answer.logprobs, answer.versions) == ([], [], [])
    assert answer.stop_reason is StopReason.ABORT


@pytest.mark.parametrize(
    ("spans", "versions"),
    [([("46", 0, 0)], []), ([("46", 0, 0), ("47", 0, 2)], [47, 47]), ([("46", 0, 1), ("47", 1, 1)], [46])],
)
def test_an_empty_span_says_nothing_of_any_token(spans, versions):
    written = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    assert decode_versions(written, len(versions)) == versions


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "not a generation"),
        ({"choices": []}, "not a generation"),
        (_answer([1], finish="repetition"), "not a generation"),
        (_answer([1, 2], logprobs=[-0.1]), "omitted log-probabilities"),
        (_answer([1], logprobs=[-9999.0]), "omitted log-probabilities"),
        (_answer([1, 2], spans=[]), "do not cover the answer"),
        (_answer([1, 2], spans=[{"version": "3", "start": 1, "end": 2}]), "do not cover the answer"),
        (_answer([1, 2], spans=[{"version": "3", "start": 0, "end": 1}]), "do not cover the answer"),
        (_answer([1, 2, 3], spans=_spans((0, 2), (1, 2))), "do not cover the answer"),
        (_answer([1, 2, 3], spans=_spans((0, 2), (1, 3))), "do not cover the answer"),
        (_answer([1, 2, 3], spans=_spans((0, 1), (2, 4))), "do not cover the answer"),
        (_answer([1, 2, 3], spans=_spans((0, 3), (9, 12))), "do not cover the answer"),
        (_answer([1, 2, 3], spans=_spans((0, 3), (3, 2), (2, 3))), "do not cover the answer"),
        (_answer([1], spans=[{"version": "main", "start": 0, "end": 1}]), "unknown version: got 'main'"),
    ],
)
def test_what_is_not_an_answer_is_an_engine_error(body, message):
    with pytest.raises(EngineError, match=message):
        decode_answer(body, frozenset())


def test_versions_are_numbers_and_the_first_is_zero():
    assert (decode_version("default"), decode_version("17")) == (0, 17)


METRICS = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 1.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
vllm:num_preemptions_total{engine="0",model_name="policy"} 4.0
vllm:prompt_tokens_total{engine="0",model_name="policy"} 1.024e+03
vllm:prompt_tokens_cached_total{engine="0",model_name="policy"} 128.0
vllm:generation_tokens_total{engine="0",model_name="policy"} 1060.0
"""


def test_the_load_is_summed_over_engines():
    load = decode_load(METRICS)
    assert (load.running, load.waiting, load.cache_used, load.preemptions) == (4, 2, 0.5, 4)
    assert (load.prompt_tokens, load.cached_tokens, load.sampled_tokens) == (1024, 128, 1060)


def test_metrics_without_a_figure_are_an_engine_error():
    with pytest.raises(EngineError, match="no vllm:num_preemptions_total"):
        decode_load("\n".join(line for line in METRICS.splitlines() if "preemptions" not in line))


def _info(mode, extension=""):
    return {
        "vllm_config": {
            "model_config": {"logprobs_mode": mode},
            "parallel_config": {"worker_extension_cls": extension},
        }
    }


def test_the_convention_is_what_the_server_was_told():
    assert convention_of(_info("raw_logprobs")) is LogprobConvention.RAW
    assert convention_of(_info("processed_logprobs")) is LogprobConvention.POST_TRUNCATION
    assert convention_of(_info("processed_logprobs", WORKER_EXTENSION)) is LogprobConvention.PRE_TRUNCATION
    assert convention_of(_info("raw_logprobs", WORKER_EXTENSION)) is LogprobConvention.RAW
    with pytest.raises(UsageError, match="--logprobs-mode raw_logits"):
        convention_of(_info("raw_logits"))
    with pytest.raises(EngineError, match="does not report"):
        convention_of({})
    assert (is_pre_truncation(-6.0), is_pre_truncation(0.0)) == (True, False)


RAW, CUT, UNCUT = LogprobConvention.RAW, LogprobConvention.POST_TRUNCATION, LogprobConvention.PRE_TRUNCATION


@pytest.mark.parametrize(
    ("params", "served"),
    [
        ({}, {RAW, CUT, UNCUT}),
        ({"temperature": 0.0}, {RAW, CUT, UNCUT}),
        ({"temperature": 0.0, "top_k": 5}, {RAW, CUT, UNCUT}),
        ({"top_p": 0.9}, {RAW, UNCUT}),
        ({"top_k": 5}, {RAW, UNCUT}),
        ({"min_p": 0.1}, {RAW, UNCUT}),
        ({"temperature": 0.6}, {CUT, UNCUT}),
        ({"temperature": 0.6, "top_p": 0.9}, {UNCUT}),
    ],
)
def test_requests_whose_logprobs_would_be_others_are_refused(params, served):
    for convention in LogprobConvention:
        if convention in served:
            check_convention(SamplingParams(**params), convention)
        else:
            with pytest.raises(UsageError, match="this vLLM server reports log-probabilities"):
                check_convention(SamplingParams(**params), convention)


def test_what_starts_a_server_on_a_cpu(tmp_path):
    config = VLLMEngineConfig(max_num_seqs=8, max_context=512, arguments=["--seed", "3"])
    command = launch_command(
        config, python="py", model=tmp_path, port=81, dtype="float32", api_key="secret", python_path="/mine"
    )
    line = " ".join(command.argv)
    assert command.argv[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    for part in (
        f"--model {tmp_path}",
        "--host 127.0.0.1 --port 81",
        "--max-num-seqs 8",
        "--max-model-len 512",
        "--dtype float32",
        "--logprobs-mode processed_logprobs --worker-extension-cls agentrl_vllm_worker.PreTruncationLogprobs",
        '--weight-transfer-config {"backend": "agentrl"}',
        '--hf-overrides {"tie_word_embeddings": false}',
        "--enable-scale-out --enable-prompt-tokens-details",
        "--enforce-eager",
    ):
        assert part in line
    assert line.endswith("--seed 3")
    assert "secret" not in line
    assert command.env["VLLM_API_KEY"] == "secret"
    assert command.env["PYTHONPATH"] == f"{WORKER_PATH}:/mine"
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert (WORKER_PATH / f"{WORKER_EXTENSION.split('.')[0]}.py").is_file()
    assert f'BACKEND = "{RECEIVER}"' in (WORKER_PATH / "agentrl_vllm_receiver.py").read_text()


def test_what_starts_a_server_on_gpus(tmp_path):
    config = VLLMEngineConfig(tensor_parallel=2)
    command = launch_command(config, python="py", model=tmp_path, port=81, dtype="bfloat16", gpus=(0, 1))
    assert "--tensor-parallel-size 2" in " ".join(command.argv)
    assert "--enforce-eager" not in command.argv
    assert "CUDA_VISIBLE_DEVICES" not in command.env
    assert "--max-model-len" not in command.argv
    assert "--enable-sleep-mode" not in command.argv


@pytest.mark.parametrize(("rank", "most"), [(None, None), (1, 1), (2, 8), (16, 16), (500, 512)])
def test_a_server_is_started_for_adapters_of_a_rank(tmp_path, rank, most):
    config = VLLMEngineConfig(adapter_rank=rank)
    command = launch_command(config, python="py", model=tmp_path, port=81, dtype="float32")
    line = " ".join(command.argv)
    assert ("--enable-lora" in line) == (rank is not None) == ("VLLM_ALLOW_RUNTIME_LORA_UPDATING" in command.env)
    assert most is None or f"--max-loras 1 --max-lora-rank {most}" in line


@pytest.mark.parametrize("gpus", [(), (0,)])
def test_only_servers_on_gpus_can_sleep(tmp_path, gpus):
    command = launch_command(
        VLLMEngineConfig(sleep=True), python="py", model=tmp_path, port=81, dtype="bfloat16", gpus=gpus
    )
    assert ("--enable-sleep-mode" in command.argv) == bool(gpus)


@pytest.mark.capability("vllm", "stop strings")
def test_stop_texts_are_asked_for_and_recognized(request_of):
    sampling = encode_request(request_of([4], stop=("</a>",)), wire_id="a-1", max_context=20)["sampling_params"]
    assert (sampling["stop"], sampling["include_stop_str_in_output"]) == (["</a>"], True)
    assert (sampling["detokenize"], sampling["skip_special_tokens"]) == (True, False)
    body = _answer([6, 7], finish="stop")
    body["choices"][0]["stop_reason"] = "</a>"
    assert decode_answer(body, frozenset({2}), ("</a>",)).stop_reason is StopReason.STOP
    with pytest.raises(EngineError, match=r"got '</a>', expected \[2, '</b>'\]"):
        decode_answer(body, frozenset({2}), ("</b>",))
