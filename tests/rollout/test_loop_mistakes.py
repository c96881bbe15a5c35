"""Mistakes of agent loops: what they put into conversations, when they act, and how they are defined."""

import asyncio
import inspect

import pytest

import agentrl
from agentrl.agent_loop import AgentLoop
from agentrl.config.derived import make_agent_loop
from agentrl.errors import ConfigError, Outcome, ToolError, UsageError
from agentrl.message import user
from agentrl.rollout.scripted_policies import ScriptedConversation, ScriptedEpisodePolicy, ScriptedPolicy


class Restless(AgentLoop):
    """Acts until the turns run out, whether or not the episode has ended."""

    async def run(self, episode):
        conversation = episode.open([user(await episode.reset())])
        while True:
            result = await episode.step((await conversation.generate()).text)
            conversation.add(user(result.observation))


async def test_an_action_after_the_end_of_the_episode_is_refused(make_runner, play, worlds):
    """The environment may pay again for it."""
    runner = make_runner(worlds.Corridor, "forward")
    runner.loop = Restless()
    with pytest.raises(UsageError, match=r"Restless acts after the end of the episode: got the action 'forward' after"):
        await play(runner)


class Unprepared(AgentLoop):
    """Acts in the world that an earlier episode left behind."""

    async def run(self, episode):
        answer = await episode.open([user("Go.")]).generate()
        await episode.step(answer.text)


async def test_an_action_before_the_reset_is_refused(make_runner, play, worlds):
    """A pooled environment would continue with the state of another task."""
    runner = make_runner(worlds.Corridor, "forward")
    runner.loop = Unprepared()
    with pytest.raises(
        UsageError, match=r"Unprepared acts before the environment is reset: got the action 'forward', ex"
    ):
        await play(runner)


class Impatient(AgentLoop):
    async def run(self, episode):
        conversation = episode.open([user(await episode.reset())])
        await asyncio.gather(conversation.generate(), conversation.generate())


async def test_concurrent_answers_of_one_conversation_are_refused(make_runner, play, worlds, monkeypatch):
    async def wait(self, *_, **__):
        await asyncio.sleep(0)

    monkeypatch.setattr(ScriptedConversation, "generate", wait)
    runner = make_runner(worlds.Corridor, "forward")
    runner.loop = Impatient()
    with pytest.raises(
        UsageError, match=r"two answers of one conversation at the same time.* Open or fork a conversation"
    ):
        await play(runner)


async def test_a_tool_cannot_act_after_the_end_of_the_episode(make_runner, play, worlds):
    told = []

    @agentrl.tool
    async def walk(context: agentrl.ToolContext) -> str:
        """Walk to the end, and on."""
        try:
            for _ in range(9):
                await context.act("forward")
        except ToolError as error:
            told.append(str(error))
            raise
        return "arrived"

    call = '<tool_call>\n{"name": "walk", "arguments": {}}\n</tool_call>'
    trajectory = await play(make_runner(worlds.Corridor, call, loop="tool_calling", tools=[walk]))
    assert told == ["the episode has ended"]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)


def opening(messages):
    class Opening(AgentLoop):
        async def run(self, episode):
            await episode.reset()
            await episode.open(messages).generate()

    return Opening()


def adding(message):
    class Adding(AgentLoop):
        async def run(self, episode):
            conversation = episode.open([user(await episode.reset())])
            await conversation.generate()
            conversation.add(message)

    return Adding()


@pytest.mark.parametrize(
    ("loop", "got"),
    [
        (opening([{"role": "user", "content": "x"}]), "dict {'role': 'user', 'content': 'x'}"),
        (opening("x"), "str 'x'"),
        (adding("x"), "str 'x'"),
    ],
)
async def test_what_is_not_a_message_is_refused(make_runner, play, worlds, loop, got):
    runner = make_runner(worlds.Corridor, "forward")
    runner.loop = loop
    with pytest.raises(UsageError, match=r"something else than messages .* expected messages of") as caught:
        await play(runner)
    assert caught.value.got == got


class Sync(AgentLoop):
    def run(self, episode):
        return None


class Generator(AgentLoop):
    async def run(self, episode):
        yield 1


@pytest.mark.parametrize("kind", [Sync, Generator])
async def test_a_loop_that_is_not_asynchronous_is_refused(make_runner, play, worlds, kind):
    runner = make_runner(worlds.Corridor, "forward")
    runner.loop = kind()
    with pytest.raises(UsageError, match=r"is not asynchronous: got run\(\) returned .* expected async def run"):
        await play(runner)


class Failing(AgentLoop):
    async def run(self, episode):
        await episode.reset()
        raise KeyError("x")


async def test_the_failure_of_a_loop_names_the_loop_and_its_line(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, "forward")
    runner.loop = Failing()
    trajectory = await play(runner)
    (found,) = runner.counters.incidents.found.values()
    lines, first = inspect.getsourcelines(Failing)
    assert (found.subject, found.file, found.line) == ("agent loop Failing", __file__, first + len(lines) - 1)
    assert trajectory.error.endswith(f'It was raised in {__file__} line {found.line}: raise KeyError("x")')


class Silent(AgentLoop):
    async def run(self, episode):
        await episode.reset()


async def test_an_episode_without_an_answer_of_the_policy_is_a_failure_of_the_loop(make_runner, play, worlds):
    """There is nothing to train, and a reward of 0 would be counted as the policy's."""
    runner = make_runner(worlds.Corridor, "forward")
    runner.loop = Silent()
    trajectory = await play(runner)
    assert (trajectory.outcome, trajectory.turns, trajectory.reward) == (Outcome.ENVIRONMENT_ERROR, [], None)
    assert trajectory.error.startswith("agent loop Silent ended without an answer of the policy (task t): got 0 turns")
    (found,) = runner.counters.incidents.found.values()
    _, first = inspect.getsourcelines(Silent)
    assert (found.subject, found.file, found.line) == ("agent loop Silent", __file__, first)


class Wordy(Restless):
    def demonstrate(self, action):
        return action


async def test_a_demonstration_that_is_not_a_message_is_refused(make_runner, play, worlds):
    class Listed(worlds.Corridor):
        def admissible_actions(self):
            return ["forward"]

    runner = make_runner(Listed, policy=ScriptedEpisodePolicy(ScriptedPolicy.RANDOM))
    runner.loop = Wordy()
    with pytest.raises(UsageError, match=r"demonstrate of agent loop Wordy does not return a message: got str 'f"):
        await play(runner)


class Sized(AgentLoop):
    def __init__(self, size):
        self.size = size

    async def run(self, episode): ...


def test_an_option_that_a_loop_requires_must_be_given():
    with pytest.raises(ConfigError, match=r"cannot be created from agent.options: got missing .*, expected size"):
        make_agent_loop(f"{__name__}:Sized", {})
