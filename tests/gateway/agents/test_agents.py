"""Agents from the package index, unmodified, play episodes of the scripted engine through the gateway."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agentrl.agent_loops.external import External
from agentrl.envs.guess_number import SPEC, GuessNumber

from agentrl.errors import Outcome
from agentrl.rollout.turns import EpisodeLimits
from agentrl.serving.scripted import Failure, ScriptedAnswer

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]

RECIPES = Path(__file__).parents[3] / "examples" / "agents"
SECRET = "18"
"""The number of the task with seed 5."""


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def python(code):
    return f"Thought: I know it.\n<code>\n{code}\n</code>"


def dspy_form(answer):
    return f"[[ ## reasoning ## ]]\nSix sevens.\n\n[[ ## answer ## ]]\n{answer}\n\n[[ ## completed ## ]]"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an example is run, and what the policy says in it."""

    answers: tuple[str, ...]
    options: dict = field(default_factory=dict)
    acts: bool = False
    """It takes actions by a tool; else it answers."""
    sequences: int = 1
    """More than one where the agent rewrites what the policy has said: smolagents adds its calls in words."""
    turns: int
    """Answers that the policy gives until the agent ends."""


GUESSES = (call("act", action="50"), call("act", action=SECRET), "Goodbye.")
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
MINI = {
    **LITELLM,
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
}
SHELL = (
    call("bash", command="echo 42 > answer.txt"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)
RECIPE = {
    "openai_tools": Recipe(answers=GUESSES, acts=True, turns=2),
    "anthropic_tools": Recipe(answers=GUESSES, acts=True, turns=3),
    "openai_agents": Recipe(answers=GUESSES, acts=True, turns=3),
    "pydantic_ai_agent": Recipe(answers=GUESSES, acts=True, turns=3),
    "langgraph_agent": Recipe(answers=GUESSES, acts=True, turns=3),
    "smolagents_code": Recipe(answers=(python("print(6 * 7)"), python("final_answer(6 * 7)")), turns=2, sequences=2),
    "dspy_question": Recipe(answers=(dspy_form("42"),), options={"variables": LITELLM}, turns=1),
    "mini_swe_agent": Recipe(answers=SHELL, options={"variables": MINI, "reward_file": "reward.json"}, turns=2),
}


@pytest.fixture
def agent(run_loop, tmp_path):
    """Play one episode with an example, in the Python that has its package."""

    async def run(name, *answers, **fields):
        recipe = RECIPE[name]
        variables = {"HOME": str(tmp_path), **recipe.options.get("variables", {})}
        words = [f"{os.environ['AGENTRL_AGENTS']}/bin/python", str(RECIPES / f"{name}.py")]
        options = {"answer": "none" if recipe.acts else "step", **recipe.options, "variables": variables}
        make = {"make": GuessNumber} if recipe.acts else {}
        fields = {"limits": EpisodeLimits(max_turns=10), **fields}
        return await run_loop(
            External(command=words, **options),
            *(answers or recipe.answers),
            system_prompt=SPEC.instructions if recipe.acts else "",
            **make,
            **fields,
        )

    return run


@pytest.mark.parametrize("name", RECIPE)
async def test_an_episode_is_recorded_as_the_engine_saw_it(agent, name):
    trajectory, script = await agent(name)
    assert trajectory.outcome is Outcome.FINISHED, (trajectory.error, trajectory.log)
    assert (trajectory.reward, trajectory.success) == (1.0, True), trajectory.log
    script.check(trajectory)
    assert len(trajectory.turns) == RECIPE[name].turns
    assert len(trajectory.sequences) == RECIPE[name].sequences
    assert "Traceback" not in trajectory.log


@pytest.mark.parametrize("name", [name for name in RECIPE if RECIPE[name].turns > 1])
async def test_an_agent_whose_budget_is_spent_is_cut_and_not_blamed(agent, name):
    trajectory, script = await agent(name, *RECIPE[name].answers[:1], limits=EpisodeLimits(max_turns=1))
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS, (trajectory.error, trajectory.log)
    assert len(trajectory.turns) == 1
    script.check(trajectory)


async def test_an_answer_that_is_not_in_dspys_form_is_the_policys_error(agent):
    trajectory, _ = await agent("dspy_question", "it is 42")
    assert trajectory.outcome is Outcome.POLICY_ERROR, (trajectory.error, trajectory.log)
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("name", RECIPE)
async def test_an_engine_that_fails_is_not_the_agents_fault(agent, name):
    lost = ScriptedAnswer(token_ids=[1], failure=Failure.RAISE)
    trajectory, _ = await agent(name, lost)
    assert trajectory.outcome is Outcome.ENGINE_ERROR, (trajectory.error, trajectory.log)
