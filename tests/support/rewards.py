"""An episode with an answer, and its score by reward functions."""

import asyncio

from agentrl.config.environment import AgentConfig
from agentrl.errors import Outcome
from agentrl.message import Message, system, user
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.reward_functions import find_reward
from agentrl.task import Task
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

TASK = Task(
    id="t-1",
    environment="w",
    ground_truth="42",
    type="sums",
    columns={"solution": "42", "data_source": "openai/gsm8k", "extra_info": {"index": 3}},
)


def episode(text="The answer is 42", reward=0.25):
    trajectory = Trajectory(id="g/0.0", task_id="t-1", environment="w", seed=0, group_id="g", outcome=Outcome.FINISHED)
    sequence = TokenSequence()
    sequence.extend([1, 2], Source.PROMPT)
    sequence.extend_sampled([7, 8], logprobs=[-1.0, -1.0], versions=[0, 0])
    sequence.turns.append(Turn(index=0, start=2, end=4))
    trajectory.add_reward(sequence.turns[0], "environment/step", reward)
    trajectory.sequences.append(sequence)
    answer = Message(role="assistant", content=text, reasoning="six times seven")
    trajectory.conversations.append([system("Think."), user("6 x 7?"), answer])
    trajectory.answers.append(answer)
    trajectory.completions.append(f"<think>six times seven</think>{text}")
    return trajectory


def exact(trajectory, task):
    return task.ground_truth in trajectory.final_text


async def slow_length(trajectory, task, *, most=100):
    await asyncio.sleep(0)
    return len(trajectory.final_text) / most


async def scored(reward, trajectory=None, task=TASK):
    thread = ThreadWorker()
    try:
        return await find_reward(AgentConfig(reward=reward), thread).score(trajectory or episode(), task)
    finally:
        await thread.close()
