"""Agents from the package index, unmodified, play episodes of the scripted engine through the gateway."""

import json
import re
from dataclasses import dataclass

import pytest
from agentrl.agent_loops.external import External
from agentrl.envs.guess_number import SPEC, GuessNumber

from agentrl.errors import Outcome
from agentrl.rollout.budget import EpisodeLimits
from agentrl.serving.scripted import Failure, ScriptedAnswer

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]

MAX_CONTEXT = 200_000
"""Codex begins with 40 KB, in which a tokenizer of 400 words finds 20,000 tokens."""
SECRET = "18"
"""The number of the task with seed 5."""


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def python(code):
    return f"Thought: I know it.\n<code>\n{code}\n</code>"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the policy says in an example, and what comes of it."""

    answers: tuple[str, ...]
    turns: int
    """Answers that the policy gives until the agent ends."""
    sequences: int = 1
    """More than one where the agent rewrites what the policy has said: smolagents adds its calls in words."""


GUESSES = (call("act", action="50"), call("act", action=SECRET), "Goodbye.")
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
FORM = "[[ ## reasoning ## ]]\nSix sevens.\n\n[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]"
WRITE = "echo 42 > answer.txt"
RECIPES = {
    "openai_tools": Recipe(answers=GUESSES, turns=2),
    "anthropic_tools": Recipe(answers=GUESSES, turns=3),
    "openai_agents": Recipe(answers=GUESSES, turns=3),
    "pydantic_ai_agent": Recipe(answers=GUESSES, turns=3),
    "langgraph_agent": Recipe(answers=GUESSES, turns=3),
    "smolagents_code": Recipe(answers=(python("print(6 * 7)"), python("final_answer(6 * 7)")), turns=2, sequences=2),
    "smolagents_tools": Recipe(
        answers=(*GUESSES[:2], call("final_answer", answer="It is done.")), turns=3, sequences=3
    ),
    "dspy_question": Recipe(answers=(FORM,), turns=1),
    "mini_swe_agent": Recipe(answers=(call("bash", command=WRITE), SUBMIT), turns=2),
    "claude_code": Recipe(answers=(call("Bash", command=WRITE, description="Answer"), "It is done."), turns=2),
    "codex_exec": Recipe(answers=(call("exec_command", cmd=WRITE), "It is done."), turns=2),
}


@pytest.fixture
def agent(run_loop, options_of):
    """Play one episode with an example."""

    async def run(name, *answers, max_turns=10):
        options = options_of(name)
        acts = {"make": GuessNumber, "system_prompt": SPEC.instructions} if options["answer"] == "none" else {}
        limits = EpisodeLimits(max_turns=max_turns, max_tokens=MAX_CONTEXT)
        answers = answers or RECIPES[name].answers
        return await run_loop(External(**options), *answers, limits=limits, max_context=MAX_CONTEXT, **acts)

    return run


def test_every_example_that_is_a_program_is_tested(examples):
    functions = {"openai_client"}  # plays as a function, in this process
    assert {path.stem for path in examples.glob("*.py")} == set(RECIPES) | functions


def test_the_documented_versions_are_those_that_are_tested(examples):
    root = examples.parents[1]
    pinned = (root / "tests/gateway/agents/requirements.txt").read_text().splitlines()
    page = (root / "docs/external-agents.md").read_text()
    told = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| `(\w+)\.py` \|", page, re.MULTILINE)
    assert {recipe for _, _, recipe in told} == set(RECIPES)
    assert {f"{package}=={version}" for package, version, _ in told} <= set(pinned)


@pytest.mark.parametrize("name", RECIPES)
async def test_an_episode_is_recorded_as_the_engine_saw_it(agent, name):
    trajectory, script = await agent(name)
    assert trajectory.outcome is Outcome.FINISHED, (trajectory.error, trajectory.log)
    assert (trajectory.reward, trajectory.success) == (1.0, True), trajectory.log
    script.check(trajectory)
    assert (len(trajectory.turns), len(trajectory.sequences)) == (RECIPES[name].turns, RECIPES[name].sequences)
    assert "Traceback" not in trajectory.log


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.turns > 1])
async def test_an_agent_whose_budget_is_spent_is_cut_and_not_blamed(agent, name):
    trajectory, script = await agent(name, RECIPES[name].answers[0], max_turns=1)
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS, (trajectory.error, trajectory.log)
    assert len(trajectory.turns) == 1
    script.check(trajectory)


@pytest.mark.parametrize("name", RECIPES)
async def test_an_engine_that_fails_is_not_the_agents_fault(agent, name):
    lost = ScriptedAnswer(token_ids=[1], failure=Failure.RAISE)
    trajectory, _ = await agent(name, lost)
    assert trajectory.outcome is Outcome.ENGINE_ERROR, (trajectory.error, trajectory.log)


async def test_an_answer_that_is_not_in_dspys_form_is_the_policys_error(agent):
    trajectory, _ = await agent("dspy_question", "it is 42")
    assert trajectory.outcome is Outcome.POLICY_ERROR, (trajectory.error, trajectory.log)
    assert len(trajectory.turns) == 1


SHELLS = {
    "mini_swe_agent": ("bash", "command"),
    "claude_code": ("Bash", "command"),
    "codex_exec": ("exec_command", "cmd"),
}
LOOK = """
p=$$
while [ "$p" -gt 1 ]; do
    if grep -qa AGENTRL_SECRET= "/proc/$p/environ"; then exit 1; fi
    p=$(cut -d" " -f4 "/proc/$p/stat")
done
test -n "$AGENTRL_URL" && echo 42 > answer.txt
"""
"""Pays only where no process above the shell shows the secret with which rewards are posted."""


@pytest.mark.parametrize("name", SHELLS)
async def test_the_shell_of_the_policy_does_not_find_its_own_secret(agent, name):
    tool, argument = SHELLS[name]
    end = SUBMIT if name == "mini_swe_agent" else "It is done."
    trajectory, _ = await agent(name, call(tool, **{argument: LOOK}), end)
    assert trajectory.reward == 1.0, trajectory.log
