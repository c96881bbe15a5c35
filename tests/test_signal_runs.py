"""Whole runs with greedy rollouts, a teacher and an expert."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.waiting import join

from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.preferences import learn_preferences, train_reward
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run

DISTILL = ("algorithm={advantage: reinforce, loss: distill}", "trainer.mini_batches=1")
LUFFY = ("algorithm={loss: luffy, expert: {members: 1}, group_size: 3}",)


class JudgeHandler(BaseHTTPRequestHandler):
    """Scores 8 of 10, but says nothing of use about every fourth episode."""

    asked = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        JudgeHandler.asked += 1
        says = "Score: 8" if "[agent] #" in question and JudgeHandler.asked % 4 else "No."
        answer = {"choices": [{"message": {"role": "assistant", "content": says}, "finish_reason": "stop"}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def judge():
    """The address of a judge."""
    JudgeHandler.asked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), JudgeHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        join(thread)


def lines_of(run):
    return read_metrics(run.folder.metrics_file)


@pytest.mark.parametrize("staleness", [0, 1])
def test_remax_plays_one_greedy_episode_beside_each_group(tiny_run, staleness):
    run = tiny_run("algorithm.advantage=remax", "trainer.steps=2", f"rollout.max_staleness={staleness}")
    train(run)
    for line in lines_of(run):
        assert line["episodes"] == 6, "the greedy ones are not among them"
        assert 0 <= line["greedy/reward"] <= 3
        assert line["train/grad_norm"] > 0
    assert len(read_trajectories_of(run)) >= 12
    assert staleness or len(read_trajectories_of(run)) == 12, "nor are they on disk"


def read_trajectories_of(run):
    return list(read_trajectories(run.folder.trajectories))


@pytest.mark.slow
def test_a_run_with_greedy_rollouts_goes_on_as_if_it_had_not_stopped(tiny_run):
    whole, part = (tiny_run("algorithm.advantage=remax", f"trainer.steps={n}", name=f"steps-{n}") for n in (4, 2))
    train(whole)
    train(part)
    train(resume_run(part.folder.path, ["trainer.steps=4"]))
    expected, found = lines_of(whole)[-1], lines_of(part)[-1]
    for name in ("greedy/reward", "reward/mean", "train/loss"):
        assert found[name] == expected[name], name


def test_a_policy_learns_what_its_teacher_does(tiny_run):
    taught = tiny_run("trainer={steps: 1, learning_rate: 0.0}", name="teacher")
    train(taught)
    teacher = f"algorithm.teacher.path={taught.folder.path}"
    student = f"model.path={taught.folder.path}"
    run = tiny_run(*DISTILL, teacher, student, "trainer.steps=1", name="student")
    train(run)
    (line,) = lines_of(run)
    assert line["train/kl_teacher"] == pytest.approx(0.0, abs=1e-5), "it is its own teacher"
    assert run.config.algorithm.teacher.path != str(taught.folder.path), "the model in the run, for ever"


def test_an_expert_is_a_member_of_every_group(tiny_run):
    run = tiny_run(*LUFFY, "trainer.steps=2", "agent.max_answer_tokens=16")
    train(run)
    for line in lines_of(run):
        assert line["episodes"] == 4, "two of the policy in each group of three"
        assert line["expert/reward"] > 2
        assert line["expert/success"] == 1
        assert line["reward/mean"] < line["expert/reward"]
        assert line["mismatch/prob_abs_mean"] < 1e-4
    assert all(stored.trajectory.sampled_tokens for stored in read_trajectories_of(run))


def test_an_environment_without_an_expert_ends_the_run_at_its_start(tiny_run, tmp_path):
    with pytest.raises(UsageError, match="has no expert to demonstrate"):
        tiny_run(*LUFFY, "environment.name=letters:Alone", name="alone")
    assert list(tmp_path.rglob("alone")) == []


@pytest.mark.slow
def test_two_ranks_learn_from_the_same_guides(tiny_run):
    taught = tiny_run("trainer={steps: 1, learning_rate: 0.1}", name="teacher")
    train(taught)
    teacher = f"{{teacher: {{path: {taught.folder.path}}}, shaping: {{distill: {{coef: 0.1}}}}, advantage: dr_grpo}}"
    found = []
    for processes in (1, 2):
        run = tiny_run(
            *LUFFY,
            f"algorithm={teacher}",
            "trainer={steps: 1, mini_batches: 1}",
            f"trainer.processes={processes}",
            "agent.max_answer_tokens=16",
            name=f"ranks-{processes}",
        )
        train(run)
        found.append(lines_of(run)[0])
    assert found[0]["train/kl_teacher"] > 0.01
    for name in ("train/loss", "train/grad_norm", "train/kl_teacher", "reward/shaped_mean", "expert/reward"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4, abs=1e-6), name


def test_a_judge_scores_a_runs_episodes_and_its_silence_is_no_reward(tiny_run, judge):
    settings = f"agent.judge={{engine: {{url: {judge}, model: m}}, attempts: 1}}"
    run = tiny_run(settings, "trainer.steps=1", "rollout.retries=0", "algorithm.advantage=reinforce")
    train(run)
    (line,) = lines_of(run)
    assert line["reward/mean"] == line["reward/component/judge"] == 0.8
    assert 0 < line["reward/component/environment"] < 3
    stored = [found.trajectory for found in read_trajectories_of(run)]
    silent = [t for t in stored if t.outcome is Outcome.ENGINE_ERROR]
    assert silent
    assert all(t.reward is None and "gave no score" in t.error for t in silent)


@pytest.mark.slow
def test_a_policy_learns_from_the_pairs_of_a_run(tiny_run):
    played = tiny_run("trainer={steps: 2, tasks_per_step: 4}", "algorithm.group_size=4", name="played")
    train(played)
    settings = f"preferences={{sources: [{played.folder.path}], pairs_per_task: 2, epochs: 4, learning_rate: 1e-3, "
    settings += "save_minutes: 1e-9}"
    run = tiny_run(settings, f"model.path={played.folder.path}", name="pairs")
    result = learn_preferences(run)
    lines = lines_of(run)
    assert result.step == len(lines) == 4
    assert sorted(path.name for path in run.folder.checkpoints.glob("step-*")) == ["step-000003", "step-000004"]
    assert lines[0]["preferences/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[-1]["preferences/accuracy"] > 0.8
    again = tiny_run(f"model.path={run.folder.path}", "trainer.steps=1", name="on")
    assert train(again).step == 1


def test_pairs_of_a_run_with_other_tokens_are_refused(tiny_run):
    played = tiny_run("trainer.steps=1", name="played")
    train(played)
    run = tiny_run(f"preferences.sources=[{played.folder.path}]", "model.scratch.vocab_size=280", name="pairs")
    with pytest.raises(ConfigError, match=r"the run .*played does not have the policy's tokenizer"):
        learn_preferences(run)


@pytest.mark.slow
def test_a_reward_model_learns_from_a_runs_pairs_and_scores_the_next(tiny_run):
    played = tiny_run("trainer={steps: 2, tasks_per_step: 4}", "algorithm.group_size=4", name="played")
    train(played)
    settings = f"preferences={{sources: [{played.folder.path}], pairs_per_task: 2, epochs: 6, learning_rate: 3e-3, "
    settings += "save_minutes: 1e-9}"
    reader = tiny_run(settings, f"model.path={played.folder.path}", "model.scratch=null", name="reader")
    result = train_reward(reader)
    lines = lines_of(reader)
    assert lines[-1]["reward_model/loss"] < lines[0]["reward_model/loss"]
    assert lines[-1]["reward_model/accuracy"] >= 0.75
    assert result.step == len(lines)
    assert len(list(reader.folder.checkpoints.glob("step-*"))) == 2, "saved after each update, and the newest two kept"

    scored = f"agent.reward_model={{path: {reader.folder.path}, environment_weight: 0.5}}"
    run = tiny_run(scored, "trainer.steps=1", name="scored")
    train(run)
    (line,) = lines_of(run)
    parts = line["reward/component/reward_model"] + 0.5 * line["reward/component/environment"]
    assert line["reward/mean"] == pytest.approx(parts)
    policy = tiny_run(f"agent.reward_model.path={played.folder.path}", "trainer.steps=1", name="policy")
    with pytest.raises(UsageError, match=r"is not a reward model.*ForCausalLM"):
        train(policy)


def test_episodes_of_another_run_are_members_of_the_groups_of_their_tasks(tiny_run):
    played = tiny_run("trainer={steps: 1, tasks_per_step: 1, learning_rate: 0.0}", name="played")
    train(played)
    best = max(stored.trajectory.reward for stored in read_trajectories_of(played))
    shown = f"algorithm={{loss: luffy, expert: {{members: 1, trajectories: {played.folder.path}}}}}"
    run = tiny_run(shown, f"model.path={played.folder.path}", "trainer.steps=1", name="shown")
    train(run)
    (line,) = lines_of(run)
    assert line["expert/reward"] == best, "one of the two groups is of the task that was played"
    assert line["episodes"] == 4
    assert line["trajectories/trained"] == 4
    assert line["mismatch/prob_abs_mean"] < 1e-4
    other = tiny_run(shown, "model.scratch.vocab_size=280", name="other")
    with pytest.raises(ConfigError, match=r"the run .*played does not have the policy's tokenizer"):
        train(other)
