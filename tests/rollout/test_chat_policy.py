"""Evaluation through a text service."""

import pytest

from agentrl.engine import (
    ChatAnswer,
    ChatPolicy,
    SamplingParams,
    StopReason,
)
from agentrl.errors import EngineError, Outcome, UsageError
from agentrl.message import Message, ToolCall
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.policies import ChatEpisodePolicy, cut_characters


class Service(ChatPolicy):
    """Answers with the given messages, over and over; an exception is raised."""

    max_context = 1000

    def __init__(self, *answers):
        self.answers = answers
        self.asked = []

    async def start(self):
        """Nothing."""

    async def chat(self, messages, tools, params, request_id):
        self.asked.append((list(messages), list(tools), params, request_id))
        answer = self.answers[(len(self.asked) - 1) % len(self.answers)]
        if isinstance(answer, Exception):
            raise answer
        return ChatAnswer(message=answer, prompt_tokens=100, answer_tokens=5, stop_reason=StopReason.STOP)

    async def close(self):
        """Nothing."""


def say(text="", *calls):
    return Message(role="assistant", content=text, tool_calls=calls)


async def test_an_episode_in_text(make_runner, play, worlds):
    service = Service(say("forward"))
    policy = ChatEpisodePolicy(service, SamplingParams(temperature=0.3))
    trajectory = await play(make_runner(worlds.Corridor, policy=policy))
    assert (trajectory.outcome, trajectory.reward, trajectory.success) == (Outcome.FINISHED, 1.0, True)
    assert [(turn.index, turn.start, turn.end) for turn in trajectory.turns] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert trajectory.sampled_tokens == 0
    assert [len(messages) for messages, *_ in service.asked] == [2, 4, 6]
    seeds = [params.seed for _, _, params, _ in service.asked]
    assert len(set(seeds)) == 3
    assert service.asked[0][2].temperature == 0.3


async def test_tools_are_sent_and_calls_taken(make_runner, play, worlds):
    call = ToolCall(name="act", arguments={"action": "forward"}, id="c1")
    service = Service(say("", call))
    trajectory = await play(
        make_runner(worlds.Corridor, policy=ChatEpisodePolicy(service, SamplingParams()), loop="tool_calling")
    )
    assert trajectory.outcome is Outcome.FINISHED
    assert service.asked[0][1][0]["function"]["name"] == "act"
    answered = service.asked[1][0][-1]
    assert (answered.role, answered.tool_call_id, answered.text) == ("tool", "c1", "You are at 1.")


async def test_calls_that_the_service_left_in_the_text_are_taken(make_runner, play, worlds):
    left = say('I go.\n```json\n{"name": "act", "arguments": {"action": "forward"}}\n```')
    service = Service(left)
    policy = ChatEpisodePolicy(service, SamplingParams())
    trajectory = await play(make_runner(worlds.Corridor, policy=policy, loop="tool_calling"))
    assert trajectory.outcome is Outcome.FINISHED
    assert [turn.repaired_calls for turn in trajectory.turns] == [1, 1, 1]
    assert trajectory.metrics["calls/repaired"] == 3
    answer, result = service.asked[1][0][-2:]
    assert (answer.text, [call.name for call in answer.tool_calls]) == ("I go.", ["act"])
    assert (result.role, result.tool_call_id, result.text) == ("tool", answer.tool_calls[0].id, "You are at 1.")
    served = make_runner(
        worlds.Corridor, policy=policy, loop="tool_calling", options={"calls": "as_served"},
        limits=EpisodeLimits(max_turns=2),
    )  # fmt: skip
    assert not any(turn.valid for turn in (await play(served)).turns)


async def test_unknown_tools_are_told(make_runner, play, worlds):
    wrong, right = (ToolCall(name=name, arguments={"action": "forward"}) for name in ("akt", "act"))
    service = Service(say("", wrong), say("", right))
    trajectory = await play(
        make_runner(worlds.Corridor, policy=ChatEpisodePolicy(service, SamplingParams()), loop="tool_calling")
    )
    assert trajectory.outcome is Outcome.FINISHED
    assert service.asked[1][0][-1].text.startswith("Error: there is no tool 'akt'")


async def test_the_token_budget_goes_by_the_services_count(make_runner, play, worlds):
    service = Service(say("forward"))
    limits = EpisodeLimits(max_tokens=105)
    trajectory = await play(
        make_runner(worlds.Corridor, policy=ChatEpisodePolicy(service, SamplingParams()), limits=limits)
    )
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert len(trajectory.turns) == 1


async def test_a_lone_surrogate_in_an_answer_becomes_a_question_mark_for_the_environment(make_runner, play, worlds):
    heard = []

    class Corridor(worlds.Corridor):
        def step(self, action):
            heard.append(action)
            return super().step(action)

    policy = ChatEpisodePolicy(Service(say("a \ud83d"), say("forward")), SamplingParams())
    trajectory = await play(make_runner(Corridor, policy=policy))
    assert trajectory.outcome is Outcome.FINISHED
    assert heard[:2] == ["a ?", "forward"]


async def test_failures_of_the_service(make_runner, play, worlds):
    policy = ChatEpisodePolicy(Service(EngineError("overloaded")), SamplingParams())
    assert (await play(make_runner(worlds.Corridor, policy=policy))).outcome is Outcome.ENGINE_ERROR
    policy = ChatEpisodePolicy(Service(UsageError("wrong key")), SamplingParams())
    with pytest.raises(UsageError, match="wrong key"):
        await play(make_runner(worlds.Corridor, policy=policy))


async def test_rewritten_histories_are_sent_as_they_are(make_runner, play, worlds):
    service = Service(say("forward"))
    policy = ChatEpisodePolicy(service, SamplingParams())
    options = {"format": "plain"}
    trajectory = await play(make_runner(worlds.Corridor, policy=policy, loop="step_independent", options=options))
    assert trajectory.outcome is Outcome.FINISHED
    assert [len(messages) for messages, *_ in service.asked] == [2, 2, 2]


def test_text_is_cut_by_an_estimate():
    assert cut_characters("a" * 40, 10) == "a" * 40
    assert cut_characters("a" * 43, 10) == "a" * 40 + "… [cut: 3 characters left out]"
