"""Episodes on the token ledger: requests, recorded tokens, and engines that fail half-way."""

import asyncio
from array import array
from dataclasses import replace

import numpy as np
import pytest

from agentrl.agent_loop import AgentLoop
from agentrl.engine import Capabilities, GenerateRequest, Generation, SamplingParams, StopReason
from agentrl.engine.answer_check import ROUNDING, check_answer
from agentrl.errors import EngineError, Outcome
from agentrl.message import user
from agentrl.render.answer_tokens import find_stop
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.policies import MAX_RESUBMISSIONS, EngineEpisodePolicy
from agentrl.serving.scripted import Failure, ScriptedAnswer, ScriptedEngine
from agentrl.trajectory import Source


class Spy(ScriptedEngine):
    """Remembers requests and ended sessions."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.requests, self.ended = [], []

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)

    async def end_session(self, session_id):
        self.ended.append(session_id)
        await super().end_session(session_id)


@pytest.fixture
def spy(renderer):
    def make(answer="forward", **options):
        given = renderer.encoder.encode(answer) if isinstance(answer, str) else answer
        script = given if callable(given) else lambda request: given
        return Spy(script=script, vocab_size=400, **options)

    return make


async def test_requests_are_prefixes_of_the_ledger_and_sampled_tokens_are_kept(make_runner, play, worlds, spy):
    engine = spy()
    trajectory = await play(make_runner(worlds.Corridor, engine=engine))
    (sequence,) = trajectory.sequences
    ids = sequence.ids_list()
    assert [list(request.prompt_ids) for request in engine.requests] == [ids[: t.start] for t in sequence.turns]
    assert all(isinstance(request.prompt_ids, array) for request in engine.requests)  # a list costs time per token
    sampled = [i for t in sequence.turns for i in range(t.start, t.end)]
    assert [i for i, masked in enumerate(sequence.loss_mask) if masked] == sampled
    assert {request.session_id for request in engine.requests} == {"g/0.0/0"}
    assert engine.ended == ["g/0.0/0"]
    assert [request.request_id for request in engine.requests] == [f"g/0.0/turn-{n}" for n in range(3)]


async def test_tokens_that_change_while_the_engine_answers_end_the_episode(make_runner, play, worlds, spy):
    """As when a renderer that is shared between episodes keeps a list that another one appends to."""
    engine = spy()
    generate = engine.generate

    async def changed(request):
        answer = await generate(request)
        object.__setattr__(request, "prompt_ids", [*list(request.prompt_ids)[:-1], 0])
        return answer

    engine.generate = changed
    trajectory = await play(make_runner(worlds.Corridor, engine=engine))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "not the ledger's prefix" in trajectory.error


async def test_each_turn_has_its_own_seed_and_the_same_one_again(make_runner, play, worlds, spy):
    async def seeds(**place):
        engine = spy()
        await play(make_runner(worlds.Corridor, engine=engine), **place)
        return [request.params.seed for request in engine.requests]

    first = await seeds()
    assert len(set(first)) == 3
    assert await seeds() == first
    assert set(first).isdisjoint(await seeds(member=1))
    assert set(first).isdisjoint(await seeds(seed=2))


async def test_sampling_is_as_configured(make_runner, play, worlds, spy, renderer):
    engine = spy()
    policy = EngineEpisodePolicy(engine, renderer, SamplingParams(temperature=0.5, top_p=0.9))
    await play(make_runner(worlds.Corridor, policy=policy, limits=EpisodeLimits(max_answer_tokens=7)))
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 7)
    assert params.stop_token_ids == renderer.stop_token_ids


async def test_an_unasked_abort_is_continued_from_what_was_sampled(make_runner, play, worlds, spy, renderer):
    whole = renderer.encoder.encode("forward forward")

    def script(request):
        done = len(request.prompt_ids) - prompt_length
        rest = whole[done : done + 2]
        stop = StopReason.ABORT if done + 2 < len(whole) else None
        return ScriptedAnswer(token_ids=rest, stop_reason=stop)

    engine = spy(script)
    runner = make_runner(worlds.Corridor, engine=engine, limits=EpisodeLimits(max_turns=1))
    prompt_length = (await play(make_runner(worlds.Corridor, "x", limits=EpisodeLimits(max_turns=1)))).turns[0].start
    trajectory = await play(runner)
    (turn,) = trajectory.turns
    ids = trajectory.sequences[0].ids_list()
    assert ids[turn.start : turn.end - 1] == whole
    assert turn.stop_reason == StopReason.STOP.value
    assert len(engine.requests) == -(-len(whole) // 2)
    assert engine.requests[1].params.max_tokens == engine.requests[0].params.max_tokens - 2


async def test_an_episode_out_of_time_ends_once_its_request_is_aborted(make_runner, play, worlds, spy):
    class Slow(Spy):
        aborted = ()

        async def abort(self, request_id):
            found = await super().abort(request_id)
            await asyncio.sleep(0.05)  # a server confirms an abort after the request has returned
            self.aborted = (*self.aborted, request_id)
            return found

    engine = Slow(script=lambda request: ScriptedAnswer(token_ids=[9], failure=Failure.HANG), vocab_size=400)
    limits = EpisodeLimits(max_seconds=0.5)
    trajectory = await play(make_runner(worlds.Corridor, engine=engine, limits=limits))
    assert trajectory.outcome is Outcome.TRUNCATED_TIME
    assert engine.aborted == ("g/0.0/turn-0",)


async def test_answers_that_were_sent_to_another_server_are_counted(make_runner, play, worlds, spy):
    engine, counts = spy(), [0, 2, 1]
    generate = engine.generate

    async def generate_elsewhere(request):
        return replace(await generate(request), resubmissions=counts.pop(0))

    engine.generate = generate_elsewhere
    trajectory = await play(make_runner(worlds.Corridor, engine=engine))
    assert (trajectory.metrics["resubmissions"], counts) == (3.0, [])


async def test_endless_aborts_are_the_engines_failure(make_runner, play, worlds, spy):
    engine = spy(lambda request: ScriptedAnswer(token_ids=[9], stop_reason=StopReason.ABORT))
    trajectory = await play(make_runner(worlds.Corridor, engine=engine))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "repeatedly" in trajectory.error
    assert len(engine.requests) == MAX_RESUBMISSIONS


async def test_weights_that_change_between_turns_are_on_the_ledger(make_runner, play, worlds, spy):
    engine = spy()

    class Update(AgentLoop):
        async def run(self, episode):
            conversation = episode.open([user(await episode.reset())])
            for version in (1, 2):
                await conversation.generate()
                await engine.update_weights(None, version)
                conversation.add(user("and on"))

    runner = make_runner(worlds.Corridor, engine=engine)
    runner.loop = Update()
    trajectory = await play(runner)
    (sequence,) = trajectory.sequences
    assert [set(sequence.versions[t.start : t.end].tolist()) for t in sequence.turns] == [{0}, {1}]
    assert trajectory.oldest_version == 0


async def test_prefilled_text_is_forced(make_runner, play, worlds, spy):
    engine = spy()

    class Prefill(AgentLoop):
        async def run(self, episode):
            conversation = episode.open([user(await episode.reset())])
            answer = await conversation.generate(prefill="go ")
            assert answer.raw_text == "go forward"

    runner = make_runner(worlds.Corridor, engine=engine)
    runner.loop = Prefill()
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.FINISHED
    sources = trajectory.sequences[0].sources.tolist()
    start = trajectory.turns[0].start
    assert sources[start] == Source.FORCED
    assert sources[-1] == Source.SAMPLED


async def test_hundreds_of_episodes_at_once_keep_their_ledgers_apart(make_runner, play, worlds, spy):
    runner = make_runner(worlds.Corridor, engine=spy())
    played = await asyncio.gather(*(play(runner, options={"length": 1 + n % 5}, member=n) for n in range(200)))
    assert [len(t.turns) for t in played] == [1 + n % 5 for n in range(200)]
    assert all(t.outcome is Outcome.FINISHED for t in played)
    assert runner.counters.outcomes == {Outcome.FINISHED: 200}


async def test_an_answer_ends_with_the_token_that_completes_a_stop_text(make_runner, play, worlds, spy, renderer):
    """Whatever the engine did: this one knows nothing of stop texts."""
    answer = renderer.encoder.encode("forward</act> and more, forward</act>")
    whole = next(n for n in range(len(answer)) if "</act>" in renderer.encoder.decode(answer[:n]))
    engine = spy(answer)
    policy = EngineEpisodePolicy(engine, renderer, SamplingParams(stop=("</act>", "never")))
    trajectory = await play(make_runner(worlds.Corridor, policy=policy))
    assert engine.requests[0].params.stop == ("</act>", "never")
    (sequence,) = trajectory.sequences
    ids = sequence.ids_list()
    for turn in sequence.turns:
        assert ids[turn.start : turn.end] == answer[:whole]
        assert turn.stop_reason == "stop"
    after = renderer.encoder.decode(ids[sequence.turns[0].end : sequence.turns[1].start])
    assert after.startswith(renderer.encoder.decode([min(renderer.boundary.end_ids)])), "the turn is closed"
    assert sum(sequence.loss_mask) == len(sequence.turns) * whole


@pytest.mark.parametrize(("text", "expected"), [("ab</x>cd</x>", "ab</x>"), ("ab", None), ("", None), ("</x>", "</x>")])
def test_where_an_answer_ends(renderer, text, expected):
    ids = renderer.encoder.encode(text)
    end = find_stop(ids, ["</x>"], renderer.encoder.decode)
    assert (None if end is None else renderer.encoder.decode(ids[:end])) == expected


def test_a_cut_answer_has_nothing_of_what_was_dropped():
    experts = np.arange(6)[:, None]
    whole = Generation(
        token_ids=[1, 2, 3, 4],
        logprobs=[-1.0, -2.0, -3.0, -4.0],
        versions=[0, 0, 1, 1],
        stop_reason=StopReason.LENGTH,
        routed_experts=experts,
    )
    cut = whole.cut(2)
    assert (cut.token_ids, cut.logprobs, cut.versions) == ([1, 2], [-1.0, -2.0], [0, 0])
    assert cut.stop_reason is StopReason.STOP
    assert cut.routed_experts.tolist() == experts[:4].tolist()
    assert whole.cut(4).routed_experts.tolist() == experts.tolist()


def check(*logprobs, **changes):
    count = len(logprobs)
    given = {
        "token_ids": list(range(count)),
        "logprobs": [*logprobs],
        "versions": [2] * count,
        "stop_reason": StopReason.STOP,
    }
    request = GenerateRequest(
        prompt_ids=[1], params=SamplingParams(max_tokens=4), session_id="s", request_id="r/turn-3"
    )
    known = Capabilities(max_context=64, vocab_size=10)
    return check_answer(Generation(**(given | changes)), request, known, version=3, engine="the engine")


@pytest.mark.parametrize("logprob", [2 * ROUNDING, 5e-4, 0.7, float("nan"), float("inf"), float("-inf"), -1e39])
def test_a_log_probability_above_0_is_refused_wherever_it_stands(logprob):
    for logprobs in ([logprob, -1.0, -2.0], [-1.0, logprob, -2.0], [-1.0, -2.0, logprob]):
        token = logprobs.index(logprob)
        with pytest.raises(
            EngineError, match=rf"answer to request r/turn-3: got .* of token {token}, expected a number"
        ):
            check(*logprobs)


def test_rounding_above_0_becomes_0_and_the_rest_stays():
    found = check(-1.5, 2e-6, 0.0, -1e-9)
    assert found.logprobs == [-1.5, 0.0, 0.0, -1e-9]
    assert found.token_ids == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, 2, 10]}, "got token id 10, expected a whole number from 0 to 9"),
        ({"token_ids": [1, -1, 2]}, "got token id -1, expected"),
        ({"token_ids": [1, 2.0, 2]}, r"got token id 2\.0, expected"),
        ({"token_ids": [True, 2, 2]}, "got token id True, expected"),
        ({"token_ids": [1, 2]}, "got 2 tokens, 3 log-probabilities and 3 weight versions"),
        ({"versions": [2]}, "got 3 tokens, 3 log-probabilities and 1 weight versions"),
        ({"versions": [2, 4, 2]}, r"got tokens of the weight versions \[2, 4\], expected 0 to 3"),
        ({"versions": [2, -1, 2]}, r"got tokens of the weight versions \[-1, 2\]"),
        ({"token_ids": [], "logprobs": [], "versions": []}, "got 0 tokens, expected 1 to 4"),
        ({"token_ids": [1] * 5, "logprobs": [-1.0] * 5, "versions": [2] * 5}, "got 5 tokens, expected 1 to 4"),
        ({"queue_s": float("nan")}, "got nan, 0.0 and 0.0 seconds"),
        ({"decode_s": float("inf")}, "got 0.0, 0.0 and inf seconds, expected finite durations"),
    ],
)
def test_an_answer_that_cannot_be_stored_is_an_engine_error(changes, message):
    with pytest.raises(EngineError, match=f"the engine gave an invalid answer to request r/turn-3: {message}"):
        check(-1.0, -1.0, -1.0, **changes)


def test_cached_tokens_are_those_of_the_prompt():
    assert [check(-1.0, cached_tokens=cached).cached_tokens for cached in (-1, 0, 1, 10**9)] == [0, 0, 1, 1]


@pytest.mark.parametrize("wrong", [1_000_000, -1])
async def test_an_id_outside_the_vocabulary_ends_its_episode_as_a_failure_of_the_engine(
    make_runner, play, worlds, renderer, wrong
):
    ids = renderer.encoder.encode("forward")
    engine = ScriptedEngine(script=lambda request: ScriptedAnswer(token_ids=[*ids, wrong, *ids]), vocab_size=400)
    trajectory = await play(make_runner(worlds.Corridor, engine=engine))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert f"got token id {wrong}" in trajectory.error


async def test_the_ledger_has_no_log_probability_above_0(make_runner, play, worlds, renderer):
    ids = renderer.encoder.encode("forward")
    engine = ScriptedEngine(
        script=lambda request: ScriptedAnswer(token_ids=ids, logprobs=[1e-6] + [-1.0] * len(ids)), vocab_size=400
    )
    trajectory = await play(make_runner(worlds.Corridor, engine=engine))
    (sequence,) = trajectory.sequences
    assert trajectory.outcome is Outcome.FINISHED
    assert max(sequence.logprobs[sequence.loss_mask]) == 0.0
