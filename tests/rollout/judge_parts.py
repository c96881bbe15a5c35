"""Episodes with texts, and judges of a service, for the tests of judges."""

from contextlib import asynccontextmanager

from agentrl.config.judge import JudgeConfig
from agentrl.errors import Outcome
from agentrl.remote.chat import ChatService, ServiceSettings
from agentrl.rollout.events import RolloutCounters
from agentrl.rollout.judges.client import JudgeClient
from agentrl.rollout.judges.scorers import make_judge
from agentrl.task import Task
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

TASK = Task(id="t-1", environment="w", prompt="Reach the hill.")


def decode(ids):
    return "".join(map(chr, ids))


def episode(answer, *, member=0, earned=0.25, group="g", told="Where to?"):
    """An episode with one answer, whose tokens are characters."""
    trajectory = Trajectory(
        id=f"{group}/{member}.0", task_id="t-1", environment="w", seed=0, group_id=group, outcome=Outcome.FINISHED
    )
    sequence = TokenSequence()
    sequence.extend(list(map(ord, told)), Source.PROMPT)
    ids = list(map(ord, answer))
    sequence.extend_sampled(ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids))
    sequence.turns.append(Turn(index=0, start=len(told), end=len(told) + len(ids), reward=earned))
    trajectory.sequences.append(sequence)
    return trajectory


def group_of(*answers, group="g"):
    return [episode(answer, member=member, group=group) for member, answer in enumerate(answers)]


def config_of(service, **settings):
    engine = {"url": service.url, "model": "m", "api_key_variable": "NO_KEY", **settings.pop("engine", {})}
    return JudgeConfig(engine=engine, **settings)


def client_of(service, config, **options):
    settings = ServiceSettings(
        url=service.url, model="m", api_key_variable="NO_KEY", timeout_s=20.0, retries=1, section="agent.judge.engine"
    )
    return JudgeClient(ChatService(settings, first_wait_s=0.001), config, **options)


@asynccontextmanager
async def judge_at(service, *, file=None, **settings):
    """A judge that asks a service, and its counts."""
    config, counters = config_of(service, **settings), RolloutCounters()
    client = client_of(service, config, file=file, counters=counters)
    try:
        yield make_judge(client, config, decode), counters
    finally:
        await client.close()
