"""Tasks whose prompt is a conversation: its system message and earlier turns are read, and scorers see them."""

from __future__ import annotations

from typing import Any

import pytest
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentLoop
from agentrl.engine import SamplingParams
from agentrl.message import Message, ToolCall, system, user
from agentrl.remote.wire import read_task, write_task
from agentrl.render.renderer import Renderer
from agentrl.reward import Score, Scorer
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.reward_conventions import _split
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import Task
from agentrl.trajectory import Source

CALL = ToolCall(name="look", arguments={"at": "door"}, id="c1")
MESSAGES = (
    system("Answer like a pirate."),
    user("First question?"),
    Message(role="assistant", tool_calls=(CALL,)),
    Message(role="tool", content="It is shut.", tool_call_id="c1", name="look"),
    Message(role="assistant", content="First answer."),
    user("Second question?"),
)
TASK = Task(id="t", environment="world", seed=5, prompt="all of it", messages=MESSAGES)


class Keeping(Scorer):
    """Keeps what a scorer sees."""

    def __init__(self) -> None:
        self.conversations: list[Any] = []

    async def score(self, trajectory: Any, task: Task) -> Score:
        self.conversations.append(_split(trajectory))
        self.completions = list(trajectory.completions)
        return Score(reward=1.0)


async def played(runner: Any, task: Task = TASK) -> Any:
    return await runner.run(task, group_id="g", member=0, seed=1)


def prompt_of(trajectory: Any, renderer: Renderer) -> str:
    (sequence, *_) = trajectory.sequences
    ids, sources = sequence.ids_list(), list(sequence.sources)
    return renderer.encoder.decode(ids[: sources.index(Source.SAMPLED)])


async def test_the_model_reads_all_messages_with_one_system_message(
    make_runner: Any, worlds: Any, renderer: Renderer
) -> None:
    scorer = Keeping()
    runner = make_runner(worlds.Corridor, "forward", system_prompt="Walk.", scorer=scorer)
    text = prompt_of(await played(runner), renderer)
    parts = [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>")[1:]]
    roles = [part.partition("\n")[0] for part in parts]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert parts[0].startswith("system\nAnswer like a pirate.\n\nWalk.")
    assert [parts[1], parts[4]] == ["user\nFirst question?", "assistant\nFirst answer."]
    assert "look" in parts[2]
    assert "It is shut." in parts[3]
    assert parts[5].startswith("user\nSecond question?\n\n")
    assert "all of it" not in text
    (conversation,) = scorer.conversations
    assert [message["role"] for message in conversation.prompt] == [message.role for message in MESSAGES]
    assert [message["role"] for message in conversation.completion][:2] == ["assistant", "user"]
    assert conversation.completion[0] == {"role": "assistant", "content": "forward"}


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("step_independent", {"format": "plain"}),
        ("react_text", {"format": "plain", "compact": {"above": 40, "tokens": 9}}),
    ],
)
async def test_histories_that_are_rewritten_keep_the_messages(
    make_runner: Any, worlds: Any, renderer: Renderer, loop: str, options: dict[str, Any]
) -> None:
    runner = make_runner(worlds.Corridor, "forward", loop=loop, options=options)
    trajectory = await played(runner)
    texts = [renderer.encoder.decode(sequence.ids_list()) for sequence in trajectory.sequences]
    assert len(texts) > 1
    assert [(text.count("Answer like a pirate."), text.count("First answer.")) for text in texts] == [(1, 1)] * len(
        texts
    )


async def test_loops_that_open_their_own_conversations_get_tasks_as_one_text(
    make_runner: Any, worlds: Any, renderer: Renderer
) -> None:
    seen = []

    class Elsewhere(AgentLoop):
        opens_with_task = False

        async def run(self, episode: Any) -> None:
            seen.append(await episode.reset())
            await episode.open([user("mine")]).generate()

    runner = make_runner(worlds.Corridor, "forward")
    runner.loop = Elsewhere()
    trajectory = await played(runner)
    assert seen[0].startswith("all of it\n\n")
    assert "pirate" not in prompt_of(trajectory, renderer)


def test_messages_of_a_task_survive_the_wire() -> None:
    assert read_task(write_task(TASK), "world") == TASK
    plain = Task(id="p", environment="world", prompt="Go.")
    assert read_task(write_task(plain), "world") == plain


@pytest.mark.parametrize(
    ("family", "said", "opening"),
    [
        ("minimax_m2", "So it is.\n</think>\n\nforward", "<think>\n"),
        ("minimax_m2", "So it goes on and", "<think>\n"),
        ("minimax_m2", "<think>\nAgain.\n</think>\n\nforward", ""),
        ("qwen3", "<think>\nSo.\n</think>\n\nforward", ""),
        ("qwen3", "forward", ""),
    ],
)
async def test_scorers_get_the_thinking_marker_that_the_prompt_opened(
    make_runner: Any, worlds: Any, family: str, said: str, opening: str
) -> None:
    renderer = Renderer(build_tokenizer(family))
    scorer = Keeping()
    engine = ScriptedEngine(script=lambda request: renderer.encoder.encode(said), vocab_size=1000)
    policy = EngineEpisodePolicy(engine, renderer, SamplingParams())
    await played(make_runner(worlds.Corridor, policy=policy, scorer=scorer), Task(id="t", environment="world", seed=5))
    assert set(scorer.completions) == {opening + said}
