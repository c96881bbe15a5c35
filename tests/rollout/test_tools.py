"""Calls of tools in episodes: at the same time, within limits, with rewards, in a sandbox."""

import asyncio
import itertools
import json
import re

import gymnasium
import pytest

import agentrl
from agentrl.agent_loop import AgentLoop
from agentrl.env import Isolation
from agentrl.errors import EnvironmentFailure, Outcome, SandboxError, UsageError
from agentrl.message import ImagePart, ToolCall, user
from agentrl.observe.metrics import trajectory_metrics
from agentrl.remote.env_methods import RemoteTool
from agentrl.remote.wire import read_tool_result, write_tool_result
from agentrl.reward import Score, Scorer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.tools import MAX_CACHED_RESULTS, RateLimiter, ToolLimits, batches
from agentrl.tool import Tool, ToolResult, ToolRules, Toolset


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Meeting:
    """Two calls that wait for each other: they end only if they run at the same time."""

    def __init__(self):
        self.here = 0
        self.all_here = asyncio.Event()

    async def meet(self, name: str) -> str:
        """Wait for the other.

        Args:
            name: Who waits.
        """
        self.here += 1
        if self.here == 2:
            self.all_here.set()
        await self.all_here.wait()
        return f"{name} met"


async def test_parallel_calls_of_a_turn_run_at_the_same_time_and_answer_in_order(make_runner, play, worlds, texts):
    meet = agentrl.tool(parallel=True)(Meeting().meet)
    turn = call("meet", name="Ann") + call("meet", name="Bob") + call("act", action="forward")
    limits = EpisodeLimits(max_turns=2)
    runner = make_runner(worlds.Corridor, turn, "x", loop="tool_calling", tools=[meet], limits=limits)
    trajectory = await play(runner)
    assert texts(trajectory)[:2] == ["Ann met", "Bob met"]
    assert trajectory.metrics["tool/meet/calls"] == 2


async def test_a_policy_that_reads_only_text_reads_a_notice_for_an_image(make_runner, play, worlds, texts):
    @agentrl.tool(inline=True)
    def photograph() -> list[str | ImagePart]:
        """Show a picture."""
        return ["It is:", ImagePart(data=b"x", alternative="a moth")]

    runner = make_runner(worlds.Corridor, call("photograph"), "x", loop="tool_calling", tools=[photograph])
    assert texts(await play(runner))[0] == "It is:\n[image: a moth]"


async def test_other_calls_wait_for_each_other(make_runner, play, worlds, texts):
    meet = agentrl.tool(Meeting().meet)
    limits = EpisodeLimits(max_turns=2, tool_timeout_s=0.3)
    turn = call("meet", name="Ann") + call("meet", name="Bob")
    runner = make_runner(worlds.Corridor, turn, "x", loop="tool_calling", tools=[meet], limits=limits)
    assert texts(await play(runner)) == ["Error: meet did not answer in 0.3 s", "Bob met"]


async def test_a_tool_that_raises_is_told_with_its_line_once(make_runner, play, worlds, caplog):
    @agentrl.tool
    def find(word: str) -> str:
        """Find a word.

        Args:
            word: Any.
        """
        return str(json.loads(word))

    @agentrl.tool
    def refuse() -> str:
        """Refuse."""
        raise agentrl.ToolError("ask for another") from KeyError("x")

    turn = call("find", word="{") + call("find", word="[") + call("refuse")
    await play(make_runner(worlds.Corridor, turn, "x", loop="tool_calling", tools=[find, refuse]))
    (line,) = caplog.messages
    assert re.fullmatch(
        r"tool find failed: JSONDecodeError: .*; it was raised in .*test_tools.py line \d+: return str\(json.*", line
    )


@agentrl.tool(pure=True, inline=True)
def double(number: int) -> int:
    """Twice a number.

    Args:
        number: Any.
    """
    return 2 * number


@agentrl.tool(inline=True)
def note(text: str) -> str:
    """Write it down.

    Args:
        text: What.
    """
    return text


def test_only_neighbours_that_are_all_parallel_run_together():
    tools = {"double": double, "note": note}
    calls = [ToolCall(name=name, arguments={}) for name in ("double", "double", "note", "nobody", "double", "note")]
    assert [[c.name for c in batch] for batch in batches(calls, tools)] == [
        ["double", "double"],
        ["note"],
        ["nobody"],
        ["double"],
        ["note"],
    ]


async def test_one_failure_of_the_machinery_stops_the_other_calls(make_runner, play, worlds):
    stopped = []

    @agentrl.tool(parallel=True)
    async def wait() -> str:
        """Wait for ever."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("wait")

    @agentrl.tool(parallel=True)
    async def lost() -> str:
        """Lose the sandbox."""
        await asyncio.sleep(0)
        raise SandboxError("the sandbox is gone")

    runner = make_runner(worlds.Corridor, call("wait") + call("lost"), loop="tool_calling", tools=[wait, lost])
    trajectory = await play(runner)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SANDBOX_ERROR, None)
    assert stopped == ["wait"]


async def test_a_pure_tool_is_called_once_for_the_same_arguments_in_all_episodes(make_runner, play, worlds):
    asked = []

    @agentrl.tool(pure=True, inline=True)
    def look_up(word: str, page: int = 1) -> ToolResult:
        """Look up a word.

        Args:
            word: Any.
            page: Where.
        """
        asked.append(word)
        return ToolResult(f"{word} {page}", reward=0.25)

    turn = call("look_up", word="fern") + call("look_up", page="1", word="fern") + call("look_up", word="moss")
    limits = EpisodeLimits(max_turns=1)
    runner = make_runner(worlds.Corridor, turn, loop="tool_calling", tools=[look_up], limits=limits)
    first, second = await play(runner), await play(runner)
    assert asked == ["fern", "moss"]
    assert second.metrics["tool/look_up/kept"] == 3
    assert first.reward == second.reward == 0.75


def test_the_latest_results_are_kept():
    limits = ToolLimits()
    for number in range(MAX_CACHED_RESULTS + 1):
        limits.cache_result(double, {"number": number}, ToolResult(number))
        limits.cached_result(double, {"number": 0})
    assert limits.cached_result(double, {"number": 0}) == ToolResult(0)
    assert limits.cached_result(double, {"number": 1}) is None
    limits.cache_result(note, {"text": "x"}, ToolResult("x"))
    assert limits.cached_result(note, {"text": "x"}) is None


async def test_calls_begin_as_often_as_the_limit_says():
    now, slept = 100.0, []

    async def sleep(seconds):
        slept.append(seconds)

    gate = RateLimiter(None, 4.0, lambda: now, sleep)
    for _ in range(3):
        async with gate.admit():
            pass
    now = 101.0
    async with gate.admit():
        pass
    assert slept == [0.25, 0.5]


async def test_no_more_calls_at_once_than_the_limit_in_all_episodes(make_runner, worlds, play):
    inside, most = 0, 0

    @agentrl.tool(max_concurrent=2, parallel=True)
    async def crowd() -> str:
        """Enter a small room."""
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        return "left"

    limits = EpisodeLimits(max_turns=1)
    runner = make_runner(worlds.Corridor, call("crowd") * 4, loop="tool_calling", tools=[crowd], limits=limits)
    await asyncio.gather(*(play(runner, group_id=str(number)) for number in range(4)))
    assert most == 2
    assert runner.counters.tool_calls == 16


async def test_the_deadline_of_a_call_is_the_tools_own(make_runner, play, worlds, texts):
    @agentrl.tool(timeout_s=0.01)
    async def hang() -> str:
        """Never answer."""
        await asyncio.Event().wait()

    limits = EpisodeLimits(max_turns=2)
    runner = make_runner(worlds.Corridor, call("hang"), loop="tool_calling", tools=[hang], limits=limits)
    assert texts(await play(runner)) == ["Error: hang did not answer in 0.01 s"]


async def test_a_tool_has_no_more_time_than_the_episode(make_runner, play, worlds):
    @agentrl.tool
    async def hang() -> str:
        """Never answer."""
        await asyncio.Event().wait()

    limits = EpisodeLimits(max_seconds=0.5)
    runner = make_runner(worlds.Corridor, call("hang"), loop="tool_calling", tools=[hang], limits=limits)
    assert (await play(runner)).outcome is Outcome.TRUNCATED_TIME


async def test_long_results_are_cut_to_the_tools_own_budget(make_runner, play, worlds, texts):
    @agentrl.tool(max_tokens=12, inline=True)
    def talk() -> str:
        """Say much."""
        return "word " * 500

    limits = EpisodeLimits(max_turns=2)
    runner = make_runner(worlds.Corridor, call("talk"), loop="tool_calling", tools=[talk], limits=limits)
    trajectory = await play(runner)
    (said,) = texts(trajectory)
    assert "left out]" in said
    assert len(said) < 100
    assert trajectory.metrics["tool/talk/cut"] == 2  # in each turn; what follows the last one is not told


@pytest.mark.parametrize("budget", [60, 150, 400])
async def test_a_long_result_keeps_its_beginning_and_its_end(make_runner, play, worlds, texts, renderer, budget):
    lines = [f"test_{number} passed" for number in range(500)]
    whole = "\n".join(["collected 500 tests", *lines, "1 failed", "[exit code 1]"])

    @agentrl.tool(max_tokens=budget, inline=True)
    def run_tests() -> str:
        """Run the tests."""
        return whole

    limits = EpisodeLimits(max_turns=2)
    runner = make_runner(worlds.Corridor, call("run_tests"), loop="tool_calling", tools=[run_tests], limits=limits)
    (said,) = texts(await play(runner))
    begin, number, end = re.split(r"… \[cut: (\d+) characters left out\]\n", said)
    assert (whole.startswith(begin), whole.endswith(end), "[exit code 1]" in end) == (True, True, True)
    assert len(begin) + int(number) + len(end) == len(whole)
    assert budget / 2 < len(renderer.encoder.encode(said)) <= budget


@agentrl.tool(inline=True)
def dig(deep: bool = False) -> ToolResult:
    """Dig.

    Args:
        deep: Deeper.
    """
    return ToolResult("gold" if deep else "earth", reward=1.0 if deep else -0.25, metrics={"depth": 2 if deep else 1})


async def test_rewards_and_metrics_of_tools_reach_the_trajectory_and_the_step(make_runner, play, worlds):
    turns = [call("dig") + call("dig"), call("dig", deep=True), call("act", action="forward")]
    runner = make_runner(
        lambda: worlds.Corridor(length=1, tell_success=False),
        *turns,
        loop="tool_calling",
        tools=[dig],
        success_threshold=1.0,
    )
    trajectory = await play(runner)
    assert [turn.reward for turn in trajectory.turns] == [-0.5, 1.0, 1.0]
    assert trajectory.reward == 1.5
    assert trajectory.reward_components["tool/dig"] == 0.5
    assert trajectory.reward_sources == {"tool/dig": 0.5, "environment/step": 1.0}
    assert trajectory.success  # of the environment's own rewards, which are 1
    assert trajectory.metrics["tool/dig/depth"] == 4
    step = trajectory_metrics([trajectory], version=0)
    assert (step["episode/tool/dig/calls"], step["episode/tool/dig/depth"]) == (3, 4)
    assert step["reward/component/tool/dig"] == 0.5
    assert "time/episode/tool/dig/seconds" in step


async def test_success_is_not_bought_from_tools(make_runner, play, worlds):
    runner = make_runner(
        lambda: worlds.Corridor(tell_success=False),
        call("dig", deep=True),
        loop="tool_calling",
        tools=[dig],
        success_threshold=1.0,
        limits=EpisodeLimits(max_turns=3),
    )
    trajectory = await play(runner)
    assert (trajectory.reward, trajectory.success) == (3.0, False)


async def test_a_reward_that_is_not_finite_is_a_failure_and_no_text(make_runner, play, worlds):
    @agentrl.tool(inline=True)
    def curse() -> ToolResult:
        """Break the numbers."""
        return ToolResult("broken", reward=float("inf"))

    runner = make_runner(worlds.Corridor, call("curse"), loop="tool_calling", tools=[curse])
    trajectory = await play(runner)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENVIRONMENT_ERROR, None)


async def test_no_call_is_made_after_a_result_that_ends_the_episode(make_runner, play, worlds):
    called = []

    @agentrl.tool(inline=True)
    def knock(times: int) -> ToolResult:
        """Knock at a door.

        Args:
            times: How often.
        """
        called.append(times)
        return ToolResult("open", reward=float(times == 3), stop=times == 3)

    turn = call("knock", times=1) + call("knock", times=3) + call("knock", times=5)
    trajectory = await play(make_runner(worlds.Corridor, turn, loop="tool_calling", tools=[knock]))
    assert (trajectory.outcome, trajectory.reward, called) == (Outcome.STOPPED_BY_TOOL, 1.0, [1, 3])


class Climb(gymnasium.Env):
    """A wall that is climbed by a tool, in two steps at most."""

    observation_space = action_space = gymnasium.spaces.Text(100)
    action_hint = None

    def __init__(self):
        self.tools = (agentrl.tool(self.climb, inline=True),)
        self._height = self._steps = 0

    def reset(self, *, seed=None, options=None):
        self._height = self._steps = 0
        return "Climb to 3.", {}

    def step(self, action):
        return "", 0.0, True, False, {"success": False}

    def climb(self, metres: int) -> ToolResult:
        """Climb.

        Args:
            metres: How far.
        """
        self._height, self._steps = self._height + metres, self._steps + 1
        done = self._height >= 3
        return ToolResult("up", stop=done, truncated=self._steps == 2 and not done, success=done or None)


@pytest.mark.parametrize(
    ("metres", "outcome", "success"),
    [((1, 2), Outcome.STOPPED_BY_TOOL, True), ((1, 1), Outcome.TRUNCATED_TURNS, None)],
)
async def test_an_environments_tool_says_how_the_episode_ended(make_runner, play, metres, outcome, success):
    trajectory = await play(
        make_runner(Climb, "".join(call("climb", metres=one) for one in metres), loop="tool_calling")
    )
    assert (trajectory.outcome, trajectory.success) == (outcome, success)


async def test_configured_tools_cannot_decide_success(make_runner, play, worlds):
    @agentrl.tool(inline=True)
    def claim() -> ToolResult:
        """Claims success."""
        return ToolResult("solved", success=True)

    with pytest.raises(UsageError, match="tool claim decides whether the task is solved"):
        await play(make_runner(worlds.Corridor, call("claim"), loop="tool_calling", tools=[claim]))


class Judge(gymnasium.Env):
    """Judges the answer that is handed in."""

    observation_space = action_space = gymnasium.spaces.Text(100)
    action_hint = None
    tools = (note,)

    def reset(self, *, seed=None, options=None):
        return "What is 6 times 7?", {}

    def step(self, action):
        return "", float(action == "42"), True, False, {"success": action == "42"}


async def test_a_tool_may_act_in_the_environment(make_runner, play):
    @agentrl.tool(stop=True)
    async def hand_in(answer: str, context: agentrl.ToolContext) -> str:
        """Hand in the answer.

        Args:
            answer: The answer.
        """
        assert (context.task_id, context.seed) == ("t", 5)
        return await context.act(answer)

    trajectory = await play(make_runner(Judge, call("hand_in", answer=42), loop="tool_calling", tools=[hand_in]))
    assert (trajectory.outcome, trajectory.reward, trajectory.success) == (Outcome.FINISHED, 1.0, True)


class Pair(Toolset):
    """Two tools that are known when somebody asks."""

    def __init__(self, fails=0):
        self.asked, self.fails, self.closed = 0, fails, False

    async def tools(self):
        self.asked += 1
        if self.asked <= self.fails:
            raise ConnectionError("nobody there")
        return (double, note)

    async def close(self):
        self.closed = True


async def test_the_tools_of_a_toolset_are_offered(make_runner, play, worlds, texts, renderer):
    pair = Pair(fails=1)
    turn = call("double", number=4) + call("note", text="x")
    limits = EpisodeLimits(max_turns=2)
    runner = make_runner(worlds.Corridor, turn, loop="tool_calling", tools=[pair], limits=limits, retries=1)
    trajectory = await play(runner)
    assert texts(trajectory) == ["8", "x"]
    assert runner.counters.outcomes[Outcome.ENVIRONMENT_ERROR] == 1
    assert '"name": "double"' in renderer.encoder.decode(trajectory.sequences[0].ids_list())


async def test_two_tools_of_one_name_are_refused_when_they_are_known(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, "x", loop="tool_calling", tools=[Pair(), double])
    with pytest.raises(UsageError, match="two tools have the same name: got double"):
        await play(runner)


async def test_what_tools_share_is_made_once_and_left_at_the_end(make_runner, play, worlds):
    events = []

    class Line:
        async def __aenter__(self):
            events.append("open")
            return self

        async def __aexit__(self, *_):
            events.append("closed")

    def make(name):
        async def ring(context: agentrl.ToolContext) -> str:
            """Ring."""
            line = await context.shared("line", Line)
            events.append(name)
            return str(line is await context.shared("line", Line))

        return Tool(ring, name=name)

    answers = [call("a") + call("b")]
    limits = EpisodeLimits(max_turns=1)
    runner = make_runner(worlds.Corridor, *answers, loop="tool_calling", tools=[make("a"), make("b")], limits=limits)
    await play(runner)
    assert events == ["open", "a", "b", "closed"]


class OneByOne(AgentLoop):
    """A loop of a user's that knows single calls."""

    offers_tools = True

    async def run(self, episode):
        await episode.reset()
        conversation = episode.open([user("Go.")], tools=[*episode.tools.values()])
        answer = await conversation.generate()
        self.told = [(await episode.call_tool(one)).text for one in answer.tool_calls]


async def test_loops_may_call_one_tool_after_the_other(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, call("double", number=1) + call("double", number=2), tools=[double])
    runner.loop, times = OneByOne(), itertools.count()
    runner.waits.clock = lambda: float(next(times))
    played = await play(runner)
    assert runner.loop.told == ["2", "4"]
    assert played.turns[0].timings.tool >= 2, "each call has begun and ended at another tick"


class Remembering(Scorer):
    """Keeps what a scorer can read of an episode."""

    async def score(self, trajectory, task):
        self.read = (trajectory.messages, trajectory.final_text, trajectory.tool_calls, trajectory.completions)
        self.conversations = [len(messages) for messages in trajectory.conversations]
        return Score(reward=trajectory.environment_reward)


async def test_a_scorer_gets_the_original_messages_not_decoded_tokens(make_runner, play, worlds):
    scorer = Remembering()
    words = [f"Doubling. {call('double', number=1)}", call("act", action="forward")]
    limits = EpisodeLimits(max_turns=3)
    runner = make_runner(worlds.Corridor, *words, loop="tool_calling", tools=[double], scorer=scorer, limits=limits)
    trajectory = await play(runner)
    messages, final_text, calls, completions = scorer.read
    assert [message.role for message in messages] == ["system", "user", *["assistant", "tool"] * 3]
    assert [message.text for message in messages][3] == "2"
    assert (final_text, [one.name for one in calls]) == ("Doubling.", ["double", "act", "double"])
    assert completions == [words[0], words[1], words[0]]
    assert scorer.conversations == [8]
    with pytest.raises(UsageError, match=r"messages of episode g/0.0 are not available.*was scored, or read from disk"):
        _ = trajectory.final_text


async def test_a_loop_that_rewrites_history_has_a_conversation_per_turn(make_runner, play, worlds):
    scorer = Remembering()
    options = {"format": "plain", "history": 0}
    await play(make_runner(worlds.Corridor, "forward", loop="step_independent", options=options, scorer=scorer))
    messages, final_text, _, completions = scorer.read
    assert scorer.conversations == [3, 3, 3]
    assert (final_text, completions) == ("forward", ["forward"] * 3)
    assert "You are at 2." in messages[-2].text


async def test_a_failing_toolset_is_no_reward(make_runner, play, worlds):
    trajectory = await play(make_runner(worlds.Corridor, "x", loop="tool_calling", tools=[Pair(fails=9)]))
    assert trajectory.outcome is EnvironmentFailure.outcome
    assert trajectory.reward is None


@pytest.mark.parametrize("isolation", [Isolation.INLINE, Isolation.PROCESS])
@pytest.mark.slow
async def test_rewards_of_remote_environment_tools_reach_the_trajectory(make_runner, play, worlds, isolation):
    limits = EpisodeLimits(max_turns=1)
    fields = {"loop": "tool_calling", "isolation": isolation, "workers": 1, "limits": limits}
    trajectory = await play(make_runner(worlds.Tipping, call("tip", amount=2), **fields))
    assert trajectory.reward == -2.0
    assert (trajectory.reward_components["tool/tip"], trajectory.metrics["tool/tip/tips"]) == (-2.0, 1)


def test_tools_and_results_are_written_as_json_and_read_again():
    tool = Tool(double.target, parallel=True, timeout_s=3.0, inline=True)
    plain = json.loads(json.dumps(RemoteTool.describe(tool).to_plain()))
    assert plain["rules"] == {"parallel": True, "timeout_s": 3.0}
    assert RemoteTool(**plain).rules == ToolRules(parallel=True, timeout_s=3.0)
    assert RemoteTool(**{**plain, "rules": {"of_the_future": 1}}).rules == ToolRules()
    ending = RemoteTool(**json.loads(json.dumps(RemoteTool.describe(Tool(double.target, stop=True)).to_plain())))
    assert ending.stop
    assert RemoteTool(**ending.to_plain()).stop  # described again, by a server of the server
    assert not RemoteTool(**plain).stop
    assert "rules" not in RemoteTool.describe(Tool(double.target)).to_plain()
    for result in (ToolResult("x"), ToolResult("x", reward=1.5, metrics={"a": 2.0}, stop=True)):
        assert read_tool_result(json.loads(json.dumps(write_tool_result(result)))) == result
    for result in (ToolResult("x", truncated=True, success=False), ToolResult("x", success=True)):
        assert read_tool_result(json.loads(json.dumps(write_tool_result(result)))) == result
    assert write_tool_result(ToolResult({"a": 1})) == {"text": '{"a": 1}'}
