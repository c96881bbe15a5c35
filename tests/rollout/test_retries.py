"""Attempts of an episode after failures of the infrastructure, and the engine seconds of failed ones."""

import pytest

from agentrl.agent_loop import AgentLoop
from agentrl.errors import Outcome
from agentrl.rollout.events import RolloutObserver
from agentrl.serving.scripted import Failure, ScriptedAnswer, ScriptedEngine


class EndRecorder(RolloutObserver):
    """Records the outcomes of attempts."""

    def __init__(self):
        self.ends = []

    def on_end(self, trajectory):
        self.ends.append(trajectory.outcome)


async def test_infrastructure_failures_are_tried_again(make_runner, play, worlds, renderer):
    failures = iter([True, True, False])
    state = {"fail": True}

    def script(request):
        if request.request_id.endswith("turn-0"):
            state["fail"] = next(failures)
        failure = Failure.RAISE if state["fail"] else Failure.NONE
        return ScriptedAnswer(token_ids=renderer.encoder.encode("forward"), failure=failure)

    recorder = EndRecorder()
    engine = ScriptedEngine(script=script, vocab_size=400)
    runner = make_runner(worlds.Corridor, engine=engine, retries=2, observer=recorder)
    trajectory = await play(runner)
    assert (trajectory.id, trajectory.attempt, trajectory.outcome) == ("g/0.2", 2, Outcome.FINISHED)
    assert recorder.ends == [Outcome.ENGINE_ERROR, Outcome.ENGINE_ERROR, Outcome.FINISHED]
    assert runner.counters.retries == 2


async def test_seconds_of_failed_attempts_are_counted(make_runner, play, worlds, renderer):
    attempts = []

    def script(request):
        is_second_turn = request.request_id.endswith("turn-1")
        attempts.extend([request] if is_second_turn else [])
        failure = Failure.RAISE if is_second_turn and len(attempts) == 1 else Failure.NONE
        return ScriptedAnswer(token_ids=renderer.encoder.encode("forward"), failure=failure)

    runner = make_runner(worlds.Corridor, engine=ScriptedEngine(script=script, vocab_size=400), retries=1)
    finished = await play(runner)
    counters = runner.counters
    assert finished.attempt == 1
    assert finished.engine_s == sum(turn.timings.engine for turn in finished.turns) > 0
    assert counters.engine_s == pytest.approx(counters.failed_engine_s + finished.engine_s)
    assert counters.failed_engine_s > 0


async def test_retries_end(make_runner, play, worlds):
    runner = make_runner(lambda: worlds.Faulty("raise"), "x", retries=2)
    trajectory = await play(runner)
    assert (trajectory.attempt, trajectory.outcome) == (2, Outcome.ENVIRONMENT_ERROR)
    assert runner.counters.outcomes[Outcome.ENVIRONMENT_ERROR] == 3


class BrokenLoop(AgentLoop):
    async def run(self, episode):
        raise KeyError(episode.task.id)


@pytest.mark.parametrize("broken", ["environment", "loop", "engine"])
async def test_the_first_failures_of_a_kind_are_logged_and_then_their_number(
    make_runner, play, worlds, make_engine, caplog, broken
):
    """An evaluation of an environment that always fails wrote a line for each attempt."""
    failing = ScriptedAnswer(token_ids=[1], failure=Failure.RAISE)
    engine = make_engine(failing if broken == "engine" else "forward")
    runner = make_runner(lambda: worlds.Faulty("raise"), engine=engine, retries=1)
    if broken == "loop":
        runner.loop = BrokenLoop()
    for number in range(12):
        await play(runner, group_id=f"g{number}", task_id=f"t{number}")
    told = [record.getMessage() for record in caplog.records if "attempt" in record.getMessage()]
    assert [text.partition(" ")[0] for text in told] == ["attempt"] * 3 + ["10"]
    assert told[2].endswith("Later failures of this kind are counted, and logged at 10, 100, 1000 …")
    assert told[3].startswith("10 attempts have failed in this way; the latest, g4/0.1: ")
    assert sum(record.exc_info is not None for record in caplog.records) == 3 * (broken == "loop")
    assert runner.counters.incidents.attempts == 24


async def test_each_kind_of_failure_is_logged(make_runner, play, worlds, caplog):
    runner = make_runner(worlds.Faulty, "forward")
    for number in range(4):
        await play(runner, options={"fault": "raise"}, group_id=f"a{number}")
    await play(runner, options={"fault": "nan"}, group_id="b")
    assert "attempt b/0.0" in caplog.text
