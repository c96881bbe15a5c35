"""Client of a run's judge, shared by all episodes: cache, budget, limits, counts.

    question ─► cached? ─► requested by another episode? ─► budget left? ─► service ─► readable? ─► cache
                                                                 ▲                         │
                                                                 └──── ask again ◄─────────┘

Every answer costs money, so each is written to the file at once, even if it cannot be parsed. A resumed run reads its
cache and its costs from that file.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.environment import AgentConfig
from agentrl.config.judge import JudgeConfig
from agentrl.engine import ChatAnswer, SamplingParams, StopReason
from agentrl.errors import BudgetSpent, EngineError, UsageError
from agentrl.message import Message, user
from agentrl.observe.files import JsonLinesWriter, read_json_lines
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.remote.chat import ChatService, ServiceSettings, ServiceStatusError
from agentrl.rollout.events import RolloutCounters, episode_counters
from agentrl.rollout.judges.verdicts import BOUNDS, UnreadableAnswer, VerdictFormat, without_bounds

NO_SCHEMA = (400, 415, 422, 501)
"""HTTP statuses with which services reject a ``response_format``."""
MILLION = 1e6
CUT = "Your answer was cut off at its end. Write a shorter answer."

_log = logging.getLogger(__name__)
JUDGE_FILE = "judge.jsonl"
"""File in the run's folder with the judge's answers and token counts."""


class Guidance(enum.IntEnum):
    """Part of a verdict's JSON schema that the service enforces."""

    WHOLE = 0
    WITHOUT_BOUNDS = 1
    NONE = 2

    def part_of(self, schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the schema to send."""
        if schema is None or self is Guidance.NONE:
            return None
        return schema if self is Guidance.WHOLE else without_bounds(schema)

    def after(self, refusal: str) -> Guidance:
        """Return the part to send after a rejection."""
        names_bounds = any(name in refusal for name in BOUNDS)
        return Guidance.WITHOUT_BOUNDS if self is Guidance.WHOLE and names_bounds else Guidance.NONE


class JudgeClient:
    """Client of a judge's service with a cache and a budget.

    Args:
        service: Chat service of the judge.
        settings: Settings of the judge.
        file: File for answers and their tokens; ``None`` keeps them only in memory.
        counters: Counts of requests that no runner's episode makes; new ones by default.
    """

    def __init__(
        self,
        service: ChatService,
        settings: JudgeConfig,
        *,
        file: Path | None = None,
        counters: RolloutCounters | None = None,
    ) -> None:
        self._service, self._settings = service, settings
        self._counters = counters or RolloutCounters()
        self._guidance = Guidance.NONE if settings.guided == "never" else Guidance.WHOLE
        self._known: dict[str, str] = {}
        self._running: dict[str, asyncio.Task[str]] = {}
        self._places = asyncio.Semaphore(settings.engine.max_concurrent)
        self._requests, self._tokens, self._cost = 0, 0, 0.0
        if file is not None and file.exists():
            self._restore(file)
        self._file = None if file is None else JsonLinesWriter(file)

    def _restore(self, file: Path) -> None:
        for record in read_json_lines(file):
            self._requests += 1
            self._tokens += record["prompt_tokens"] + record["answer_tokens"]
            self._cost += self._cost_of(record["prompt_tokens"], record["answer_tokens"])
            if record["readable"] and self._settings.cache == "disk":
                self._known[record["key"]] = record["answer"]

    @property
    def counters(self) -> RolloutCounters:
        """Counts of the runner that makes the request: of training, an evaluation, or extra rollouts."""
        return episode_counters.get(self._counters)

    @property
    def continues_without(self) -> bool:
        """True if the budget is spent and the run continues without the judge."""
        return self._settings.budget.when_spent == "environment" and self.spent is not None

    @property
    def spent(self) -> str | None:
        """Description of the budget that is used up; ``None`` while some budget is left."""
        budget = self._settings.budget
        if budget.max_requests is not None and self._requests >= budget.max_requests:
            return f"{self._requests} requests of {budget.max_requests}"
        if budget.max_tokens_total is not None and self._tokens >= budget.max_tokens_total:
            return f"{self._tokens} tokens of {budget.max_tokens_total}"
        if budget.max_cost is not None and self._cost >= budget.max_cost:
            return f"a cost of {self._cost:g} of {budget.max_cost:g}"
        return None

    async def ask(self, question: str, answer_format: VerdictFormat, name: str) -> Mapping[str, Any]:
        """Ask the judge, and return the fields of a readable answer.

        Args:
            question: Question without the instructions of the answer's format.
            answer_format: Required format of the answer.
            name: Name of the judged episode or group, for messages.

        Raises:
            EngineError: no answer could be parsed in the allowed number of attempts, or the service did not answer.
            BudgetSpent: the answer is not cached, and the budget is used up.
            UsageError: the service refuses the key or the model, or reports no tokens although the budget needs them.
        """
        whole = "\n\n".join(filter(None, (question, answer_format.instructions)))
        key = self._key(whole, answer_format)
        if (known := self._find_verdict(key, answer_format)) is not None:
            self.counters.judge_cached += 1
            return known
        if self._settings.cache == "off":
            return answer_format.read(await self._readable(whole, answer_format, key, name))
        request = self._running.get(key)
        if request is None:
            request = self._running[key] = asyncio.create_task(self._readable(whole, answer_format, key, name))
            request.add_done_callback(lambda done: self._remove_request(key, done))
        else:
            self.counters.judge_cached += 1
        return answer_format.read(await asyncio.shield(request))

    def _find_verdict(self, key: str, answer_format: VerdictFormat) -> Mapping[str, Any] | None:
        """Return a cached verdict, unless its pydantic model has become stricter since."""
        if (answer := self._known.get(key)) is None:
            return None
        try:
            return answer_format.read(answer)
        except UnreadableAnswer:
            return None

    def _remove_request(self, key: str, task: asyncio.Task[str]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # all callers may have been cancelled

    def _key(self, question: str, answer_format: VerdictFormat) -> str:
        settings = self._settings
        inputs = {
            "model": settings.engine.model,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "question": question,
            "schema": answer_format.schema,
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=False).encode()).hexdigest()

    async def _readable(self, question: str, answer_format: VerdictFormat, key: str, name: str) -> str:
        """Repeat the question until an answer can be parsed, and return its text."""
        messages: list[Message] = [user(question)]
        for attempt in range(self._settings.attempts):
            answer = await self._request(messages, answer_format, f"{name}/judge-{attempt}")
            text = _text_of(answer, answer_format)
            wrong = CUT if answer.stop_reason is StopReason.LENGTH else _find_fault(text, answer_format)
            self._note(answer, key, text, is_readable=wrong is None)
            if wrong is None:
                return text
            messages = _asked_again(messages, text, wrong)
        raise EngineError(
            f"the judge gave no score for {name}",
            got=repr(text[-200:]),
            expected=f"an answer that can be parsed ({wrong})",
            hint="raise agent.judge.max_tokens if the answer is cut off, or change the prompt",
        )

    async def _request(self, messages: list[Message], answer_format: VerdictFormat, request_id: str) -> ChatAnswer:
        """Send one request to the service if the budget allows it."""
        async with self._places:
            if (spent := self.spent) is not None:
                raise BudgetSpent(
                    "the budget of the judge is spent",
                    got=spent,
                    hint="raise it in agent.judge.budget and resume with: agentrl train --resume RUN",
                )
            self._requests += 1  # requests in flight count, so that the limit holds
            began = time.perf_counter()
            try:
                answer = await self._send(messages, answer_format, request_id)
            except asyncio.CancelledError:
                self._note_withdrawn(request_id)
                raise
            except BaseException:
                self._requests -= 1
                raise
            self.counters.judge_seconds += time.perf_counter() - began
            return answer

    async def _send(self, messages: list[Message], answer_format: VerdictFormat, request_id: str) -> ChatAnswer:
        """Send a request with as much of the JSON schema as the service accepts."""
        settings, schema = self._settings, answer_format.schema
        params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
        guidance = self._guidance
        refusal: ServiceStatusError | None = None
        while True:
            part = guidance.part_of(schema)
            try:
                answer = await self._service.chat(messages, (), params, request_id, json_schema=part)
            except ServiceStatusError as error:
                if part is None or error.status not in NO_SCHEMA:
                    raise  # the schema is not the reason
                guidance, refusal = guidance.after(error.text), error
                if guidance is Guidance.NONE and settings.guided == "always":
                    raise
                continue
            if refusal is not None and guidance > self._guidance:
                self._guidance = guidance
                what = "the bounds in response_format" if guidance < Guidance.NONE else "response_format"
                _log.warning(
                    "the judge rejects %s (%s): from now on, only the prompt describes %s",
                    what,
                    refusal.got,
                    "the bounds" if guidance < Guidance.NONE else "the format",
                )
            return answer

    def _note(self, answer: ChatAnswer, key: str, text: str, *, is_readable: bool) -> None:
        """Record an answer, its text and its cost."""
        budget, counters = self._settings.budget, self.counters
        tokens, cost = answer.prompt_tokens + answer.answer_tokens, self._cost_of_answer(answer)
        if not tokens and (budget.max_tokens_total is not None or budget.max_cost is not None):
            raise UsageError(
                f"the judge at {self._settings.engine.url} does not report its tokens",
                expected="usage in its answers, which agent.judge.budget needs",
                hint="limit agent.judge.budget.max_requests instead",
            )
        self._tokens += tokens
        self._cost += cost
        counters.judge_requests += 1
        counters.judge_unreadable += not is_readable
        counters.judge_tokens += tokens
        counters.judge_cost += cost
        if is_readable and self._settings.cache != "off":
            self._known[key] = text
        self._append(key, text, answer.prompt_tokens, answer.answer_tokens, is_readable=is_readable)

    def _note_withdrawn(self, request_id: str) -> None:
        """Record a request that was cancelled before its answer: the service may have received it, and may bill it."""
        self._append(request_id, "", 0, 0, is_readable=False)

    def _append(self, key: str, answer: str, prompt_tokens: int, answer_tokens: int, *, is_readable: bool) -> None:
        if self._file is not None:
            self._file.append(
                {
                    "key": key,
                    "readable": is_readable,
                    "answer": answer,
                    "prompt_tokens": prompt_tokens,
                    "answer_tokens": answer_tokens,
                }
            )

    def _cost_of_answer(self, answer: ChatAnswer) -> float:
        return self._cost_of(answer.prompt_tokens, answer.answer_tokens)

    def _cost_of(self, prompt_tokens: int, answer_tokens: int) -> float:
        budget = self._settings.budget
        return (prompt_tokens * budget.prompt_price + answer_tokens * budget.answer_price) / MILLION

    async def close(self) -> None:
        """Cancel running requests, and close the connections and the file. Idempotent."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._service.close()
        if self._file is not None:
            self._file.close()


def _asked_again(messages: Sequence[Message], answer: str, wrong: str) -> list[Message]:
    """Return a question after an answer that cannot be read; services reject histories with an empty answer."""
    if answer:
        return [*messages, Message(role="assistant", content=answer), user(wrong)]
    return [*messages[:-1], user(f"{messages[-1].text}\n\n{wrong}")]


def _text_of(answer: ChatAnswer, answer_format: VerdictFormat) -> str:
    """Return the text of an answer; of a typed one without any, its thinking.

    Servers that parse thinking may take a whole answer that is constrained to JSON for it.
    """
    text = answer.message.text
    return text if text.strip() or answer_format.schema is None else answer.message.reasoning or ""


def _find_fault(text: str, answer_format: VerdictFormat) -> str | None:
    """Describe why an answer cannot be read; ``None`` for a readable answer."""
    try:
        answer_format.read(text)
    except UnreadableAnswer as why:
        return str(why)
    return None


def build_judge(config: AgentConfig, *, folder: Path | None = None) -> JudgeClient | None:
    """Build the client of the judge that all episodes of a run share; ``None`` if the config has no judge.

    Args:
        config: The ``agent`` section.
        folder: Folder of the run, for the judge's answers and spent budget.
    """
    judge = config.judge
    if judge is None:
        return None
    keeps = judge.cache == "disk" or judge.budget.is_limited
    file = folder / JUDGE_FILE if folder is not None and keeps else None
    return JudgeClient(ChatService(judge_service_settings(judge)), judge, file=file)


def judge_metrics(counts: Mapping[str, float], judge: JudgeConfig, prefix: str = "") -> dict[str, float]:
    """Return the metrics of a judge.

    Args:
        counts: Counts as `RolloutCounters.judge_counts` returns them, of a step or an evaluation.
        judge: Settings of the judge.
        prefix: Beginning of the metrics' names: ``"eval/"``.
    """
    requests, pairs = counts["requests"], counts["pairs"]
    metrics = {f"{prefix}judge/{name}": counts[name] for name in ("requests", "cached", "tokens")}
    if requests:
        metrics[f"{prefix}judge/unreadable"] = counts["unreadable"] / requests
        metrics[f"{TIMING_PREFIX}{prefix}judge_s"] = counts["seconds"] / requests
    if pairs:
        metrics[f"{prefix}judge/order_agreement"] = counts["agreeing"] / pairs
    if judge.budget.prompt_price or judge.budget.answer_price:
        metrics[f"{prefix}judge/cost"] = counts["cost"]
    if judge.budget.when_spent == "environment":
        metrics[f"{prefix}judge/without"] = counts["without"]
    return metrics


def judge_service_settings(judge: JudgeConfig) -> ServiceSettings:
    """Return the settings of the judge's chat service."""
    engine = judge.engine
    return ServiceSettings(
        url=engine.url,
        model=engine.model,
        api_key_variable=engine.api_key_variable,
        timeout_s=engine.timeout_s,
        retries=engine.retries,
        max_concurrent=engine.max_concurrent,
        section="agent.judge.engine",
    )
