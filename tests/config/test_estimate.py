import json

import pytest

from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.config import load_config
from agentrl.config.derived import most_turns, per_environment_configs
from agentrl.config.estimate import derive, rows, run_size
from agentrl.env import EnvironmentSpec
from agentrl.registry import Kind, register, unregister
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.rollout.task_source import limited_by_tasks
from agentrl.task import Task

SMALL = [
    "environment=guess_number",
    "trainer.steps=10",
    "trainer.tasks_per_step=4",
    "algorithm.group_size=3",
    "trainer.mini_batches=2",
    "trainer.epochs=2",
    "trainer.tokens_per_micro_batch=250",
    "agent.max_tokens=100",
    "agent.max_turns=5",
    "agent.max_answer_tokens=30",
    "rollout.max_staleness=1",
    "rollout.max_concurrent=20",
    "evaluation={every: 4, tasks: 6, samples: 2}",
    "checkpoint.every=4",
]


def test_numbers_of_a_small_run_by_hand():
    a = derive(load_config(None, SMALL))
    assert (a.groups_per_step, a.episodes_per_step, a.episodes) == (4, 12, 120)
    assert (a.admitted_ahead, a.episodes_in_flight) == (24, 20)
    assert (a.most_tokens_per_episode, a.most_sampled_tokens_per_episode, a.most_tokens_per_step) == (100, 100, 1200)
    assert a.most_micro_batches == 3, "6 sequences per mini-batch, two of 100 tokens fit into 250"
    assert a.optimizer_steps == 40
    assert (a.evaluation_episodes, a.checkpoints) == (24, 3)


@pytest.mark.parametrize("loop", ["step_independent", "agentrl.agent_loops.step_independent:StepIndependent"])
def test_a_loop_of_separate_turns_has_a_sequence_per_turn(loop):
    a = derive(load_config(None, [*SMALL, f"agent.loop='{loop}'"]))
    assert (a.sequences_per_episode, a.most_tokens_per_episode) == (5, 500)
    assert (a.most_sampled_tokens_per_episode, a.most_tokens_per_step, a.most_micro_batches) == (150, 6000, 15)


@pytest.mark.parametrize(
    ("overrides", "turns"),
    [
        (["agent.max_turns=50"], 10),
        (["agent.max_turns=50", "environment.options={max_steps: 7}"], 7),
        (["agent.max_turns=5"], 5),
        (["agent.max_turns=50", "agent.loop=memory"], 50),
        (["agent.max_turns=50", "agent.loop=planner_worker"], 50),
        (["agent.max_turns=50", "agent.loop=self_play"], 50),
        (["agent.max_turns=50", "agent.roles={helper: {as_tool: {description: Helps.}}}"], 50),
    ],
)
def test_the_turns_of_a_plan_are_those_of_the_run(overrides, turns):
    config = load_config(None, ["environment=guess_number", "agent.max_answer_tokens=3", *overrides])
    pool = build_env_pool(config)
    runner = build_runner(config, pool, ScriptedEpisodePolicy(ScriptedPolicy.RANDOM))
    assert runner.limits.max_turns == turns
    assert derive(config).most_sampled_tokens_per_episode == 3 * turns
    assert f"of at most {turns} turns x 3 tokens" in run_size(config)
    found = {row[0]: row[1:] for row in rows(config)}
    assert found["sampled per episode"] == (f"at most {3 * turns}", f"{turns} turns x 3, within that limit")


@pytest.mark.parametrize(
    ("limits", "overrides", "turns"),
    [
        ([3, 2], [], 3),
        ([3, 2], ["agent.loop=planner_worker", "agent.max_turns=50"], 3),
        ([3, 2], ["agent.max_turns=2"], 2),
        ([3, None], [], 10),
        ([30, 2], [], 10),
        ([3, 2], ["trainer.episodes=runs/other"], 10),
    ],
)
def test_the_turns_of_a_plan_are_at_most_those_of_its_tasks(tmp_path, limits, overrides, turns):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"seed": seed, "max_turns": most}) + "\n" for seed, most in enumerate(limits)))
    words = [f"environment={{name: guess_number, tasks: {file}}}", "agent.max_answer_tokens=3", *overrides]
    config = limited_by_tasks(load_config(None, words))
    assert f"of at most {turns} turns x 3 tokens" in run_size(config)
    runner = build_runner(config, build_env_pool(config), ScriptedEpisodePolicy(ScriptedPolicy.RANDOM))
    tasks = [Task(id="t", environment="guess_number", max_turns=most) for most in limits]
    assert "trainer.episodes" in str(overrides) or turns == max(runner.limits.for_task(t).max_turns for t in tasks)


def test_each_environment_of_a_mix_has_the_turns_of_its_tasks(tmp_path):
    """Tasks may also be a list that an environment makes."""
    listed = [Task(id=str(most), environment="listed", max_turns=most) for most in (4, 6)]
    register(Kind.ENVIRONMENT, "listed", EnvironmentSpec(name="listed", make=object, tasks=lambda split: listed))
    try:
        words = ["environment=null", "environments={a: {name: listed}, b: {name: guess_number}, c: {name: listed}}"]
        config = limited_by_tasks(load_config(None, [*words, "environments.c.agent.max_turns=5"]))
        turns = {part.label: most_turns(part) for part in per_environment_configs(config)}
    finally:
        unregister(Kind.ENVIRONMENT, "listed")
    assert turns == {"a": 6, "b": 10, "c": 5}


def test_a_step_limit_bounds_the_sequences_of_a_loop_of_separate_turns():
    words = [
        "environment=guess_number",
        "agent={loop: step_independent, max_turns: 50, max_tokens: 100, max_answer_tokens: 9}",
    ]
    a = derive(load_config(None, words))
    assert (a.sequences_per_episode, a.most_tokens_per_episode) == (10, 1000)


@pytest.mark.parametrize(
    ("loop", "rows_per_update", "per_step", "micro_batches"),
    [("step_independent", 16, 8, 8), ("tool_calling", 5, 6, 3), ("tool_calling", 500, 2, 6)],
)
def test_mini_batches_in_rows_count_turns_of_loops_with_a_row_per_turn(loop, rows_per_update, per_step, micro_batches):
    config = [word for word in SMALL if "mini_batches" not in word]
    config += [f"agent.loop={loop}", f"trainer.mini_batch_rows={rows_per_update}"]
    loaded = load_config(None, config)
    a = derive(loaded)
    assert (a.updates_per_step, a.optimizer_steps, a.most_micro_batches) == (per_step, 10 * per_step, micro_batches)
    found = {row[0]: row[1:] for row in rows(loaded)}
    trained = 12 * a.sequences_per_episode
    assert found["updates per step"] == (
        f"at most {per_step}",
        f"2 epochs x {trained} rows / {rows_per_update} (trainer.mini_batch_rows)",
    )
    assert found["optimizer steps"][0] == f"at most {10 * per_step}"


def test_the_published_alfworld_batch_makes_25_updates_per_step():
    words = ["environment=household", "trainer={tasks_per_step: 16, mini_batch_rows: 256, steps: 150}"]
    a = derive(load_config(None, [*words, "agent={loop: step_independent, max_turns: 50}"]))
    assert (a.updates_per_step, a.optimizer_steps) == (25, 3750)


def test_parameters_of_a_scratch_model_by_hand():
    scratch = "model.scratch={layers: 1, hidden_size: 8, heads: 2, kv_heads: 1, vocab_size: 10}"
    size = derive(load_config(None, [*SMALL, scratch])).model
    assert size.parameters == 10 * 8 + (8 * 8 + 2 * 8 * 4 + 8 * 8) + 3 * 8 * 24
    assert size.cache_values_per_token == 2 * 4


@pytest.mark.parametrize(("staleness", "copies"), [(0, 0), (1, 1)])
def test_a_stale_local_engine_needs_its_own_weights(staleness, copies):
    memory = derive(load_config(None, [*SMALL, f"rollout.max_staleness={staleness}"])).memory
    assert memory.engine_copy == copies * memory.weights
    assert memory.total > memory.weights + memory.gradients + memory.optimizer


def test_a_local_engine_for_evaluations_needs_another_model_and_cache():
    stale = [*SMALL, "rollout.max_staleness=1", "engine.cache_tokens=1000"]
    one = derive(load_config(None, stale)).memory
    both = load_config(None, [*stale, "evaluation={every: 1, engine: {type: local, cache_tokens: 500}}"])
    two = derive(both).memory
    assert (two.engine_copy, two.cache) == (2 * one.engine_copy, 1.5 * one.cache)
    how = {name: how for name, _, how in rows(both)}["key-value cache"]
    assert how == "engine.cache_tokens and evaluation.engine.cache_tokens"


def test_a_critic_of_its_own_is_a_model_more_and_a_shared_one_is_next_to_nothing():
    fixed = [*SMALL, "trainer.tokens_per_micro_batch=10"]
    none, own, shared = (
        derive(load_config(None, [*fixed, f"trainer.critic={critic}"]))
        for critic in ("null", "{kind: own}", "{kind: shared}")
    )
    assert none.critic_parameters is None
    width, parameters = own.model.hidden_size, own.model.parameters
    assert (own.critic_parameters, shared.critic_parameters) == (parameters + width + 1, width + 1)
    assert own.memory.total - none.memory.total == (parameters + width + 1) * (4 + 4 + 8)
    assert shared.memory.total - none.memory.total == (width + 1) * (4 + 4 + 8)


def test_the_dry_run_shows_a_critic():
    row = table("trainer.critic={kind: own, pretrain_steps: 3}")["critic"]
    assert row[0].endswith("parameters")
    assert row[1].startswith("a separate model, pretrained for 3 steps; ")
    assert "hidden states" in table("trainer.critic={kind: shared}")["critic"][1]
    assert table("trainer.critic={path: Qwen/none}")["critic"][0] == "size unknown"
    assert "critic" not in table()
    assert "and a frozen reference" in table("trainer.process_reward={}")["process reward"][1]
    assert table("trainer.process_reward={path: Qwen/none}")["process reward"][0] == "size unknown"


@pytest.mark.parametrize("path", ["{folder}/mine", "mine"])
def test_the_size_of_a_model_folder_is_read_from_its_config(path, tmp_path, monkeypatch):
    """Of a folder, or of a name that `agentrl model add` gave."""
    monkeypatch.setenv("AGENTRL_MODELS", str(tmp_path))
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(sizes))
    size = derive(load_config(None, [*SMALL, f"model.path={path.format(folder=tmp_path)}"])).model
    assert size.parameters == 2 * 10 * 8 + 2 * (4 * 8 * 8 + 3 * 8 * 16)


def test_an_absent_model_has_no_size():
    config = load_config(None, [*SMALL, "model.path=Qwen/none"])
    assert derive(config).memory is None
    assert "unknown" in rows(config)[-1][1]


def table(*overrides):
    return {name: (value, how) for name, value, how in rows(load_config(None, [*SMALL, *overrides]))}


def test_launched_servers_are_named_and_no_key_of_another_engine():
    found = table("engine={type: vllm, replicas: 2, max_num_seqs: 32, max_context: 4096}")
    assert "key-value cache" not in found
    assert found["servers"][0] == "2 vllm launched"
    assert found["weight transport"][0] == "shared_memory"
    assert found["decoded together"][0] == "32 sequences per server"
    assert found["context of servers"][0] == "4,096 tokens"
    assert not any("cache_tokens" in how for _, how in found.values())


def test_attached_servers_are_named_by_their_addresses():
    found = table("engine={type: sglang, servers: [http://a:1, http://b:2], transport: tensor}")
    assert (found["servers"][0], found["servers"][1]) == ("2 attached", "http://a:1, http://b:2")
    assert (found["weight transport"][0], found["context of servers"][0]) == (
        "tensor",
        "the model's own limit",
    )


def test_only_the_local_engine_has_a_cache_of_its_own():
    assert table("engine=local")["key-value cache"][1] == "engine.cache_tokens"
    assert "servers" not in table("engine=local")


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        (["rollout.max_staleness=0"], "all groups that were started for it"),
        (["rollout.max_staleness=2"], "waits for those that would become too stale"),
        (["rollout={max_staleness: 2, batch_order: greedy}"], "those that end first; slow ones are dropped"),
    ],
)
def test_the_dry_run_says_which_groups_a_batch_takes(settings, value):
    assert ("groups of a batch", value) in [row[:2] for row in rows(load_config(None, [*SMALL, *settings]))]
