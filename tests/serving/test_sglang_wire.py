import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.engines import SGLangEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams, StopReason
from agentrl.errors import EngineError, UsageError
from agentrl.serving.http import decode_version
from agentrl.serving.sglang import launch_command, start_with_key
from agentrl.serving.sglang.server import CPU_MODULES
from agentrl.serving.sglang.wire import (
    NEEDED_ROUTES,
    TRANSPORT_ROUTES,
    check_answers,
    check_routes,
    check_settings,
    check_updates,
    decode_answer,
    decode_checksums,
    decode_context,
    decode_load,
    decode_vocabulary,
    encode_request,
    encode_update,
    needs_flush,
)

ANSWER = {
    "text": "se",
    "output_ids": [191, 235, 285],
    "meta_info": {
        "id": "a",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 4,
        "weight_version": "7",
        "forward_entry_time": 100.5,
        "prefill_finished_time": 100.75,
        "queue_time": 0.125,
        "output_token_logprobs": [[-5.0, 191, None], [-3.5, 235, None], [-0.25, 285, None]],
        "cached_tokens": 2,
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "7", "start": 1, "end": 3},
        ],
        "request_finished_ts": 102.75,
    },
}
"""As SGLang 0.5.23 answers, less what is not read."""


def _answer(**meta):
    return ANSWER | {"meta_info": ANSWER["meta_info"] | meta}


def _request(*prompt, **params):
    return GenerateRequest(prompt_ids=prompt, params=SamplingParams(**params), session_id="s", request_id="r")


def _encode(request, **settings):
    return encode_request(request, **{"wire_id": "w", "max_context": 100} | settings)


def test_a_request_sends_every_setting():
    body = _encode(_request(1, 2, max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=3))
    assert body == {
        "input_ids": [1, 2],
        "rid": "w",
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "stop_token_ids": [],
            "ignore_eos": True,
        },
    }


def test_no_top_k_is_minus_one():
    assert _encode(_request(1))["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(("temperature", "cuts"), [(0.5, (1.0, -1, 1.0)), (0.0, (0.9, 1, 0.0))])
def test_one_candidate_is_asked_for_in_a_way_that_keeps_its_temperature(temperature, cuts):
    params = _encode(_request(1, temperature=temperature, top_p=0.9, top_k=1))["sampling_params"]
    assert (params["top_p"], params["top_k"], params["min_p"]) == cuts


def test_stop_tokens_are_not_ignored_with_the_end_tokens():
    params = _encode(_request(1, stop_token_ids=frozenset({9, 4})))["sampling_params"]
    assert (params["stop_token_ids"], params["ignore_eos"]) == ([4, 9], False)


def test_a_continuation_holds_the_answer_so_far_and_asks_for_the_rest():
    body = _encode(_request(1, 2, 3, max_tokens=50), sampled=[8, 9], max_context=10)
    assert (body["input_ids"], body["sampling_params"]["max_new_tokens"]) == ([1, 2, 3, 8, 9], 5)


def test_an_answer():
    part = decode_answer(ANSWER, frozenset())
    generation = part.generation
    assert not part.continues
    assert (generation.token_ids, generation.logprobs) == ([191, 235, 285], [-5.0, -3.5, -0.25])
    assert generation.versions == [0, 7, 7]
    assert generation.stop_reason is StopReason.LENGTH
    assert generation.cached_tokens == 2
    assert decode_answer(_answer(cached_tokens=None), frozenset()).generation.cached_tokens == 0
    assert (generation.queue_s, generation.prefill_s, generation.decode_s) == (0.125, 0.25, 2.0)


@pytest.mark.parametrize(("stops", "continues"), [({285}, False), ({191}, True)])
def test_an_end_token_that_the_request_does_not_stop_at_is_gone_past(stops, continues):
    part = decode_answer(_answer(finish_reason={"type": "stop", "matched": 285}), frozenset(stops))
    assert part.continues is continues
    assert part.generation.stop_reason is StopReason.STOP


def test_an_abort_before_the_first_token():
    meta = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "default"}
    part = decode_answer({"text": "", "output_ids": [], "meta_info": meta}, frozenset())
    assert (part.generation.token_ids, part.generation.versions) == ([], [])
    assert part.generation.stop_reason is StopReason.ABORT


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"error": {"message": "no"}}, "is not a generation"),
        (_answer(finish_reason={"type": "eaten"}), "is not a generation"),
        (_answer(finish_reason={"type": "stop", "matched": "NaN happened"}), "neither a stop token.*NaN happened"),
        (_answer(output_token_logprobs=[[-5.0, 191, None]]), "omitted log-probabilities"),
        (_answer(weight_versions=[{"version": "1", "start": 0, "end": 2}]), "do not cover"),
        (_answer(weight_versions=[{"version": "1", "start": 1, "end": 3}]), "do not cover"),
        (_answer(weight_versions=[{"version": "mine", "start": 0, "end": 3}]), "unknown version.*mine"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_engine_error(body, what):
    with pytest.raises(EngineError, match=what):
        decode_answer(body, frozenset())


def test_versions():
    assert [decode_version("default"), decode_version("12")] == [0, 12]


def test_joined_parts_keep_the_first_prefix_and_the_last_reason():
    first = decode_answer(_answer(finish_reason={"type": "stop", "matched": 285}), frozenset()).generation
    second = decode_answer(_answer(cached_tokens=7), frozenset()).generation
    joined = first.followed_by(second)
    assert joined.token_ids == [191, 235, 285] * 2
    assert joined.logprobs == [-5.0, -3.5, -0.25] * 2
    assert joined.versions == [0, 7, 7] * 2
    assert (joined.stop_reason, joined.cached_tokens) == (StopReason.LENGTH, 2)
    assert (joined.queue_s, joined.prefill_s, joined.decode_s) == (0.25, 0.5, 4.0)


def test_an_update():
    assert encode_update(Path("/weights/3"), 3) == {
        "model_path": "/weights/3",
        "load_format": "auto",
        "weight_version": "3",
        "flush_cache": True,
    }


def test_a_refused_flush_is_told_from_refused_weights():
    assert needs_flush(
        "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or "
        "finish them, then call /flush_cache."
    )
    assert not needs_flush("Failed to get weights iterator: no such folder.")


LOADS = {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25}]}
METRICS = """
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 16.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 4.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 1807.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 6.0
sglang:num_running_reqs{model_name="m"} 0.0
sglang:num_queue_reqs{model_name="m"} 4.0
python_info 1.0
"""


def test_the_load_of_a_server_that_runs_and_of_one_that_is_paused():
    load = decode_load(LOADS, METRICS, paused=False)
    assert (load.running, load.waiting, load.cache_used) == (3, 1, 0.25)
    assert (load.prompt_tokens, load.cached_tokens, load.sampled_tokens, load.preemptions) == (20, 6, 1807, 0)
    load = decode_load(LOADS, METRICS, paused=True)
    assert (load.running, load.waiting, load.cache_used) == (0, 4, 0.0)


@pytest.mark.parametrize(
    ("loads", "metrics", "paused"),
    [({}, METRICS, False), ({"loads": [{}]}, METRICS, False), (LOADS, "", True), (LOADS, "sglang:x eaten", False)],
)
def test_a_load_without_its_figures_is_an_engine_error(loads, metrics, paused):
    with pytest.raises(EngineError, match="SGLang"):
        decode_load(loads, metrics, paused=paused)


def test_missing_routes_are_named():
    paths = {route: {} for route in NEEDED_ROUTES}
    check_routes("u", {"paths": paths}, "0.5.23")
    del paths["/pause_generation"]
    with pytest.raises(UsageError, match=r"no /pause_generation: got SGLang 0\.4\.2, expected .* 0\.5\.23"):
        check_routes("u", {"paths": paths}, "0.4.2")


@pytest.mark.parametrize(
    ("settings", "openapi", "info", "what"),
    [
        ({"transport": "collective"}, {"paths": {}}, {}, "has no /init_weights_update_group"),
        ({"transport": "tensor"}, {"paths": {}}, {}, "has no /update_weights_from_tensor"),
        ({"sleep": True}, {"paths": {}}, {"device": "cuda"}, "Start it with --enable-memory-saver"),
    ],
)
def test_what_the_config_asks_of_updates_is_checked(settings, openapi, info, what):
    with pytest.raises(UsageError, match=what):
        check_updates("u", openapi, info, SGLangEngineConfig(**settings))
    whole = {"paths": {route: {} for routes in TRANSPORT_ROUTES.values() for route in routes}}
    check_updates("u", whole, {"device": "cpu"}, SGLangEngineConfig(**settings))
    check_updates("u", whole, {"device": "cuda", "enable_memory_saver": True}, SGLangEngineConfig(**settings))


@pytest.mark.parametrize(
    ("info", "model", "what"),
    [
        ({"enable_metrics": True}, {"is_generation": False}, "does not generate text"),
        ({"enable_metrics": True}, {"preferred_sampling_params": {"top_k": 3}}, "its own sampling settings.*top_k"),
        ({"enable_metrics": False}, {}, "--enable-metrics"),
    ],
)
def test_settings_that_cannot_work_are_refused(info, model, what):
    check_settings("u", {"enable_metrics": True}, {"is_generation": True, "preferred_sampling_params": None})
    with pytest.raises(UsageError, match=what):
        check_settings("u", info, model)


def test_the_sizes_that_a_server_tells():
    assert decode_context({"max_req_input_len": 1018}) == 1018
    assert decode_vocabulary("logit_bias must has keys in [0, 403], got 2147483647.") == 404
    with pytest.raises(EngineError, match="prompt limit"):
        decode_context({})
    with pytest.raises(EngineError, match="vocabulary size"):
        decode_vocabulary("fine")


def _told(logprob, **meta):
    return {"meta_info": {"weight_versions": [{}], "output_token_logprobs": [[logprob, 5, None]]} | meta}


def test_answers_must_tell_versions_and_the_temperature_they_were_sampled_at():
    check_answers("u", _told(-2.0), _told(-1.0), "0.5.23")
    check_answers("u", _told(0.0), _told(0.0), "0.5.23")
    with pytest.raises(UsageError, match=r"the weight version of each token: got SGLang 0\.5\.1"):
        check_answers("u", _told(-2.0, weight_versions=None), _told(-1.0), "0.5.1")
    with pytest.raises(UsageError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        check_answers("u", _told(-2.0), _told(-2.0), "0.5.23")


def _launch(config, **settings):
    given = {"python": "/env/python", "model": Path("/m"), "port": 8001, "dtype": "float32"}
    return launch_command(config, **given | settings)


def _value(command, flag):
    return command.argv[command.argv.index(flag) + 1]


def test_the_command_on_a_cpu():
    command = _launch(SGLangEngineConfig(max_context=4096, max_num_seqs=8), python_path="/mine")
    assert command.argv[:3] == ["/env/python", "-m", "sglang.launch_server"]
    assert (_value(command, "--model-path"), _value(command, "--port")) == ("/m", "8001")
    assert (_value(command, "--device"), _value(command, "--max-running-requests")) == ("cpu", "8")
    assert _value(command, "--context-length") == "4102"
    assert command.env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    assert command.env["PYTHONPATH"] == f"{CPU_MODULES}:/mine"
    assert command.env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("gpus", [(), (0,)])
def test_only_servers_on_gpus_can_sleep(gpus):
    command = _launch(SGLangEngineConfig(sleep=True), gpus=gpus)
    assert ("--enable-memory-saver" in command.argv) == bool(gpus)


def test_the_command_on_gpus_has_no_stand_ins():
    command = _launch(SGLangEngineConfig(tensor_parallel=2), gpus=(0, 1))
    assert _value(command, "--tp-size") == "2"
    assert "--device" not in command.argv
    assert "--context-length" not in command.argv
    assert not {"PYTHONPATH", "CUDA_VISIBLE_DEVICES", "SGLANG_USE_CPU_ENGINE"} & command.env.keys()


def test_the_key_is_not_in_the_command_but_in_the_environment():
    command = _launch(SGLangEngineConfig(), api_key="secret")
    assert command.argv[:2] == ["/env/python", start_with_key.__file__]
    assert "secret" not in " ".join(command.argv)
    assert command.env[start_with_key.VARIABLE] == "secret"


def test_sglang_gets_the_key_as_its_own_argument(tmp_path):
    (tmp_path / "sglang").mkdir()
    program = tmp_path / "sglang" / "launch_server.py"
    program.write_text("import os, sys\nprint(sys.argv[1:], __name__, 'AGENTRL_SGLANG_API_KEY' in os.environ)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), start_with_key.VARIABLE: "secret"}
    command = [sys.executable, start_with_key.__file__, "--port", "1"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "['--port', '1', '--api-key', 'secret'] __main__ False\n"


def test_own_arguments_go_last():
    command = _launch(SGLangEngineConfig(arguments=["--max-total-tokens", "99"]))
    assert command.argv[-2:] == ["--max-total-tokens", "99"]


STAND_INS = """
import triton, triton.language as tl, torchvision, sgl_kernel
from triton.runtime.jit import JITFunction
from torchvision.transforms import InterpolationMode

@triton.jit
def kernel(x: tl.constexpr): return 7

@triton.autotune(configs=[triton.Config({"B": 2}, num_warps=4)], key=["n"])
def tuned(): return 8

class Own(JITFunction): pass

assert (kernel(1), tuned(), triton.cdiv(7, 2), triton.next_power_of_2(5)) == (7, 8, 4, 8)
assert InterpolationMode.BICUBIC != InterpolationMode.NEAREST
assert triton.Config({"B": 2}).kwargs == {"B": 2}
assert not hasattr(sgl_kernel, "something")
try:
    sgl_kernel.shm_allreduce_cpu(1)
except NotImplementedError as error:
    print(error)
"""


def test_the_stand_ins_can_be_imported_and_decorate():
    result = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(CPU_MODULES)!r})\n{STAND_INS}"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "sgl_kernel.shm_allreduce_cpu was called on a placeholder" in result.stdout


@pytest.mark.parametrize("body", [{}, {"ranks": []}, None, {"ranks": [{}]}, {"ranks": [{"checksums": ["0123"]}]}])
def test_an_answer_without_checksums_is_an_engine_error(body):
    with pytest.raises(EngineError, match="does not report the checksums"):
        decode_checksums(body)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [({"prefill_finished_time": None}, (0.0, 0.0)), ({"forward_entry_time": 101.0}, (0.0, 2.0))],
)
def test_times_that_are_missing_or_run_backwards_count_as_none(times, seconds):
    generation = decode_answer(_answer(**times), frozenset()).generation
    assert (generation.prefill_s, generation.decode_s) == seconds


@pytest.mark.capability("sglang", "stop strings")
def test_stop_texts_are_asked_for_and_recognized(request_of):
    sampling = encode_request(request_of([4], stop=("</a>",)), wire_id="a-1", max_context=20)["sampling_params"]
    assert (sampling["stop"], sampling["no_stop_trim"], sampling["skip_special_tokens"]) == (["</a>"], True, False)
    body = _answer(finish_reason={"type": "stop", "matched": "</a>"})
    part = decode_answer(body, frozenset(), ("</a>",))
    assert (part.generation.stop_reason, part.continues) == (StopReason.STOP, False)
    with pytest.raises(EngineError, match="neither a stop token nor a stop string of the request"):
        decode_answer(body, frozenset(), ("</b>",))
