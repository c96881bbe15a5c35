"""Each setting of a run, a sampler or a result has its own effect: no two values are equal here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tinker.proto import tinker_public_pb2 as proto

from agentrl.engine import SamplingParams
from agentrl.errors import UsageError
from agentrl.training_service import futures
from agentrl.training_service.futures import FetchedResult, Future, Futures
from agentrl.training_service.requests import Sampling
from agentrl.training_service.runs import LOSSES, AdamStep, BaseWeights, RunSettings, TrainingRun, check_pass
from agentrl.training_service.samplers import Samplers
from agentrl.training_service.sessions import MAX_PENDING, MAX_WAITING_BYTES, Busy, ServedRun, WaitingRequest
from agentrl.training_service.store import CheckpointInfo, CheckpointStore
from agentrl.training_service.wire import Datum, PassRequest, read_pass

SETTINGS = RunSettings(rank=4, seed=3)
ADAM = AdamStep(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)


def request_of(loss: str = "cross_entropy", **options: float) -> PassRequest:
    random = np.random.default_rng(2)
    inputs: dict[str, Any] = {"target_tokens": random.integers(0, 300, 5)}
    for name in LOSSES[loss].inputs:
        inputs[name] = random.normal(-1, 1, 5).astype(np.float32)
    return PassRequest(data=[Datum(tokens=random.integers(0, 300, 5), inputs=inputs)], loss=loss, options=options)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2},
        {"rank": None},
        {"alpha": 16.0},
        {"train_attn": False},
        {"train_mlp": False},
        {"train_unembed": False},
    ],
)
def test_weights_fit_only_runs_with_the_same_layers_and_scale(change: dict[str, Any]) -> None:
    assert replace(SETTINGS, **change).compatibility_key != SETTINGS.compatibility_key
    assert replace(SETTINGS, seed=4).compatibility_key == SETTINGS.compatibility_key


def test_a_seed_decides_the_first_adapters(base_model: Callable[..., BaseWeights]) -> None:
    base = base_model()

    def values(seed: int) -> list[torch.Tensor]:
        run = TrainingRun(base, replace(SETTINGS, seed=seed))
        return [p.detach() for p in run.model.parameters() if p.requires_grad]

    first, again, other = values(5), values(5), values(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_loaded_weights_have_no_gradients_and_no_failures(
    base_model: Callable[..., BaseWeights], tmp_path: Path
) -> None:
    run = TrainingRun(base_model(), SETTINGS)
    run.save(tmp_path, optimizer=True)
    run.forward_backward(request_of())
    run.load(tmp_path, optimizer=True)
    with pytest.raises(UsageError, match="no gradients are accumulated"):
        run.optim_step(ADAM)
    run.forward_backward(request_of())
    run.mark_incomplete("its data did not fit")
    run.load(tmp_path, optimizer=False)
    run.forward_backward(request_of())
    run.optim_step(ADAM)


def test_first_failure_since_an_update_is_reported(base_model: Callable[..., BaseWeights]) -> None:
    run = TrainingRun(base_model(), SETTINGS)
    run.mark_incomplete("the first reason")
    run.mark_incomplete("the second reason")
    with pytest.raises(UsageError, match="the first reason"):
        run.optim_step(ADAM)


@pytest.mark.parametrize(
    ("loss", "low", "high"), [("ppo", 0.8, 1.2), ("cispo", 0.0, 4.0), ("gspo", 0.7, 1.4), ("ppo", 1.0, 1.0)]
)
def test_thresholds_have_the_documented_defaults(loss: str, low: float, high: float) -> None:
    names = ("clip_low_threshold", "clip_high_threshold")
    given = dict(zip(names, (low, high), strict=True))
    limits = {"vocab_size": 300, "max_context": 99}
    if loss != "gspo" and low != high:
        assert check_pass(request_of(loss), **limits)[1] == given
    assert check_pass(request_of(loss, **given), **limits)[1] == given
    assert check_pass(request_of(loss, **{**given, names[1]: 9.0}), **limits)[1] == {names[0]: low, names[1]: 9.0}
    with pytest.raises(UsageError, match="is above"):
        check_pass(request_of(loss, **{**given, names[0]: high + 0.1}), **limits)


def test_newer_form_of_an_option_takes_precedence() -> None:
    message = proto.ForwardBackwardRequest(
        model_id="m",
        seq_id=1,
        data=[proto.Datum()],
        loss_fn="dro",
        loss_fn_config={"beta": 0.25, "other": 2.0},
    )
    message.loss_fn_config_v2["beta"].number = 0.5
    assert dict(read_pass(message).options) == {"beta": 0.5, "other": 2.0}


def test_every_sampling_setting_reaches_the_engine(base_model: Callable[..., BaseWeights]) -> None:
    samplers = Samplers(base_model(), 1)
    given = Sampling(max_tokens=7, seed=11, stop=["so", "is"], temperature=0.5, top_k=13, top_p=0.75)
    found = samplers._params(given, 0)
    ends = samplers._end_tokens()
    assert ends
    assert found == SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=13,
        max_tokens=7,
        stop_token_ids=frozenset(ends),
        stop=("so", "is"),
        seed=found.seed,
    )
    seeds = [
        samplers._params(given.model_copy(update={"seed": seed}), number).seed
        for seed in (11, 12)
        for number in range(3)
    ]
    assert len(set(seeds)) == 6
    assert seeds[0] == found.seed


@pytest.mark.parametrize(
    ("stop", "texts", "tokens", "ends"),
    [
        (None, (), set(), True),
        ([], (), set(), False),
        ("so", ("so",), set(), True),
        ([5, 6], (), {5, 6}, True),
    ],
)
def test_an_empty_list_of_stops_is_no_stop_at_all(
    base_model: Callable[..., BaseWeights], stop: Any, texts: tuple[str, ...], tokens: set[int], ends: bool
) -> None:
    samplers = Samplers(base_model(), 1)
    found = samplers._params(Sampling(stop=stop), 0)
    expected = tokens | (samplers._end_tokens() if ends else set())
    assert (found.stop, found.stop_token_ids) == (texts, frozenset(expected))
    assert (found.top_k, found.seed, found.max_tokens) == (0, None, samplers.base.max_context)


def result(size: int) -> FetchedResult:
    return FetchedResult(body=b"x" * size)


def test_results_are_kept_as_long_as_they_may_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "KEPT_S", 10.0)
    monkeypatch.setattr(futures, "UNFETCHED_S", 100.0)
    clock = 0.0
    monkeypatch.setattr(futures.time, "monotonic", lambda: clock)
    kept = Futures()

    def made(name: str, *, fetched: bool) -> Future:
        future = kept.add(name, b"")
        future.set(result(1))
        future.is_fetched = fetched
        return future

    made("fetched", fetched=True)
    made("unfetched", fetched=False)
    kept.add("running", b"")
    left = []
    for clock in (9.0, 11.0, 99.0, 101.0):  # noqa: B007
        kept.sweep()
        left.append(sorted(kept._by_id))
    assert left == [
        ["fetched", "running", "unfetched"],
        ["running", "unfetched"],
        ["running", "unfetched"],
        ["running"],
    ]


def test_above_the_limit_fetched_results_go_first_and_the_oldest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "MAX_BYTES", 10)
    kept = Futures()
    for number, (name, fetched) in enumerate((("a", False), ("b", True), ("c", True), ("d", False))):
        future = kept.add(name, b"")
        future.set(result(4))
        future.is_fetched, future.since = fetched, futures.time.monotonic() + number / 100
    kept.sweep()
    assert sorted(kept._by_id) == ["a", "d"]
    monkeypatch.setattr(futures, "MAX_BYTES", 7)
    kept.sweep()
    assert sorted(kept._by_id) == ["d"]


def test_number_cannot_be_reused_for_another_body() -> None:
    kept = Futures()
    future = kept.add("r:1", b"one")
    assert kept.find_retried("r:1", b"one") is future
    assert kept.find_retried("r:2", b"one") is None
    with pytest.raises(UsageError, match="a different request with this number"):
        kept.find_retried("r:1", b"two")


def test_the_newest_unnamed_samplers_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    about = CheckpointInfo(base_model="m", settings=SETTINGS, updates=0, created="2026-01-01")
    for number in range(5):
        store.write("run", "ephemeral", f"{number:06d}", about, lambda folder: None)
    store.forget_old("run", "ephemeral", keep=2)
    assert sorted(folder.name for folder in (tmp_path / "run" / "ephemeral").iterdir()) == ["000003", "000004"]


tinker = pytest.importorskip("tinker")
types = tinker.types
GREEDY = types.SamplingParams(max_tokens=1, temperature=0.0, stop=[])


def trainer_of(service: Any, **options: Any) -> Any:
    return service.create_lora_training_client(base_model="tiny", **{"rank": 4, "seed": 0, **options}).result()


def sentence(*ids: int) -> Any:
    inputs = {"target_tokens": list(ids[1:]), "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=inputs)


def test_checkpoint_with_other_layers_is_rejected_and_lists_its_layers(service: Any) -> None:
    trainer = trainer_of(service, train_mlp=False)
    path = trainer.save_state("a").result().path
    with pytest.warns(FutureWarning, match="create_rest_client"):
        rest = service.create_rest_client()
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (False, True, True)
    for other in (trainer_of(service), trainer_of(service, train_mlp=False, rank=2)):
        with (
            pytest.warns(FutureWarning, match="load_state"),
            pytest.raises(tinker.RequestFailedError, match="the checkpoint's adapters differ from the run's"),
        ):
            other.load_state(path).result()


def test_lifetime_of_sampler_weights_is_limited(service: Any, tmp_path: Path) -> None:
    trainer = trainer_of(service)
    for name, ttl in (("short", 5000), ("long", None)):
        trainer.save_weights_for_sampler(name, ttl_seconds=ttl).result()
    found = {file.parent.name: json.loads(file.read_text()) for file in (tmp_path / "service").rglob("service.json")}
    assert found["long"]["expires"] is None
    assert found["short"]["expires"] > found["short"]["created"]


def test_failed_forward_only_pass_does_not_block_the_next_update(service: Any) -> None:
    trainer = trainer_of(service)
    with pytest.raises(tinker.RequestFailedError, match="out of the vocabulary"):
        trainer.forward([sentence(1, 2, 99_999)], "cross_entropy").result()
    trainer.forward_backward([sentence(1, 2, 3)], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def test_top_tokens_have_the_temperature_of_the_sample(service: Any) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=4, temperature=0.25, seed=5, stop=[])
    (answer,) = sampler.sample(prompt, 1, params, topk_sample_logprobs=256).result().sequences
    for token, logprob, top in zip(answer.tokens, answer.logprobs, answer.topk_logprobs, strict=True):
        assert dict(top)[token] == pytest.approx(logprob, abs=1e-3)


def test_the_weights_that_were_not_used_for_longest_make_room(serve: Callable[..., Any], client_of: Any) -> None:
    served = serve(most_engines=2)
    service = client_of(served)
    samplers = {}
    for name, rank in (("a", 1), ("b", 2), ("c", 3)):  # of different sizes: none can be loaded into another's engine
        path = trainer_of(service, rank=rank).save_weights_for_sampler(name).result().path
        samplers[name] = service.create_sampling_client(model_path=path).result()
    for name in ("a", "b", "a", "c"):
        samplers[name].sample(types.ModelInput.from_ints([1]), 1, GREEDY).result()
    slots = served.server.service._samplers._slots
    assert sorted(slot.weights.folder.name for slot in slots) == ["a", "c"]


def test_unfetched_result_can_be_fetched_later() -> None:
    async def fetch() -> None:
        kept = Futures()
        future = kept.add("r:1", b"")
        assert await kept.fetch("r:1", wait_s=0.0) is None
        assert not future.is_fetched
        future.set(result(3))
        future.set(result(4))
        assert await kept.fetch("r:1", wait_s=0.0) == result(3)
        assert future.is_fetched

    asyncio.run(fetch())


def test_a_number_is_used_once_and_not_far_ahead_and_only_the_next_may_be_large() -> None:
    waiting = WaitingRequest(future=cast("Future", None), work=cast("Any", None), bytes=10)
    run = ServedRun(id="r", session=cast("Any", None), training=cast("Any", None), metadata=None, next=5)
    run.waiting = {7: waiting, 8: replace(waiting, bytes=20)}
    assert run.waiting_bytes == 30
    for used in (4, 7, 8):
        with pytest.raises(UsageError, match=f"sent before: got seq_id {used}, expected 5 or more"):
            run.check(used, 1, 0)
    for new in (5, 6, 9, 4 + MAX_PENDING):
        run.check(new, 1, MAX_WAITING_BYTES - 1)
    with pytest.raises(UsageError, match="too many requests are waiting"):
        run.check(5 + MAX_PENDING, 1, 0)
    with pytest.raises(Busy, match="too large"):
        run.check(6, 2, MAX_WAITING_BYTES - 1)
    run.check(5, 2, MAX_WAITING_BYTES - 1)
