import asyncio
from dataclasses import replace

import pytest

from agentrl.engine.answer_check import InvalidAnswer
from agentrl.errors import TrainingError
from agentrl.serving.scripted import ScriptedAnswer, ScriptedEngine
from agentrl.weights import TOLERANCE, InProcessSync, Probe


class Source:
    """A trainer that is sure of every token: log-probability -0.5."""

    def __init__(self, logprob=-0.5):
        self.logprob = logprob
        self.handed_over = 0

    def weights(self):
        self.handed_over += 1
        return {}

    def token_logprobs(self, prompt_ids, answer_ids):
        return [self.logprob] * len(answer_ids)


def engine(drift=0.0, version=None, token_ids=(5, 6, 7, 8), logprobs=(-0.5,) * 4, newest=0):
    def script(request):
        return ScriptedAnswer(token_ids=token_ids, logprobs=logprobs, drift=drift, version=version)

    return ScriptedEngine(script=script, vocab_size=16, version=newest)


PROBE = Probe.random(16, tolerance=1e-3)


async def test_equal_weights_pass_and_nothing_is_left_behind():
    served = engine()
    assert (await PROBE.compare(served, Source(), version=0)).difference == 0
    assert served.metrics().running == 0


@pytest.mark.parametrize("drift", [2e-3, -2e-3])
async def test_error_names_the_drifting_engine(drift):
    with pytest.raises(
        TrainingError, match=r"does not serve the trainer's weights of version 0: log-probability of token"
    ):
        await PROBE.compare(engine(drift=drift), Source(), version=0)


async def test_a_difference_need_not_come_from_an_update():
    with pytest.raises(TrainingError, match=r"The engine serves another model, an update did not reach every tensor"):
        await PROBE.compare(engine(drift=0.3), Source(), version=0)


async def test_a_difference_within_rounding_is_reported_and_passes():
    assert (await PROBE.compare(engine(drift=5e-4), Source(), version=0)).difference == pytest.approx(5e-4)


async def test_a_single_token_may_be_far_off_in_bfloat16_but_not_all_of_them():
    """A real model's step in bfloat16 gave 0.63 on one token of the probe, and 0.07 on average."""
    probe = Probe.random(16, **TOLERANCE["bfloat16"])
    rounded = engine(logprobs=[-0.43, -1.13, -0.57, -0.5])
    assert (await probe.compare(rounded, Source(), version=0)).difference == pytest.approx(0.63)
    with pytest.raises(TrainingError, match=r"16 tokens differ by 0\.3 on average, expected .* 0\.25 on average"):
        await probe.compare(engine(drift=0.3), Source(), version=0)


@pytest.mark.parametrize("position", range(4))
async def test_every_token_of_an_answer_is_compared(position):
    logprobs = [-0.5] * 4
    logprobs[position] = -0.51
    wrong = engine(logprobs=logprobs)
    expected = f"log-probability of token {5 + position} after {24 + position} tokens: got -0.51 from the engine"
    with pytest.raises(TrainingError, match=expected):
        await PROBE.compare(wrong, Source(), version=0)
    recorded = (await PROBE.compare(engine(), Source(), version=0)).answers
    with pytest.raises(TrainingError, match=expected):
        await PROBE.compare_recorded(wrong, recorded, version=0)


async def test_recorded_answers_are_compared_up_to_the_first_other_token_and_with_it_when_it_is_the_first():
    recorded = (await PROBE.compare(engine(), Source(), version=0)).answers
    later = engine(token_ids=[5, 6, 9, 8], logprobs=[-0.5, -0.5003, -3.0, -3.0])
    assert await PROBE.compare_recorded(later, recorded, version=0) == pytest.approx(3e-4)
    first = engine(token_ids=[9, 6, 7, 8], logprobs=[-0.5002, -3.0, -3.0, -3.0])
    assert await PROBE.compare_recorded(first, recorded, version=0) == pytest.approx(2e-4)
    with pytest.raises(TrainingError, match="token 9 after 24 tokens"):
        await PROBE.compare_recorded(engine(token_ids=[9, 6], logprobs=[-0.6, -0.5]), recorded, version=0)


async def test_the_version_of_every_token_is_compared():
    recorded = (await PROBE.compare(engine(), Source(), version=0)).answers
    with pytest.raises(TrainingError, match=r"another version after a sync: got \[0\], expected 3"):
        await PROBE.compare_recorded(engine(version=0, newest=3), recorded, version=3)


@pytest.mark.parametrize(
    "wrong", [{"token_ids": (99, 6, 7, 8)}, {"drift": float("nan")}, {"version": 7}, {"drift": 2.0}]
)
async def test_a_single_wrong_answer_does_not_end_a_run(wrong):
    """It says nothing about the weights, and the probe asks again."""
    answers = iter([wrong])

    def script(request):
        given = {"token_ids": (5, 6, 7, 8), "logprobs": (-0.5,) * 4, **next(answers, {})}
        return ScriptedAnswer(**given)

    served = ScriptedEngine(script=script, vocab_size=16)
    assert (await PROBE.compare(served, Source(), version=0)).difference == 0
    assert served.metrics().running == 0


async def test_a_lost_answer_does_not_hang_the_probe(monkeypatch):
    served, lost = engine(), iter([True])
    real = served.generate

    async def generate(request):
        if next(lost, False):
            await asyncio.Event().wait()
        return await real(request)

    monkeypatch.setattr(served, "generate", generate)
    probe = replace(PROBE, answer_timeout_s=0.05)
    assert (await probe.compare(served, Source(), version=0)).difference == 0


async def test_error_names_the_engine_that_missed_the_update():
    with pytest.raises(TrainingError, match=r"weights of another version after a sync: got \[0\], expected 3"):
        await PROBE.compare(engine(version=0, newest=3), Source(), version=3)


@pytest.mark.parametrize("wrong", [{"drift": float("nan")}, {"drift": 1.0}, {"version": 3}])
async def test_error_names_the_engine_with_invalid_answers(wrong):
    with pytest.raises(InvalidAnswer, match="the engine gave an invalid answer to request probe-0-"):
        await PROBE.compare(engine(**wrong), Source(), version=0)


async def test_recorded_answers_stand_for_the_trainer():
    recorded = (await PROBE.compare(engine(), Source(), version=0)).answers
    assert await PROBE.compare_recorded(engine(drift=5e-4), recorded, version=0) == pytest.approx(5e-4)
    with pytest.raises(TrainingError, match="server x does not serve the trainer's weights"):
        await PROBE.compare_recorded(engine(drift=2e-3), recorded, version=0, name="server x")


@pytest.mark.parametrize("shared", [True, False])
async def test_a_sync_raises_the_version_and_copies_only_when_it_must(shared):
    source, served = Source(), engine()
    report = await InProcessSync(source, served, shared=shared, probe=PROBE).sync(4)
    assert (served.version, report.version, report.probe_difference) == (4, 4, 0)
    assert source.handed_over == (0 if shared else 1)
    assert report.seconds == report.transport_s + report.verify_s >= 0


async def test_an_engine_of_this_process_is_held_while_its_weights_change(monkeypatch):
    served, calls = engine(), []

    def record(name):
        real = getattr(served, name)

        async def recorded(*args):
            calls.append(name)
            return await real(*args)

        monkeypatch.setattr(served, name, recorded)

    for name in ("pause", "update_weights", "resume", "generate"):
        record(name)
    report = await InProcessSync(Source(), served, shared=False, probe=PROBE).sync(1)
    assert calls == ["pause", "update_weights", "resume", *["generate"] * 4]
    assert max(report.transport_s, report.verify_s) < 60


def test_the_prompts_are_the_same_every_time_and_inside_the_vocabulary():
    assert Probe.random(16, tolerance=1).prompts == PROBE.prompts
    assert max(max(prompt) for prompt in PROBE.prompts) < 16
