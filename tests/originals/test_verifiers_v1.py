"""Tasksets of verifiers 0.4 are played by their harnesses, with the policy as their model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agentrl.agent_loops.external import External
from agentrl.envs.adapters.verifiers_v1 import FUNCTION
from support.tokenizers import build_tokenizer

from agentrl.engine import SamplingParams
from agentrl.env.lookup import resolve_environment
from agentrl.errors import Outcome, UsageError
from agentrl.render.renderer import Renderer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.serving.scripted import ScriptedEngine
from agentrl.trajectory import Trajectory

pytestmark = [pytest.mark.originals, pytest.mark.timeout(600)]
OPTIONS = {"taskset": "verifiers_taskset", "runtime": "subprocess"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example taskset importable."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


async def play(*answers: str, row: int, **fields: Any) -> Trajectory:
    """Play the task of a row with these answers."""
    spec, renderer = resolve_environment("verifiers_v1"), Renderer(build_tokenizer("qwen2.5"))
    left = list(answers)

    def answer(_request: Any) -> list[int]:
        return [*renderer.encoder.encode(left.pop(0)), renderer.boundary.end_id]

    engine = ScriptedEngine(None, script=answer, vocab_size=400, max_context=32768)
    policy = EngineEpisodePolicy(engine, renderer, SamplingParams(), trains=True)
    loop = External(function=FUNCTION)
    runner = EpisodeRunner(pool=EnvPool(spec, options=OPTIONS), loop=loop, policy=policy, **fields)
    try:
        return await runner.run(spec.tasks("train", **OPTIONS)[row], group_id="g", member=0, seed=1)
    finally:
        await runner.close()


async def test_a_harness_plays_with_native_calls_and_the_taskset_judges() -> None:
    played = await play(CALL, "It is 5.", row=2)
    assert (played.outcome, played.reward, played.success) == (Outcome.FINISHED, 1.5, True), played.error
    assert (len(played.turns), len(played.sequences)) == (2, 1)
    (text,) = (build_tokenizer("qwen2.5").decode(sequence.ids_list()) for sequence in played.sequences)
    assert "Answer with a number." in text
    assert "<tool_response>\n5\n</tool_response>" in text


async def test_a_wrong_answer_fails() -> None:
    played = await play("7", row=2)
    assert (played.outcome, played.reward, played.success) == (Outcome.FINISHED, 0.0, False)


async def test_failures_have_their_causes() -> None:
    broken = await play("9", row=4)
    assert broken.outcome is Outcome.ENVIRONMENT_ERROR
    assert "the disk of the task is full" in str(broken.error)
    spent = await play(CALL, "It is 5.", row=2, limits=EpisodeLimits(max_turns=1))
    assert spent.outcome is Outcome.TRUNCATED_TURNS
    crashed = await play(CALL.replace('"b"', '"c"'), row=2)
    assert crashed.outcome is Outcome.POLICY_ERROR
    assert "KeyError" in str(crashed.error)


def test_tasks_are_split_and_listed() -> None:
    spec = resolve_environment("verifiers_v1")
    tasks = {split: spec.tasks(split, **OPTIONS, size=30) for split in spec.splits}
    assert {split: len(source) for split, source in tasks.items()} == {"train": 27, "test": 3}
    rows = {split: {source[i].options["row"] for i in range(len(source))} for split, source in tasks.items()}
    assert not rows["train"] & rows["test"]


async def test_the_environment_shows_tasks_but_takes_no_actions() -> None:
    env: Any = resolve_environment("verifiers_v1").make(**OPTIONS)
    assert (await env.reset(options={"row": 3}))[0] == "What is 3 plus 4?"
    with pytest.raises(UsageError, match=r"agent\.loop=external"):
        await env.step("7")
    with pytest.raises(UsageError, match="no such row: got 20"):
        await env.reset(options={"row": 20})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "the option taskset of verifiers_v1 is not set"),
        ({"taskset": "no_such_taskset"}, "no_such_taskset of verifiers cannot be created"),
        ({"taskset": "verifiers_taskset", "colour": 1}, r"(?s)cannot be created: got .*colour"),
        ({"taskset": "verifiers_taskset", "harness": "no_such"}, "no_such' not found"),
        ({"taskset": "verifiers_taskset", "runtime": "cloud"}, r"(?s)cannot be created: got .*cloud"),
        ({"taskset": "verifiers_taskset", "size": 1}, "cannot be split: got 1 tasks"),
        ({"taskset": "endless_taskset"}, "is infinite"),
    ],
)
def test_wrong_options_say_what_is_wrong(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, endless: Callable[[], Any]
) -> None:
    monkeypatch.setitem(sys.modules, "endless_taskset", endless())
    with pytest.raises(UsageError, match=words):
        resolve_environment("verifiers_v1").make(**options)


@pytest.fixture
def endless() -> Callable[[], Any]:
    """Return a module with an infinite taskset."""

    def make() -> Any:
        from verifiers_taskset import SumTaskset

        class EndlessTaskset(SumTaskset):  # type: ignore[misc]
            INFINITE = True

        return SimpleNamespace(__name__="endless_taskset", __all__=["EndlessTaskset"], EndlessTaskset=EndlessTaskset)

    return make
