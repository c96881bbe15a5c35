"""Whole runs of several agents, each with an adapter of its own."""

import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from support.fixtures import WORLDS
from support.forks import RESUME
from support.token_tables import check_token_tables
from support.waiting import wait_until

from agentrl.builders.checks import check_training
from agentrl.config import load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.models.lora import ADAPTER_WEIGHTS, adapter_folder
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run

LOOP = ("agent={loop: 'two_agents:Telling', options: {}}", "agent.max_answer_tokens=6", "agent.max_tokens=256")
ADAPTERS = (
    *LOOP,
    "model.lora={rank: 4}",
    "agent.roles={teller: {adapter: teller}, writer: {adapter: writer}}",
    "adapters={teller: {learning_rate: 0.05, algorithm: {advantage: rloo}}, writer: {}}",
)


def numbers(run):
    lines = read_metrics(run.folder.metrics_file)
    return [
        {k: v for k, v in line.items() if "time/" not in k and not k.endswith(("seconds", "_per_s"))} for line in lines
    ]


def adapters(run):
    """The tensors of each adapter in the newest checkpoint."""
    checkpoint = Checkpoints(run.folder.checkpoints, keep=9).newest()
    return {
        name: load_file(adapter_folder(checkpoint.path / "model", name) / ADAPTER_WEIGHTS)
        for name in ("teller", "writer")
    }


@pytest.mark.slow
def test_two_adapters_train_and_go_on_bit_for_bit(tiny_run):
    whole = tiny_run(*ADAPTERS, "observe.tokens=all", name="whole")
    train(whole)
    check_token_tables(whole.folder.path)
    lines = numbers(whole)
    for line in lines:
        assert line["adapter/teller/tokens"] + line["adapter/writer/tokens"] == line["train/tokens"]
        assert line["adapter/teller/updates"] == line["adapter/writer/updates"] == 2
        assert (line["adapter/teller/learning_rate"], line["adapter/writer/learning_rate"]) == (0.05, 0.01)
        assert line["adapter/teller/staleness/max"] == 0
        assert line["adapter/teller/probe_difference"] < 1e-4
        assert line["mismatch/prob_abs_mean"] < 1e-6
    cut = tiny_run(*ADAPTERS, "trainer.steps=2", name="cut")
    train(cut)
    train(resume_run(cut.folder.path, ["trainer.steps=4"]))
    assert numbers(cut) == lines
    for name, tensors in adapters(whole).items():
        for key, tensor in adapters(cut)[name].items():
            assert torch.equal(tensor, tensors[key])


@pytest.mark.slow
def test_a_killed_process_resumes_bit_for_bit(tiny_run, start_python):
    expected, killed = tiny_run(*ADAPTERS, name="expected"), tiny_run(*ADAPTERS, name="killed")
    train(expected)
    program = start_python("-c", RESUME, str(killed.folder.path), folder=WORLDS)
    checkpoints = Checkpoints(killed.folder.checkpoints, keep=9)
    wait_until(lambda: checkpoints.newest() or program.poll() is not None, "a checkpoint")
    assert program.kill() == -signal.SIGKILL
    train(resume_run(killed.folder.path))
    assert numbers(killed) == numbers(expected)
    for name, tensors in adapters(expected).items():
        assert all(torch.equal(tensor, adapters(killed)[name][key]) for key, tensor in tensors.items())


@pytest.mark.slow
def test_episodes_go_on_while_adapters_train(tiny_run):
    run = tiny_run(*ADAPTERS, "rollout.max_staleness=1", "checkpoint.background=true")
    train(run)
    lines = numbers(run)
    assert max(line["adapter/writer/staleness/max"] for line in lines) == 1
    assert max(line["adapter/teller/probe_difference"] for line in lines) < 1e-4
    assert sorted(adapters(run)) == ["teller", "writer"]


def test_tokens_say_which_adapter_sampled_them_and_which_version_of_it(tiny_run):
    run = tiny_run(*ADAPTERS, "trainer.steps=2")
    train(run)
    stored = [found.trajectory for found in read_trajectories(run.folder.trajectories)]
    turns = [turn for trajectory in stored for turn in trajectory.turns]
    assert {(turn.role, turn.adapter) for turn in turns} == {("teller", "teller"), ("writer", "writer")}
    assert {int(v) for t in stored for s in t.sequences for v in s.versions[s.loss_mask]} == {0, 1}


@pytest.mark.slow
def test_an_older_self_plays_and_stays_as_it_is(tiny_run, tmp_path):
    old = tiny_run(*ADAPTERS, "trainer.steps=1", name="old")
    train(old)
    run = tiny_run(
        *LOOP,
        f"model.path={old.folder.model}",
        "model.lora={rank: 4}",
        "agent.roles={teller: {adapter: teller}, writer: {adapter: older}}",
        f"adapters.teller={{path: {old.folder.path}}}",
        f"adapters.older={{path: {old.folder.path}, source: writer, trained: false}}",
        "trainer.steps=2",
        "checkpoint.every=1",
        name="new",
    )
    train(run)
    lines = numbers(run)
    assert all("adapter/older/tokens" not in line and "role/writer/members" not in line for line in lines)
    assert all(line["adapter/older/probe_difference"] < 1e-4 for line in lines)
    found = Checkpoints(run.folder.checkpoints, keep=9).newest().path / "model"
    before = adapters(old)
    kept = load_file(adapter_folder(found, "older") / ADAPTER_WEIGHTS)
    assert all(torch.equal(tensor, kept[key]) for key, tensor in before["writer"].items())
    learned = load_file(adapter_folder(found, "teller") / ADAPTER_WEIGHTS)
    assert not all(torch.equal(tensor, learned[key]) for key, tensor in before["teller"].items())
    shutil.rmtree(old.folder.checkpoints)  # the run has what it needs
    train(resume_run(run.folder.path, ["trainer.steps=3"]))


@pytest.mark.slow
def test_the_reference_of_a_loaded_adapter_is_that_adapter(tiny_run):
    old = tiny_run(*ADAPTERS, "trainer.steps=1", name="old")
    train(old)
    run = tiny_run(
        *ADAPTERS,
        f"model.path={old.folder.model}",
        f"adapters={{teller: {{path: {old.folder.path}}}, writer: {{}}}}",
        "algorithm.kl_coef=0.1",
        "trainer={steps: 2, learning_rate: 0.05, mini_batches: 1, epochs: 1}",
        "checkpoint.every=1",
        name="new",
    )
    train(run)
    train(resume_run(run.folder.path, ["trainer.steps=3"]))
    for name in ("teller", "writer"):
        first, *later = (line[f"adapter/{name}/kl_reference"] for line in numbers(run))
        assert first == pytest.approx(0.0, abs=1e-6)
        assert min(later) > 1e-4


def test_the_base_model_plays_a_role(tiny_run):
    run = tiny_run(
        *LOOP,
        "model.lora={rank: 4}",
        "agent.roles={teller: {adapter: base}, writer: {adapter: writer}}",
        "adapters={writer: {}}",
        "trainer.steps=1",
    )
    train(run)
    (line,) = numbers(run)
    assert "role/teller/members" not in line
    assert line["adapter/writer/tokens"] == line["train/tokens"]


@pytest.mark.slow
def test_two_adapters_learn_opposite_answers_to_one_prompt(tiny_run):
    run = tiny_run(
        "agent={loop: 'two_agents:Opposites', options: {}, max_answer_tokens: 8, max_tokens: 256}",
        "model.lora={rank: 8}",
        "agent.roles={early: {adapter: early}, late: {adapter: late}}",
        "adapters={early: {}, late: {}}",
        "algorithm.group_size=8",
        "trainer={steps: 30, tasks_per_step: 4, learning_rate: 3e-2}",
        "checkpoint.every=30",
    )
    train(run)
    lines = numbers(run)
    for role in ("early", "late"):
        first, last = (sum(line[f"role/{role}/return/mean"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
        assert last > first + 0.3


def refused(setting, message):
    return pytest.param(setting, message, id=" ".join(setting))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        refused(("model.lora=null",), r"adapters need model\.lora"),
        refused(("agent.roles={teller: {adapter: teller}}",), r"agent\.roles\.writer does not name an adapter"),
        refused(("agent.roles.writer.adapter=teler",), r"writer\.adapter is not an adapter of the run: got teler"),
        refused(("agent.roles.writer.adapter=base",), r"no role uses adapters\.writer"),
        refused(("agent.roles.writer.trained=false",), r"no trained role uses adapters\.writer"),
        refused(("agent.loop=react_text", "agent.roles=null"), "the agent loop react_text has none"),
        refused(("adapters=null",), r"teller\.adapter is not an adapter of the run"),
        refused(("adapters.writer.algorithm={group_size: 4}",), r"group_size is not a setting of an adapter"),
        refused(("adapters.writer.algorithm={advantge: rloo}",), r"advantge is not a setting of an adapter.*advantage"),
        refused(("adapters.writer.algorithm={kl_coef: -1}",), r"adapters\.writer is invalid"),
        refused(("adapters.writer.algorithm={advantage: remax}",), "greedy rollouts"),
        refused(("model.lora.modules_to_save=[embed_tokens]",), "modules_to_save does not work with several"),
        refused(("trainer.processes=2",), r"trainer\.processes does not work with several adapters"),
        refused(("trainer.critic={}", "algorithm.advantage=gae"), r"trainer\.critic does not work with several"),
        pytest.param(
            ("engine=sglang",),
            "SGLang replaces an adapter only while",
            id="sglang",
            marks=pytest.mark.capability(["sglang", "attached sglang"], "several adapters", refused=True),
        ),
        refused(("engine=vllm",), r"Set engine\.adapter_rank=4 engine\.max_adapters=2"),
        refused(("adapters.writer={path: nowhere/at/all}",), "no model found in nowhere/at/all"),
    ],
)
def test_what_does_not_fit_is_refused(tiny_run, settings, message):
    with pytest.raises((ConfigError, UsageError), match=message):
        check_training(tiny_run(*ADAPTERS, *settings, name="refused").config)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{trained: false}", "has no path is the base model"),
        ("{source: x}", "source of an adapter is ignored without its path"),
        ("{path: x, trained: false, learning_rate: 0.1}", "learning_rate of an adapter is ignored with trained: false"),
    ],
)
def test_an_adapters_section_is_read(section, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["environment=letters", f"adapters={{a: {section}}}"])
