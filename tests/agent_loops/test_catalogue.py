"""Shipped environments with their own tools, played by both loops with the expert's answers."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.config.derived import make_agent_loop
from agentrl.env.lookup import resolve_environment
from agentrl.errors import Outcome


def expert_actions(env, seed):
    observation, _ = env.reset(seed=seed)
    expert, actions, done = env.expert(), [], False
    while not done:
        actions.append(expert.act(observation))
        observation, _, done, _, _ = env.step(actions[-1])
    return actions


@pytest.mark.parametrize("name", ["retail", "search_qa"])
@pytest.mark.parametrize(
    ("loop", "options"), [("tool_calling", {}), ("react_text", {}), ("react_text", {"format": "free"})]
)
async def test_the_expert_s_answers_solve_the_task(play, renderer, name, loop, options):
    spec = resolve_environment(name)
    env = spec.make()
    actions = expert_actions(env, seed=0)
    by_tools = loop == "tool_calling"
    messages = [env.tool_message(a) if by_tools else make_agent_loop(loop, options).demonstrate(a) for a in actions]
    answers = [renderer.answer_text(m).removesuffix("<|im_end|>") if m.tool_calls else m.text for m in messages]
    played = await play(
        lambda: env,
        loop,
        *answers,
        options=options,
        instructions=spec.instructions,
        tool_instructions=spec.tool_instructions,
        max_tokens=200_000,
        max_answer_tokens=4_000,
        max_observation_tokens=20_000,
    )
    assert (played.trajectory.outcome, played.trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert len(played.trajectory.turns) == len(actions)
    calls = sum(bool(m.tool_calls) for m in messages)
    assert played.trajectory.metrics.get("tool_calls", 0) == calls
    assert (calls > 0) == by_tools


@pytest.mark.parametrize("loop", ["tool_calling", "react_text"])
@pytest.mark.parametrize("name", ["retail", "search_qa"])
def test_experts_are_evaluated_in_both_loops(name, loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = agentrl.evaluate(f"{name}/valid", policy="expert", tasks=6, samples=2, overrides=[f"agent.loop={loop}"])
    assert result.success.mean == 1.0
    assert result.pass_hat_k == {1: 1.0, 2: 1.0}
