"""Every ending of an episode."""

import asyncio
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import agentrl
from agentrl.agent_loop import AgentLoop
from agentrl.engine import StopReason
from agentrl.errors import Outcome, PolicyError, SandboxError, UsageError
from agentrl.message import ImagePart, TextPart, user
from agentrl.reward import EnvironmentReward, Score, Scorer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.episode import _cut_parts
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.turns import derive_seed
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.serving.scripted import Failure, ScriptedAnswer, ScriptedEngine


async def test_finished(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, "forward")
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.FINISHED
    assert (trajectory.reward, trajectory.success, trajectory.task_type) == (1.0, True, "walk")
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    assert [turn.state_key for turn in trajectory.turns] == ["place 0", "place 1", "place 2"]
    assert trajectory.reward_components == {"walked": 3.0}
    assert trajectory.seed == 5
    assert runner.counters.outcomes == {Outcome.FINISHED: 1}
    assert (runner.counters.running, runner.counters.turns) == (0, 3)
    assert runner.counters.answer_tokens == trajectory.sampled_tokens
    assert runner.counters.prompt_tokens == sum(turn.start for turn in trajectory.turns)


@pytest.mark.parametrize(("agent", "environment", "turns"), [(4, None, 4), (9, 2, 2), (2, 7, 2)])
async def test_turn_budget_is_exact(make_runner, play, worlds, agent, environment, turns):
    limits = EpisodeLimits(max_turns=min(agent, environment or agent))
    trajectory = await play(make_runner(worlds.Corridor, "back", limits=limits, success_threshold=1.0))
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS
    assert len(trajectory.turns) == turns
    assert (trajectory.reward, trajectory.success) == (0.0, False)


@pytest.mark.parametrize(("threshold", "success"), [(0.0, True), (0.01, False)])
async def test_a_reward_that_reaches_the_threshold_is_a_success(make_runner, play, worlds, threshold, success):
    limits = EpisodeLimits(max_turns=2)
    trajectory = await play(make_runner(worlds.Corridor, "back", limits=limits, success_threshold=threshold))
    assert (trajectory.reward, trajectory.success) == (0.0, success)


async def test_the_environments_own_truncation_is_a_turn_limit(make_runner, play, worlds):
    import gymnasium

    runner = make_runner(lambda: gymnasium.wrappers.TimeLimit(worlds.Corridor(), 2), "back")
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS
    assert len(trajectory.turns) == 2
    assert [turn.state_key for turn in trajectory.turns] == ["place 0", "place -1"]


async def test_token_budget_is_exact(make_runner, play, worlds):
    unlimited = await play(make_runner(worlds.Corridor, "back", limits=EpisodeLimits(max_turns=3)))
    last = unlimited.turns[-1]
    whole = EpisodeLimits(max_turns=9, max_tokens=last.end)
    trajectory = await play(make_runner(worlds.Corridor, "back", limits=whole))
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert [turn.end for turn in trajectory.turns] == [turn.end for turn in unlimited.turns]

    cut = EpisodeLimits(max_turns=9, max_tokens=last.end - 1)
    trajectory = await play(make_runner(worlds.Corridor, "back", limits=cut))
    assert trajectory.turns[-1].end == last.end - 1
    assert trajectory.turns[-1].stop_reason == StopReason.LENGTH.value


async def test_the_engines_context_bounds_the_tokens(make_runner, play, worlds, make_engine):
    engine = make_engine("back", max_context=360)
    trajectory = await play(make_runner(worlds.Corridor, engine=engine))
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert trajectory.turns[-1].end <= 360


async def test_answers_are_bounded(make_runner, play, worlds):
    limits = EpisodeLimits(max_answer_tokens=2, max_turns=1)
    trajectory = await play(make_runner(worlds.Corridor, "an endless answer", limits=limits))
    assert [turn.end - turn.start for turn in trajectory.turns] == [2]


async def test_policy_error_after_too_many_unusable_answers(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, "?", options={"format": "react"}, limits=EpisodeLimits(max_parse_failures=3))
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.POLICY_ERROR
    assert trajectory.metrics["invalid_answers"] == 3
    assert (runner.counters.invalid_answers, runner.counters.invalid_actions) == (3, 0)
    assert [turn.valid for turn in trajectory.turns] == [False] * 3
    assert trajectory.reward == 0.0


async def test_policy_error_after_too_many_refused_actions(make_runner, play, worlds):
    trajectory = await play(make_runner(worlds.Corridor, "jump", limits=EpisodeLimits(max_rejected_actions=2)))
    assert trajectory.outcome is Outcome.POLICY_ERROR
    assert [turn.valid for turn in trajectory.turns] == [False] * 2
    assert trajectory.reward is not None


async def test_an_observation_that_is_no_text_is_an_environment_error(make_runner, play, worlds):
    class Listing(worlds.Corridor):
        def reset(self, *, seed=None, options=None):
            return ("You are", "at 0."), {}

    trajectory = await play(make_runner(Listing, "forward"))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "expected text, or a tuple of TextPart and ImagePart" in trajectory.error


async def test_accepted_actions_do_not_count_as_refused(make_runner, play, worlds):
    runner = make_runner(
        worlds.Corridor, "jump", "forward", "forward", "forward", limits=EpisodeLimits(max_rejected_actions=2)
    )
    assert (await play(runner)).outcome is Outcome.FINISHED


async def test_no_step_is_taken_once_the_time_is_over(make_runner, play, worlds, make_engine):
    class Counting(worlds.Corridor):
        steps = 0

        def step(self, action):
            type(self).steps += 1
            return super().step(action)

    engine = make_engine(ScriptedAnswer(token_ids=[11, 12, 13], failure=Failure.HANG))
    await play(make_runner(Counting, engine=engine, limits=EpisodeLimits(max_seconds=0.5)))
    assert Counting.steps == 0


async def test_invalid_actions_are_counted_and_play_on(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, "jump", "forward")
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.metrics["invalid_actions"] == 3
    assert (runner.counters.invalid_answers, runner.counters.invalid_actions) == (0, 3)
    assert [turn.valid for turn in trajectory.turns] == [False, True, False, True, False, True]


@pytest.mark.parametrize(
    "fault", ["raise", "nan", "component", "reward", "four", "flag", "info", "observation", "reset", "make"]
)
async def test_environment_error(make_runner, play, worlds, fault):
    trajectory = await play(make_runner(lambda: worlds.Faulty(fault), "x"))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert trajectory.reward is None
    assert "environment world" in trajectory.error


async def test_engine_error(make_runner, play, worlds, make_engine):
    engine = make_engine(ScriptedAnswer(token_ids=[1], failure=Failure.RAISE))
    trajectory = await play(make_runner(worlds.Corridor, engine=engine))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "script" in trajectory.error


async def test_a_hanging_engine_meets_its_deadline(make_runner, play, worlds, make_engine):
    engine = make_engine(ScriptedAnswer(token_ids=[1], failure=Failure.HANG))
    limits = EpisodeLimits(answer_timeout_s=0.02)
    trajectory = await play(make_runner(worlds.Corridor, engine=engine, limits=limits))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "no answer in 0.02 s" in trajectory.error
    assert engine.metrics().running == 0


async def test_truncated_time_keeps_what_was_sampled(make_runner, play, worlds, make_engine):
    engine = make_engine(ScriptedAnswer(token_ids=[11, 12, 13], failure=Failure.HANG))
    trajectory = await play(make_runner(worlds.Corridor, engine=engine, limits=EpisodeLimits(max_seconds=0.5)))
    assert trajectory.outcome is Outcome.TRUNCATED_TIME
    assert trajectory.sampled_tokens == 4  # the three, and the stop token that the script appends
    assert trajectory.turns[-1].stop_reason == StopReason.ABORT.value
    assert trajectory.reward == 0.0


@agentrl.tool(stop=True)
def give_up() -> str:
    """End the episode."""
    return "as you wish"


@agentrl.tool
async def sandboxed() -> str:
    """Run in a sandbox."""
    raise SandboxError("the sandbox is gone")


def call(name, **arguments):
    import json

    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def test_stopped_by_tool(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, call("give_up"), loop="tool_calling", tools=[give_up])
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.STOPPED_BY_TOOL
    assert trajectory.metrics["tool_calls"] == 1


@agentrl.tool
def whisper() -> str:
    """Be heard by nobody."""
    return ""


async def test_a_tool_of_an_environments_own_name_is_refused(make_runner, play, worlds):
    runner = make_runner(worlds.Whispering, call("whisper"), loop="tool_calling", tools=[whisper])
    with pytest.raises(UsageError, match="two tools with the same name in environment world: got whisper"):
        await play(runner)


@agentrl.tool
def ponder() -> str:
    """Think."""
    return "Well."


async def test_the_state_key_is_read_again_after_an_environment_tool_and_unknown_after_another_tool(
    make_runner, play, worlds
):
    answers = [call("climb"), call("climb", steps=3), call("ponder"), call("climb")]
    limits = EpisodeLimits(max_turns=4)
    runner = make_runner(worlds.Stairs, *answers, loop="tool_calling", tools=[ponder], limits=limits)
    trajectory = await play(runner)
    counted = {name: value for name, value in trajectory.metrics.items() if not name.endswith("seconds")}
    each = {"tool/climb/calls": 3, "tool/climb/errors": 1, "tool/ponder/calls": 1}
    assert counted == {"tool_calls": 4, "tool_errors": 1, "calls/repaired": 0} | each
    assert [turn.state_key for turn in trajectory.turns] == ["place 0", "place 1", "place 1", None]


async def test_a_tool_of_the_actions_name_is_refused(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, "x", loop="tool_calling", options={"action_name": "give_up"}, tools=[give_up])
    with pytest.raises(UsageError, match="got give_up, expected a unique name"):
        await play(runner)


async def test_sandbox_error(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, call("sandboxed"), loop="tool_calling", tools=[sandboxed])
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.SANDBOX_ERROR


@agentrl.tool
class Stubborn:
    """Neither opens nor closes as it should."""

    hangs = False

    async def __aenter__(self):
        if self.hangs:
            await asyncio.Event().wait()
        return self

    async def __aexit__(self, *_):
        raise RuntimeError("it will not close")

    def __call__(self) -> str:
        """Do nothing."""
        return "done"


async def test_a_tool_that_hangs_while_it_opens_is_an_error_for_the_policy(make_runner, play, worlds, monkeypatch):
    monkeypatch.setattr(Stubborn.target, "hangs", True)
    limits = EpisodeLimits(tool_timeout_s=0.01, max_turns=2)
    runner = make_runner(worlds.Corridor, call("stubborn"), loop="tool_calling", tools=[Stubborn], limits=limits)
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS
    assert trajectory.metrics["tool_errors"] == 2


async def test_a_tool_that_does_not_close_costs_nothing(make_runner, play, worlds, caplog):
    limits = EpisodeLimits(max_turns=2)
    runner = make_runner(worlds.Corridor, call("stubborn"), loop="tool_calling", tools=[Stubborn], limits=limits)
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS
    assert "tool_errors" not in trajectory.metrics
    assert "closing the tools of g/0.0 failed: got RuntimeError: it will not close" in caplog.text


class Recorder(RolloutObserver):
    def __init__(self):
        self.starts, self.turns, self.ends = [], [], []

    def on_start(self, trajectory):
        self.starts.append(trajectory.id)

    def on_turn(self, trajectory, turn):
        self.turns.append((trajectory.id, turn.index, turn.reward))

    def on_end(self, trajectory):
        self.ends.append((trajectory.id, trajectory.outcome))


async def test_cancellation_is_recorded_and_passed_on(make_runner, play, worlds, make_engine):
    engine = make_engine("forward", ScriptedAnswer(token_ids=[1], failure=Failure.HANG))
    recorder = Recorder()
    runner = make_runner(worlds.Corridor, engine=engine, observer=recorder)
    episode = asyncio.create_task(play(runner))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (runner.counters.turns, engine.metrics().running) == (1, 1)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert recorder.ends == [("g/0.0", Outcome.CANCELLED)]
    assert recorder.turns == [("g/0.0", 0, 0.0)]
    assert engine.metrics().running == 0
    assert runner.counters.running == 0


async def test_observers_see_final_rewards_turn_by_turn(make_runner, play, worlds):
    recorder = Recorder()
    await play(make_runner(worlds.Corridor, "forward", observer=recorder))
    assert recorder.starts == ["g/0.0"]
    assert recorder.turns == [("g/0.0", 0, 0.0), ("g/0.0", 1, 0.0), ("g/0.0", 2, 1.0)]


class Judge(Scorer):
    def __init__(self, verdict, components=None):
        self.verdict, self.components = verdict, components or {"judge": 1.0}

    async def score(self, trajectory, task):
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return Score(reward=self.verdict, components=self.components)


@pytest.mark.parametrize("verdict", [math.nan, math.inf, KeyError("answer")])
async def test_scorers_that_fail(make_runner, play, worlds, verdict):
    trajectory = await play(make_runner(worlds.Corridor, "forward", scorer=Judge(verdict)))
    assert trajectory.outcome is Outcome.REWARD_ERROR
    assert trajectory.reward is None
    assert "task t" in trajectory.error


async def test_no_reward_is_not_zero(make_runner, play, worlds):
    trajectory = await play(make_runner(worlds.Corridor, "forward", scorer=Judge(None)))
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.reward is None
    assert trajectory.reward_components == {"walked": 3.0, "judge": 1.0}
    assert trajectory.reward_sources == {}


async def test_sources_that_gave_nothing_are_not_listed(make_runner, play, worlds):
    trajectory = await play(make_runner(worlds.Corridor, "forward", scorer=Judge(0.0)))
    assert (trajectory.reward, trajectory.reward_sources) == (0.0, {})


async def test_a_scorer_replaces_the_rewards_of_the_environment_which_are_still_recorded(make_runner, play, worlds):
    trajectory = await play(make_runner(worlds.Corridor, "forward", scorer=Judge(0.5)))
    assert trajectory.reward_sources == {"Judge": trajectory.reward} == {"Judge": 0.5}
    assert trajectory.environment_sources == {"environment/step": trajectory.environment_reward}


class Broken(AgentLoop):
    def __init__(self, error):
        self.error = error

    async def run(self, episode):
        await episode.reset()
        raise self.error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(KeyError("x"), Outcome.ENVIRONMENT_ERROR), (PolicyError("unreadable"), Outcome.POLICY_ERROR)],
)
async def test_errors_of_loops(make_runner, play, worlds, error, outcome, caplog):
    runner = make_runner(worlds.Corridor, "x")
    runner.loop = Broken(error)
    trajectory = await play(runner)
    assert trajectory.outcome is outcome
    assert trajectory.error is not None
    assert ("agent loop Broken failed in g/0.0" in caplog.text) == isinstance(error, KeyError)


async def test_what_the_user_must_change_stops_everything(make_runner, play, worlds):
    recorder = Recorder()
    runner = make_runner(worlds.Corridor, "x", observer=recorder)
    runner.loop = Broken(UsageError("wrong key"))
    with pytest.raises(UsageError, match="wrong key"):
        await play(runner)
    assert recorder.ends == [("g/0.0", Outcome.CANCELLED)]


async def test_acting_before_answering_is_an_error_of_the_loop(make_runner, play, worlds):
    class Hasty(AgentLoop):
        async def run(self, episode):
            await episode.reset()
            await episode.step("forward")

    runner = make_runner(worlds.Corridor, "x")
    runner.loop = Hasty()
    with pytest.raises(UsageError, match="before the policy has answered"):
        await play(runner)


async def test_a_tasks_prompt_comes_first_and_long_observations_are_cut(make_runner, play, worlds, renderer):
    limits = EpisodeLimits(max_observation_tokens=40, max_turns=1)
    runner = make_runner(worlds.Corridor, "forward", limits=limits)
    trajectory = await play(runner, prompt="Be quick.", options={"length": 10**50})
    text = renderer.encoder.decode(trajectory.sequences[0].ids_list())
    assert "Be quick.\n\nYou are" in text
    assert "left out]" in text


def test_the_parts_of_an_observation_share_one_budget():
    image = ImagePart(data=b"", media_type="image/png")
    content = (TextPart(text="one "), image, TextPart(text="two three "), TextPart(text="four"))
    assert _cut_parts(content, "one two [cut]", kept=8) == (
        TextPart(text="one "),
        image,
        TextPart(text="two [cut]"),
    )
    assert _cut_parts(content, "on[cut]", kept=2) == (TextPart(text="on[cut]"), image)


async def test_a_system_prompt_replaces_the_instructions(make_runner, play, worlds, renderer):
    runner = make_runner(worlds.Corridor, "forward", system_prompt="Walk on.", options={"format": "react"})
    trajectory = await play(runner)
    assert "Walk on." in renderer.encoder.decode(trajectory.sequences[0].ids_list())


async def test_time_spent_in_tools_environments_and_scoring_is_on_the_turn(make_runner, play, worlds):
    now = 0.0

    class Slow(worlds.Corridor):
        def step(self, action):
            nonlocal now
            now += 2.0
            return super().step(action)

    @agentrl.tool(inline=True)
    def ponder() -> str:
        """Take three seconds."""
        nonlocal now
        now += 3.0
        return "hm"

    class Deliberate(EnvironmentReward):
        async def score(self, trajectory, task):
            nonlocal now
            now += 4.0
            return await super().score(trajectory, task)

    waits = WaitTracker(lambda: now)
    turn = call("ponder") + "\n" + call("act", action="forward")
    runner = make_runner(Slow, turn, loop="tool_calling", tools=[ponder], waits=waits, scorer=Deliberate())
    trajectory = await play(runner, options={"length": 2})
    assert [(t.timings.tool, t.timings.env) for t in trajectory.turns] == [(3.0, 2.0), (3.0, 2.0)]
    assert [t.timings.scoring for t in trajectory.turns] == [0.0, 4.0]
    assert [t.timings.started for t in trajectory.turns] == [pytest.approx(0.0, abs=0.5), pytest.approx(5.0, abs=0.5)]
    assert trajectory.metrics["seconds"] == 14.0
    assert (waits.seconds[WaitKind.TOOL], waits.seconds[WaitKind.ENVIRONMENT]) == (6.0, 4.0)
    assert runner.counters.snapshot()["tool_calls"] == 2.0


class Striding(AgentLoop):
    """Takes all words of an answer as actions."""

    async def run(self, episode):
        conversation = episode.open([user(await episode.reset())])
        while True:
            for action in (await conversation.generate()).text.split():
                result = await episode.step(action)
                if result.done:
                    return
            conversation.add(user(result.observation))


async def test_the_steps_of_one_turn_add_up_on_it(make_runner, play, worlds):
    now = 0.0

    class Paying(worlds.Corridor):
        def step(self, action):
            nonlocal now
            now += 2.0
            observation, _, *rest = super().step(action)
            return observation, 0.25, *rest

    recorder = Recorder()
    runner = make_runner(
        Paying, "forward jump", "back forward forward", waits=WaitTracker(lambda: now), observer=recorder
    )
    runner.loop = Striding()
    trajectory = await play(runner, options={"length": 2})
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.75]
    assert [turn.timings.env for turn in trajectory.turns] == [4.0, 6.0]
    assert [turn.valid for turn in trajectory.turns] == [False, True]
    assert [turn.state_key for turn in trajectory.turns] == ["place 0", "place 1"]
    assert trajectory.reward == 1.25
    assert trajectory.reward_components == {"walked": 5.0}
    assert recorder.turns == [("g/0.0", 0, 0.5), ("g/0.0", 1, 0.75)]


async def test_every_turn_attempt_and_member_samples_with_a_seed_of_its_own(make_runner, play, worlds, renderer):
    seeds = {}

    def script(request):
        seeds[request.request_id] = request.params.seed
        failure = Failure.RAISE if ".0/" in request.request_id and request.request_id.endswith("1") else Failure.NONE
        return ScriptedAnswer(token_ids=renderer.encoder.encode("forward"), failure=failure)

    runner = make_runner(worlds.Corridor, engine=ScriptedEngine(script=script, vocab_size=400), retries=1)
    for member in (0, 1):
        await play(runner, member=member, seed=7)
    first = dict(seeds)
    assert len(first) == 2 * (2 + 3)
    assert len(set(first.values())) == len(first)
    assert first["g/0.0/turn-0"] == derive_seed(derive_seed(7, 0, 0), 0)
    assert first["g/1.1/turn-2"] == derive_seed(derive_seed(7, 1, 1), 2)
    await play(runner, seed=8)
    assert not [name for name in first if name.startswith("g/0") and seeds[name] == first[name]]


class Worth:
    """A number that is no number."""

    def __repr__(self):
        return "Worth()"


GOOD = [
    *((True, 1.0), (np.bool_(1), 1.0), (3, 3.0), (np.float32(0.5), 0.5)),
    *((np.int64(-2), -2.0), (Fraction(1, 4), 0.25), (-4e11, -4e11)),
    *((np.array(1.5), 1.5), (np.array([2]), 2.0), (torch.tensor(0.5), 0.5), (Decimal("0.5"), 0.5)),
]
BAD = [1e308, -1.1e12, 10**400, math.inf, math.nan, np.float32("inf"), 1j, "1", None, Worth(), [1.0]]
BAD += [np.array("1"), np.array(math.nan), np.complex64(1), Decimal("NaN"), Decimal("sNaN"), b"1", np.str_("1")]


def paying(worlds, reward):
    """A world that gives `reward` with each step."""

    class Paying(worlds.Corridor):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, reward, *rest

    return Paying


@pytest.mark.parametrize(("reward", "number"), GOOD)
async def test_rewards_of_all_real_types_are_taken(make_runner, play, worlds, reward, number):
    trajectory = await play(make_runner(paying(worlds, reward), "forward"), options={"length": 2})
    assert trajectory.reward == 2 * number
    assert {type(turn.reward) for turn in trajectory.turns} == {float}
    components = {"style": reward}
    scored = make_runner(worlds.Corridor, "forward", scorer=Judge(reward, components))
    trajectory = await play(scored)
    assert (trajectory.reward, trajectory.reward_components["style"]) == (number, number)


@pytest.mark.parametrize("reward", BAD, ids=repr)
async def test_rewards_that_no_sum_should_hold_fail_their_episode(make_runner, play, worlds, reward):
    """A finite reward may be too large for the arithmetic of training."""
    failed = [await play(make_runner(paying(worlds, reward), "forward"))]
    failed.append(await play(make_runner(worlds.Corridor, "forward", scorer=Judge(1.0, {"style": reward or "0"}))))
    if reward is not None:
        failed.append(await play(make_runner(worlds.Corridor, "forward", scorer=Judge(reward))))
    environment, *scorer = [trajectory.outcome for trajectory in failed]
    assert (environment, {*scorer}) == (Outcome.ENVIRONMENT_ERROR, {Outcome.REWARD_ERROR})
    for trajectory in failed:
        assert trajectory.reward is None
        assert "1e12" in trajectory.error or "finite number" in trajectory.error
    assert type(reward) is not float or repr(reward) in failed[0].error


@pytest.mark.parametrize("reward", [1e308, 10**400, True, "1"])
async def test_a_reward_of_a_tool_is_bounded_too(make_runner, play, worlds, reward):
    @agentrl.tool
    def pay() -> agentrl.ToolResult:
        """Pay."""
        return agentrl.ToolResult("there", reward=reward)

    trajectory = await play(make_runner(worlds.Corridor, call("pay"), loop="tool_calling", tools=[pay]))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "reward of tool pay is" in trajectory.error
