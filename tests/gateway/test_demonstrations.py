"""Expert demonstrations through an external agent program, for supervised fine-tuning."""

import json

import openai
import pytest
from agentrl.agent_loops.external import External
from agentrl.envs.guess_number import SPEC

from agentrl.env import Isolation
from agentrl.errors import Outcome, UsageError
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.task import Task

ACT = {
    "type": "function",
    "function": {
        "name": "act",
        "parameters": {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]},
    },
}


async def by_text(task):
    await _play(task, lambda message: message.content.removeprefix("I guess "), tools=openai.omit)


async def by_call(task):
    await _play(task, lambda message: json.loads(message.tool_calls[0].function.arguments)["action"], tools=[ACT])


async def _play(task, action_of, tools):
    async with openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": task.prompt}]
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = reply.choices[0].message
            result = await task.step(action_of(message))
            if result.done:
                return
            ids = [call.id for call in message.tool_calls or ()]
            said = [{"role": "tool", "tool_call_id": id_, "content": result.observation} for id_ in ids]
            messages += [message, *(said or [{"role": "user", "content": result.observation}])]


@pytest.mark.parametrize(
    ("function", "demonstration"),
    [("by_text", "I guess {action}"), ("by_call", {"tool": "act", "argument": "action"})],
)
async def test_an_expert_plays_through_a_program(renderer, function, demonstration):
    loop = External(function=f"{__name__}:{function}", answer="none", demonstration=demonstration)
    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer)
    runner = EpisodeRunner(pool=EnvPool(SPEC, isolation=Isolation.INLINE), loop=loop, policy=policy)
    try:
        trajectory = await runner.run(Task(id="t", environment=SPEC.name, seed=5), group_id="g", member=0, seed=1)
    finally:
        await runner.close()
    assert (trajectory.outcome, trajectory.success) == (Outcome.FINISHED, True), trajectory.error
    (sequence,) = trajectory.sequences
    assert len(sequence.turns) == len(trajectory.turns) > 1
    said = renderer.encoder.decode(sequence.ids_list()[sequence.turns[0].start : sequence.turns[0].end])
    assert ("I guess 50" in said) == (function == "by_text")


@pytest.mark.parametrize("told", ["no place for it", {"tool": "act"}, 3])
def test_a_demonstration_that_is_not_understood_is_refused(told):
    with pytest.raises(UsageError, match=r"agent\.options\.demonstration"):
        External(command="true", demonstration=told)


def test_without_one_nothing_can_be_demonstrated():
    with pytest.raises(UsageError, match=r"agent\.options\.demonstration"):
        External(command="true").demonstrate("50")
