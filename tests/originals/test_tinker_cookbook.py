"""The loops of tinker-cookbook against `agentrl serve-training`, unchanged: they train, save, resume and learn."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny_model
from support.tokenizers import build_tokenizer
from training_service.conftest import Served

from agentrl.cli.serve_training import read_service_config
from agentrl.render.tokenizers import load_tokenizer
from agentrl.training_service.runs import BaseWeights
from agentrl.training_service.server import TrainingServer
from agentrl.training_service.service import TrainingServiceSettings

chz = pytest.importorskip("chz", reason="make originals")

import tinker  # noqa: E402
from tinker_cookbook import checkpoint_utils, renderers  # noqa: E402
from tinker_cookbook.rl import train as rl  # noqa: E402
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder  # noqa: E402
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder  # noqa: E402
from tinker_cookbook.supervised import train as supervised  # noqa: E402
from tinker_cookbook.supervised.data import FromConversationFileBuilder  # noqa: E402
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig  # noqa: E402
from tinker_cookbook.tokenizer_utils import get_tokenizer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # the cookbook uses parts of tinker that are deprecated
    pytest.mark.timeout(1200),
]
RENDERER = "role_colon"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small model, which is also its name."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = build_tokenizer("qwen3", vocab_size=320)
    tokenizer.save_pretrained(folder)
    tiny_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def service(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A service, whose address and key are where Tinker's client looks for them."""
    config = read_service_config([f"model.path={model}", "model.device=cpu", "engine.max_num_seqs=32"])
    settings = TrainingServiceSettings(folder=tmp_path / "service", model_name=model)
    base = functools.partial(BaseWeights, model, load_tokenizer(model), config)
    served = Served(TrainingServer(settings, base, host="127.0.0.1", port=0, key=None))
    monkeypatch.setenv("TINKER_BASE_URL", served.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-tests")
    for loop in (supervised, rl):
        monkeypatch.setattr(loop, "fetch_model_pricing", lambda name: None)  # it would ask Tinker's site
    yield served
    served.close()


def metrics_of(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.fixture
def conversations(model: str, tmp_path: Path) -> FromConversationFileBuilder:
    """Conversations as the cookbook's recipes read them."""
    file = tmp_path / "conversations.jsonl"
    said = [("user", "Your task is to look."), ("assistant", "You see a drawer 2.")]
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(48)))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model,
        renderer_name=RENDERER,
        max_length=256,
        batch_size=8,
        train_on_what=renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )
    return FromConversationFileBuilder(common_config=common, file_path=str(file), test_size=8)


def test_the_supervised_loop_learns_evaluates_saves_and_resumes(
    service: Served, model: str, conversations: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "sl"
    config = supervised.Config(
        log_path=str(folder),
        model_name=model,
        recipe_name="test",
        renderer_name=RENDERER,
        dataset_builder=conversations,
        learning_rate=1e-2,
        lr_schedule="constant",
        lora_rank=8,
        save_every=2,
        eval_every=2,
    )
    asyncio.run(supervised.main(chz.replace(config, max_steps=3)))
    saved = folder / "checkpoints.jsonl"
    lines = [line for line in saved.read_text().splitlines() if json.loads(line)["name"] != "final"]
    saved.write_text("".join(f"{line}\n" for line in lines))  # what an interrupted loop leaves
    asyncio.run(supervised.main(config))  # resumes with the optimizer's state
    losses = metrics_of(folder, "train_mean_nll")
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.5
    tested = metrics_of(folder, "test/nll")
    assert tested[-1] < tested[0]
    found = checkpoint_utils.get_last_checkpoint(str(folder))
    assert found is not None
    ended = tinker.RestClient().get_training_run_by_tinker_path(found.sampler_path).result()
    assert ended.user_metadata["renderer_name"] == RENDERER, "the service knows a run that has ended by its checkpoints"
    assert re.fullmatch(r"tinker://[\w:-]+/sampler_weights/final", found.sampler_path)


class Digit(ProblemEnv):
    """Asks for an answer with a digit."""

    def get_question(self) -> str:
        return "Your task is to guess a number."

    def check_answer(self, sample_str: str) -> bool:
        return any(letter.isdigit() for letter in sample_str)

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "7"


class Digits(RLDataset):
    """The same question in each batch."""

    def __init__(self, make: Callable[[], ProblemEnv], batches: int) -> None:
        self._make, self._batches = make, batches

    def get_batch(self, index: int) -> list[ProblemGroupBuilder]:
        return [ProblemGroupBuilder(env_thunk=self._make, num_envs=8) for _ in range(4)]

    def __len__(self) -> int:
        return self._batches


@chz.chz
class DigitsBuilder(RLDatasetBuilder):
    """Builds `Digits`."""

    model: str
    batches: int

    async def __call__(self) -> tuple[RLDataset, None]:
        renderer = renderers.get_renderer(RENDERER, get_tokenizer(self.model))
        return Digits(functools.partial(Digit, renderer), self.batches), None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_fn": "ppo", "num_substeps": 2, "compute_post_kl": True},
        {"async_config": rl.AsyncConfig(max_steps_off_policy=2, groups_per_batch=4, loss_fn="importance_sampling")},
        {"stream_minibatch_config": rl.StreamMinibatchConfig(groups_per_batch=4, num_minibatches=2)},
    ],
    ids=["synchronous", "ppo", "asynchronous", "streaming"],
)
def test_the_rl_loop_trains(service: Served, model: str, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = tmp_path / "rl"
    config = rl.Config(
        learning_rate=1e-2,
        dataset_builder=DigitsBuilder(model=model, batches=3),
        model_name=model,
        recipe_name="test",
        renderer_name=RENDERER,
        max_tokens=4,
        lora_rank=8,
        log_path=str(folder),
        eval_every=0,
        save_every=2,
        **options,
    )
    asyncio.run(rl.main(config))
    rewards = metrics_of(folder, "env/all/reward/total")
    assert len(rewards) == 3
    assert all(math.isfinite(value) for value in metrics_of(folder, "optim/kl_sample_train_v1"))
    if "num_substeps" not in options:  # with several, later ones follow an update
        assert abs(metrics_of(folder, "optim/kl_sample_train_v1")[0]) < 1e-3, "sampler and trainer agree"
    found = checkpoint_utils.get_last_checkpoint(str(folder))
    assert found is not None
    assert found.state_path.startswith("tinker://")


def test_the_rl_loop_learns(service: Served, model: str, tmp_path: Path) -> None:
    folder = tmp_path / "rl"
    config = rl.Config(
        learning_rate=2e-2,
        dataset_builder=DigitsBuilder(model=model, batches=15),
        model_name=model,
        recipe_name="test",
        renderer_name=RENDERER,
        max_tokens=4,
        lora_rank=16,
        log_path=str(folder),
        eval_every=0,
        save_every=0,
    )
    asyncio.run(rl.main(config))
    rewards = metrics_of(folder, "env/all/correct")
    assert rewards[0] < 0.4  # of the model before training; some runs learn within two steps
    assert sum(rewards[-3:]) / 3 > 0.7
