"""Runs with one fault each, made by the real runtime: `agentrl diagnose` names the fault first.

No metrics are written by hand. Most runs begin with a small model that was warm-started for a second; each takes a few
seconds. The engine that disagrees is the local engine with a faulty sampler.
"""

import dataclasses
import json

import pytest
from support.fixtures import tiny_runs
from support.judge_service import judge_service

from agentrl.cli.diagnose import diagnosis_text
from agentrl.runs.diagnosis import diagnose_folder
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start
from agentrl.serving import local as local_engine

pytestmark = pytest.mark.slow


STEPS = ("trainer={steps: 5, tasks_per_step: 4}", "algorithm.group_size=4", "checkpoint.every=100")
SEARCHING = "{loop: 'faults:Searching', options: {}, tools: ['faults:%s'], max_answer_tokens: 8, max_tokens: 256}"


def world(name, isolation="inline"):
    return f"environment={{name: 'faults:{name}', isolation: {isolation}}}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model that writes some vowels and ends its answers."""
    with tiny_runs(tmp_path_factory.mktemp("model")) as start:
        lessons = "sft={episodes: 96, tokens_per_update: 256, learning_rate: 7e-3, epochs: 1}"
        run = start(lessons)
        warm_start(run)
        yield str(run.folder.path)


@pytest.fixture
def diagnose(tiny_run, model):
    """Train, and diagnose the folder of the run."""

    def run(*words, scratch=False):
        start = tiny_run(*STEPS, *([] if scratch else [f"model.path={model}", "trainer.learning_rate=2e-3"]), *words)
        train(start)
        return diagnose_folder(start.folder.path)

    return run


LONG = ("trainer.steps=15", "algorithm.group_size=6", "trainer.learning_rate=1e-2")
STALE = (
    "environment={name: 'faults:Uneven', isolation: thread, workers: 64}",
    "rollout={max_staleness: 1, batch_order: greedy}",
    "trainer.steps=12",
)
WRONG_FORM = ("agent.options={format: action_tag, explain: false}", "agent.max_answer_tokens=32")
MORE = (pytest.mark.slow,)

PLANTED = {
    "constant reward": ("constant_reward", ['agent.reward=["letters:constant"]'], ()),
    "reward of the wrong sign": ("reward_against_success", ['agent.reward=["letters:against_success"]'], ()),
    "nothing varies within groups": ("nothing_varies", [world("ByTask")], ()),
    "turns run out": ("truncated_turns", ["agent.max_turns=1"], ()),
    "context runs out": ("truncated_tokens", ["agent.max_tokens=22"], ()),
    "wrong format of answers": ("unusable_answers", WRONG_FORM, ()),
    "a tool always fails": ("tool_failed", [f"agent={SEARCHING % 'broken'}"], ()),
    "a tool is slow": ("tool_slow", [f"agent={SEARCHING % 'slow'}"], ()),
    "most calls of a tool are refused": ("tool_failed", [f"agent={SEARCHING % 'refusing'}"], MORE),
    "reward of the wrong sign with noise": (
        "reward_against_success",
        ['agent.reward=["faults:noisy_against_success"]', "trainer.steps=10"],
        MORE,
    ),
    "all answers are cut": ("answers_cut", [world("Whole"), "agent.max_answer_tokens=1"], ()),
    "rate too high": ("learning_rate_high", ["trainer.learning_rate=0.3"], ()),
    "rate too low": ("learning_rate_low", ["trainer.learning_rate=1e-8"], ()),
    "stale groups": ("groups_stale", STALE, MORE),
    "never paid": ("never_rewarded", [world("Unpaid")], ()),
    "entropy collapses": (
        "entropy_falls",
        [world("Chance"), "algorithm.entropy_coef=-0.5", "trainer.steps=12", "trainer.learning_rate=1e-2"],
        MORE,
    ),
    "length is rewarded": (
        "length_growth",
        [world("Chance"), 'agent.reward=["faults:length_of"]', "agent.max_answer_tokens=24", *LONG],
        MORE,
    ),
    "overfitting": (
        "overfitting",
        [world("Memorized"), "evaluation={every: 3, tasks: 24, split: test}", *LONG],
        MORE,
    ),
}
CRITIC = (
    "algorithm={advantage: gae, group_size: 1}",
    "trainer.critic={kind: own, pretrain_steps: 1, learning_rate: 1e-2}",
)
MIXTURE = (
    "environments={vowels: {name: 'letters:Letters', isolation: inline, weight: 2}, "
    "digits: {name: 'letters:Digits', isolation: inline, agent: {max_answer_tokens: 6}}}"
)
ROLES = ("agent={loop: 'two_agents:Telling', options: {}, max_answer_tokens: 12, max_tokens: 256}",)
FROM_SCRATCH = ("overfitting",)


@pytest.mark.parametrize(
    ("kind", "words"),
    [pytest.param(kind, words, id=name, marks=marks) for name, (kind, words, marks) in PLANTED.items()],
)
def test_the_planted_fault_is_named_first(diagnose, kind, words):
    found = diagnose(*words, scratch=kind in FROM_SCRATCH)
    assert [finding.kind for finding in found.findings][:1] == [kind], str(diagnosis_text(found))
    first = found.findings[0]
    assert first.remedy
    assert first.because_of is None
    assert found.state == "finished"
    assert json.loads(json.dumps(found.to_json()))["findings"][0]["kind"] == kind


def test_answers_that_are_cut_are_named_first(diagnose):
    """A model with random weights hardly ever ends its answers."""
    first = diagnose(scratch=True).findings[0]
    assert first.kind == "answers_cut"
    assert [str(change) for change in first.changes] == ["set agent.max_answer_tokens=16 (now 8)"]


def test_a_judge_that_always_agrees_is_named_first(diagnose):
    with judge_service(lambda question, body: "Well done. Score: 9") as service:
        found = diagnose(f"agent.judge={{engine: {{url: '{service.url}', model: m}}}}")
    assert found.findings[0].kind == "judge_always_agrees"
    assert {finding.because_of for finding in found.findings[1:]} <= {"judge_always_agrees"}


def test_an_engine_that_disagrees_is_named_first(diagnose, monkeypatch):
    sound = local_engine.sample

    def sharpened(logits, params, *rest):
        """Sample at another temperature than the trainer is told; greedy probes do not notice."""
        sampled = [p.temperature != 0 for p in params]
        return sound(logits * 1.3 if all(sampled) else logits, params, *rest)

    monkeypatch.setattr(local_engine, "sample", sharpened)
    first = diagnose().findings[0]
    assert first.kind == "engine_disagrees"
    assert "mismatch/prob_abs_mean" in first.evidence[0]


def test_evidence_example_and_answers(diagnose, agentrl_out):
    found = diagnose(*WRONG_FORM)
    first = found.findings[0]
    assert len(first.evidence) == 3
    assert any("aeiou" in line for line in first.evidence)
    command = first.example.view_command(found.folder).split()
    assert command[:2] == ["agentrl", "view"]
    assert first.example.task_id in agentrl_out(*command[1:])


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["trainer.steps=12", "algorithm.group_size=6"], id="letters"),
        pytest.param(["rollout.max_staleness=1", "trainer.steps=8"], id="asynchronous", marks=MORE),
        pytest.param([*CRITIC, "trainer={steps: 8, tasks_per_step: 16}"], id="critic", marks=MORE),
        pytest.param(["model.lora={rank: 4}", "trainer.learning_rate=1e-2", "trainer.steps=8"], id="lora", marks=MORE),
        pytest.param([MIXTURE, "trainer={steps: 8, tasks_per_step: 6}"], id="mixture", marks=MORE),
        pytest.param([*ROLES, "trainer.steps=8"], id="roles", marks=MORE),
        pytest.param(["trainer.steps=3"], id="three steps"),
        pytest.param([world("Easy"), *LONG, "trainer.steps=40"], id="solved", marks=MORE),
    ],
)
def test_nothing_is_said_of_a_run_that_learns(diagnose, words):
    found = diagnose(*words)
    assert found.findings == (), str(diagnosis_text(found))


def test_findings_are_records_that_can_be_changed(diagnose):
    finding = diagnose('agent.reward=["letters:constant"]').findings[0]
    assert type(finding).from_json(json.loads(json.dumps(finding.to_json()))) == dataclasses.replace(
        finding, causes=frozenset()
    )
