"""The table of metrics against what runs write, and against the names that rules, dashboards and screens use."""

import ast
import json
import re
from pathlib import Path

import pytest
from support.judge_service import judge_service
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.evaluation.curves import PANELS
from agentrl.observe.metric_table import documented_names, find_documented, metric_sections
from agentrl.observe.metrics import read_metrics
from agentrl.observe.terminal import COLUMNS
from agentrl.runs.preferences import learn_preferences, train_reward
from agentrl.runs.prometheus import STEP_PREFIX, metric_name
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start

ROOT = Path(__file__).parent.parent
MIXTURE = (
    "environments={vowels: {name: 'letters:Letters', isolation: inline, weight: 2}, "
    "digits: {name: 'letters:Digits', isolation: inline, algorithm: {advantage: rloo}}}"
)
TWO_AGENTS = "agent={loop: 'two_agents:Telling', options: {}, max_answer_tokens: 6, max_tokens: 256}"
EVALUATION = "evaluation={every: 1, tasks: 2, split: test}"
RUNS = {
    "synchronous": (
        EVALUATION,
        "run.price_per_hour=7.2",
        "curriculum={horizon: {turns: [2, 3], at_steps: [0, 1]}}",
        "algorithm.filters={top_entropy: {share: 0.5}}",
    ),
    "asynchronous": (
        "rollout.max_staleness=1",
        "evaluation={every: 1, tasks: 2, split: test, engine: {type: local, max_num_seqs: 4}}",
        "checkpoint={every: 1, keep: 9}",
        "trainer.steps=3",
    ),
    "critic": (
        "algorithm={advantage: gae, group_size: 1}",
        "trainer={tasks_per_step: 6, max_kl: 1.0e-9, critic: {kind: own, learning_rate: 1e-2}}",
    ),
    "mixture": (
        MIXTURE,
        EVALUATION,
        "trainer.tasks_per_step=3",
        "rollout.max_staleness=1",
        "curriculum={horizon: {turns: [2, 3], at_steps: [0, 1]}, pools: {by: environment}}",
    ),
    "tools": (
        "agent={loop: 'measured:Spelling', options: {}, tools: ['measured:spell'], reward: ['measured:long']}",
        "environment.name=measured:Doubtful",
        "agent={max_tokens: 1024, max_answer_tokens: 8}",
        "model.scratch.max_context=1024",
        "engine.cache_tokens=16384",
    ),
    "branches": ("agent.branch={roots: 2, turns: [1, 2]}", "algorithm={advantage: tree, group_size: 6}"),
    "adapters": (
        TWO_AGENTS,
        "model.lora={rank: 4}",
        "agent.roles={teller: {adapter: teller}, writer: {adapter: writer}}",
        "adapters={teller: {}, writer: {}}",
    ),
    "greedy rollouts": ("algorithm={advantage: remax, observation_coef: 0.1}",),
    "expert": ("algorithm={loss: luffy, expert: {members: 1}, group_size: 3}", "agent.max_answer_tokens=16"),
    "further models": (
        "algorithm={advantage: prime, group_size: 3, kl_coef: 0.1, reference: {refresh_every: 2}}",
        "trainer.process_reward={learning_rate: 1e-2, beta: 0.2}",
    ),
    "entropy shaping": ("algorithm={shaping: {ares: {window: 2, percentile: 0.5, weight: 0.5}}, group_size: 3}",),
}
ELSEWHERE = {
    "episode/resubmissions",
    "sync/released_bytes",
    "eval/judge/COUNT",
    "eval/LABEL/judge/COUNT",
    "extras/judge/COUNT",
    "time/eval/judge_s",
    "time/eval/LABEL/judge_s",
    "time/extras/judge_s",
    "groups/left_out",
    "trajectories/left_out",
    "proposals/new",
    "proposals/valid",
    "train/running_baselines",
    "settings/KEY",
    *(f"live/{name}" for name in ("open", "waiting", "opened", "answers", "rewarded", "expired", "stale", "dropped")),
    *(f"live/feedback_{name}" for name in ("late", "duplicate", "unknown", "refused")),
}
"""Metrics of servers, judges outside training, selections, proposals, schedules and live traffic, which have tests of
their own."""


def written(run, start=train):
    start(run)
    lines = read_metrics(run.folder.metrics_file)
    assert lines
    return {name for line in lines for name in line} - {"step"}


def judged(tiny_run):
    with judge_service(lambda question, body: {"better": "1"}) as service:
        judge = {
            "engine": {"url": service.url, "model": "m"},
            "compare": "pairwise",
            "reasons": False,
            "budget": {"max_requests": 30, "when_spent": "environment", "prompt_price": 1.0},
            "environment_weight": 0.5,
        }
        settings = (f"agent.judge={json.dumps(judge)}", "algorithm={advantage: grpo, dynamic_sampling: false}")
        return written(tiny_run(*settings, "trainer.steps=2", name="judged"))


def only_learned(tiny_run, played):
    model, pairs = f"model.path={played}", f"preferences={{sources: [{played}], pairs_per_task: 2}}"
    names = written(tiny_run("sft={episodes: 8, tokens_per_update: 256}", name="sft"), warm_start)
    names |= written(tiny_run(model, pairs, name="pairs"), learn_preferences)
    return names | written(tiny_run(model, pairs, "model.scratch=null", name="reader"), train_reward)


def taught(tiny_run, played):
    teacher = f"algorithm={{advantage: reinforce, loss: distill, teacher: {{path: {played}}}}}"
    words = (teacher, f"model.path={played}", "trainer={steps: 1, mini_batches: 1}")
    return written(tiny_run(*words, name="taught"))


def taught_in_other_tokens(tiny_run):
    other = tiny_run("trainer={steps: 1}", "model.scratch.vocab_size=280", "run.seed=4", name="other")
    train(other)
    teacher = f"algorithm={{advantage: reinforce, loss: distill, teacher: {{path: {other.folder.path}}}}}"
    return written(tiny_run(teacher, "trainer={steps: 1, mini_batches: 1}", name="taught in other tokens"))


def of_experts(tiny_run, folder):
    tokenizer = build_tokenizer("qwen3")
    model = tiny_model("qwen3_moe", vocab_size=len(tokenizer), max_context=256)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    moe = "trainer={steps: 1, moe: {router_replay: true, aux_loss_coef: 0.01}}"
    return written(tiny_run("model.scratch=null", f"model.path={folder}", moe, name="experts"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_metric_that_runs_write_is_documented_and_the_other_way_round(tiny_run, tmp_path):
    names = {}
    for name, words in RUNS.items():
        run = tiny_run("trainer.steps=2", *words, name=name.replace(" ", "-"))
        names[name] = written(run)
    played = tiny_run("trainer={steps: 2, tasks_per_step: 4}", "algorithm.group_size=4", name="played")
    train(played)
    names["judge"] = judged(tiny_run)
    names["learned"] = only_learned(tiny_run, played.folder.path)
    names["teacher"] = taught(tiny_run, played.folder.path)
    names["teacher with another tokenizer"] = taught_in_other_tokens(tiny_run)
    names["experts"] = of_experts(tiny_run, tmp_path / "model")
    undocumented = {
        kind: sorted(name for name in found if find_documented(name) is None) for kind, found in names.items()
    }
    assert {kind: found for kind, found in undocumented.items() if found} == {}, "add them to metric_table.yaml"
    seen = {find_documented(name) for found in names.values() for name in found}
    assert sorted(set(documented_names()) - seen - ELSEWHERE) == [], "no run writes these"


def test_each_name_is_documented_once_and_says_what_it_means():
    names = documented_names()
    assert len(names) == len(set(names)) > 150
    for rows in metric_sections().values():
        for row in rows:
            assert row.meaning
            assert not row.remedy or row.healthy, f"{row.names}: a remedy for what?"


METRIC_LIKE = re.compile(r"(?<![\w/{])[a-z_]+(?:/[a-z_0-9]+)+(?![\w/{])")
PREFIXES = {name.partition("/")[0] for name in documented_names() if "/" in name}


def named_in(path):
    """The metrics that the texts of a module name."""
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    found = {name for text in texts if isinstance(text, str) for name in METRIC_LIKE.findall(text)}
    return {name for name in found if name.partition("/")[0] in PREFIXES}


def test_rules_of_diagnose_name_only_documented_metrics():
    named = {name for path in (ROOT / "agentrl").rglob("diagnosis/*.py") for name in named_in(path)}
    assert len(named) > 15
    assert sorted(name for name in named if find_documented(name) is None) == []


def test_the_dashboard_names_only_documented_metrics():
    known = {metric_name(name) for name in documented_names()}
    asked = set(re.findall(rf"{STEP_PREFIX}\w+", (ROOT / "docs" / "grafana.json").read_text()))
    assert len(asked) > 8
    assert sorted(asked - known) == []


def test_curves_and_the_progress_line_name_only_documented_metrics():
    names = {name for names in PANELS.values() for name in names} | {column.metric for column in COLUMNS}
    derived = {"groups/differ"}  # computed for the screen
    assert sorted(name for name in names - derived if find_documented(name) is None) == []


def test_pages_name_only_documented_metrics():
    wrong, known = set(), set(documented_names())
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"`([a-z_]+(?:/[a-z_0-9 ]+)+)`", page.read_text()):
            if name.partition("/")[0] in PREFIXES and name not in known and find_documented(name) is None:
                wrong.add(f"{page.name}: {name}")
    assert sorted(wrong) == []
