import dataclasses
import itertools
import json
import sys
import time

import pytest
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentLoop
from agentrl.builders import scratch
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.builders.models import build_renderer, prepare_model, resolve_model
from agentrl.builders.scratch import scratch_corpus
from agentrl.builders.tools import find_tool
from agentrl.config import load_config, shipped_configs
from agentrl.config.derived import make_agent_loop, per_environment_configs
from agentrl.config.keys import all_keys
from agentrl.config.resume_rules import RULES, rule_of
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError, Outcome, TemplateError, UnknownNameError, UsageError
from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.observe.run_status import RunEnd, read_status, write_status
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.registry import Kind, name_of
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer, token_breaker
from agentrl.rollout.curriculum import check_curriculum
from agentrl.rollout.environment_probe import has_expert
from agentrl.rollout.loop_choice import check_rendering
from agentrl.rollout.task_source import task_source
from agentrl.rollout.text_corpus import MAX_FAILED
from agentrl.runs.rl import train
from agentrl.runs.sft import _select_trainable, collect_demonstrations
from agentrl.runs.start import finished_result, resume_run, start_run
from agentrl.task import Task
from agentrl.training.gradients import Objective
from agentrl.trajectory import Source, Trajectory

NEEDS_DATA = {"alfworld", "prompts"}
"""Environments whose tasks are in files that must be downloaded."""


@pytest.mark.parametrize("name", [name for name in shipped_configs() if not name.startswith("hardware/")])
def test_every_shipped_config_names_parts_that_exist(name):
    config = load_config(name)
    for part in per_environment_configs(config):
        environment, evaluation = part.config.sole_environment, part.config.evaluation
        spec = resolve_environment(environment.name)
        assert {environment.split, evaluation.split} <= set(spec.splits)
        if spec.name not in NEEDS_DATA and not {"data", "files"} & environment.options.keys():
            assert len(task_source(spec, environment)) >= config.trainer.tasks_per_step
            assert len(task_source(spec, environment, split=evaluation.split)) >= evaluation.tasks
        make_agent_loop(part.config.agent.loop, part.config.agent.options)
    check_curriculum(config)
    Objective(config.algorithm)


def test_a_task_file_replaces_the_split(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"id": "mine", "seed": 5}\n')
    config = load_config(None, ["environment=household", f"environment.tasks={tmp_path / 'tasks.jsonl'}"]).environment
    spec = resolve_environment(config.name)
    assert list(task_source(spec, config)) == [Task(id="mine", environment="household", seed=5)]
    assert len(task_source(spec, config, split="valid_unseen")) > 1


def test_tools_for_a_loop_that_offers_none_are_an_error(tiny_run):
    with pytest.raises(ConfigError, match=r"agent\.tools is ignored by the agent loop react_text"):
        tiny_run("agent.tools=[calculator]")


def test_a_tool_parser_for_a_loop_without_tools_is_an_error(tiny_run):
    with pytest.raises(ConfigError, match=r"agent\.tool_parser is ignored by the agent loop react_text"):
        tiny_run("agent.tool_parser=hermes")


@pytest.mark.parametrize(("family", "expected"), [("qwen2.5", 1), ("qwen3", 0)])
def test_thinking_that_a_template_does_not_have_is_reported(tiny_run, family, expected):
    said: list[str] = []
    config = tiny_run("agent={loop: step_independent, enable_thinking: true}").config
    check_rendering(config, Renderer(build_tokenizer(family), enable_thinking=True), say=said.append)
    assert len([text for text in said if text.startswith("agent.enable_thinking is true, but the chat")]) == expected


@pytest.mark.parametrize("loop", ["react_text", "agentrl.agent_loops.react_text:ReactText"])
def test_a_template_that_rewrites_history_is_detected_for_every_loop_with_follow_ups(tiny_run, loop):
    renderer = Renderer(build_tokenizer("qwen3"), enable_thinking=True)
    said: list[str] = []
    agent = f"loop: '{loop}', max_tokens: 256"
    with pytest.raises(TemplateError, match="rewrites history"):
        check_rendering(tiny_run(f"agent={{{agent}, rewritten_history: refuse}}").config, renderer)
    check_rendering(tiny_run("agent={loop: step_independent}", name="alone").config, renderer, say=said.append)
    assert (said, renderer.rewrites_history) == ([], False)
    check_rendering(tiny_run(f"agent={{{agent}}}", name="forks").config, renderer, say=said.append)
    assert renderer.rewrites_history
    assert len(said) == 1
    assert "): conversations fork at these turns. A turn after that starts a new sequence" in said[0]


def test_a_template_that_leaves_out_text_beside_calls_is_reported_or_refused(tiny_run):
    agent = "loop: tool_calling, max_tokens: 256"
    refusing = tiny_run(f"agent={{{agent}, rewritten_history: refuse}}", name="refuses").config
    forking = tiny_run(f"agent={{{agent}}}", name="forks").config
    said: list[str] = []
    shows = Renderer(build_tokenizer("qwen2.5"))
    check_rendering(refusing, shows, say=said.append)
    assert (said, shows.omits_text_beside_calls) == ([], False)
    omits = Renderer(build_tokenizer("llama3"))
    with pytest.raises(TemplateError, match=r"leaves out the text of an answer next to.*chat_template=llama3"):
        check_rendering(refusing, omits)
    check_rendering(forking, omits, say=said.append)
    assert (omits.omits_text_beside_calls, omits.rewrites_history) == (True, False)
    assert len(said) == 1
    assert "next to tool calls: conversations fork after such answers, or set model.chat_template=llama3." in said[0]


def test_the_split_of_evaluations_is_looked_up_before_a_run_starts(tiny_run, tmp_path):
    with pytest.raises(UnknownNameError, match="vald"):
        tiny_run("evaluation={every: 2, split: vald}")
    assert not (tmp_path / "runs").exists()


def test_evaluations_do_not_ask_for_more_tasks_than_there_are(tiny_run, tmp_path):
    with pytest.raises(ConfigError, match=r"got 200,000 tasks of letters:Letters/test, expected at most 100,000"):
        tiny_run("evaluation={every: 2, split: test, tasks: 200000}")
    assert not list(tmp_path.rglob("config.yaml"))


def test_an_unknown_split_is_named():
    config = load_config(None, ["environment=household/trian"]).environment
    with pytest.raises(UnknownNameError, match="Did you mean household/train"):
        task_source(resolve_environment(config.name), config)


async def test_the_corpus_is_what_the_agent_will_read_and_write(tiny_run):
    config = tiny_run().config
    corpus = await scratch_corpus(config)
    assert {"aeiou", "More."} < set(corpus)
    assert corpus == await scratch_corpus(config)


async def test_the_corpus_holds_tool_calls_and_the_tools(tiny_run):
    corpus = await scratch_corpus(tiny_run("agent.loop=tool_calling", "agent.options={}").config)
    assert '{"name": "act", "arguments": {"action": "aeiou"}}' in corpus
    assert any(text.startswith('{"type": "function", "function": {"name": "act"') for text in corpus)


async def test_an_environment_that_cannot_be_played_gives_no_corpus(tiny_run, monkeypatch):
    import letters

    def broken(self, **options):
        raise RuntimeError("it is broken")

    monkeypatch.setattr(letters.Letters, "reset", broken)
    with pytest.raises(UsageError, match="no episode can be played"):
        await scratch_corpus(tiny_run().config)


async def test_an_environment_that_ends_the_program_when_it_is_made_is_named(tiny_run, monkeypatch):
    import letters

    def leave(self):
        sys.exit(0)

    config = tiny_run().config
    monkeypatch.setattr(letters.Letters, "__init__", leave)
    with pytest.raises(UsageError, match=r"making environment letters:Letters failed: got SystemExit: 0"):
        await scratch_corpus(config)
    with pytest.raises(UsageError, match=r"environment letters:Letters cannot be created: got SystemExit: 0"):
        tiny_run()


async def test_a_step_that_hangs_while_a_model_is_prepared_is_reported_and_abandoned(tiny_run, monkeypatch):
    import letters

    steps, told = itertools.count(), []

    def hang(self, action):
        next(steps)
        time.sleep(0.1)

    monkeypatch.setattr(letters.Letters, "step", hang)
    config = tiny_run("environment.isolation=thread", "environment.step_timeout_s=0.01", "rollout.retries=0").config
    assert any("Write" in text for text in await scratch_corpus(config, say=told.append))
    first, last = told
    assert first.startswith("an episode for the new model's vocabulary failed; others follow: ")
    assert "missed its deadline: got no answer in 0.01 s" in first
    assert last.startswith("8 episodes in a row failed")
    assert "run: agentrl env check " in last
    assert next(steps) <= MAX_FAILED  # on a busy machine, calls before the step miss the deadline as well


async def test_an_environment_without_an_expert_plays_at_random(tiny_run, monkeypatch):
    import letters

    monkeypatch.delattr(letters.Letters, "expert")
    config = tiny_run().config
    assert not has_expert(resolve_environment(config.environment.name), config)
    assert "aeiou" not in await scratch_corpus(config)


async def test_a_scratch_model_is_made_once_and_whole(tiny_run):
    run = tiny_run()
    (run.folder.path / "model.partial").mkdir()
    path = await prepare_model(run.config, run.folder.model)
    before = (run.folder.model / "model.safetensors").stat().st_mtime_ns
    assert await prepare_model(run.config, run.folder.model) == path
    assert (run.folder.model / "model.safetensors").stat().st_mtime_ns == before
    assert not (run.folder.path / "model.partial").exists()
    assert json.loads((run.folder.model / "config.json").read_text())["hidden_size"] == 32


async def test_demonstrations_are_forced_tokens_of_solved_tasks(tiny_run):
    run = tiny_run("sft.episodes=5")
    path = await prepare_model(run.config, run.folder.model)
    renderer = build_renderer(run.config, path, load_tokenizer(path))
    found = await collect_demonstrations(run.config, renderer)
    assert [t.group_id for t in found] == [f"demonstration-{i}" for i in range(5)]
    for trajectory in found:
        assert trajectory.success
        sequence = trajectory.sequences[0]
        assert (sequence.sources == Source.FORCED).any()
        assert not sequence.loss_mask.any()


def test_demonstrations_that_a_limit_ended_are_not_learned_if_others_report_success():
    ends = [(Outcome.FINISHED, True), (Outcome.TRUNCATED_TURNS, None), (Outcome.FINISHED, False)]
    fields = {"task_id": "t", "environment": "e", "seed": 0, "group_id": "g"}
    played = {n: Trajectory(id=str(n), outcome=end, success=known, **fields) for n, (end, known) in enumerate(ends)}
    assert list(_select_trainable(played)) == [0]
    assert list(_select_trainable({1: played[1]})) == [1]


async def test_mistakes_need_an_expert_that_makes_them(tiny_run):
    run = tiny_run("sft={episodes: 5, mistakes: 0.9}")
    path = await prepare_model(run.config, run.folder.model)
    renderer = build_renderer(run.config, path, load_tokenizer(path))
    with pytest.raises(UsageError, match=r"makes no mistakes.*sft\.mistakes=0"):
        await collect_demonstrations(run.config, renderer)


async def test_answers_that_the_agent_could_not_give_are_not_demonstrated(tiny_run):
    run = tiny_run("sft.episodes=5", "agent.max_answer_tokens=1")
    path = await prepare_model(run.config, run.folder.model)
    renderer = build_renderer(run.config, path, load_tokenizer(path))
    with pytest.raises(UsageError, match=r"2 tokens: .*, expected at most agent\.max_answer_tokens=1\. Set agent"):
        await collect_demonstrations(run.config, renderer)


async def test_latest_is_resolved_before_a_new_run_becomes_the_latest(tiny_run, tmp_path):
    first = tiny_run(name="first")
    await prepare_model(first.config, first.folder.model)
    latest = tmp_path / "runs" / "latest"
    second = start_run(load_config(None, [*_settings(first), f"model.path={latest}", "run.name=second"]), kind="test")
    assert second.config.model.path == str(first.folder.model)
    assert latest.resolve() == second.folder.path.resolve()


def _settings(run):
    return [f"run.directory={run.folder.path.parent}", "environment={name: letters:Letters, isolation: inline}"]


@pytest.mark.parametrize(
    "override",
    [
        *("environment.split=test", "algorithm.loss=dapo", "run.seed=1", "agent.options.format=react", "model.path=/x"),
        *("trainer.tasks_per_step=3", "trainer.optimizer=muon", "algorithm.group_size=2", "sampling.temperature=0.5"),
        *("trainer.epochs=2", "engine.max_context=256", "sft.episodes=3"),
    ],
)
def test_a_resumed_run_does_not_become_another_one(tiny_run, override):
    run = tiny_run()
    before = run.folder.config_file.read_bytes()
    with pytest.raises(ConfigError, match=rf"got {override.split('=')[0]}"):
        resume_run(run.folder.path, [override])
    assert run.folder.config_file.read_bytes() == before


@pytest.mark.parametrize(
    "override",
    [
        "trainer.steps=9",
        "engine.max_num_seqs=4",
        "trackers=[tensorboard]",
        "model.device=cpu",
        "trainer.learning_rate=1e-3",
    ],
)
def test_a_resumed_run_may_change_length_speed_and_trackers(tiny_run, override):
    run = tiny_run()
    resumed = resume_run(run.folder.path, [override])
    assert [change.key for change in resumed.changes] == [override.split("=")[0]]
    assert resume_run(run.folder.path).config == run.config  # until the run has begun


def test_every_config_key_has_a_rule_for_resumed_runs_and_every_rule_a_key():
    keys = [".".join(key) for key in all_keys()]
    rules = {key: rule_of(key) for key in keys}
    assert all(rule.why for rule in rules.values())
    assert {key for key in keys if rules[key].may_change} >= {"trainer.steps", "trackers", "environment.workers"}
    own = {rule for rule in RULES if not any(f"{key}.".startswith(f"{rule}.") for key in keys)}
    assert not own, "no such key"
    assert rule_of("environments.maze.workers") == rule_of("environment.workers")
    assert not rule_of("environments.maze.options.size").may_change
    assert rule_of("rollout.batch_order") == rule_of("rollout.max_staleness") != rule_of("rollout.max_concurrent")
    assert rule_of("adapters.planner.learning_rate").may_change
    assert not rule_of("adapters.planner.algorithm.loss").may_change


def test_a_resumed_run_says_what_is_changed_and_keeps_it_once_it_has_begun(tiny_run):
    run = tiny_run("trainer.steps=1")
    train(run)
    said = []

    class Listener(RunWatcher):
        def on_message(self, text):
            said.append(text)

    before = run.folder.config_file.read_bytes()
    resumed = resume_run(run.folder.path, ["trainer.steps=2", "trainer.learning_rate=1e-3"])
    assert run.folder.config_file.read_bytes() == before
    train(resumed, watcher=Listener())
    assert [text.partition(" (")[0] for text in said if text.startswith("changed: ")] == [
        "changed: trainer.learning_rate: 0.01 -> 0.001",
        "changed: trainer.steps: 1 -> 2",
    ]
    assert resume_run(run.folder.path).config == resumed.config


@pytest.mark.parametrize("override", ["trainer.steps=1", "trainer.learning_rate=1e-3"])
def test_a_change_that_no_step_would_see_is_refused(tiny_run, override):
    run = tiny_run("trainer.steps=2")
    train(run)
    before = run.folder.config_file.read_bytes()
    with pytest.raises(ConfigError, match=r"no steps left.*2 steps are done.*trainer.steps=4"):
        resume_run(run.folder.path, [override])
    assert run.folder.config_file.read_bytes() == before
    assert resume_run(run.folder.path).changes == ()


def test_a_finished_run_says_that_it_has_no_steps_left(tiny_run, monkeypatch):
    said: list[str] = []
    found: list[RunStatus] = []

    class Listener(RunWatcher):
        def on_start(self, folder, status):
            found.append(status)

        def on_message(self, text):
            said.append(text)

    run = tiny_run("trainer.steps=1")
    first = train(run)
    monkeypatch.setattr("agentrl.runs.rl.prepare_model", lambda *_, **__: pytest.fail("a model is loaded"))
    again = train(resume_run(run.folder.path), watcher=Listener())
    assert (again.step, again.checkpoint, again.interrupted) == (1, first.checkpoint, False)
    assert again.metrics == first.metrics
    assert [str(problem) for problem in again.problems] == [str(problem) for problem in first.problems]
    assert "the run has no steps left; to train longer, add trainer.steps=2" in said
    assert found[0].step == 1


def test_a_run_that_was_killed_after_its_last_step_is_resumed(tiny_run):
    run = tiny_run("trainer.steps=1")
    train(run)
    ended = read_status(run.folder.path)
    write_status(run.folder.path, dataclasses.replace(ended, ended=None, end=None))
    assert finished_result(resume_run(run.folder.path), RunWatcher()) is None
    assert train(resume_run(run.folder.path)).step == 1
    assert read_status(run.folder.path).end is RunEnd.FINISHED


def test_an_absent_tokenizer_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UsageError, match=r"cannot load the tokenizer of .*: got no such folder"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no model found in"):
        resolve_model(load_config(None, ["environment=a", f"model.path={tmp_path / 'none'}"]))


def test_tools_are_found_by_name():
    assert find_tool("calculator").name == "calculator"
    assert find_tool("agentrl.message:parse_int").name == "parse_int"


def test_reading_an_empty_store(tmp_path):
    assert list(read_trajectories(tmp_path)) == []


@pytest.mark.parametrize(("engine", "seconds"), [("local", 70), ("vllm", 75)])
async def test_episodes_wait_longer_for_answers_of_servers_that_may_restart(engine, seconds):
    words = ["engine.timeout_s=70", *(["engine.start_timeout_s=5"] if engine == "vllm" else [])]
    config = load_config("quickstart", [f"engine={engine}", *words])
    pool = build_env_pool(config, spec=resolve_environment(config.environment.name))
    try:
        assert build_runner(config, pool, None).limits.answer_timeout_s == seconds
    finally:
        await pool.close()


async def test_a_loop_without_demonstrations_has_a_vocabulary_of_bare_actions(tiny_run):
    class Mute(AgentLoop):
        async def run(self, episode):
            raise AssertionError("it reads tokens that there are not yet")

    said = []
    loop = f"agent.loop={name_of(Kind.AGENT_LOOP, Mute)}"
    corpus = await scratch_corpus(tiny_run(loop, "agent.options={}").config, say=said.append)
    assert len(set(corpus)) > 3
    assert [line for line in said if "agent loop Mute has no demonstrate(action)" in line]


async def test_a_loop_of_several_roles_without_demonstrations_has_a_vocabulary_of_bare_actions(tiny_run, monkeypatch):
    monkeypatch.setattr(scratch, "EPISODES", 8)

    class Duet(AgentLoop):
        roles = ("first", "second")

        async def run(self, episode):
            raise AssertionError("it reads tokens that there are not yet")

    loop = f"agent.loop={name_of(Kind.AGENT_LOOP, Duet)}"
    config = tiny_run(loop, "agent.options={}", "agent.roles={first: {trained: false}}").config
    said = []
    assert len(set(await scratch_corpus(config, say=said.append))) > 3
    (notice,) = said
    assert notice.startswith("agent loop Duet has no demonstrate(action): ")


async def test_an_external_program_without_a_demonstration_has_a_vocabulary_of_bare_actions(tiny_run, monkeypatch):
    monkeypatch.setattr(scratch, "EPISODES", 8)
    config = tiny_run("agent.loop=external", "agent.options={command: [program]}").config
    said = []
    assert len(set(await scratch_corpus(config, say=said.append))) > 3
    (notice,) = said
    assert notice.startswith("agent.options.demonstration of the external loop is not set: ")
    with pytest.raises(UsageError, match=r"agent\.options\.demonstration="):
        make_agent_loop("external", {"command": ["program"]}).demonstrate("a")


def test_special_tokens_of_a_services_model_are_known_if_its_folder_is_local(tmp_path):
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.add_special_tokens({"additional_special_tokens": ["@@JUDGE@@"]})
    tokenizer.save_pretrained(tmp_path / "judge")
    policy = Renderer(build_tokenizer("qwen2.5"))
    policy.encoder.special_tokens |= {"~~PLAYER~~"}
    assert token_breaker(str(tmp_path / "judge"))("a @@JUDGE@@ b ~~PLAYER~~") == "a @ @JUDGE@@ b ~~PLAYER~~"
    assert token_breaker("judge", policy)("a @@JUDGE@@ b ~~PLAYER~~") == "a @@JUDGE@@ b ~ ~PLAYER~~"
    (tmp_path / "empty").mkdir()
    assert token_breaker(str(tmp_path / "empty"))("a <|im_end|>") == "a < |im_end|>"
