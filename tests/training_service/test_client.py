"""The real client against the service: loops, sampling, checkpoints, errors, several clients."""

from __future__ import annotations

import itertools
import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.models.load import load_model
from agentrl.observe.model_folder import find_model
from agentrl.training_service import server as server_module

tinker = pytest.importorskip("tinker")
types = tinker.types
EXAMPLE = Path(__file__).parents[2] / "examples/12_own_training_loop.py"
ADAM = types.AdamParams(learning_rate=1e-2)
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])


def sentence(*ids: int) -> Any:
    inputs = {"target_tokens": list(ids[1:]), "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=inputs)


def trainer_of(service: Any, **options: Any) -> Any:
    return service.create_lora_training_client(base_model="tiny", **{"rank": 4, "seed": 0, **options}).result()


def step(trainer: Any, *data: Any, adam: Any = ADAM) -> float:
    passed, updated = trainer.forward_backward(list(data), "cross_entropy"), trainer.optim_step(adam)
    updated.result()
    return float(passed.result().metrics["loss:sum"])


def logprobs_of(client: Any, *ids: int) -> list[float | None]:
    found: list[float | None] = client.compute_logprobs(types.ModelInput.from_ints(list(ids))).result()
    return found


@pytest.mark.slow
def test_the_example_learns(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", serve().url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    monkeypatch.setattr("sys.argv", ["12_own_training_loop.py", "--model", "tiny"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, then = re.findall(r"loss per token ([\d.]+), then ([\d.]+)", (said := capsys.readouterr().out))[0]
    assert float(then) < float(first) / 2
    first, then = re.findall(r"reward ([\d.]+), then ([\d.]+)", said)[0]
    assert float(first) < 0.75
    assert float(then) > 0.8


def test_model_description_for_clients(service: Any) -> None:
    trainer = trainer_of(service, rank=3)
    info = trainer.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == ("tiny", True, 3)
    assert trainer.get_tokenizer().decode(trainer.get_tokenizer().encode("a clean mug")) == "a clean mug"
    assert service.create_sampling_client(base_model="tiny").result().get_base_model() == "tiny"


def test_samples_and_their_numbers(service: Any) -> None:
    trainer = trainer_of(service)
    step(trainer, sentence(1, 2, 3, 4, 5))
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([1, 2])
    params = types.SamplingParams(max_tokens=5, seed=7, stop=[])
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}
    answer = sampler.sample(prompt, 3, params, **options).result()
    tokens = [sequence.tokens for sequence in answer.sequences]
    assert [len(own) for own in tokens] == [5, 5, 5]
    assert len({tuple(own) for own in tokens}) > 1, "samples of one request differ"
    assert tokens == [s.tokens for s in sampler.sample(prompt, 3, params).result().sequences], "seeds repeat"
    assert len({sequence.sequence_id for sequence in answer.sequences}) == 3

    first = answer.sequences[0]
    scored = logprobs_of(sampler, 1, 2, *first.tokens)
    assert scored[0] is None
    assert first.logprobs == pytest.approx(scored[2:], abs=1e-4)
    assert answer.prompt_logprobs == [None, pytest.approx(scored[1], abs=1e-4)]
    assert answer.topk_prompt_logprobs[0] is None
    assert [len(row) for row in (answer.topk_prompt_logprobs[1], *first.topk_logprobs)] == [2, 3, 3, 3, 3, 3]
    best = first.topk_logprobs[0][0]
    greedy = sampler.sample(prompt, 1, GREEDY).result().sequences[0]
    assert best[0] == greedy.tokens[0]
    assert best[1] == pytest.approx(greedy.logprobs[0], abs=1e-4)
    last = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, 4]), prompt_logprobs_last_n=2).result()
    assert last[:2] == [None, None]
    assert last[2:] == pytest.approx(logprobs_of(sampler, 1, 2, 3, 4)[2:], abs=1e-5)


def test_stop_conditions_of_a_sample(service: Any) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints([9, 8])
    whole = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, temperature=0, stop=[])).result().sequences[0]
    assert (whole.stop_reason, len(whole.tokens)) == ("length", 6)
    end = whole.tokens[2]
    cut = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, temperature=0, stop=[end])).result().sequences[0]
    assert (cut.stop_reason, cut.tokens) == ("stop", whole.tokens[: whole.tokens.index(end) + 1])


def test_sampler_keeps_its_weights_during_training(serve: Callable[..., Any], client_of: Any) -> None:
    service = client_of(serve(most_engines=1))  # every change of sampler loads weights anew
    trainer, ids = trainer_of(service), (1, 2, 3, 4, 5)
    samplers, before = [], []
    for number in range(3):
        named = trainer.save_weights_for_sampler(f"s{number}").result().path
        client = service.create_sampling_client(model_path=named).result()
        unnamed = trainer.save_weights_and_get_sampling_client().result()
        samplers.append((client, unnamed))
        before.append(logprobs_of(client, *ids))
        assert logprobs_of(unnamed, *ids) == before[-1]
        for _ in range(2):
            step(trainer, sentence(*ids))
    assert all(math.dist(a[1:], b[1:]) > 0.1 for a, b in itertools.pairwise(before))
    base = service.create_sampling_client(base_model="tiny").result()
    assert logprobs_of(base, *ids) == pytest.approx(before[0], abs=1e-5), "adapters begin as nothing"
    for (client, unnamed), expected in zip(reversed(samplers), reversed(before), strict=True):
        assert logprobs_of(client, *ids) == expected
        assert logprobs_of(unnamed, *ids) == expected
        answer = client.sample(types.ModelInput.from_ints([1, 2]), 1, GREEDY).result().sequences[0]
        assert answer.logprobs == pytest.approx(logprobs_of(client, 1, 2, *answer.tokens)[2:], abs=1e-4)


def test_sampling_during_training(service: Any) -> None:
    trainer, ids = trainer_of(service), (1, 2, 3, 4, 5)
    step(trainer, sentence(*ids))
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=40, seed=1, stop=[])
    prompt = types.ModelInput.from_ints([1, 2])
    waiting = [sampler.sample(prompt, 4, params) for _ in range(6)]
    losses = [step(trainer, sentence(*ids)) for _ in range(6)]
    assert losses[-1] < losses[0]
    answers = [[tuple(own.tokens) for own in answer.result().sequences] for answer in waiting]
    assert answers == [answers[0]] * 6, "of one seed and one set of weights"
    first = waiting[0].result().sequences[0]
    assert first.logprobs == pytest.approx(logprobs_of(sampler, 1, 2, *first.tokens)[2:], abs=1e-3)


def test_a_sampler_never_gets_the_weights_of_another(serve: Callable[..., Any], client_of: Any) -> None:
    service, ids = client_of(serve(most_engines=1)), (1, 2, 3, 4, 5)
    trainer = trainer_of(service)
    step(trainer, sentence(*ids))
    path = trainer.save_state("a").result().path
    first = service.create_sampling_client(model_path=path).result()
    before = logprobs_of(first, *ids)
    step(trainer, sentence(*ids))
    trainer.save_state("a", overwrite=True).result()
    assert logprobs_of(first, *ids) == before, "its weights are still in memory"
    second = service.create_sampling_client(model_path=path).result()
    assert math.dist(logprobs_of(second, *ids)[1:], before[1:]) > 0.1
    with pytest.raises(tinker.RequestFailedError, match="the weights of this sampler no longer exist"):
        logprobs_of(first, *ids)


def test_saved_state_continues_identically(service: Any) -> None:
    trainer, data = trainer_of(service), sentence(1, 2, 3, 4, 5)
    for _ in range(3):
        step(trainer, data)
    path = trainer.save_state("here", user_metadata={"step": "3"}).result().path
    losses = [step(trainer, data) for _ in range(3)]

    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert [step(again, data) for _ in range(3)] == losses
    without = service.create_training_client_from_state(path).result()
    first, *others = [step(without, data) for _ in range(3)]
    assert first == losses[0]
    assert others != losses[1:]
    with pytest.warns(FutureWarning, match="load_state"):
        trainer.load_state_with_optimizer(path).result()
    assert [step(trainer, data) for _ in range(3)] == losses
    with pytest.raises(tinker.RequestFailedError, match="already exists"):
        trainer.save_state("here").result()
    assert trainer.save_state("here", overwrite=True).result().path == path


def test_a_loss_of_the_users_own(service: Any) -> None:
    trainer, data = trainer_of(service), sentence(1, 2, 3, 4)

    def squares(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return (logprobs[0] ** 2).sum(), {"seen": 1.0}

    losses = []
    for _ in range(4):
        passed = trainer.forward_backward_custom([data], squares)
        trainer.optim_step(ADAM).result()
        losses.append(passed.result().metrics["loss:sum"])
    assert losses[-1] < losses[0] / 2
    assert passed.result().metrics["seen"] == 1.0


def test_gradients_of_several_requests_form_one_update(
    serve: Callable[..., Any], client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [sentence(1, 2, 3 + k, 4) for k in range(7)]
    whole = trainer_of(client_of(serve()))
    loss = step(whole, *data)
    monkeypatch.setitem(server_module.CLIENT_CONFIG, "fwdbwd_max_chunk_len", 2)
    cut = trainer_of(client_of(serve()))  # the client sends the first of the requests last
    passed = cut.forward_backward(data, "cross_entropy")
    cut.optim_step(ADAM).result()
    assert passed.result().metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert len(passed.result().loss_fn_outputs) == 7
    assert step(cut, *data) == pytest.approx(step(whole, *data), rel=1e-4)


def test_errors_reach_the_user_and_hold_nothing_up(service: Any) -> None:
    trainer, good = trainer_of(service), sentence(1, 2, 3)
    unknown = types.Datum(
        model_input=types.ModelInput.from_ints([1]),
        loss_fn_inputs={"target_tokens": [2], "weights": [1.0], "advantages": [1.0]},
    )
    image = types.Datum(
        model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]),
        loss_fn_inputs={"target_tokens": [2], "weights": [1.0]},
    )
    first = step(trainer, good)
    failed = trainer.forward_backward([good, unknown], "cross_entropy")
    update, after = trainer.optim_step(ADAM), trainer.forward_backward([good], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=r"data\[1\] has loss_fn_inputs\.advantages") as error:
        failed.result()
    assert error.value.category is types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="no update: a forward_backward since the last update failed"):
        update.result()
    assert after.result().metrics["loss:sum"] < first
    refused = trainer.forward_backward([image], "cross_entropy")
    update = trainer.optim_step(ADAM)
    with pytest.raises(tinker.BadRequestError, match=r"data\[0\]\.model_input\[0\] is not supported.*image chunk"):
        refused.result()
    with pytest.raises(tinker.RequestFailedError, match="image chunk"):
        update.result()
    for loss, config, expected in (
        ("stable_reinforce", None, "is not supported"),
        ("ppo", {"clip_low": 0.5}, r"loss_fn_config\.clip_low is not an option of ppo"),
        ("dro", None, r"dro requires loss_fn_config\.beta"),
        ("ppo", {"clip_low_threshold": 2.0}, "above clip_high_threshold"),
        ("importance_sampling", None, r"data\[0\] lacks loss_fn_inputs\.advantages"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=expected):
            trainer.forward_backward([good], loss, config).result()
    with pytest.raises(tinker.RequestFailedError, match="out of the vocabulary"):
        trainer.forward_backward([sentence(1, 2, 99_999)], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match=r"adam_params\.beta1 is invalid"):
        trainer.optim_step(types.AdamParams(beta1=1.5)).result()
    with pytest.raises(tinker.BadRequestError, match=r"optimizer_params is not supported|adam_params"):
        trainer.optim_step(types.DimuonParams(learning_rate=0.1)).result()
    with pytest.raises(tinker.RequestFailedError, match="invalid checkpoint name"):
        trainer.save_state("../up").result()
    with pytest.raises(tinker.BadRequestError, match="save_weights_external is not supported"):
        trainer.save_weights_external("x").result()


def test_requests_that_no_server_could_serve(service: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="another base model"):
        service.create_lora_training_client(base_model="other", rank=4).result()
    with pytest.raises(tinker.BadRequestError, match="another base model"):
        service.create_sampling_client(base_model="other").result()
    with pytest.raises(tinker.BadRequestError, match="invalid checkpoint path"):
        service.create_sampling_client(model_path="tinker://../../etc/weights/x").result()
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint found"):
        service.create_training_client_from_state("tinker://a/weights/b").result()
    sampler = service.create_sampling_client(base_model="tiny").result()
    for prompt, params, expected in (
        ([99_999], GREEDY, "outside the vocabulary"),
        ([], GREEDY, "empty prompt"),
        ([1] * 600, GREEDY, "does not fit"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=expected):
            sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()
    with pytest.raises(tinker.BadRequestError, match="temperature"):
        sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(temperature=-1)).result()
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k"):
        sampler.sample(types.ModelInput.from_ints([1]), 1, GREEDY, prompt_alt_tokens_k=2).result()
    assert len(sampler.sample(types.ModelInput.from_ints([1]), 1, GREEDY).result().sequences) == 1


@pytest.mark.slow
def test_concurrent_clients_learn_as_if_alone(serve: Callable[..., Any], client_of: Any) -> None:
    texts = {"a": sentence(1, 2, 3, 4, 5), "b": sentence(9, 8, 7, 6)}
    alone = {name: trainer_of(client_of(serve()), seed=k) for k, name in enumerate(texts)}
    losses = {name: [step(alone[name], data) for _ in range(4)] for name, data in texts.items()}
    served = serve()
    together = {name: trainer_of(client_of(served), seed=k) for k, name in enumerate(texts)}
    waiting: dict[str, list[Any]] = {name: [] for name in texts}
    for _ in range(4):
        for name, data in texts.items():
            waiting[name].append(together[name].forward_backward([data], "cross_entropy"))
            together[name].optim_step(ADAM)
    for name, passes in waiting.items():
        assert [passed.result().metrics["loss:sum"] for passed in passes] == losses[name]


@pytest.mark.slow
def test_all_weights(serve: Callable[..., Any], client_of: Any) -> None:
    service = client_of(serve(all_weights=True, most_engines=1))
    trainer, data = trainer_of(service), sentence(1, 2, 3, 4, 5)
    assert trainer.get_info().is_lora is False
    adam = types.AdamParams(learning_rate=1e-3)
    base = logprobs_of(trainer.save_weights_and_get_sampling_client().result(), 1, 2, 3, 4, 5)
    for _ in range(3):
        step(trainer, data, adam=adam)
    path = trainer.save_state("all").result().path
    losses = [step(trainer, data, adam=adam) for _ in range(2)]
    again = service.create_training_client_from_state_with_optimizer(path).result()
    sampler = again.save_weights_and_get_sampling_client().result()
    assert [step(again, data, adam=adam) for _ in range(2)] == losses
    learned = logprobs_of(sampler, 1, 2, 3, 4, 5)
    assert -sum(learned[1:]) == pytest.approx(losses[0], rel=1e-4)
    assert logprobs_of(service.create_sampling_client(base_model="tiny").result(), 1, 2, 3, 4, 5) == base


def test_checkpoints_are_listed_described_and_deleted(service: Any) -> None:
    trainer = trainer_of(service, rank=2, train_mlp=False, user_metadata={"my": "run"})
    step(trainer, sentence(1, 2, 3))
    path = trainer.save_state("a", ttl_seconds=4000, user_metadata={"k": "v"}).result().path
    trainer.save_weights_for_sampler("b").result()
    with pytest.warns(FutureWarning, match="create_rest_client"):
        rest = service.create_rest_client()
    run = rest.get_training_run(trainer.model_id).result()
    assert (run.lora_rank, run.is_lora, run.user_metadata) == (2, True, {"my": "run"})
    assert [own.training_run_id for own in rest.list_training_runs().result().training_runs] == [trainer.model_id]
    assert rest.get_session(service.holder.get_session_id()).result().training_run_ids == [trainer.model_id]
    found = {own.checkpoint_id: own for own in rest.list_user_checkpoints().result().checkpoints}
    assert set(found) == {"weights/a", "sampler_weights/b"}
    saved = found["weights/a"]
    assert (saved.tinker_path, saved.user_metadata) == (path, {"k": "v"})
    assert 3990 < (saved.expires_at - saved.time).total_seconds() <= 4000
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.lora_rank, info.train_mlp, info.train_attn) == (2, False, True)
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert len(rest.list_checkpoints(trainer.model_id).result().checkpoints) == 1
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint found"):
        service.create_training_client_from_state(path).result()


@pytest.mark.parametrize("unembed", [True, False])
def test_a_checkpoint_is_a_model_that_every_command_takes(unembed: bool, service: Any, tmp_path: Path) -> None:
    trainer, ids = trainer_of(service, train_unembed=unembed), [1, 2, 3, 4, 5]
    for _ in range(3):
        step(trainer, sentence(*ids))
    path = trainer.save_state("a").result().path.removeprefix("tinker://")
    model = load_model(find_model(str(tmp_path / "service" / path)), dtype="float32", device="cpu")
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    assert logprobs_of(sampler, *ids)[1:] == pytest.approx(expected, abs=1e-4)


def test_a_closed_client_ends_its_runs(serve: Callable[..., Any], client_of: Any) -> None:
    served = serve(most_runs=1)
    first, second = client_of(served), client_of(served)
    trainer_of(first)
    with pytest.raises(tinker.BadRequestError, match="maximum number of runs is active"):
        trainer_of(second)
    first.close("success").result(60)
    assert trainer_of(second).get_info().lora_rank == 4
