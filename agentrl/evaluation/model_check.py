"""Check of a model before it is used: what its chat template shows, whether its answers can be read, speed, agreement.

The answers are first answers to tasks of an environment, under several settings: by tool calls and as text, with and
without examples in the prompt. The cheapest settings under which nearly all answers can be read are recommended.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.builders.episodes import build_env_pool, build_runner, sampling_params
from agentrl.builders.models import resolve_model, start_renderer
from agentrl.config.config import Config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.evaluation.evaluate import PolicyKind, evaluate_panel, open_policy
from agentrl.evaluation.panel import EvaluatedEpisode, Panel
from agentrl.models.load import load_model
from agentrl.render.call_form import PROBE_TOOL
from agentrl.render.renderer import Renderer
from agentrl.render.template_check import find_omitted_text, template_faults
from agentrl.rollout.loop_choice import PlaySettings, Recommendation, answer_forms, calls_tools, save_recommendation
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.task_source import task_source
from agentrl.training.diagnostics.agreement import Agreement, measure_agreement
from agentrl.trajectory import Trajectory, Turn

TOOL_LOOP, TEXT_LOOP = "tool_calling", "react_text"
"""Agent loops that a check tries."""
GOOD = 0.9
"""Share of usable first answers at which no more examples are put into the prompt."""
ENOUGH = 0.97
"""Share at which no further settings are tried."""
SHOTS = (0, 1, 3)
FREQUENT = 3
"""Number of unusable answers that are shown."""
MAX_ANSWER_CHARS = 160
"""Maximum number of characters of an answer that are shown."""
COMPARED_TOKENS = 2048
"""Number of sampled tokens after which engine and trainer are compared on no further sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Properties of a chat template."""

    family: str
    """Recognized family of models."""
    tool_parser: str | None
    """Notation of tool calls; ``None`` if the template has none."""
    end_of_turn: list[str]
    """Tokens at which sampling stops."""
    faults: list[str]
    """Descriptions of what would go wrong; empty for a template without a known fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShare:
    """First answers under one choice of settings."""

    settings: PlaySettings
    answers: int
    usable: float
    """Share that the agent loop could read."""
    repaired: float
    """Share with a tool call that was not quite in the model's notation; the loop reads it all the same."""
    accepted: float
    """Share whose action the environment accepted."""
    prompt_tokens: float
    """Mean length of the first prompt."""
    tokens_per_s: float
    """Sampled tokens per second of wall time, prompts included."""
    unusable: list[tuple[int, str]]
    """The most frequent unusable answers, with how often each was given."""
    episodes: list[EvaluatedEpisode] = field(repr=False, default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """Result of a check."""

    model: str
    environment: str
    dtype: str
    template: TemplateFacts
    shares: list[AnswerShare]
    recommended: Recommendation | None
    """``None`` if no settings gave a usable answer."""
    best: dict[str, AnswerShare]
    """The best settings of each agent loop."""
    agreement: Agreement | None
    peak_bytes: int
    """Largest resident memory of this process."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON types."""
        return {
            "model": self.model,
            "environment": self.environment,
            "dtype": self.dtype,
            "template": asdict(self.template),
            "answers": [
                {
                    "overrides": share.settings.overrides,
                    "answers": share.answers,
                    "usable": share.usable,
                    "repaired": share.repaired,
                    "accepted": share.accepted,
                    "prompt_tokens": share.prompt_tokens,
                    "tokens_per_s": share.tokens_per_s,
                    "unusable": [{"count": count, "answer": text} for count, text in share.unusable],
                }
                for share in self.shares
            ],
            "recommended": None if self.recommended is None else self.recommended.settings.overrides,
            "agreement": None if self.agreement is None else asdict(self.agreement),
            "peak_bytes": self.peak_bytes,
        }


async def check_model(
    config: Config, *, answers: int, loops: Sequence[str] = (TOOL_LOOP, TEXT_LOOP), say: Callable[[str], None]
) -> ModelCheck:
    """Check the config's model on its environment, and store the recommended settings for `train` and `eval`.

    Args:
        config: Model, environment, engine and sampling; its agent loop is replaced.
        answers: First answers for each choice of settings.
        loops: Agent loops to try, ``tool_calling`` and ``react_text``.
        say: Called with a line before and after each choice of settings.

    Raises:
        UsageError: no such model or environment, or an engine that does not sample tokens.
        TemplateError: the chat template cannot be rendered.
    """
    if not isinstance(config.engine, LocalEngineConfig | ServerEngineConfig):
        raise UsageError(
            "model check needs an engine that samples tokens",
            got=f"engine={config.engine.type}",
            expected="local, vllm or sglang",
        )
    config = resolve_model(config)
    renderer = start_renderer(config)
    if renderer is None:
        raise UsageError(
            "model check needs a trained model",
            got=config.model.path,
            expected="a model folder, a name on the hub, a run or a checkpoint",
        )
    facts = template_facts(renderer)
    tried = [loop for loop in loops if loop != TOOL_LOOP or calls_tools(config)]
    shares: list[AnswerShare] = []
    with tempfile.TemporaryDirectory() as folder:
        as_text = PlaySettings(loop=TEXT_LOOP).apply_to(config)  # the engine is the same for all loops
        async with open_policy(as_text, PolicyKind.ENGINE, Path(folder)) as policy:
            assert isinstance(policy, EngineEpisodePolicy)
            plans = [settings_to_try(config, loop) for loop in tried]
            progress = CheckProgress([form for forms in plans for form in forms], say)
            for forms in plans:
                shares += await _try_settings(config, forms, policy, answers, progress)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    best = {loop: _best([share for share in shares if share.settings.loop == loop]) for loop in tried}
    recommended = _recommend(config, best)
    return ModelCheck(
        model=config.model.path,
        environment=config.sole_environment.name,
        dtype=config.model.dtype,
        template=facts,
        shares=shares,
        recommended=recommended,
        best=best,
        agreement=_agreement(config, shares),
        peak_bytes=peak,
    )


class CheckProgress:
    """Progress of a check, reported before and after each choice of settings.

    Args:
        settings: All that may be tried, in their order; those that turn out to be unnecessary are left out.
        say: Called with each line.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        settings: Sequence[PlaySettings],
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left, self._say, self._clock = list(settings), say, clock
        self._number = 0
        self._began = self._spent = 0.0

    def begin(self, settings: PlaySettings) -> None:
        """Report the settings that are tried now, and the maximum remaining time."""
        del self._left[: self._left.index(settings) + 1]
        left = ""
        if self._number:
            seconds = self._spent / self._number * (len(self._left) + 1)
            left = f" (at most about {shown_duration(seconds)} left)"
        self._number += 1
        self._began = self._clock()
        self._say(f"{self._progress}: {settings}{left}")

    def end(self, share: AnswerShare) -> None:
        """Report the result of the settings."""
        seconds = self._clock() - self._began
        self._spent += seconds
        usable = f"{share.usable:.0%} of {share.answers} first answers usable"
        self._say(f"{self._progress}: {usable} ({shown_duration(seconds)})")

    def refuse(self, error: UsageError) -> None:
        """Report why the settings could not be tried."""
        self._say(f"{self._progress}: not tried: {error}")

    @property
    def _progress(self) -> str:
        return f"settings {self._number} of at most {self._number + len(self._left)}"


def shown_duration(seconds: float) -> str:
    """Format a duration.

    >>> shown_duration(3.2), shown_duration(100), shown_duration(9000)
    ('3 s', '2 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def settings_to_try(config: Config, loop: str) -> list[PlaySettings]:
    """List the settings of a loop that may be tried, the cheapest first."""
    found = []
    for shots in SHOTS:
        found += [PlaySettings(loop=loop, options=dict(form), shots=shots) for form in answer_forms(loop, config)]
    return found


async def _try_settings(
    config: Config, settings: Sequence[PlaySettings], policy: EngineEpisodePolicy, answers: int, progress: CheckProgress
) -> list[AnswerShare]:
    """Measure settings of a loop in their order, until answers are usable."""
    shares: list[AnswerShare] = []
    for form in settings:
        if shares and form.shots > shares[-1].settings.shots and _best(shares).usable >= GOOD:
            break
        progress.begin(form)
        try:
            shares.append(await _measure(config, form, policy, answers))
        except UsageError as error:
            if not shares:
                raise
            progress.refuse(error)
            break
        progress.end(shares[-1])
        if shares[-1].usable >= ENOUGH:
            break
    return shares


async def _measure(config: Config, settings: PlaySettings, policy: EngineEpisodePolicy, answers: int) -> AnswerShare:
    own = settings.apply_to(config)
    own = own.model_copy(
        update={"agent": own.agent.model_copy(update={"max_turns": 1, "few_shot_turns": settings.shots})}
    )
    spec = resolve_environment(own.sole_environment.name)
    source = task_source(spec, own.sole_environment)
    tasks = min(answers, len(source))
    panel = Panel(
        environment=spec.name,
        policy=PolicyKind.ENGINE.value,
        model=config.model.path,
        n_tasks=tasks,
        samples=max(1, answers // tasks),
        seed=0,
    )
    pool = build_env_pool(own, spec=spec)
    began = time.perf_counter()
    try:
        runner = build_runner(own, pool, policy.with_sampling(sampling_params(own.sampling), trains=False))
        result = await evaluate_panel(runner, source, panel, concurrency=own.rollout.max_concurrent)
    finally:
        await pool.close()
    seconds = time.perf_counter() - began
    return _share(settings, [one for one in result.episodes if one.is_measured], policy.renderer, seconds)


class FirstAnswer(NamedTuple):
    """First answer of an episode."""

    turn: Turn | None
    """``None`` if the episode ended before an answer."""
    token_ids: list[int]


def first_answer(trajectory: Trajectory) -> FirstAnswer:
    """Find the first answer of an episode."""
    first = next((sequence for sequence in trajectory.sequences if sequence.turns), None)
    if first is None:
        return FirstAnswer(None, [])
    turn = first.turns[0]
    return FirstAnswer(turn, first.ids_list()[turn.start : turn.end])


def _share(settings: PlaySettings, episodes: list[EvaluatedEpisode], renderer: Renderer, seconds: float) -> AnswerShare:
    if not episodes:
        raise UsageError("no episode could be played", got=str(settings), hint="see the warnings above")
    unusable: Counter[str] = Counter()
    readable = repaired = accepted = tokens = prompt = 0
    for episode in episodes:
        trajectory = episode.trajectory
        turn, ids = first_answer(trajectory)
        tokens += len(ids)
        prompt += 0 if turn is None else turn.start
        if trajectory.metrics.get("invalid_answers"):
            unusable[_shorten(renderer.encoder.decode(ids))] += 1
            continue
        readable += 1
        repaired += bool(turn is not None and turn.repaired_calls)
        accepted += bool(turn is not None and turn.valid)
    return AnswerShare(
        settings=settings,
        answers=len(episodes),
        usable=readable / len(episodes),
        repaired=repaired / len(episodes),
        accepted=accepted / len(episodes),
        prompt_tokens=prompt / len(episodes),
        tokens_per_s=tokens / seconds,
        unusable=[(count, text) for text, count in unusable.most_common(FREQUENT)],
        episodes=episodes,
    )


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ANSWER_CHARS else f"{text[:MAX_ANSWER_CHARS]}…"


def _best(shares: Sequence[AnswerShare]) -> AnswerShare:
    """Return the settings with the most usable answers; among several above `ENOUGH`, the first, which cost least."""
    enough = min(ENOUGH, max(share.usable for share in shares))
    return next(share for share in shares if share.usable >= enough)


def _recommend(config: Config, best: dict[str, AnswerShare]) -> Recommendation | None:
    """Recommend tool calls if nearly all are usable, else the settings with the most usable answers, and store them."""
    tools = best.get(TOOL_LOOP)
    chosen = tools if tools is not None and tools.usable >= GOOD else max(best.values(), key=lambda share: share.usable)
    if not chosen.usable:
        return None
    found = Recommendation(
        settings=chosen.settings, usable=chosen.usable, answers=chosen.answers, date=date.today().isoformat()
    )
    save_recommendation(config, found)
    return found


def template_facts(renderer: Renderer) -> TemplateFacts:
    """Find out what a chat template shows, and its faults."""
    calls = renderer.parser_name is not None
    faults = [
        *(template_faults(renderer, roles=("tool",), tools=[PROBE_TOOL]) if calls else ()),
        *template_faults(renderer, roles=("user",)),
        *((omitted,) if calls and (omitted := find_omitted_text(renderer)) else ()),
    ]
    ends = sorted(renderer.encoder.decode([token]) for token in renderer.stop_token_ids)
    return TemplateFacts(
        family=renderer.family.name,
        tool_parser=renderer.parser_name,
        end_of_turn=ends,
        faults=list(dict.fromkeys(fault.what for fault in faults)),
    )


def _agreement(config: Config, shares: Sequence[AnswerShare]) -> Agreement | None:
    """Compare the engine's probabilities of sampled tokens with those of the trainer's forward pass."""
    path = config.model.path
    return measure_agreement(
        load_model(path, dtype=config.model.dtype, device=config.model.device),
        (sequence for share in shares for episode in share.episodes for sequence in episode.trajectory.sequences),
        temperature=config.sampling.temperature,
        most_tokens=COMPARED_TOKENS,
    )
