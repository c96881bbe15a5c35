import asyncio
import logging
import os
import shutil
import signal
import time

import pytest
from support.runs import numbers

from agentrl.agent_loop import AgentLoop
from agentrl.config import load_config
from agentrl.errors import ConfigError, Outcome, ServersLost, TemplateError, TrainingError, UnknownNameError, UsageError
from agentrl.errors.deadlines import CLOSING_S
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import read_metrics
from agentrl.observe.model_folder import find_model
from agentrl.observe.progress import Phase, RunWatcher
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import Orchestrator, train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import Run, resume_run, start_run
from agentrl.runs.stop import StopRequest
from agentrl.serving.local import LocalEngine
from agentrl.serving.local.runner import LocalModelRunner
from agentrl.weights import InProcessSync


class Recorder(RunWatcher):
    def __init__(self):
        self.steps, self.phases, self.messages, self.checkpoints, self.evaluations = [], [], [], [], []

    def on_status(self, status):
        if self.phases[-1:] != [status.phase]:
            self.phases.append(status.phase)

    def on_step(self, step, metrics):
        self.steps.append(step)

    def on_evaluation(self, step, metrics):
        self.evaluations.append(step)

    def on_checkpoint(self, step, folder):
        self.checkpoints.append(step)

    def on_message(self, text):
        self.messages.append(text)


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.slow
def test_a_run_from_start_to_end(tiny_run, staleness):
    run = tiny_run(f"rollout.max_staleness={staleness}", "evaluation={every: 2, tasks: 3, split: test}")
    watcher = Recorder()
    result = train(run, watcher=watcher)
    assert (result.step, result.interrupted) == (4, False)
    assert (watcher.steps, watcher.checkpoints, watcher.evaluations) == ([1, 2, 3, 4], [2, 4], [2, 4])
    lines = read_metrics(run.folder.metrics_file)
    assert [line["step"] for line in lines] == [line["version"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert staleness or line["mismatch/prob_abs_mean"] < 1e-4
        assert line["sync/probe_difference"] < 1e-4
        assert line["staleness/max"] <= staleness
        assert line["train/grad_norm"] > 0
        assert line["episodes"] == 6
        assert {"time/rollout_s", "time/train_s", "time/sync_s", "time/tokens_per_s", "time/share/engine"} <= set(line)
    assert (max(line["staleness/max"] for line in lines) > 0) == (staleness > 0), "episodes go on beside training"
    assert lines[1]["eval/reward_low"] <= lines[1]["eval/reward"] <= lines[1]["eval/reward_high"]
    stored = [s.trajectory for s in read_trajectories(run.folder.trajectories)]
    assert len({t.id for t in stored}) == len(stored) >= 24
    assert sum(t.sampled_tokens for t in stored) >= sum(line["tokens/sampled"] for line in lines)


def test_the_same_seed_gives_the_same_run(tiny_run):
    lines = []
    for name in ("a", "b"):
        run = tiny_run("trainer.steps=2", name=name)
        train(run)
        lines.append(numbers(run.folder.path))
    assert lines[0] == lines[1]


def test_a_policy_learns_and_its_checkpoint_can_be_trained_on(tiny_run):
    run = tiny_run("trainer={steps: 12, tasks_per_step: 4}", "algorithm.group_size=6", "checkpoint.every=100")
    result = train(run)
    lines = read_metrics(run.folder.metrics_file)
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.3
    again = tiny_run(f"model.path={result.checkpoint}", "trainer.steps=1", name="again")
    assert again.config.model.path == find_model(str(run.folder.path))
    train(again)
    first = read_metrics(again.folder.metrics_file)[0]["reward/mean"]
    assert first > lines[0]["reward/mean"] + 0.2


@pytest.mark.capability("local", "training")
def test_a_warm_start_learns_what_the_expert_does(tiny_run):
    run = tiny_run("sft={episodes: 96, tokens_per_update: 256, learning_rate: 1e-2, epochs: 3}")
    watcher = Recorder()
    result = warm_start(run, watcher=watcher)
    assert result.metrics["sft/loss"] < 0.3
    assert watcher.phases[:3] == [Phase.PREPARE, Phase.DEMONSTRATE, Phase.WARM_START]
    trained = tiny_run(f"model.path={run.folder.path}", "trainer.steps=1", name="trained")
    train(trained)
    assert read_metrics(trained.folder.metrics_file)[0]["success/mean"] > 0.6
    with pytest.raises(UsageError, match=r"got a run of agentrl sft.*model\.path="):
        train(resume_run(run.folder.path))


@pytest.mark.parametrize("where", ["update", "measurement"])
def test_a_stopped_warm_start_leaves_its_model(tiny_run, where):
    stop = StopRequest()

    class Stopper(Recorder):
        def on_step(self, step, metrics):
            if step == 3 and where == "update":
                stop()

        def on_status(self, status):
            if status.phase is Phase.EVALUATE:
                stop()

    lessons = "sft={episodes: 32, tokens_per_update: 256, stop_at: 0.99, check_every: 3, check_tasks: 64}"
    run, watcher = tiny_run(lessons), Stopper()
    assert warm_start(run, watcher=watcher, interruption=stop).interrupted
    [checkpoint] = Checkpoints(run.folder.checkpoints, keep=2).present()
    assert checkpoint.step == 3
    assert find_model(str(run.folder.path)) == str(checkpoint.path / "model")
    again = warm_start(tiny_run(f"model.path={run.folder.path}", "sft={episodes: 8}", name="again"))
    assert again.step >= 1


def test_a_warm_start_saves_its_model_every_few_minutes(tiny_run):
    run, watcher = tiny_run("sft={episodes: 32, tokens_per_update: 256, save_minutes: 1e-9}"), Recorder()
    result = warm_start(run, watcher=watcher)
    assert watcher.checkpoints == list(range(1, result.step + 1))
    assert [found.step for found in Checkpoints(run.folder.checkpoints, keep=2).present()] == [
        result.step - 1,
        result.step,
    ]


def test_a_warm_start_continues_if_the_disk_is_full_for_a_while(tiny_run, monkeypatch):
    save, full = Checkpoints.save, [1, 2]

    def save_if_there_is_room(self, step, write):
        if step in full:
            raise UsageError("the disk is full")
        return save(self, step, write)

    monkeypatch.setattr(Checkpoints, "save", save_if_there_is_room)
    run, watcher = tiny_run("sft={episodes: 32, tokens_per_update: 256, save_minutes: 1e-9}"), Recorder()
    result = warm_start(run, watcher=watcher)
    assert watcher.checkpoints == list(range(3, result.step + 1))
    assert [message for message in watcher.messages if "is not saved, and the training continues" in message][1:]


@pytest.mark.slow
def test_a_warm_start_ends_at_the_success_that_was_asked_for(tiny_run):
    lessons = "sft={episodes: 96, tokens_per_update: 256, learning_rate: 1e-2, epochs: 3"
    whole = warm_start(tiny_run(lessons + "}", name="whole"))
    watcher = Recorder()
    run = tiny_run(lessons + ", stop_at: 0.4, check_every: 2, check_tasks: 16, warmup_steps: 5}")
    result = warm_start(run, watcher=watcher)
    assert 0 < result.step < whole.step
    assert result.step % 2 == 0
    shares = [float(message.split("success ")[1].split("%")[0]) for message in watcher.messages]
    assert len(shares) == result.step // 2 - 2, "none while the learning rate warms up"
    assert max(shares[:-1], default=0.0) < 40 <= shares[-1]


@pytest.mark.parametrize(("settings", "seen"), [("stop_at: 0.99", "got "), ("stop_at: 0.1", "not measured")])
def test_a_warm_start_that_does_not_get_there_says_so(tiny_run, settings, seen):
    watcher = Recorder()
    every = 1 if "got" in seen else 1000
    warm_start(tiny_run("sft={episodes: 8, " + settings + f", check_every: {every}, check_tasks: 4}}"), watcher=watcher)
    assert "all demonstrations were used before sft.stop_at was reached" in watcher.messages[-1]
    assert seen in watcher.messages[-1]


@pytest.mark.slow
def test_a_warm_start_cannot_wait_for_a_success_that_nobody_tells(tiny_run):
    run = tiny_run("environment.name=letters:Silent", "sft={episodes: 8, stop_at: 0.4, check_every: 1}")
    with pytest.raises(UsageError, match=r"does not report success.*Remove sft\.stop_at"):
        warm_start(run)


def test_bad_episodes_are_data(tiny_run):
    run = tiny_run("environment.name=letters:Raising", "rollout.retries=3")
    train(run)
    lines = read_metrics(run.folder.metrics_file)
    assert sum(line["rollout/retries"] for line in lines) > 0
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.slow
def test_runs_are_equal_wherever_environments_run_if_that_is_asked_for(tiny_run):
    """Steps of environments end in another order each time."""
    words = [
        "environment={name: letters:Jittering, isolation: thread, workers: 3}",
        "trainer.deterministic=true",
        "rollout.max_concurrent=5",
        "evaluation={every: 2, tasks: 3, split: test}",
    ]
    lines, episodes = [], []
    for name in ("first", "second"):
        run = tiny_run(*words, name=name)
        train(run)
        lines.append(numbers(run.folder.path))
        stored = [s.trajectory for s in read_trajectories(run.folder.trajectories)]
        episodes.append(sorted((t.id, t.sequences[0].ids_list(), t.sequences[0].logprobs.tobytes()) for t in stored))
    assert lines[0] == lines[1]
    assert episodes[0] == episodes[1]


@pytest.mark.slow
def test_an_environment_that_hangs_costs_its_episodes_only(tiny_run):
    run = tiny_run("environment={name: letters:Hanging, isolation: thread, step_timeout_s: 0.1}", "rollout.retries=1")
    train(run)
    assert [line["step"] for line in read_metrics(run.folder.metrics_file)] == [1, 2, 3, 4]
    stored = [s.trajectory for s in read_trajectories(run.folder.trajectories)]
    hung = [t for t in stored if t.outcome is Outcome.ENVIRONMENT_ERROR]
    assert hung
    assert all("missed its deadline" in t.error for t in hung)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["environment.name=letters:Broken"], TrainingError, r"Broken failed in \d+ of \d+ attempts: got RuntimeError"),
        (["environment.name=letters:NotFinite"], TrainingError, r"reward is nan"),
        (["environment.name=lettres"], UnknownNameError, "unknown environment"),
        (["model.path=/none"], UsageError, "no model found in /none"),
        (["engine=scripted"], ConfigError, "engine scripted cannot be"),
        (["sampling.temperature=0"], ConfigError, r"got sampling\.temperature 0, expected a temperature above 0"),
        (["sampling={top_p: 0.9, top_k: 5}"], ConfigError, r"got sampling\.top_p 0\.9, sampling\.top_k 5"),
        (["sampling.min_p=0.1"], ConfigError, r"got sampling\.min_p 0\.1"),
        (["agent.options={formt: plain}"], ConfigError, "Did you mean 'format'"),
        (["algorithm.advantage=grop"], UnknownNameError, "Did you mean 'grpo'"),
        (["algorithm.loss_options={clip_hihg: 0.3}"], ConfigError, "clip_high"),
        (["trackers=[wandbb]"], UnknownNameError, "Did you mean 'wandb'"),
    ],
)
def test_what_cannot_work_is_one_clear_message(tiny_run, overrides, error, message):
    with pytest.raises(error, match=message):
        train(tiny_run("rollout.retries=0", *overrides))


def test_a_template_that_rewrites_history_is_refused_before_anything_runs(tiny_run, tmp_path):
    run = tiny_run("trainer.steps=1")
    train(run)
    template = run.folder.model / "chat_template.jinja"
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content[:3] if message.role == 'assistant' and not loop.last else message.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(TemplateError):
        tiny_run(f"model.path={run.folder.model}", name="rewriting")
    assert not run.folder.path.with_name("rewriting").exists()


@pytest.mark.slow
def test_groups_without_a_difference_are_replaced_and_counted(tiny_run):
    run = tiny_run("algorithm.dynamic_sampling=true", "algorithm.group_size=2", "agent.max_answer_tokens=1")
    train(run)
    lines = read_metrics(run.folder.metrics_file)
    assert sum(line["rollout/groups_filtered"] for line in lines) > 0
    assert all(line["groups/zero_variance"] == 0 for line in lines)


@pytest.mark.slow
def test_components_that_differ_are_worth_training_on_where_the_estimator_compares_them(tiny_run):
    """All episodes earn 1 in all; of two components, which gdpo compares with different weights, each has a share."""
    words = ["algorithm.dynamic_sampling=true", 'agent.reward=["letters:has_vowels", "letters:has_others"]']
    weights = 'algorithm.advantage_options={"weights": {"has_vowels": 3.0}}'
    run = tiny_run(*words, "algorithm.advantage=gdpo", weights, "trainer.steps=2")
    assert train(run).step == 2
    lines = read_metrics(run.folder.metrics_file)
    assert all(line["reward/min"] == pytest.approx(1) == line["reward/max"] for line in lines)
    assert all(line["groups/zero_variance"] == 0 and line["train/advantage_abs_mean"] > 0.1 for line in lines)


@pytest.mark.slow
def test_a_run_that_can_only_filter_stops(tiny_run):
    run = tiny_run("algorithm.dynamic_sampling=true", "agent.max_parse_failures=1", "agent.options.format=react")
    with pytest.raises(TrainingError, match="groups in a row were not worth training on"):
        train(run)


def test_an_engine_that_keeps_old_weights_stops_training(tiny_run, monkeypatch):
    monkeypatch.setattr(LocalModelRunner, "load", lambda self, weights: None)
    with pytest.raises(TrainingError, match=r"does not serve the trainer's weights of version 1"):
        train(tiny_run("rollout.max_staleness=1"))


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.TRAIN, Phase.SYNC, Phase.EVALUATE])
@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_run_saves_and_goes_on(tiny_run, phase, staleness):
    run = tiny_run(
        f"rollout.max_staleness={staleness}", "evaluation={every: 2, tasks: 3, split: test}", "checkpoint.every=100"
    )

    class Interrupting(Recorder):
        asked = False

        def on_status(self, status):
            if (status.phase, status.step) == (phase, 1) and not self.asked:
                self.asked = True
                os.kill(os.getpid(), signal.SIGINT)

    first = train(run, watcher=Interrupting())
    assert first.interrupted
    assert 1 <= first.step < 4
    second = train(resume_run(run.folder.path))
    assert (second.step, second.interrupted) == (4, False)
    lines = read_metrics(run.folder.metrics_file)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/success" in line] == [2, 4]
    stored = [s.trajectory for s in read_trajectories(run.folder.trajectories)]
    assert len({trajectory.id for trajectory in stored}) == len(stored)
    if not staleness:
        assert len(stored) == 4 * 2 * 3
        assert {trajectory.outcome for trajectory in stored} == {Outcome.FINISHED}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.slow
def test_a_sync_that_does_not_end_is_given_up(tiny_run, monkeypatch, staleness):
    run = tiny_run(f"rollout.max_staleness={staleness}", "checkpoint.every=100")
    monkeypatch.setattr("agentrl.runs.rl.SYNC_GRACE_S", 0.01)

    class Interrupting(Recorder):
        def on_status(self, status):
            if (status.phase, status.step) == (Phase.SYNC, 1) and "stopping" not in "".join(self.messages):
                os.kill(os.getpid(), signal.SIGINT)

    async def hang(sync, version):
        if version == 2:
            await asyncio.Event().wait()
        return await real(sync, version)

    real = InProcessSync.sync
    monkeypatch.setattr(InProcessSync, "sync", hang)
    watcher = Interrupting()
    first = train(run, watcher=watcher)
    assert (first.step, first.interrupted) == (2, True)
    assert "stopping" in [text.partition(";")[0] for text in watcher.messages]
    monkeypatch.setattr(InProcessSync, "sync", real)
    assert train(resume_run(run.folder.path)).step == 4
    lines = read_metrics(run.folder.metrics_file)
    assert [line["step"] for line in lines] == [line["version"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "sync/probe_difference" not in line] == [2]
    assert max(line["mismatch/prob_abs_mean"] for line in lines) < 1e-4 or staleness


@pytest.mark.parametrize("ends", [RuntimeError("the gateway is gone"), None])
def test_a_finished_run_closes_everything_although_a_part_fails_or_hangs(tiny_run, monkeypatch, ends):
    monkeypatch.setattr("agentrl.errors.deadlines.INTERRUPTED_CLOSING_S", 0.5)
    closed, began = [], []

    async def close_loop(loop):
        began.append(time.monotonic())
        if ends is not None:
            raise ends
        os.kill(os.getpid(), signal.SIGINT)  # the user does not wait for it
        await asyncio.Event().wait()

    async def close_engine(engine):
        await real(engine)
        closed.append(True)

    async def close_sync(sync):
        raise RuntimeError("no connection")

    real = LocalEngine.close
    monkeypatch.setattr(AgentLoop, "close", close_loop)
    monkeypatch.setattr(InProcessSync, "close", close_sync)
    monkeypatch.setattr(LocalEngine, "close", close_engine)
    result = train(tiny_run("trainer.steps=1"))
    assert (result.step, result.interrupted, closed) == (1, False, [True])
    assert time.monotonic() - began[0] < CLOSING_S


@pytest.mark.parametrize(("where", "saved"), [("rollout", "step-000001"), ("sync", "step-000002")])
def test_a_run_whose_servers_are_lost_ends_with_a_checkpoint_and_goes_on(tiny_run, monkeypatch, where, saved):
    run = tiny_run()
    generate, sync = LocalEngine.generate, InProcessSync.sync

    async def lose(self, request):
        if self.version == 1:
            raise ServersLost("no server is left")
        return await generate(self, request)

    async def lose_in_sync(self, version):
        if version == 2:
            raise ServersLost("no server is left")
        return await sync(self, version)

    with monkeypatch.context() as patch:
        if where == "rollout":
            patch.setattr(LocalEngine, "generate", lose)
        else:
            patch.setattr(InProcessSync, "sync", lose_in_sync)
        with pytest.raises(ServersLost, match="no server is left"):
            train(run)
    assert saved in {path.name for path in run.folder.checkpoints.iterdir()}
    assert train(resume_run(run.folder.path)).step == 4
    assert [line["step"] for line in read_metrics(run.folder.metrics_file)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_that_is_interrupted_before_its_first_step_goes_on(tiny_run, monkeypatch):
    run = tiny_run()

    async def hang(sync):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(InProcessSync, "verify", hang)
        first = train(run)
    assert (first.step, first.checkpoint, first.interrupted) == (0, "", True)
    assert train(resume_run(run.folder.path)).step == 4


@pytest.mark.slow
def test_finished_groups_survive_an_interruption(tiny_run):
    run = tiny_run("rollout={max_staleness: 1, max_concurrent: 3}", "trainer.steps=3")

    class Interrupting(RunWatcher):
        def on_status(self, status):
            if status.step >= 1 and status.episodes_done >= 3:
                orchestrator.stop()

    async def interrupted():
        nonlocal orchestrator
        orchestrator = Orchestrator(run, watcher=Interrupting())
        return await orchestrator.run()

    orchestrator = None
    assert asyncio.run(interrupted()).interrupted
    before = {s.trajectory.id for s in read_trajectories(run.folder.trajectories) if s.trajectory.reward is not None}
    train(resume_run(run.folder.path))
    again = [s.trajectory.id for s in read_trajectories(run.folder.trajectories) if s.trajectory.reward is not None]
    assert all(again.count(name) == 1 for name in before)


@pytest.mark.slow
def test_a_resumed_run_can_be_made_longer(tiny_run):
    run = tiny_run("trainer.steps=2")
    train(run)
    result = train(resume_run(run.folder.path, ["trainer.steps=3"]))
    assert result.step == 3
    assert resume_run(run.folder.path).config.trainer.steps == 3


def test_what_is_wrong_in_a_config_leaves_no_folder_behind(tmp_path):
    with pytest.raises(UnknownNameError):
        start_run(load_config(None, ["environment=no_such_world", f"run.directory={tmp_path}"]), kind="test")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_run_keeps_its_own_log(tiny_run):
    run = tiny_run("environment.name=letters:Raising", "rollout.retries=3", "trainer.steps=1")
    train(run)
    assert "the letters ran out" in (run.folder.logs / "agentrl.log").read_text()
    assert not logging.getLogger("agentrl").handlers


def test_a_run_is_its_folder_and_its_config(tiny_run):
    run = tiny_run()
    assert isinstance(run, Run)
    assert resume_run(run.folder.path).config == run.config


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.slow
def test_a_run_whose_folder_is_moved_ends_with_an_error(tiny_run, tmp_path, again):
    tokens = "none" if again else "all"  # the thread that writes tables would disturb the copy of the folder
    run = tiny_run("checkpoint.every=1", f"observe.tokens={tokens}")

    class Moving(RunWatcher):
        def on_step(self, step, metrics):
            if step == 2:
                run.folder.path.rename(tmp_path / "moved")
                if again:
                    shutil.copytree(tmp_path / "moved", run.folder.path)

    with pytest.raises(UsageError, match=r"was moved or removed during the run.*--resume"):
        train(run, watcher=Moving())
    moved = tmp_path / "moved"
    assert run.folder.path.exists() == again
    assert train(resume_run(moved)).step == 4
    assert [line["step"] for line in read_metrics(moved / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_copies_beside_checkpoints_disturb_neither_a_run_nor_its_resume(tiny_run):
    run = tiny_run("checkpoint.every=1", "checkpoint.keep=1")

    class Copying(RunWatcher):
        def on_checkpoint(self, step, folder):
            if step == 2:
                shutil.copytree(folder, folder.with_name(f"{folder.name}-keep"))
                (folder.parent / "step-000009.tmp").write_text("mine")
                (run.folder.trajectories / "step-000002 copy.jsonl").write_text("mine")

    assert train(run, watcher=Copying()).step == 4
    assert train(resume_run(run.folder.path, ["trainer.steps=5"])).step == 5
    names = {path.name for path in run.folder.checkpoints.iterdir()}
    assert names == {"step-000002-keep", "step-000009.tmp", "step-000005"}


@pytest.mark.slow
def test_a_checkpoint_that_is_passed_over_is_named_on_the_screen(tiny_run):
    run, watcher = tiny_run("trainer.steps=2", "checkpoint.every=1"), Recorder()
    train(run)
    (run.folder.checkpoints / "step-000002" / "manifest.json").write_text("{}")
    run.folder.metrics_file.write_bytes(run.folder.metrics_file.read_bytes()[:50])
    train(resume_run(run.folder.path), watcher=watcher)
    assert any("skipped checkpoint" in text for text in watcher.messages)
    assert any("metrics.jsonl is truncated" in text for text in watcher.messages)
    assert b"\0" not in run.folder.metrics_file.read_bytes()
    assert [line["step"] for line in read_metrics(run.folder.metrics_file)] == [2]
