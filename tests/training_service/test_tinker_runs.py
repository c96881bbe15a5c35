"""Runs whose model is trained and sampled at a service of its own process: equal to local ones, and resumed."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.fixtures import LETTERS, WORLDS
from training_service.test_command import Program

from agentrl.builders.checks import check_training
from agentrl.builders.trainers import build_trainer
from agentrl.config import load_config
from agentrl.errors import ConfigError, Outcome, TrainingError, UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.remote.tinker import TinkerClient, TinkerRun
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run, start_run
from agentrl.training.distributed import Ranks
from agentrl.training.tinker_trainer import TinkerTrainer, TinkerWeights
from agentrl.training.weights import ModelWeights
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

pytest.importorskip("tinker")

RANK = 4


@pytest.fixture(scope="module")
def service_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def address(model_folder: Path, service_folder: Path) -> Iterator[str]:
    """The address of `agentrl serve-training` in another process."""
    program = Program(service_folder, model_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-local")
        patch.syspath_prepend(WORLDS)
        yield program.url
    program.end(signal.SIGTERM)


def words(model: Path, address: str) -> list[str]:
    return [
        f"model={{path: '{model}', device: cpu, lora: {{rank: {RANK}}}}}",
        f"engine={{type: tinker, url: '{address}', max_context: 256}}",
        f"environment={{name: {LETTERS}, isolation: inline}}",
        "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 6, max_tokens: 200}",
        "algorithm={group_size: 3, loss_options: {clip_low: 0.2, clip_high: 0.28, dual_clip: null}}",
        "trainer={steps: 2, tasks_per_step: 2, learning_rate: 1e-2, mini_batches: 2}",
        "checkpoint.every=1",
    ]


def episodes(seed: int, *roles: str) -> list[Trajectory]:
    """Two groups of three episodes of two turns, sampled by nobody: their log-probabilities differ from any model's.

    The turns belong to two `roles` with rewards of their own, if these are given.
    """
    draw, found = random.Random(seed), []
    for number in range(6):
        sequences = [TokenSequence() for _ in roles[:2] or ("all",)]
        for index in range(2):
            sequence = sequences[index % len(sequences)]
            sequence.extend([draw.randrange(300) for _ in range(8)], Source.OBSERVATION if index else Source.PROMPT)
            start = len(sequence)
            ids = [draw.randrange(300) for _ in range(draw.randrange(2, 7))]
            sequence.extend_sampled(ids, logprobs=[-draw.uniform(4.5, 6.5) for _ in ids], versions=[0] * len(ids))
            turn = Turn(index=index, start=start, end=len(sequence))
            if roles:
                turn.role, turn.reward = roles[index], draw.random()
                turn.own_reward = turn.reward
            sequence.turns.append(turn)
        found.append(
            Trajectory(
                id=f"{number}.0", task_id="t", environment="e", seed=0, group_id=str(number // 3), sequences=sequences
            )
        )
        found[-1].reward, found[-1].outcome = draw.random(), Outcome.FINISHED
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "options", [(), ("algorithm.aggregation=seq-mean-token-mean", "algorithm.correction={mode: sequence, cap: 3}")]
)
def test_updates_at_the_service_equal_local_ones(
    address: str, model_folder: Path, service_folder: Path, options: tuple[str, ...]
) -> None:
    config = load_config(None, [*words(model_folder, address), *options])
    client = TinkerClient(TinkerRun(url=address, base_model=str(model_folder), rank=RANK, seed=0))
    there = TinkerTrainer(client, config)
    _, _, path = client.save("start")().partition("tinker://")
    adapter = service_folder / path / "model"
    assert config.model.lora is not None
    lora = config.model.lora.model_copy(update={"alpha": 32})  # as at the service
    local = config.model_copy(
        update={
            "engine": load_config(None, [f"environment={LETTERS}"]).engine,
            "model": config.model.model_copy(update={"lora": lora}),
        }
    )
    parts = build_trainer(local, str(adapter), str(model_folder), ranks=Ranks())
    weights, here = TinkerWeights(client, str(model_folder)), ModelWeights(parts.trainer.model)
    for number in range(4):
        found = episodes(number, *(("buyer", "seller") if number == 3 else ()))
        remote = there.step(found, temperature=1.0).metrics
        own = parts.trainer.step(found, temperature=1.0).metrics
        for name in ("train/loss", "train/grad_norm", "train/learning_rate", "reward/mean", "mismatch/prob_abs_mean"):
            assert remote[name] == pytest.approx(own[name], rel=1e-3, abs=1e-5), name
    before = torch.tensor([-5.7] * 4)
    for prompt in ([1, 2, 3], [50, 60, 70, 80, 90]):
        answer = [7, 8, 9, 10]
        remote_logp = torch.tensor(weights.token_logprobs(prompt, answer))
        local_logp = torch.tensor(here.token_logprobs(prompt, answer))
        assert torch.allclose(remote_logp, local_logp, atol=1e-3)
        assert not torch.allclose(remote_logp, before, atol=1e-3)
    client.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_trains_at_the_service_and_resumes(address: str, model_folder: Path, tmp_path: Path) -> None:
    own = [f"run.directory={tmp_path / 'runs'}", "run.name=run", "rollout.max_staleness=1"]
    run = start_run(load_config(None, [*words(model_folder, address), *own]), kind="test")
    assert train(run).step == 2
    assert train(resume_run(run.folder.path, ["trainer.steps=3"])).step == 3
    lines = read_metrics(run.folder.metrics_file)
    assert [line["version"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["sync/probe_difference"] < 1e-3, "sampler and trainer have the same weights"
        assert line["train/grad_norm"] > 0
        assert line["staleness/max"] <= 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora=null", "trains only adapters"),
        ("algorithm.loss=gspo", "ppo, with clip"),
        ("algorithm.loss_options={clip: 0.2}", "dual_clip: null"),
        ("algorithm.kl_coef=0.1", "its default"),
        ("algorithm.advantage=gae", "rewards only"),
        ("algorithm.correction={mode: icepop}", "token, sequence or off"),
        ("algorithm.shaping={kl: {coef: 0.1}}", "a shaping of rewards"),
        ("algorithm.shaping={ares: {}}", "a shaping of rewards"),
        ("trainer.optimizer=muon", "its default"),
        ("trainer.processes=2", "its default"),
        ("sampling.temperature=0.7", "at which the service trains"),
        ("schedules={sampling.temperature: {points: {0: 1.0, 1: 1.2}}}", "at which the service trains"),
        ("schedules={algorithm.entropy_coef: {target: 0.5, step: 0.01}}", "does not follow it"),
        ("sampling.first_token={temperature: 30, top_k: 16}", "min_p or first_token"),
        ("evaluation.sampling={min_p: 0.1}", "min_p or first_token"),
        ("model.lora={rank: 4, alpha: 64}", "only model.lora.rank"),
    ],
)
def test_settings_that_a_service_cannot_follow_are_errors(
    model_folder: Path, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(WORLDS)
    with pytest.raises(ConfigError, match=message):
        check_training(load_config(None, [*words(model_folder, "http://127.0.0.1:1"), override]))


def test_a_service_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TinkerRun(url="http://127.0.0.1:1", base_model="m", rank=4, seed=0, api_key_variable="NOT_SET_ANYWHERE")
    with pytest.raises(UsageError, match="NOT_SET_ANYWHERE is not set"):
        TinkerClient(run).open()


def test_the_weights_cannot_be_read() -> None:
    with pytest.raises(TrainingError, match="on the Tinker service"):
        TinkerWeights(None, "m").weights()  # type: ignore[arg-type]
