"""The one client that all episodes of a run ask their judge through: cache, budget, limits, counts.

    verdict ─► known? ─► asked for by another episode? ─► budget left? ─► service ─► readable? ─► cache
                                                              ▲                          │
                                                              └──── asked again ◄────────┘

Every answer is paid for, so each is written to the file at once, readable or not: a resumed run reads there what it
knows and what it has spent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.judge import JudgeConfig
from agentrl.engine import ChatAnswer, SamplingParams, StopReason
from agentrl.errors import BudgetSpent, EngineError, UsageError
from agentrl.message import Message, user
from agentrl.observe.files import JsonLinesWriter, read_json_lines
from agentrl.remote.chat import ChatService, ServiceRefusal
from agentrl.rollout.judges.forms import Form, Unreadable
from agentrl.rollout.waits import RolloutCounters

NO_SCHEMA = (400, 415, 422, 501)
"""Statuses of services that do not take a ``response_format``."""
MILLION = 1e6
CUT = "Your answer was cut off at its end: write less."

_log = logging.getLogger(__name__)


class JudgeClient:
    """Asks a judge's service, no more often than needed, and within the budget.

    Args:
        service: Where the judge is.
        settings: Of the judge.
        file: Keeps answers and what they cost; ``None`` keeps them in memory.
        counters: Get the counts.
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
        self.counters = counters or RolloutCounters()
        self._is_guided = settings.guided != "never"
        self._known: dict[str, str] = {}
        self._asked: dict[str, asyncio.Task[str]] = {}
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
    def goes_on_without(self) -> bool:
        """The budget is spent, and the run goes on without the judge."""
        return self._settings.budget.when_spent == "environment" and self.spent is not None

    @property
    def spent(self) -> str | None:
        """Say what has been spent; ``None`` while something of the budget is left."""
        budget = self._settings.budget
        if budget.max_requests is not None and self._requests >= budget.max_requests:
            return f"{self._requests} requests of {budget.max_requests}"
        if budget.max_tokens_total is not None and self._tokens >= budget.max_tokens_total:
            return f"{self._tokens} tokens of {budget.max_tokens_total}"
        if budget.max_cost is not None and self._cost >= budget.max_cost:
            return f"a cost of {self._cost:g} of {budget.max_cost:g}"
        return None

    async def ask(self, question: str, form: Form, name: str) -> Mapping[str, Any]:
        """Return the fields of a readable answer.

        Args:
            question: What the judge is asked, without the form of its answer.
            form: Of the answer.
            name: What is judged, for messages.

        Raises:
            EngineError: no answer of the form in as many attempts as are allowed, or no answer at all.
            BudgetSpent: the question would have to be paid for, and nothing is left.
            UsageError: the service refuses the key or the model, or reports no tokens for a budget of tokens.
        """
        whole = "\n\n".join(filter(None, (question, form.instructions)))
        key = self._key(whole, form)
        if (known := self._recalled(key, form)) is not None:
            self.counters.judge_cached += 1
            return known
        if self._settings.cache == "off":
            return form.read(await self._readable(whole, form, key, name))
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = asyncio.create_task(self._readable(whole, form, key, name))
            asked.add_done_callback(lambda done: self._forget(key, done))
        else:
            self.counters.judge_cached += 1
        return form.read(await asyncio.shield(asked))

    def _recalled(self, key: str, form: Form) -> Mapping[str, Any] | None:
        """Return a known verdict, unless a pydantic model has become stricter since."""
        if (answer := self._known.get(key)) is None:
            return None
        try:
            return form.read(answer)
        except Unreadable:
            return None

    def _forget(self, key: str, task: asyncio.Task[str]) -> None:
        del self._asked[key]
        if not task.cancelled():
            task.exception()  # those who asked may be gone

    def _key(self, question: str, form: Form) -> str:
        settings = self._settings
        said = {
            "model": settings.engine.model,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "question": question,
            "schema": form.schema,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=False).encode()).hexdigest()

    async def _readable(self, question: str, form: Form, key: str, name: str) -> str:
        """Ask until an answer is of the form, and return its text."""
        messages: list[Message] = [user(question)]
        for attempt in range(self._settings.attempts):
            answer = await self._paid(messages, form, f"{name}/judge-{attempt}")
            wrong = _what_is_wrong(answer, form)
            self._note(answer, key, is_readable=wrong is None)
            if wrong is None:
                return answer.message.text
            messages += [answer.message, user(wrong)]
        raise EngineError(
            f"the judge gave no score for {name}",
            got=repr(answer.message.text[-200:]),
            expected=f"an answer that can be read ({wrong})",
            hint="raise agent.judge.max_tokens if the answer is cut short, or change the prompt",
        )

    async def _paid(self, messages: list[Message], form: Form, request_id: str) -> ChatAnswer:
        """Ask the service once, if the budget allows it."""
        async with self._places:
            if (spent := self.spent) is not None:
                raise BudgetSpent(
                    "the budget of the judge is spent",
                    got=spent,
                    hint="raise it in agent.judge.budget and go on with: agentrl train --resume RUN",
                )
            self._requests += 1  # those in flight count, so that the limit holds
            began = time.perf_counter()
            try:
                answer = await self._guided(messages, form, request_id)
            except asyncio.CancelledError:
                self._note_withdrawn(request_id)
                raise
            except BaseException:
                self._requests -= 1
                raise
            self.counters.judge_seconds += time.perf_counter() - began
            return answer

    async def _guided(self, messages: list[Message], form: Form, request_id: str) -> ChatAnswer:
        """Ask with the JSON schema, unless the service has refused one."""
        settings, schema = self._settings, form.schema if self._is_guided else None
        params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
        try:
            return await self._service.chat(messages, (), params, request_id, json_schema=schema)
        except ServiceRefusal as refusal:
            if schema is None or settings.guided == "always" or refusal.status not in NO_SCHEMA:
                raise
            answer = await self._service.chat(messages, (), params, request_id)  # raises if something else is wrong
            if self._is_guided:
                self._is_guided = False
                _log.warning(
                    "the judge refuses response_format (%s): verdicts are asked for in words alone from now on",
                    refusal.got,
                )
            return answer

    def _note(self, answer: ChatAnswer, key: str, *, is_readable: bool) -> None:
        """Keep an answer, and what it cost."""
        budget, counters = self._settings.budget, self.counters
        tokens, cost = answer.prompt_tokens + answer.answer_tokens, self._cost_of_answer(answer)
        if not tokens and (budget.max_tokens_total is not None or budget.max_cost is not None):
            raise UsageError(
                f"the judge at {self._settings.engine.url} does not report its tokens",
                expected="usage in its answers, for agent.judge.budget",
                hint="limit agent.judge.budget.max_requests instead",
            )
        self._tokens += tokens
        self._cost += cost
        counters.judge_requests += 1
        counters.judge_unreadable += not is_readable
        counters.judge_tokens += tokens
        counters.judge_cost += cost
        if is_readable and self._settings.cache != "off":
            self._known[key] = answer.message.text
        if self._file is not None:
            self._file.append(
                {
                    "key": key,
                    "readable": is_readable,
                    "answer": answer.message.text,
                    "prompt_tokens": answer.prompt_tokens,
                    "answer_tokens": answer.answer_tokens,
                }
            )

    def _note_withdrawn(self, request_id: str) -> None:
        """Keep a request that was withdrawn before its answer came: the service may have been sent it, and bills it."""
        if self._file is not None:
            self._file.append(
                {"key": request_id, "readable": False, "answer": "", "prompt_tokens": 0, "answer_tokens": 0}
            )

    def _cost_of_answer(self, answer: ChatAnswer) -> float:
        return self._cost_of(answer.prompt_tokens, answer.answer_tokens)

    def _cost_of(self, prompt_tokens: int, answer_tokens: int) -> float:
        budget = self._settings.budget
        return (prompt_tokens * budget.prompt_price + answer_tokens * budget.answer_price) / MILLION

    async def close(self) -> None:
        """Drop the requests that run, and close the connections and the file. Idempotent."""
        running = list(self._asked.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._service.close()
        if self._file is not None:
            self._file.close()


def _what_is_wrong(answer: ChatAnswer, form: Form) -> str | None:
    """Say why an answer cannot be read; ``None`` for one that can."""
    if answer.stop_reason is StopReason.LENGTH:
        return CUT
    try:
        form.read(answer.message.text)
    except Unreadable as why:
        return str(why)
    return None
