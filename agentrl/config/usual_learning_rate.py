"""Usual learning rates by model size, with and without adapters, and a comparison of a config with them.

The basis: 1e-6 for models of 0.5 to 32 billion parameters (DeepSeekMath, arXiv 2402.03300; DAPO, arXiv 2503.14476; the
examples of verl and TRL), and 5e-4 for the models of half a million parameters that agentrl trains from scratch. Rates
for sizes in between are interpolated linearly on logarithmic axes. Adapters need ten times as much, or fifteen times in
very short runs ("LoRA Without Regret", Schulman et al., 2025).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import Config, TrainerConfig
from agentrl.config.derived import adapter_config
from agentrl.config.estimate import EstimateRow
from agentrl.config.model_size import model_size
from agentrl.config.trainer import SFTConfig

LARGE, USUAL = 5e8, 1e-6
SMALL, USUAL_SMALL = 5e5, 5e-4
SLOPE = math.log(USUAL / USUAL_SMALL) / math.log(LARGE / SMALL)
LORA_FACTOR, SHORT_LORA_FACTOR = 10.0, 15.0
SHORT_RUN = 50
"""Maximum number of training steps of a very short run."""
FAR = 8.0
"""Minimum ratio between a learning rate and the usual one, in either direction, for a warning."""
BASIS = "published runs of 0.5B to 32B models use 1e-6, LoRA needs ten times as much, and smaller models need more"


def usual_learning_rate(parameters: float, *, lora: bool, steps: int = SHORT_RUN + 1) -> float:
    """Return the learning rate that is usual for reinforcement learning of a model.

    >>> f"{usual_learning_rate(7e9, lora=False):.1e}", f"{usual_learning_rate(494e6, lora=True):.1e}"
    ('1.0e-06', '1.0e-05')
    """
    size = min(max(parameters, SMALL), LARGE)
    factor = 1.0 if not lora else SHORT_LORA_FACTOR if steps <= SHORT_RUN else LORA_FACTOR
    return float(USUAL * (size / LARGE) ** SLOPE * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCheck:
    """A configured learning rate and the usual one."""

    name: str
    """Config key of the rate."""
    rate: float
    usual: float
    warmup: int
    model: str
    """Kind of training and model size: ``full fine-tuning of 494M parameters``."""

    @property
    def ratio(self) -> float:
        """The configured rate over the usual one."""
        return self.rate / self.usual

    @property
    def is_far(self) -> bool:
        """True if the rate is far above or below the usual one; a rate of 0 counts as intended."""
        return self.rate > 0 and not 1 / FAR < self.ratio < FAR

    @property
    def usual_range(self) -> str:
        """From a third of the usual rate to three times the usual rate."""
        return f"{self.usual / 3:.0e} to {self.usual * 3:.0e}"

    @property
    def warning(self) -> str | None:
        """Warning about a rate that is far from the usual one; ``None`` otherwise."""
        if not self.is_far:
            return None
        usual = f"usual for {self.model} is about {self.usual:.0e} ({self.usual_range}): {BASIS}"
        if self.ratio < 1:
            share = f"1/{1 / self.ratio:.0f} of the usual rate"
            return f"{self.name} {self.rate:g} is {share}, so the model may hardly learn anything; {usual}"
        warmup = (
            f"with a warm-up of {self.warmup} optimizer steps (trainer.warmup_steps)"
            if self.warmup
            else "and there is no warm-up (trainer.warmup_steps 0)"
        )
        much = f"{self.ratio:.0f} times the usual rate, {warmup}"
        return f"{self.name} {self.rate:g} is {much}: the policy may collapse within a few steps; {usual}"


def check_learning_rates(config: Config) -> list[RateCheck]:
    """Compare the learning rates of a training run with the usual ones; empty if the model's size is unknown."""
    parameters = _parameters(config)
    if parameters is None:
        return []
    lora = config.model.lora is not None
    model = f"{'LoRA training' if lora else 'full fine-tuning'} of {_short(parameters)} parameters"
    usual = usual_learning_rate(parameters, lora=lora, steps=config.trainer.steps)
    trainers: Mapping[str, Config] = {
        f"adapters.{name}.learning_rate": adapter_config(config, name)
        for name, section in config.named_adapters.items()
        if section.trained and section.learning_rate is not None
    } or {"trainer.learning_rate": config}
    return [
        RateCheck(
            name=name,
            rate=own.trainer.learning_rate,
            usual=usual,
            warmup=own.trainer.warmup_steps,
            model=model,
        )
        for name, own in trainers.items()
    ]


def rate_rows(config: Config) -> list[EstimateRow]:
    """Return the rows of the dry run's table about learning rates."""
    return [
        ("learning rate", f"{check.rate:g}", f"{check.name}; usual for {check.model}: {check.usual_range}")
        for check in check_learning_rates(config)
    ]


def rate_warnings(config: Config) -> list[str]:
    """Return warnings about learning rates that are far from the usual ones, and a warm-up that does not end."""
    found = [warning for check in check_learning_rates(config) if (warning := check.warning) is not None]
    return [*found, *_warmup_warnings(config)]


def _warmup_warnings(config: Config) -> list[str]:
    """Warn of a warm-up that the run does not finish; the number of updates is unknown with rows per mini-batch."""
    trainer = config.trainer
    if trainer.mini_batch_rows is not None:
        return []
    updates = trainer.steps * trainer.epochs * trainer.mini_batches
    sections = {
        f"adapters.{name}": adapter_config(config, name).trainer
        for name, section in config.named_adapters.items()
        if section.trained and section.warmup_steps is not None
    } or {"trainer": trainer}
    return [text for name, own in sections.items() for text in warmup_warnings(name, own, updates=updates)]


def warmup_warnings(
    section: str, settings: TrainerConfig | SFTConfig | PreferencesConfig, *, updates: int
) -> list[str]:
    """Warn of a warm-up that does not end within the run's number of updates."""
    if settings.warmup_steps < updates or not settings.learning_rate:
        return []
    return [
        f"{section}.warmup_steps {settings.warmup_steps:,} is not below the {updates:,} optimizer steps of the run, so "
        f"that the learning rate rises to the end and is never more than {updates / settings.warmup_steps:.0%} of "
        f"{section}.learning_rate {settings.learning_rate:g}: lower {section}.warmup_steps"
    ]


def _parameters(config: Config) -> float | None:
    """Return the number of the model's parameters, from its files or, if they are not on this machine, its name."""
    size = model_size(config.model)
    return _size_in_name(config.model.path) if size is None else float(size.parameters)


def _size_in_name(path: str) -> float | None:
    """Return the number of parameters that a model's name states.

    >>> _size_in_name("Qwen/Qwen2.5-0.5B-Instruct"), _size_in_name("smollm2-135m-instruct"), _size_in_name("gpt-oss")
    (500000000.0, 135000000.0, None)
    """
    found = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", path.rpartition("/")[2].lower())
    return None if found is None else float(found[1]) * {"b": 1e9, "m": 1e6}[found[2]]


def _short(parameters: float) -> str:
    """Format a number of parameters.

    >>> _short(494032768), _short(7.6e9), _short(524288)
    ('494M', '7.6B', '0.52M')
    """
    if parameters >= 1e9:
        return f"{parameters / 1e9:.3g}B"
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e7 else f"{parameters / 1e6:.2g}M"
