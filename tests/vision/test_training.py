"""Tokens sampled from images are trained with the same images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import tiny_model
from support.tokenizers import build_tokenizer
from support.vision import FAMILIES, save_vision_model

from agentrl.builders.checks import check_training
from agentrl.builders.models import build_renderer
from agentrl.config import load_config
from agentrl.errors import ConfigError, LedgerError, UsageError
from agentrl.message import TextPart, user
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.render.conversation import LedgerConversation
from agentrl.rollout.loop_choice import check_rendering
from agentrl.runs.api import evaluate
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import Run, start_run
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import scored_sequence
from agentrl.trajectory import Source, TokenSequence, Trajectory

from .conftest import Eyes, noise, processor_inputs

TOLERANCE = 1e-4
SETTINGS = (
    *("environment.name=frozen_lake", "environment.options={observation: image, size: 3}"),
    *("agent.loop=react_text", "agent.options={format: plain}"),
    *("agent.max_turns=3", "agent.max_answer_tokens=8", "agent.max_tokens=1000", "agent.max_parse_failures=10"),
    *("engine.max_num_seqs=8", "engine.cache_tokens=16384", "engine.max_context=1000"),
    *("algorithm.group_size=2", "trainer.steps=2", "trainer.tasks_per_step=2", "trainer.tokens_per_micro_batch=1500"),
    *("checkpoint.every=2", "sft.episodes=3", "sft.tokens_per_update=600"),
)

StartRun = Callable[..., Run]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_vision_model(family, made[family])
        return made[family]

    return get


@pytest.fixture
def start(tmp_path: Path, model_of: Callable[[str], Path]) -> StartRun:
    """Starts the folder of a run on pictures."""

    def begin(family: str, *overrides: str, name: str = "run") -> Run:
        fixed = [f"run.directory={tmp_path / 'runs'}", f"run.name={name}", f"model.path={model_of(family)}"]
        return start_run(load_config(None, [*SETTINGS, *fixed, *overrides]), kind="test")

    return begin


def sequence_of(eyes: Eyes, *sizes: tuple[int, int]) -> TokenSequence:
    """A conversation with an image of each size, whose answers were forced."""
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")
    conversation = LedgerConversation(eyes.renderer, trajectory, [user("Hello.")])
    conversation.demonstrate("hi")
    for number, (height, width) in enumerate(sizes):
        conversation.add([user((TextPart(text="see "), noise(height, width, number)))])
        conversation.demonstrate(f"go {number}")
    return conversation.sequence


def test_scores_of_a_padded_batch_equal_full_passes(eyes: Eyes) -> None:
    sequences = [sequence_of(eyes, (60, 90), (40, 40)), sequence_of(eyes), sequence_of(eyes, (100, 30))]
    scored = [scored_sequence(s.token_ids, s.sources == Source.FORCED, s.images) for s in sequences]
    with torch.no_grad():
        got = score(eyes.model, scored, temperature=1.0, image_processor=eyes.images).logp
        expected = []
        for sequence, one in zip(sequences, scored, strict=True):
            ids = sequence.ids_list()
            images = [placed.image for placed in sequence.images]
            inputs = processor_inputs(eyes, ids, images) if images else {}
            logits = eyes.model(input_ids=torch.tensor([ids]), **inputs).logits[0, one.positions]
            expected.append(torch.log_softmax(logits, dim=-1)[range(len(one.targets)), one.targets])
    assert (got - torch.cat(expected)).abs().max() < TOLERANCE


def test_gradients_reach_the_vision_tower(eyes: Eyes) -> None:
    sequence = sequence_of(eyes, (60, 60))
    scored = scored_sequence(sequence.token_ids, sequence.sources == Source.FORCED, sequence.images)
    parameters = dict(eyes.model.named_parameters())
    loss = score(eyes.model, [scored], temperature=1.0, image_processor=eyes.images).logp.sum()
    tower = [name for name in parameters if "visual.patch_embed" in name]
    gradients = torch.autograd.grad(loss, [parameters[name] for name in tower])
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_images_without_a_processor_and_loss_on_images_are_rejected(eyes: Eyes) -> None:
    sequence = sequence_of(eyes, (60, 60))
    scored = scored_sequence(sequence.token_ids, sequence.sources == Source.FORCED, sequence.images)
    with pytest.raises(UsageError, match="cannot read images"):
        score(eyes.model, [scored], temperature=1.0)
    everything = np.ones(len(sequence), dtype=bool)
    everything[0] = False
    with pytest.raises(LedgerError, match="an image token has a loss"):
        scored_sequence(sequence.token_ids, everything, sequence.images)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_grpo_on_pictures(family: str, start: StartRun) -> None:
    run = start(family)
    result = train(run)
    lines = read_metrics(run.folder.metrics_file)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["mismatch/prob_abs_mean"] < TOLERANCE for line in lines)
    played = [stored.trajectory for stored in read_trajectories(run.folder.trajectories)]
    assert len(played) >= 8
    for trajectory in played:
        sequence = trajectory.sequences[0]
        assert len(sequence.images) == len(sequence.turns) > 1
        assert sequence.images[0].image.alternative.replace("\n", " ").split()[0] in "FGHPS"
    group = [t.sequences[0].images[0].image for t in played if t.group_id == played[0].group_id]
    assert len(set(group)) == 1
    assert (Path(result.checkpoint) / "model" / "preprocessor_config.json").is_file()
    measured = evaluate(
        "frozen_lake/test",
        model=result.checkpoint,
        tasks=2,
        overrides=[*SETTINGS[1:], f"run.directory={run.folder.path.parent}"],
    )
    assert measured.failures == 0


def test_independent_turns_have_their_own_images(start: StartRun) -> None:
    run = start(FAMILIES[0], "agent.loop=step_independent", "trainer.steps=1")
    train(run)
    (line,) = read_metrics(run.folder.metrics_file)
    assert line["mismatch/prob_abs_mean"] < TOLERANCE
    played = [stored.trajectory for stored in read_trajectories(run.folder.trajectories)]
    assert all(len(sequence.images) == 1 for trajectory in played for sequence in trajectory.sequences)


def test_a_reasoner_reads_the_description_and_not_the_image(start: StartRun) -> None:
    roles = "agent.roles={reasoner: {trained: false}}"
    run = start(FAMILIES[0], "agent.loop=caption_reasoner", "agent.options={}", roles, "trainer.steps=1")
    train(run)
    played = [stored.trajectory for stored in read_trajectories(run.folder.trajectories)]
    answered = [trajectory for trajectory in played if len(trajectory.sequences) == 2]
    assert answered
    for trajectory in answered:
        captioner, reasoner = trajectory.sequences
        assert (len(captioner.images), len(reasoner.images)) == (1, 0)
        assert (captioner.loss_mask.any(), reasoner.loss_mask.any()) == (True, False)


def test_a_warm_start_learns_from_pictures(start: StartRun) -> None:
    run = start(FAMILIES[1], "sft.observation_weight=0.2", "agent.max_turns=8", "agent.max_tokens=1000")
    result = warm_start(run)
    assert 0 < result.metrics["sft/loss"] < 20


@pytest.mark.capability(["sglang", "attached sglang"], "images", refused=True)
def test_engine_without_image_support_is_rejected_before_a_run() -> None:
    config = load_config(None, [*SETTINGS[:2], "engine=sglang"])
    with pytest.raises(ConfigError, match="engine sglang does not accept images"):
        check_training(config)
    check_training(load_config(None, [SETTINGS[0], "engine=sglang"]))


def test_text_only_model_is_rejected_before_a_run(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("qwen2.5")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = load_config(None, [*SETTINGS, f"model.path={tmp_path}"])
    with pytest.raises(UsageError, match="environment frozen_lake shows images, but the model reads text only"):
        check_rendering(config, build_renderer(config, str(tmp_path), tokenizer))
