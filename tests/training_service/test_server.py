"""The service against raw requests: order, retries, keys, and bodies that no client would send."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as proto

from agentrl.errors import UsageError
from agentrl.training_service import wire
from agentrl.training_service.server import TrainingServer
from agentrl.training_service.service import TrainingServiceSettings
from agentrl.training_service.store import CheckpointStore

JSON = "application/json"


class Raw:
    """A client that sends what it is told."""

    def __init__(self, served: Any, key: str = "tml-x") -> None:
        self.address, self.key = urlsplit(served.url), key

    def send(
        self, method: str, path: str, body: bytes = b"", kind: str = JSON, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port or 0, timeout=60)
        try:
            connection.request(
                method, f"/api/v1/{path}", body, {"Content-Type": kind, "X-API-Key": self.key, **(headers or {})}
            )
            answer = connection.getresponse()
            data = answer.read()
            return answer.status, json.loads(data) if answer.headers.get_content_type() == JSON else data
        finally:
            connection.close()

    def post(self, path: str, /, **body: Any) -> tuple[int, Any]:
        return self.send("POST", path, json.dumps(body).encode())

    def result(self, request_id: str) -> Any:
        while True:
            status, found = self.post("retrieve_future", request_id=request_id)
            if status != 408:
                assert status == 200, found
                return found

    def run(self, **lora: Any) -> str:
        """Begin a run; gives its id."""
        _, session = self.post("create_session", tags=[], sdk_version="0.38.0")
        lora = {"rank": 2, "seed": 0, **lora}
        _, begun = self.post(
            "create_model", session_id=session["session_id"], model_seq_id=0, base_model="tiny", lora_config=lora
        )
        return str(self.result(begun["request_id"])["model_id"])

    def pass_(self, model: str, number: int, *data: Any) -> tuple[int, Any]:
        return self.send("POST", "forward_backward", pass_body(model, number, *data), wire.MEDIA_TYPE)

    def step(self, model: str, number: int) -> tuple[int, Any]:
        return self.post("optim_step", model_id=model, seq_id=number, adam_params={"learning_rate": 1e-2})


def tensor(values: Any, dtype: str = "<f4") -> Any:
    array = np.asarray(values, dtype=dtype)
    return proto.Tensor(dense=array.tobytes(), dtype=1 if dtype == "<f4" else 2, shape=array.shape)


def datum(*ids: int, **inputs: Any) -> Any:
    chunk = proto.Chunk(encoded_text=proto.EncodedTextChunk(tokens=np.asarray(ids[:-1], dtype="<i4").tobytes()))
    given = {"target_tokens": tensor(ids[1:], "<i8"), "weights": tensor([1.0] * (len(ids) - 1)), **inputs}
    made = proto.Datum(model_input=[chunk])
    for name, value in given.items():
        made.loss_fn_inputs[name].CopyFrom(value)
    return made


def pass_body(model: str, number: int, *data: Any, loss: str = "cross_entropy", **fields: Any) -> bytes:
    message = proto.ForwardBackwardRequest(
        model_id=model, seq_id=number, data=data or [datum(1, 2, 3)], loss_fn=loss, **fields
    )
    return bytes(message.SerializeToString())


@pytest.fixture
def raw(serve: Callable[..., Any]) -> Raw:
    return Raw(serve())


def test_requests_are_worked_off_in_their_order_not_in_that_of_arrival(raw: Raw) -> None:
    model, other = raw.run(), raw.run()
    late = [raw.step(model, 4), raw.pass_(model, 3), raw.step(model, 2)]
    status, waiting = raw.send("GET", f"sessions/{model.partition(':')[0]}")
    assert (status, waiting["training_run_ids"]) == (200, [model])
    raw.pass_(model, 1)
    found = [raw.result(answer["request_id"]) for _, answer in late]
    in_order = [raw.pass_(other, 1), raw.step(other, 2), raw.pass_(other, 3), raw.step(other, 4)]
    expected = [raw.result(answer["request_id"]) for _, answer in in_order]
    assert found == expected[:0:-1]


def test_retried_request_is_computed_once(raw: Raw) -> None:
    model = raw.run()
    first, again = raw.pass_(model, 1), raw.pass_(model, 1)
    assert first == again
    step, repeated = raw.step(model, 2), raw.step(model, 2)
    assert step == repeated
    norm = raw.result(step[1]["request_id"])["metrics"]["grad_norm"]
    assert raw.result(step[1]["request_id"])["metrics"]["grad_norm"] == norm, "a result can be fetched again"
    assert raw.pass_(model, 1) == first, "also when it is over"
    status, refused = raw.post("optim_step", model_id=model, seq_id=1, adam_params={})
    assert (status, refused["category"]) == (400, "user")
    assert "a different request with this number" in refused["error"]
    begun = raw.post("create_session", tags=[], sdk_version="x")[1]["session_id"]
    body = {"session_id": begun, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    assert raw.post("create_model", **body) == raw.post("create_model", **body)


def test_result_can_be_fetched_several_times(raw: Raw) -> None:
    model = raw.run()
    _, later = raw.step(model, 2)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(raw.result, later["request_id"]) for _ in range(8)]
        raw.pass_(model, 1)
        assert len({json.dumps(own.result(60)) for own in waiting}) == 1


def test_two_runs_do_not_mix(raw: Raw) -> None:
    first, second = raw.run(seed=0), raw.run(seed=1)
    data = datum(1, 2, 3, 4)
    alone = raw.run(seed=0)
    for number in (1, 3):
        raw.pass_(first, number, data)
        raw.pass_(second, number, datum(9, 8, 7))
        raw.step(second, number + 1)
        raw.step(first, number + 1)
        raw.pass_(alone, number, data)
        raw.step(alone, number + 1)
    assert raw.result(f"{first}:4") == raw.result(f"{alone}:4") != raw.result(f"{second}:4")
    status, refused = raw.post("get_info", model_id=first.replace("train:0", "train:1"))
    assert (status, refused["category"]) == (404, "user")


BROKEN: dict[str, tuple[Callable[[str], bytes], str]] = {
    "no protocol buffer": (lambda model: b"\xff\xff\xff\xff", "not a protocol buffer"),
    "no model": (lambda model: pass_body("", 1), "has no model_id"),
    "a number below 1": (lambda model: pass_body(model, 0), "has no model_id or no seq_id"),
    "an unknown field": (lambda model: pass_body(model, 1) + b"\x9a\x3e\x01x", "has unknown fields"),
    "an unknown field of a datum": (
        lambda model: pass_body(model, 1, proto.Datum.FromString(datum(1, 2).SerializeToString() + b"\x9a\x3e\x01x")),
        "data[0] has unknown fields",
    ),
    "a tensor without its end": (
        lambda model: pass_body(model, 1, datum(1, 2, weights=proto.Tensor(dense=b"123", dtype=1, shape=[1]))),
        "is truncated",
    ),
    "another shape": (
        lambda model: pass_body(model, 1, datum(1, 2, weights=proto.Tensor(dense=b"1234", dtype=1, shape=[1 << 20]))),
        "does not fit its shape",
    ),
    "a negative shape": (
        lambda model: pass_body(model, 1, datum(1, 2, weights=proto.Tensor(dense=b"", dtype=1, shape=[-1]))),
        "negative length",
    ),
    "a small body that would be large": (
        lambda model: pass_body(
            model,
            1,
            datum(1, 2, weights=proto.Tensor(sparse_csr=proto.SparseCsr(), dtype=1, shape=[1 << 40, 8])),
        ),
        "too large",
    ),
    "a sparse matrix with rows that lead astray": (
        lambda model: pass_body(model, 1, datum(1, 2, weights=_sparse(rows=[0, 5], columns=[0], values=[1.0]))),
        "not a valid sparse matrix",
    ),
    "a sparse matrix with a column outside": (
        lambda model: pass_body(model, 1, datum(1, 2, weights=_sparse(rows=[0, 1], columns=[-3], values=[1.0]))),
        "column outside",
    ),
    "a number that is none": (
        lambda model: pass_body(model, 1, datum(1, 2, weights=tensor([float("nan")]))),
        "not finite",
    ),
    "an unknown dtype": (
        lambda model: pass_body(model, 1, datum(1, 2, weights=proto.Tensor(dense=b"12", dtype=4, shape=[1]))),
        "unknown dtype",
    ),
    "text in the loss's numbers": (
        lambda model: pass_body(model, 1, loss_fn_config_v2={"a": proto.LossConfigValue(text="x")}),
        "loss_fn_config.a is not a number",
    ),
}


def test_no_field_of_a_request_is_ignored() -> None:
    """A field of a new version of the client would be parsed, and not read."""
    read = {
        proto.ForwardBackwardRequest: "model_id seq_id data loss_fn loss_fn_config forward_only loss_fn_config_v2",
        proto.LossConfigValue: "number text",
        proto.Datum: "model_input loss_fn_inputs model_input_spans loss_fn_input_spans",
        proto.Chunk: "encoded_text image dmel",
        proto.EncodedTextChunk: "tokens",
        proto.Tensor: "dense sparse_csr dtype shape",
        proto.SparseCsr: "values crow_indices col_indices",
    }
    for message, fields in read.items():
        assert [field.name for field in message.DESCRIPTOR.fields] == fields.split(), message


def _sparse(*, rows: list[int], columns: list[int], values: list[float]) -> Any:
    matrix = proto.SparseCsr(
        values=np.asarray(values, "<f4").tobytes(),
        crow_indices=np.asarray(rows, "<i8").tobytes(),
        col_indices=np.asarray(columns, "<i8").tobytes(),
    )
    return proto.Tensor(sparse_csr=matrix, dtype=1, shape=[len(rows) - 1, 2])


def test_error_names_the_invalid_field_of_a_pass_and_the_run_continues(raw: Raw) -> None:
    for what, (make, expected) in BROKEN.items():
        model = raw.run()
        body = make(model)
        status, answer = raw.send("POST", "forward_backward", body, wire.MEDIA_TYPE)
        assert (status, answer["category"]) == (400, "user"), what
        assert expected in answer["error"], what
        status, _ = raw.send("POST", "forward_backward", body, wire.MEDIA_TYPE)
        assert status in (200, 400), what  # sent again it is the one that has failed
        number = 1 if "has no model_id" in expected or "not a protocol" in expected else 2
        raw.pass_(model, number)
        assert "error" not in json.dumps(raw.result(f"{model}:{number}").hex()), what
        session = model.partition(":")[0]
        assert raw.post(f"sessions/{session}/finish", reason={"type": "success"})[0] == 204


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("create_session", b"[]", "not a JSON object"),
        ("create_session", b"{" * 100_000, "not valid JSON"),
        ("create_session", b'{"tags": [], "sdk_version": "x", "surprise": 1}', "surprise is not supported here"),
        ("create_model", b'{"session_id": 5}', "session_id is invalid"),
        ("optim_step", b'{"model_id": "x", "seq_id": "1", "adam_params": {}}', "seq_id is invalid"),
        ("retrieve_future", b'{"request_id": ""}', "request_id is invalid"),
        ("asample", b'{"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": [{"type": "image"}]}}', "prompt"),
        ("weights_info", b'{"tinker_path": "tinker://a/../../weights/b"}', "invalid checkpoint path"),
        ("no_such_thing", b"{}", "no_such_thing is not supported here"),
    ],
)
def test_error_names_the_invalid_json_field(path: str, body: bytes, expected: str, raw: Raw) -> None:
    status, answer = raw.send("POST", path, body)
    assert (status, answer["category"]) == (400, "user")
    assert expected in answer["error"]


def test_other_doors_are_shut(raw: Raw) -> None:
    assert raw.send("POST", "create_session", b"{}", "text/plain")[0] == 400, "pages can send this without being asked"
    assert raw.send("POST", "create_session", b"{}", headers={"Host": "evil.example"})[0] == 403
    assert raw.send("POST", "create_session", b"{}", headers={"Origin": "https://site.example.com"})[0] == 403
    assert raw.send("POST", "create_session", b"", headers={"Content-Length": str(1 << 40)})[0] == 413
    assert raw.send("DELETE", "training_runs/x/checkpoints/weights/..%2f..%2fy")[0] in (400, 404)
    assert raw.send("GET", "checkpoints?limit=-1")[0] == 400
    for path, field in (("retrieve_future", "request_id"), ("get_info", "model_id"), ("get_info", "model_id")):
        assert raw.post(path, **{field: "unknown"})[0] == 404
    assert raw.post("session_heartbeat", session_id="unknown")[0] == 410, "at which the client stops"
    assert raw.send("GET", "healthz") == (200, {"status": "ok"})


def test_a_key_keeps_strangers_out(serve: Callable[..., Any]) -> None:
    served = serve(key="tml-secret")
    assert Raw(served, "tml-wrong").post("create_session", tags=[], sdk_version="x")[0] == 401
    assert Raw(served, "tml-secret").post("create_session", tags=[], sdk_version="x")[0] == 200
    assert Raw(served, "").send("GET", "healthz")[0] == 200


def test_a_sample_can_be_cancelled_and_its_engine_serves_on(raw: Raw) -> None:
    _, session = raw.post("create_session", tags=[], sdk_version="x")
    name = session["session_id"]
    _, sampler = raw.post("create_sampling_session", session_id=name, sampling_session_seq_id=0, base_model="tiny")
    asked = {
        "sampling_session_id": sampler["sampling_session_id"],
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 500, "stop": []},
    }
    _, long = raw.post("asample", seq_id=0, num_samples=64, **asked)
    assert len(long["sample_sequence_ids"]) == 64
    assert raw.post("cancel_future", request_id=long["request_id"])[0] == 200
    assert "cancelled" in raw.result(long["request_id"])["error"]
    asked["sampling_params"] = {"max_tokens": 2, "stop": []}
    _, short = raw.post("asample", seq_id=1, **asked)
    assert isinstance(raw.result(short["request_id"]), bytes)


@pytest.mark.slow
def test_a_session_without_a_sign_of_life_ends(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.training_service.service.SWEEP_S", 0.02)
    served = serve(lease_s=2.0)  # long enough for a slow machine to open a run in
    raw = Raw(served)
    model = raw.run()
    deadline = time.monotonic() + 60
    while served.server.service._sessions and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    status, answer = raw.pass_(model, 1)
    assert status == 404
    assert "Make a new client from a saved state" in answer["error"]


def test_incomplete_checkpoints_are_rejected(raw: Raw, tmp_path: Path) -> None:
    model = raw.run()
    _, saved = raw.post("save_weights", model_id=model, seq_id=1, path="a")
    path = raw.result(saved["request_id"])["path"]
    folder = tmp_path / "service" / model / "weights" / "a"
    replaced = folder.with_name(".replaced-a")
    folder.rename(replaced)  # as if the server had been killed while it overwrote the checkpoint
    assert raw.post("weights_info", tinker_path=path)[0] == 200
    assert folder.is_dir()
    state = folder / "trainer.pt"
    state.write_bytes(state.read_bytes()[:-1])
    status, answer = raw.post("weights_info", tinker_path=path)
    assert (status, "trainer.pt is damaged" in answer["error"]) == (400, True)


def test_folder_is_locked_by_one_server(tmp_path: Path, raw: Raw) -> None:
    raw.run()
    with pytest.raises(UsageError, match="another server uses the folder"):
        CheckpointStore(tmp_path / "service").lock()


def test_a_damaged_checkpoint_does_not_hide_the_others(tmp_path: Path, raw: Raw) -> None:
    model = raw.run()
    for number, name in enumerate(("a", "b"), start=1):
        raw.result(raw.post("save_weights", model_id=model, seq_id=number, path=name)[1]["request_id"])
    (tmp_path / "service" / model / "weights" / "a" / "service.json").write_text("{")
    status, found = raw.send("GET", "checkpoints")
    assert (status, [own["checkpoint_id"] for own in found["checkpoints"]]) == (200, ["weights/b"])


def test_unloaded_run_fails_its_pending_requests(raw: Raw) -> None:
    model = raw.run()
    _, later = raw.step(model, 2)
    _, unloaded = raw.post("unload_model", model_id=model)
    assert raw.result(unloaded["request_id"])["model_id"] == model
    assert raw.result(later["request_id"]) == {"error": "the run has ended", "category": "user"}
    assert raw.pass_(model, 1)[0] == 404


def test_store_deletes_expired_checkpoints(tmp_path: Path, raw: Raw) -> None:
    model = raw.run()
    for number, name in enumerate(("a", "b"), start=1):
        _, saved = raw.post("save_weights", model_id=model, seq_id=number, path=name, ttl_seconds=3600)
        raw.result(saved["request_id"])
    about = tmp_path / "service" / model / "weights" / "a" / "service.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "expires": "2001-01-01T00:00:00+00:00"}))
    store = CheckpointStore(tmp_path / "service")
    store.sweep()
    assert [saved.name for saved in store.list()] == ["b"]


@pytest.mark.parametrize("is_started", [False, True])
async def test_a_server_closes_whether_or_not_it_was_started(
    tmp_path: Path, base_model: Callable[..., Any], is_started: bool
) -> None:
    settings = TrainingServiceSettings(folder=tmp_path / "service", model_name="tiny")
    server = TrainingServer(settings, base_model, host="127.0.0.1", port=0, key=None)
    if is_started:
        await server.start()
    await server.close()
    if is_started:
        address = urlsplit(server.url)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.hostname or "", address.port or 0), timeout=20)


@pytest.mark.parametrize(
    ("coding", "expected", "message"),
    [("br", 415, "Content-Encoding 'br' is not read here"), ("gzip", 400, "Content-Encoding is 'gzip'")],
)
def test_a_body_that_cannot_be_decoded_is_refused_in_the_clients_form(
    raw: Raw, coding: str, expected: int, message: str
) -> None:
    status, refusal = raw.send("POST", "create_session", b"{}", headers={"Content-Encoding": coding})
    assert (status, refusal["category"]) == (expected, "user")
    assert message in refusal["error"]
