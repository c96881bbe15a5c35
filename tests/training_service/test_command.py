"""`agentrl serve-training`: what it takes, and that state outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.cli.serve_training import read_service_config
from agentrl.errors import ConfigError, UsageError

tinker = pytest.importorskip("tinker")
types = tinker.types


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.path=x", "algorithm.loss=ppo"], "unsupported key algorithm.loss"),
        (["model.path=x", "model.lora.rank=8"], "unsupported key model.lora.rank"),
        (["model.path=x", "quickstart"], "unsupported key quickstart"),
        (["model.dtype=bfloat16"], "no model to serve"),
        (["model.path=scratch"], "a scratch model"),
        (["model.path=x", "model.dtype=int3"], "model.dtype"),
    ],
)
def test_every_key_must_say_something(words: list[str], expected: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=expected):
        read_service_config(words)


def test_server_rejects_keys_that_clients_reject(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("no-beginning")
    with pytest.raises(SystemExit) as end:
        main(["serve-training", f"model.path={model_folder}", "--token-file", str(tmp_path / "key")])
    assert end.value.code == 2
    assert "a token that begins with tml-" in " ".join(capsys.readouterr().err.split())


def test_strangers_need_a_key(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve-training", f"model.path={model_folder}", "--host", "0.0.0.0"])
    assert end.value.code == 2
    assert "non-local host without a token" in capsys.readouterr().err


class Program:
    """The command in a process of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        words = ["serve-training", f"model.path={model}", "model.device=cpu", "--port", "0", "--folder", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import agentrl.cli; agentrl.cli.main({words!r})"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def client(self) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key="tml-local")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def program(tmp_path: Path, model_folder: Path) -> Iterator[Callable[[], Program]]:
    started: list[Program] = []

    def start() -> Program:
        started.append(Program(tmp_path / "service", model_folder))
        return started[-1]

    yield start
    for own in started:
        if own.process.poll() is None:
            own.end(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_state_survives_a_kill_to_the_last_bit(program: Callable[[], Program]) -> None:
    ids = [1, 2, 3, 4, 5]
    data = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * 4},
    )

    def steps(trainer: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            passed = trainer.forward_backward([data], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-2, weight_decay=0.1)).result()
            losses.append(passed.result().metrics["loss:sum"])
        return losses

    server = program()
    trainer = server.client().create_lora_training_client(base_model=_name(server), rank=4).result()
    steps(trainer, 3)
    path = trainer.save_state("kept").result().path
    sampler = trainer.save_weights_for_sampler("sampler").result().path
    losses = steps(trainer, 3)
    for _ in range(3):
        written = trainer.save_state("again", overwrite=True).result().path
    trainer.save_state("again", overwrite=True)  # under way when the server dies
    assert server.end(signal.SIGKILL) == -signal.SIGKILL

    server = program()
    with server.client() as service:
        again = service.create_training_client_from_state_with_optimizer(path).result()
        first = service.create_sampling_client(model_path=sampler).result()
        assert steps(again, 3) == losses
        prompt = types.ModelInput.from_ints(ids)
        assert -sum(first.compute_logprobs(prompt).result()[1:]) == pytest.approx(losses[0], rel=1e-4)
        service.create_training_client_from_state_with_optimizer(written).result()
    assert server.end(signal.SIGTERM) == 0


def _name(server: Program) -> str:
    models = tinker.RestClient(base_url=server.url, api_key="tml-local").get_server_capabilities().result()
    return str(models.supported_models[0].model_name)
