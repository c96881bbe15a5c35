"""The conformance kit, on every engine that runs here, and on engines that break one promise each."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.local_server import LocalServer
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.config.engines import LocalEngineConfig, ScriptedEngineConfig
from agentrl.engine import StopReason
from agentrl.errors import EngineError
from agentrl.serving.local import LocalEngine
from agentrl.serving.scripted import ScriptedAnswer, ScriptedEngine
from agentrl.testing import ServerEngine, check_engine, engine_check
from agentrl.testing.engine_check import RULES
from agentrl.testing.report import CheckStatus
from agentrl.weights import write_served_model


def skipped(report):
    return [row.check for row in report.rows if row.status is CheckStatus.SKIPPED]


@pytest.mark.parametrize("delay_s", [0.0, 1e-6])
async def test_the_scripted_engine_conforms(delay_s):
    report = await check_engine(lambda: ScriptedEngine(ScriptedEngineConfig(delay_s=delay_s), max_context=300))
    report.raise_on_failure()
    assert skipped(report) == ["logprobs", "first token", "killed engine"]


def _shaken(model):
    """Change the model's weights in place, as a trainer that shares them does."""
    generator = torch.Generator().manual_seed(0)

    def change():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    return change


SIZES = {
    "roomy": {"max_num_seqs": 16, "cache_tokens": 16_384},
    "tight": {"max_num_seqs": 3, "cache_tokens": 256, "prefill_tokens": 7},
}


@pytest.mark.parametrize(("family", "size"), [("qwen3", "roomy"), ("qwen3", "tight"), ("gemma3", "roomy")])
@pytest.mark.slow
async def test_the_local_engine_conforms(family, size, reference_of):
    model = tiny_model(family, max_context=128)
    report = await check_engine(
        lambda: LocalEngine(model, LocalEngineConfig(**SIZES[size])),
        reference=reference_of(model),
        new_weights=_shaken(model),
    )
    report.raise_on_failure()
    assert skipped(report) == ["killed engine"]


async def test_the_local_engine_conforms_with_weights_that_are_sent(reference_of):
    trained, served = tiny_model(max_context=128), tiny_model(max_context=128)
    shake = _shaken(trained)

    def send():
        shake()
        return {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}

    report = await check_engine(
        lambda: LocalEngine(served, LocalEngineConfig(max_num_seqs=16)),
        reference=reference_of(trained),
        new_weights=send,
    )
    report.raise_on_failure()


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    write_served_model(tiny_model(vocab_size=300, max_context=128), build_tokenizer("qwen3", vocab_size=280), path)
    return path


@pytest.mark.slow
async def test_a_server_conforms_up_to_its_death(served_folder, reference_of, tmp_path):
    servers, numbers = [], itertools.count()
    trained = tiny_model(vocab_size=300, max_context=128)
    shake = _shaken(trained)

    def factory():
        servers.append(LocalServer(served_folder, name=str(len(servers))))
        return ServerEngine(servers[-1])

    def send():
        shake()
        folder = tmp_path / str(next(numbers))
        write_served_model(trained, build_tokenizer("qwen3", vocab_size=280), folder)
        return {"folder": folder}

    report = await check_engine(
        factory,
        reference=reference_of(trained),
        new_weights=send,
        sampling=ServerEngine.sampling,
        kill=lambda: servers[-1].kill(),
    )
    report.raise_on_failure()
    assert skipped(report) == []


async def test_the_kit_sees_that_a_process_was_not_killed():
    report = await check_engine(lambda: ScriptedEngine(max_context=300), kill=lambda: None)
    (row,) = [row for row in report.rows if not row.passed]
    assert row.check == "killed engine"
    assert row.detail == "a request that was running at the kill did not raise EngineError"


async def test_a_request_that_is_over_before_it_is_seen_is_told():
    async def blind(engine):
        return 0

    report = await check_engine(lambda: ScriptedEngine(max_context=300), sampling=blind)
    (found,) = [row.detail for row in report.rows if row.check == "abort"]
    assert "could be observed in flight: it ended with 291 tokens" in found


class _KeepsStaleCache(LocalEngine):
    async def update_weights(self, weights, version):
        forget, self._scheduler.forget_computed = self._scheduler.forget_computed, lambda: None
        await super().update_weights(weights, version)
        self._scheduler.forget_computed = forget


class _IgnoresAborts(LocalEngine):
    async def abort(self, request_id):
        return request_id in self._jobs


class _IgnoresPauses(LocalEngine):
    async def pause(self):
        return


class _DriftsALittle(LocalEngine):
    async def generate(self, request):
        answer = await super().generate(request)
        return replace(answer, logprobs=[value - 1e-3 for value in answer.logprobs])


class _ReportsTheCutDistribution(LocalEngine):
    async def generate(self, request):
        answer = await super().generate(request)
        cut = request.params.top_k or request.params.top_p < 1
        return replace(answer, logprobs=[value / 2 for value in answer.logprobs]) if cut else answer


class _DropsTheStopToken(LocalEngine):
    async def generate(self, request):
        answer = await super().generate(request)
        if answer.stop_reason is not StopReason.STOP:
            return answer
        return replace(
            answer, token_ids=answer.token_ids[:-1], logprobs=answer.logprobs[:-1], versions=answer.versions[:-1]
        )


class _StampsTheLatestVersion(LocalEngine):
    async def generate(self, request):
        answer = await super().generate(request)
        return replace(answer, versions=[self.version] * len(answer.versions))


@pytest.mark.parametrize(
    ("engine", "failing"),
    [
        (_KeepsStaleCache, {"update in flight", "sessions"}),
        (_IgnoresAborts, {"abort", "pause"}),
        (_IgnoresPauses, {"pause"}),
        (_DriftsALittle, {"logprobs", "update in flight", "sessions", "shared session", "load"}),
        (_ReportsTheCutDistribution, {"logprobs"}),
        (_DropsTheStopToken, {"stop"}),
        (_StampsTheLatestVersion, {"update in flight"}),
    ],
)
async def test_the_kit_finds_a_broken_promise(engine, failing, reference_of, monkeypatch):
    """The other rules, which take seconds, are left out."""
    monkeypatch.setattr(engine_check, "RULES", [rule for rule in RULES if rule.name in failing])
    model = tiny_model(max_context=128)
    report = await check_engine(
        lambda: engine(model, LocalEngineConfig(max_num_seqs=16)),
        reference=reference_of(model),
        new_weights=_shaken(model),
        deadline_s=2,
    )
    assert {row.check for row in report.rows if not row.passed} == failing
    with pytest.raises(EngineError, match="does not conform to its contract"):
        report.raise_on_failure()


async def test_the_kit_finds_answers_that_are_too_long_or_stamped_wrong():
    def script(request):
        return ScriptedAnswer(token_ids=[1] * request.params.max_tokens, version=7)

    report = await check_engine(lambda: ScriptedEngine(script=script, max_context=300), deadline_s=2)
    assert {"versions", "seeds"} <= {row.check for row in report.rows if not row.passed}
    assert "failed   versions" in str(report)
    assert len(report.rows) == len(RULES)
