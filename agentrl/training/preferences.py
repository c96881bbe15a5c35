"""Learning from pairs of better and worse episodes: losses such as DPO on the policy, and reward models.

Losses on pairs use the same ledger, masks and batches as other training. They read sums of log-probabilities over whole
episodes, so the gradient needs all tokens of a pair at once. Two passes allow any division of a pair into
micro-batches: the first, without gradients, computes the sums and the derivative of the loss with respect to each sum;
the second backpropagates these derivatives. The reference is the initial model. Its sums are computed once, so no
second model is needed.

A reward model is a causal model's body with one output, which maps a text to a reward. It is trained to give the better
text of a pair the higher reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from agentrl.algorithms.off_policy_losses import PreferencePairs
from agentrl.algorithms.traits import other_input
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import TrainerConfig
from agentrl.config.trainer import FSDPOptions
from agentrl.errors import ConfigError, TrainingError, UsageError
from agentrl.message.image import ImageReader
from agentrl.models.load import check_complete, silence_load_reports
from agentrl.observe.trajectory_record import environment_label
from agentrl.registry import Kind, lookup
from agentrl.reward import rewards_differ
from agentrl.training.algorithm_functions import bind
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import load_sharded
from agentrl.training.forward.micro_batches import MicroBatch
from agentrl.training.forward.runner import ModelRunner, RunnerSettings, SumsByName, make_runner
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence
from agentrl.training.learner import Learner
from agentrl.training.roles import role_members
from agentrl.training.weights import ModelWeights
from agentrl.trajectory import ATTEMPT, Source, Trajectory, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two episodes of one task."""

    better: Trajectory
    worse: Trajectory


def make_pairs(
    trajectories: Iterable[Trajectory], *, by: Literal["rewards", "demonstrations"], per_task: int
) -> list[Pair]:
    """Pair the episodes of each task and seed of an environment; each episode is in at most one pair.

    Episodes without a valid outcome are skipped, as are those without a reward if `by` is ``rewards``. Rewards of
    several agents are compared per role: a pair then has two episodes' parts of one role, with the role's returns.

    Args:
        trajectories: Trajectories of any tasks, in any order.
        by: ``rewards`` pairs the best with the worst, the second best with the second worst, and so on while their
            rewards differ. ``demonstrations`` pairs a demonstration with a sampled episode, whatever their rewards.
        per_task: Maximum number of pairs of a task.

    Raises:
        UsageError: no pair was found.
    """
    tasks: dict[tuple[str | int, ...], list[Trajectory]] = {}
    for trajectory in trajectories:
        task: tuple[str | int, ...] = (trajectory.environment, trajectory.task_id, trajectory.seed)
        if by == "rewards":  # rows of different files may have the same ids
            task = (*task, environment_label(trajectory.group_id, trajectory.task_id))
        has_parts = by == "rewards" and trajectory.sampled_tokens > 0
        for part in role_members([trajectory]) if has_parts else [trajectory]:
            if part.outcome is not None and part.outcome.is_trainable and answer_sequences(part):
                compared = part.group_id if ATTEMPT in role_of(part) else role_of(part)
                tasks.setdefault((*task, compared), []).append(part)
    make = _by_reward if by == "rewards" else _by_demonstration
    pairs = [pair for members in tasks.values() for pair in make(members)[:per_task]]
    if not pairs:
        raise UsageError(
            "no pairs of episodes to learn from",
            got=f"{sum(map(len, tasks.values()))} episodes of {len(tasks)} tasks",
            expected="two episodes of one task whose rewards differ"
            if by == "rewards"
            else "a demonstration and a sampled episode of one task",
            hint="use the trajectories of a run that trains on groups"
            if by == "rewards"
            else "pass both sources, of the same tasks and seed: --from RUN_OF_SFT --from RUN_OF_TRAIN",
        )
    return pairs


def _by_reward(members: Sequence[Trajectory]) -> list[Pair]:
    ranked = sorted((t for t in members if t.reward is not None), key=lambda t: -_reward(t))
    half = len(ranked) // 2
    both = zip(ranked[:half], reversed(ranked[-half:] if half else []), strict=True)
    return [Pair(better=good, worse=bad) for good, bad in both if rewards_differ([_reward(good), _reward(bad)])]


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None
    return trajectory.reward


def _by_demonstration(members: Sequence[Trajectory]) -> list[Pair]:
    demonstrations = [t for t in members if not t.sampled_tokens]
    sampled = [t for t in members if t.sampled_tokens]
    return [Pair(better=good, worse=bad) for good, bad in zip(demonstrations, sampled, strict=False)]


def answer_sequences(trajectory: Trajectory) -> list[ScoredSequence]:
    """Return an episode's sequences with their own answers: sampled tokens, or forced ones if nothing was sampled."""
    source = Source.SAMPLED if trajectory.sampled_tokens else Source.FORCED
    found = []
    for sequence in trajectory.sequences:
        wanted = np.equal(sequence.sources, source)
        wanted[: max(sequence.shared, 1)] = False
        if wanted.any():
            found.append(scored_sequence(sequence.token_ids, wanted, sequence.images))
    return found


ON_PAIRS = "(PreferencePairs)"


def preference_loss(settings: PreferencesConfig) -> Callable[[PreferencePairs], torch.Tensor]:
    """Return the configured loss on pairs, with its options bound.

    Raises:
        ConfigError: the loss is not a loss on pairs, or does not take the options.
        UnknownNameError: the loss is not registered.
    """
    loss = lookup(Kind.LOSS, settings.loss)
    takes = other_input(loss) or "episodes"
    if not takes.endswith(ON_PAIRS):
        raise ConfigError(
            f"the loss {settings.loss} does not learn from pairs of episodes",
            got=f"a loss on {takes}",
            expected="preferences.loss=dpo, spin, or a function marked with takes('… (PreferencePairs)')",
        )
    bound: Callable[[PreferencePairs], torch.Tensor] = bind("loss", settings.loss, loss, settings.loss_options)
    return bound


class PreferenceLearner(Learner[list[int]]):
    """Trainer of a policy in place on pairs; its initial state is the reference. Every rank has one.

    Args:
        model: Model from `agentrl.models.load.load_model`, or a sharded one.
        pairs: Pairs of episodes.
        settings: Loss, learning rate, and pairs per update.
        trainer: Micro-batches, optimizer, clipping.
        seed: Seed of the order of pairs.
        image_processor: Image processor; required if episodes contain images.
        ranks: Ranks that train together.

    Raises:
        TrainingError: there are no pairs.
    """

    data, section = "pairs", "preferences"

    def __init__(
        self,
        model: PreTrainedModel,
        pairs: Sequence[Pair],
        settings: PreferencesConfig,
        trainer: TrainerConfig,
        *,
        seed: int,
        image_processor: ImageReader | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if not pairs:
            raise TrainingError("no pairs to learn from", expected="at least one pair of episodes")
        super().__init__(model, list(pair_batches(len(pairs), settings, seed)), settings, trainer, ranks or Ranks())
        self._loss = preference_loss(settings)
        self._runner = make_runner(model, trainer, ranks=self.ranks, image_processor=image_processor)
        self._episodes = [answer_sequences(side) for pair in pairs for side in (pair.better, pair.worse)]
        """Sequences of each pair's better episode, at index 2 p for pair p, and of its worse one, at 2 p + 1."""
        self._reference = torch.zeros(len(pairs), 2, dtype=torch.float64)
        """Log-probabilities of the reference of the better and the worse episode of each pair, from the first update
        on.
        """

    def _backward(self, batch: list[int]) -> tuple[float, dict[str, float]]:
        if self.done == 0:
            self._reference = self._sums(range(len(self._reference)))
        sums, reference = self._sums(batch).requires_grad_(), self._reference[batch]
        value = self._loss(
            PreferencePairs(
                chosen_logp=sums[:, 0],
                rejected_logp=sums[:, 1],
                chosen_reference_logp=reference[:, 0],
                rejected_reference_logp=reference[:, 1],
            )
        ).mean()
        self._check_finite(float(value.detach()))
        (by_sum,) = torch.autograd.grad(value, sums)
        sequences, owner = self._lay_out(batch)
        lengths = torch.tensor([sequence.targets.numel() for sequence in sequences])
        by_logp = by_sum.flatten()[owner].float().repeat_interleave(lengths)
        self._runner.backward_logprobs(sequences, by_logp, temperature=1.0)
        gain = (sums - reference).detach()
        return float(value.detach()), {  # from log pi / pi_ref of each episode, in nats, before the step
            "accuracy": float((gain[:, 0] > gain[:, 1]).double().mean()),
            "better_gain": float(gain[:, 0].mean()),
            "worse_gain": float(gain[:, 1].mean()),
        }

    def _lay_out(self, batch: Sequence[int]) -> tuple[list[ScoredSequence], torch.Tensor]:
        """Return the sequences of some pairs, and their indices in the flattened sums [pairs, 2]: int64 [sequences]."""
        sides = [self._episodes[2 * pair + side] for pair in batch for side in (0, 1)]
        owner = [index for index, side in enumerate(sides) for _ in side]
        return [sequence for side in sides for sequence in side], torch.tensor(owner)

    def _sums(self, batch: Sequence[int]) -> torch.Tensor:
        """Compute log-probabilities of the better and the worse episode of some pairs: float64 [pairs, 2]."""
        sequences, owner = self._lay_out(batch)
        scores = self._runner.logprobs(sequences, temperature=1.0)
        lengths = torch.tensor([sequence.targets.numel() for sequence in sequences])
        sums = torch.zeros(2 * len(batch), dtype=torch.float64)
        return sums.index_add(0, owner.repeat_interleave(lengths), scores.logp.double().cpu()).view(-1, 2)

    def _progress(self) -> dict[str, Any]:
        return {**super()._progress(), "reference": self._reference}

    def _restore(self, progress: Mapping[str, Any]) -> None:
        super()._restore(progress)
        self._reference = progress["reference"]


def pair_batches(count: int, settings: PreferencesConfig, seed: int) -> Iterator[list[int]]:
    """Yield the indices of the pairs of each update, in random order."""
    generator, size = torch.Generator().manual_seed(seed), settings.pairs_per_update
    for _ in range(settings.epochs):
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[first : first + size] for first in range(0, len(order), size))


HEAD = "ForSequenceClassification"
OUTPUT = ("score.", "classifier.")
CHARACTERS_PER_TOKEN = 3
"""Characters per token, to estimate the tokens of texts in a micro-batch; English has more."""


class RewardModel:
    """Model that maps texts to rewards.

    Args:
        path: Folder, or name on the Hugging Face hub.
        dtype: Data type of the weights.
        device: Device, with the same values as ``model.device``.
        max_tokens: Maximum number of tokens of a text; only the end of a longer text is used.
        new_head: True to add an untrained output to a language model; otherwise the model must have one.
        seed: Seed of the new output's weights.
        ranks: Ranks that share the model; with several, it is sharded.
        sharding: Options of the sharding.

    Raises:
        UsageError: the model cannot be loaded, or has no reward output.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        device: str = "auto",
        max_tokens: int = 4096,
        new_head: bool = False,
        seed: int = 0,
        ranks: Ranks | None = None,
        sharding: FSDPOptions | None = None,
    ) -> None:
        transformers_logging.disable_progress_bar()
        self.ranks = ranks or Ranks()
        try:
            config = _read_config(path, new_head=new_head)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, use_fast=True)
            _check_head(path, config, new_head=new_head)
            new = OUTPUT if new_head else ()
            self.model: PreTrainedModel
            if self.ranks.is_distributed:
                self.model = load_sharded(
                    path,
                    dtype=dtype,
                    device=self.ranks.device(device),
                    ranks=self.ranks,
                    options=sharding or FSDPOptions(),
                    make=lambda _: AutoModelForSequenceClassification.from_config(config, dtype=torch.float32),
                    load=lambda _, dtype: _load_model(path, config, dtype, seed, new),
                )
            else:
                self.model = _load_model(path, config, dtype, seed, new)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UsageError(
                "cannot load the reward model",
                got=f"{path} ({str(error).strip().splitlines()[0]})",
                expected="a folder with a Hugging Face model and its tokenizer, or a name on the hub",
            ) from error
        self.model.eval()
        if not self.ranks.is_distributed:
            _move(self.model, device)
        self.source = ModelWeights(self.model, ranks=self.ranks, dtype=dtype)
        room = getattr(config.get_text_config(), "max_position_embeddings", max_tokens)
        self._max_tokens = min(max_tokens, room)
        self._pad_id = self._choose_pad()

    def rewards(self, texts: Sequence[str]) -> torch.Tensor:
        """Compute the rewards of texts: float32 [texts]; gradients flow if they are enabled."""
        rows = [self._encode(text)[-self._max_tokens :] for text in texts]
        longest = max(1, max(map(len, rows)))
        ids = torch.full((len(rows), longest), self._pad_id)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[index, : len(row)] = 1
        device = self.model.device
        logits: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits.squeeze(-1).float()

    def _encode(self, text: str) -> list[int]:
        """Encode a policy's text; a spelled-out special token is encoded as text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def score(self, text: str) -> float:
        """Compute the reward of one text."""
        with torch.no_grad():
            return float(self.rewards([text])[0])

    def _choose_pad(self) -> int:
        """Choose a padding id with which no text ends, because the output is read at the last token that is not
        padding.
        """
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        pad = next((number for number in known if number is not None), 0)
        self.model.config.pad_token_id = pad
        self.model.config.get_text_config().pad_token_id = pad
        return int(pad)


def _read_config(path: str | Path, *, new_head: bool) -> Any:
    """Read the config of a reward model; one that does not say how many labels it has has one, as OpenRLHF's."""
    found, _ = PreTrainedConfig.get_config_dict(path)
    says_labels = not new_head and not {"num_labels", "id2label"}.isdisjoint(found)
    return AutoConfig.from_pretrained(path, **({} if says_labels else {"num_labels": 1}))


def _load_model(
    path: str | Path, config: Any, dtype: Literal["float32", "bfloat16"], seed: int, new: tuple[str, ...]
) -> PreTrainedModel:
    """Load the model; only parameters with a prefix in `new` may be missing in its files."""
    with torch.random.fork_rng(), silence_load_reports():
        torch.manual_seed(seed)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), output_loading_info=True, ignore_mismatched_sizes=True
        )
    check_complete(path, report, new=new)
    if ignored := sorted(name for name in report["unexpected_keys"] if name.startswith(OUTPUT)):
        raise UsageError(
            f"the reward model {path} has an output that its architecture would ignore",
            got=", ".join(ignored),
            expected="one matrix, as of AutoModelForSequenceClassification",
            hint="use it through a reward function of your own: docs/reward-functions.md",
        )
    loaded: PreTrainedModel = model
    return loaded


def _move(model: PreTrainedModel, device: str) -> None:
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        model.to(torch.device(target))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"the reward model cannot be moved to {target}", got=reason, hint="check model.device"
        ) from error


def _check_head(path: str | Path, config: Any, *, new_head: bool) -> None:
    named = (getattr(config, "architectures", None) or ["nothing"])[0]
    if new_head or (named.endswith(HEAD) and config.num_labels == 1):
        return
    raise UsageError(
        f"{path} is not a reward model",
        got=f"{named} with {config.num_labels} labels" if named.endswith(HEAD) else named,
        expected=f"a model …{HEAD} with one label",
        hint="train one on pairs of episodes: agentrl reward-model --from RUN --model MODEL",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPair:
    """Two texts about one task."""

    better: str
    worse: str


def bradley_terry(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """Compute -log sigmoid(r_better - r_worse): [pairs] from rewards [pairs] (InstructGPT, arXiv 2203.02155, eq. 1)."""
    return -functional.logsigmoid(better - worse)


class RewardLearner(Learner[list[TextPair]]):
    """Trainer of a reward model in place on pairs of texts; every rank that shares the model has one.

    Args:
        model: The reward model.
        pairs: Pairs of texts.
        settings: Learning rate, and pairs per update.
        trainer: Micro-batches, optimizer, clipping.
        seed: Seed of the order of pairs.

    Raises:
        TrainingError: there are no pairs.
    """

    data, section = "pairs of texts", "preferences"

    def __init__(
        self,
        model: RewardModel,
        pairs: Sequence[TextPair],
        settings: PreferencesConfig,
        trainer: TrainerConfig,
        *,
        seed: int,
    ) -> None:
        if not pairs:
            raise TrainingError("no pairs to learn from", expected="at least one pair of texts")
        batches = [[pairs[i] for i in batch] for batch in pair_batches(len(pairs), settings, seed)]
        super().__init__(model.model, batches, settings, trainer, model.ranks)
        self._reward_model = model

    def _backward(self, batch: list[TextPair]) -> tuple[float, dict[str, float]]:
        """Add the gradient of the mean loss of some pairs; return it, with accuracy and margin."""

        def loss(pairs: list[int], tally: SumsByName) -> torch.Tensor:
            texts = [text for pair in pairs for text in (batch[pair].better, batch[pair].worse)]
            rewards = self._reward_model.rewards(texts).view(-1, 2)
            losses, margins = bradley_terry(rewards[:, 0], rewards[:, 1]), rewards[:, 0] - rewards[:, 1]
            tally.add("loss", losses)
            tally.add("accuracy", margins > 0)
            tally.add("margin", margins)
            return losses.sum() / len(batch)

        runner = ModelRunner(self.model, RunnerSettings(ranks=self.ranks, every_time=self._trainer.fsdp.reduce))
        means = runner.run(_micro_batches(batch, self._trainer.tokens_per_micro_batch), loss).tally.means()
        self._check_finite(means["loss"])
        return means.pop("loss"), means


def _micro_batches(batch: Sequence[TextPair], budget: int) -> list[MicroBatch]:
    """Make micro-batches of pairs of similar length, within a budget of tokens including padding."""
    sizes = [max(len(pair.better), len(pair.worse)) for pair in batch]
    parts: list[MicroBatch] = []
    room = 0
    for index in sorted(range(len(batch)), key=lambda index: -sizes[index]):
        tokens = 2 * max(1, sizes[index] // CHARACTERS_PER_TOKEN)
        if room == 0:
            parts.append(MicroBatch([], needs_grad=True, tokens=0, cost=0))
            room = max(1, budget // tokens)
        last = parts[-1]
        parts[-1] = replace(
            last, sequences=[*last.sequences, index], tokens=last.tokens + tokens, cost=last.cost + tokens
        )
        room -= 1
    return parts
