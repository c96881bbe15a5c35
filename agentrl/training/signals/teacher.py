"""The teacher of ``algorithm.teacher``: a frozen model, local or served, that provides log-probabilities."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.config.algorithm import POLICY
from agentrl.config.config import AlgorithmConfig, Config, TrainerConfig
from agentrl.errors import ConfigError, TrainingError, UsageError
from agentrl.registry import Kind, lookup
from agentrl.render.translation import Translation
from agentrl.training.batch import StepBatch, trained_mask
from agentrl.training.forward.logprobs import TeacherLogprobs
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence, with_prefix
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals.base import SignalSetup, TokenSignal
from agentrl.trajectory import Trajectory

LOSS_INPUTS = frozenset({Input.TEACHER, Input.TEACHER_TOP})
DISTILL = "distill"


class TeacherModel(TokenSignal):
    """Log-probabilities of a teacher, for losses that read them or as part of the rewards.

    Without a runner, the teacher is served, and was queried when the episodes ended.
    """

    name = "teacher"

    def __init__(
        self,
        runner: ModelRunner | None,
        top_k: int | None,
        shaping: RewardShaping,
        device: torch.device,
        *,
        hinted: bool = False,
    ) -> None:
        self._runner, self._top_k, self._shaping, self._device = runner, top_k, shaping, device
        self._hinted = hinted
        self._metrics: dict[str, float] = {}

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that there is a teacher if, and only if, the algorithm reads its log-probabilities."""
        needed, teacher = needed_inputs(lookup(Kind.LOSS, algorithm.loss)), algorithm.teacher
        top_k = None if teacher is None else teacher.top_k
        readers = {
            f"the loss {algorithm.loss}": Input.TEACHER in needed,
            f"the shaping {DISTILL}": DISTILL in algorithm.shaping,
        }
        for reader, reads in readers.items():
            if reads and teacher is None:
                raise ConfigError(
                    f"{reader} needs {Input.TEACHER}",
                    got="no algorithm.teacher",
                    expected="algorithm.teacher={path: MODEL}",
                )
        if Input.TEACHER_TOP in needed and top_k is None:
            raise ConfigError(
                f"the loss {algorithm.loss} needs {Input.TEACHER_TOP}",
                got="no algorithm.teacher" if teacher is None else "no algorithm.teacher.top_k",
                expected="algorithm.teacher={path: MODEL, top_k: 20}",
            )
        if top_k is not None and Input.TEACHER_TOP not in needed:
            raise ConfigError(
                f"algorithm.teacher.top_k is ignored: the loss {algorithm.loss} reads only the sampled tokens",
                got=top_k,
                expected="algorithm.loss=distill_top_k",
                hint="or remove algorithm.teacher.top_k",
            )
        if teacher is not None and not needed & LOSS_INPUTS and DISTILL not in algorithm.shaping:
            raise ConfigError(
                "algorithm.teacher is ignored: nothing reads its log-probabilities",
                got=f"algorithm.loss {algorithm.loss} and no shaping {DISTILL}",
                expected=f"algorithm.loss=distill, or algorithm.shaping={{{DISTILL}: {{coef: 1.0}}}}",
            )

    @classmethod
    def build(cls, setup: SignalSetup) -> TeacherModel | None:
        """Build the signal, if the algorithm has a teacher."""
        section, model = setup.algorithm.teacher, setup.models.get(cls.name)
        if section is None:
            return None
        if section.path == POLICY:
            return cls(setup.policy, section.top_k, setup.shaping, setup.policy.model.device, hinted=True)
        if not section.servers and model is None:
            raise UsageError(
                "algorithm.teacher needs a model", got="no teacher", expected="Trainer(signal_models={'teacher': …})"
            )
        runner = None if model is None else setup.policy.for_model(model, setup.config)
        device, hinted = setup.policy.model.device, section.hint is not None
        return cls(runner, section.top_k, setup.shaping, device, hinted=hinted)

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the teacher's log-probabilities, and the divergence from it in the rewards, if configured.

        Raises:
            TrainingError: a served teacher was not queried for an episode, or an episode has no hint.
        """
        if batch.extras.translations:
            logp = _of_tokens(batch, self._translated_logprobs(batch), torch.device("cpu"))
            teacher = TeacherLogprobs(logp=_fill_unaligned(batch, logp).to(self._device))
            self._metrics = _alignment_metrics(batch)
        elif self._runner is None:
            teacher = _served_logprobs(batch, self._device)
        else:
            sequences = _with_hints(batch) if self._hinted else batch.sequences
            teacher = self._runner.top_logprobs(sequences, top_k=self._top_k, temperature=batch.temperature)
        return dataclasses.replace(with_teacher_reward(batch, self._shaping, teacher), teacher=teacher)

    def metrics(self) -> dict[str, float]:
        """Return the shares of tokens that correspond to one token of a teacher with another tokenizer, or to none."""
        return self._metrics

    def _translated_logprobs(self, batch: StepBatch) -> list[npt.NDArray[np.float32]]:
        """Return the log-probabilities of a teacher with another tokenizer for each sequence: float32 [T]."""
        extras, rows = batch.extras, _trained_rows(batch)
        _check_known(rows, extras.translations)
        translations = [extras.translations[trajectory.id][number] for trajectory, number in rows]
        if self._runner is None:
            logprobs = [extras.teacher_logp[trajectory.id][number] for trajectory, number in rows]
        else:
            logprobs = self._score(translations, [extras.hints.get(trajectory.id, ()) for trajectory, _ in rows], batch)
        sampled = [trajectory.sequences[number].logprobs for trajectory, number in rows]
        return [one.distribute(own, logp) for one, own, logp in zip(translations, logprobs, sampled, strict=True)]

    def _score(
        self, translations: Sequence[Translation], hints: Sequence[Sequence[int]], batch: StepBatch
    ) -> list[npt.NDArray[np.float32]]:
        """Score the tokens of each translation that have a group: float32 [scored]."""
        assert self._runner is not None
        sequences = [
            with_prefix(scored_sequence(ids, groups >= 0), hint)
            for one, hint in zip(translations, hints, strict=True)
            for ids, groups in zip(one.ids, one.other_groups, strict=True)
        ]
        if not sequences:
            return [np.empty(0, np.float32) for _ in translations]
        logp = self._runner.logprobs(sequences, temperature=batch.temperature).logp.cpu().numpy()
        return np.split(logp, np.cumsum([one.scored_groups.size for one in translations])[:-1])


def _with_hints(batch: StepBatch) -> list[ScoredSequence]:
    """Return the sequences that the teacher reads: each after the hint of its episode."""
    names = [batch.trajectories[owner].id for owner in batch.sequence_trajectory]
    if missing := [name for name in names if name not in batch.extras.hints]:
        raise TrainingError(
            "the teacher has no hint for every episode", got=f"none for {missing[0]}", expected="StepExtras.hints"
        )
    hints = batch.extras.hints
    return [with_prefix(sequence, hints[name]) for sequence, name in zip(batch.sequences, names, strict=True)]


def _served_logprobs(batch: StepBatch, device: torch.device) -> TeacherLogprobs:
    extras = batch.extras
    rows = _trained_rows(batch)
    _check_known(rows, extras.teacher_logp)
    of_tokens = functools.partial(_of_tokens, batch, device=device)
    logp = of_tokens([extras.teacher_logp[trajectory.id][number] for trajectory, number in rows])
    if not extras.teacher_top:
        return TeacherLogprobs(logp=logp)
    tops = [extras.teacher_top[trajectory.id][number] for trajectory, number in rows]
    ids, top_logp = of_tokens([top.ids for top in tops]), of_tokens([top.logp for top in tops])
    return TeacherLogprobs(logp=logp, top_ids=ids, top_logp=top_logp)


def _trained_rows(batch: StepBatch) -> list[tuple[Trajectory, int]]:
    """Return the trajectory of each of the batch's sequences, and the sequence's number in it."""
    experts = batch.extras.expert_ids
    return [
        (trajectory, number)
        for trajectory in batch.trajectories
        for number, sequence in enumerate(trajectory.sequences)
        if trained_mask(sequence, by_expert=trajectory.id in experts).any()
    ]


def _check_known(rows: Sequence[tuple[Trajectory, int]], known: Container[str]) -> None:
    if missing := [trajectory.id for trajectory, _ in rows if trajectory.id not in known]:
        raise TrainingError(
            "the teacher was not queried for every episode",
            got=f"{len(missing)} sequences without its log-probabilities, such as one of trajectory {missing[0]}",
        )


def _of_tokens(batch: StepBatch, by_sequence: Sequence[npt.NDArray[Any]], device: torch.device) -> torch.Tensor:
    """Select the values of the batch's tokens from those of whole sequences, [T, …] each."""
    indices = [scored.positions + 1 for scored in batch.sequences]
    found = [torch.from_numpy(own)[where] for own, where in zip(by_sequence, indices, strict=True)]
    return torch.cat(found).to(device)


def _fill_unaligned(batch: StepBatch, logp: torch.Tensor) -> torch.Tensor:
    """Give tokens that a teacher cannot compare (NaN) the mean difference from log mu of the others.

    They are then neither preferred nor avoided. With a difference of 0, they would be the only tokens without a cost,
    and a policy that is far from its teacher would learn to write them.
    """
    gap = batch.behaviour_logp - logp
    known = ~gap.isnan() if batch.expert is None else ~gap.isnan() & ~batch.expert
    mean = gap[known].mean() if known.any() else gap.new_zeros(())
    return torch.where(logp.isnan(), batch.behaviour_logp - mean, logp)


def _alignment_metrics(batch: StepBatch) -> dict[str, float]:
    """Compute the shares of tokens that correspond to one token of a teacher with another tokenizer, or to none."""
    known = batch.extras.translations
    counts = [known[trajectory.id][number].counts for trajectory, number in _trained_rows(batch)]
    trained, equal, unaligned = (sum(column) for column in zip(*counts, strict=True))
    return {"train/teacher_equal_tokens": equal / trained, "train/teacher_unaligned_tokens": unaligned / trained}


def with_teacher_reward(batch: StepBatch, shaping: RewardShaping, teacher: TeacherLogprobs) -> StepBatch:
    """Add the divergence from a teacher to a batch's rewards if a shaping asks for it, except on an expert's tokens."""
    if shaping.distill is None:
        return batch
    penalty = shaping.distill.penalty(batch.behaviour_logp, teacher.logp.cpu())
    if batch.expert is not None:
        penalty = penalty.masked_fill(batch.expert, 0.0)
    return dataclasses.replace(batch, episodes=batch.episodes.with_token_reward(penalty))


def check_teacher(config: Config) -> None:
    """Check the teacher: top-k needs whole rows, and a served teacher supports only temperature 1.

    Raises:
        ConfigError: the run has another setting.
    """
    teacher, temperature = config.algorithm.teacher, config.sampling.temperature
    if teacher is not None and teacher.top_k is not None and config.trainer.context_parallel > 1:
        raise ConfigError(
            "algorithm.teacher.top_k needs whole rows",
            got=f"trainer.context_parallel {config.trainer.context_parallel}",
            expected="trainer.context_parallel=1, or algorithm.loss=distill without top_k",
        )
    if teacher is not None and teacher.servers and temperature != 1.0:
        raise ConfigError(
            "a served teacher reports log-probabilities at temperature 1, but the policy uses another temperature",
            got=f"sampling.temperature {temperature:g}",
            expected="sampling.temperature=1",
            hint="without algorithm.teacher.servers, the trainer loads the teacher and supports any temperature",
        )
