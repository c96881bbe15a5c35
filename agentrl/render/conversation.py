"""Conversation on one sequence of the ledger; the only code that writes the tokens of an episode."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.agent_loop import Answer, AnswerSoFar
from agentrl.engine import Generation, StopReason
from agentrl.errors import LedgerError, TemplateError
from agentrl.message import Message
from agentrl.message.image import PlacedImage, common_tokens
from agentrl.render.answer_tokens import AnswerProgress
from agentrl.render.chat_template import ToolSchema, common_prefix, require_prefix
from agentrl.render.content_guard import unbroken
from agentrl.render.renderer import RenderedTokens, Renderer
from agentrl.render.template_check import is_same_history
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn, TurnContext, TurnTimings


@dataclass(frozen=True, slots=True)
class _AnswerEnd:
    """End of an answer, up to which other histories can share the sequence exactly."""

    messages: int
    """Number of messages up to and including the answer."""
    tokens: int
    """Number of tokens of the sequence up to and including the answer."""
    last_id: int | None
    """Last token of the answer; ``None`` if it is empty."""


class LedgerConversation:
    """Growing sequence of messages, stored as tokens.

    A turn consists of `prepare`, the engine's answer and `accept`. Messages are added between turns with `add`, and the
    next `prepare` tokenizes them:

        conversation = LedgerConversation(renderer, trajectory, [system(...), user(...)])
        ids = conversation.prepare()
        answer = conversation.accept(await engine.generate(request(ids)))
        conversation.add([user("You see a cabinet 1.")])

    Args:
        renderer: Renderer of the model that answers.
        trajectory: Trajectory that gets the conversation's sequence in the first `prepare`.
        messages: First messages.
        tools: Schemas for the prompt; with tools, answers are searched for tool calls.
        repairs_calls: Also read calls with small deviations from the model's notation; sampled tokens do not change.

    Raises:
        TemplateError: Tools are offered, but the model's template omits them or its notation of calls is unknown.
    """

    def __init__(
        self,
        renderer: Renderer,
        trajectory: Trajectory,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        repairs_calls: bool = False,
    ) -> None:
        if tools:
            renderer.require_tools()
        self.sequence = TokenSequence()
        """Tokens of this conversation; part of the trajectory from the first `prepare` on."""
        self.messages: list[Message] = list(messages)
        """All messages so far, including those that are not tokenized yet."""
        self._renderer = renderer
        self._trajectory = trajectory
        self.tools = tools
        """Schemas of the offered tools."""
        self._repairs_calls = repairs_calls
        self._prompt_length = 0
        self._answer_start: int | None = None
        self._previous_sequence = self.sequence
        self._answers: list[_AnswerEnd] = []
        self._rewritten_from: TokenSequence | None = None
        self._ahead: RenderedTokens | None = None

    def add(self, messages: Sequence[Message]) -> None:
        """Append messages; the next `prepare` tokenizes them.

        Raises:
            LedgerError: A prompt is prepared and has no answer yet.
        """
        if self._answer_start is not None:
            raise LedgerError("messages were added between a prompt and its answer", hint="accept the answer first")
        self._ahead = None
        self.messages.extend(messages)

    @property
    def pending_characters(self) -> int:
        """Number of characters of the messages that the next `prepare` writes."""
        known = self._answers[-1].messages if self._answers else 0
        return sum(len(message.text) for message in self.messages[known:])

    def render_ahead(self) -> None:
        """Render the text of the next `prepare` without any other change; only this may run in a thread."""
        if self._answer_start is None and not self._may_be_rewritten():
            self._ahead = self._render()

    def prepare(self, prefill: str = "") -> array[int]:
        """Write pending messages and the header of the next answer, and return the ids to send to the engine.

        Another call before `accept` returns the same ids, for a request that is sent again. `prefill` begins the
        answer, and is recorded as forced tokens.

        Raises:
            TemplateError: The template refuses the messages.
            LedgerError: The new text would change earlier tokens.
        """
        if self._answer_start is None:
            self._previous_sequence = self.sequence if self._answers else TokenSequence()
            self._write_pending()
            self._answer_start = len(self.sequence)
            self.sequence.extend(self._renderer.prefill(prefill), Source.FORCED)
            self._prompt_length = len(self.sequence)
        return self.sequence.ids_array()

    def progress(self, stop: Sequence[str], tell: Callable[[AnswerSoFar], None]) -> Callable[[Sequence[int]], None]:
        """Return a function that takes tokens during sampling and tells the parts of the answer that are final.

        `stop` are the texts that end the answer.
        """
        return AnswerProgress(self._renderer, self.tools, stop, self._prompt_length, tell).take

    def withdraw(self) -> None:
        """Withdraw a prompt without an answer, and its sequence if the prompt began it."""
        self._answer_start = None
        sequences = self._trajectory.sequences
        if sequences and sequences[-1] is self.sequence and not self.sequence.turns:
            sequences.pop()
        self.sequence = self._previous_sequence

    def accept(self, generation: Generation, *, role: str = "assistant", trained: bool = True) -> Answer:
        """Append the sampled tokens as a turn of `role`, or as forced ones unless `trained`; return the parsed answer.

        Raises:
            LedgerError: No prompt was prepared, or ids, log-probabilities and versions differ in number.
        """
        start = self._take_answer_start()
        if trained:
            ids, logprobs, versions = generation.token_ids, generation.logprobs, generation.versions
            self.sequence.extend_sampled(ids, logprobs=logprobs, versions=versions)
        else:
            self.sequence.extend(generation.token_ids, Source.FORCED)
        if generation.routed_experts is not None:
            self.sequence.routes.append(generation.routed_experts, computed=len(self.sequence) - 1)
        timings = TurnTimings(queue=generation.queue_s, prefill=generation.prefill_s, decode=generation.decode_s)
        return self._end_turn(start, role, generation.stop_reason, timings)

    def demonstrate(self, text: str, *, role: str = "assistant", source: Source = Source.FORCED) -> Answer:
        """Add a turn with an answer that the policy did not sample, as tokens of `source` with the end of the turn."""
        self.prepare()
        start = self._take_answer_start()
        self.sequence.extend(self._renderer.demonstration(text), source)
        return self._end_turn(start, role, StopReason.STOP, TurnTimings())

    def fork(self, messages: Sequence[Message]) -> LedgerConversation:
        """Return a conversation whose history is rewritten to `messages`.

        A history that equals this one up to an answer keeps that answer's sampled tokens: the sequence continues if
        nothing follows the answer yet, and forks there otherwise. Any other history is rendered again and shares the
        longest common prefix of tokens. Shared tokens are stored and trained once.
        """
        child = LedgerConversation(
            self._renderer, self._trajectory, messages, tools=self.tools, repairs_calls=self._repairs_calls
        )
        same = common_prefix(self.messages, messages)
        child._answers = [end for end in self._answers if end.messages <= same]
        if child._answers:
            child.sequence = self.sequence
        else:
            child._rewritten_from = self.sequence
        return child

    def verify(self, sent_ids: Sequence[int], sent_images: Sequence[PlacedImage] = ()) -> None:
        """Check that the tokens sent to an engine for the current or else the latest answer are the ledger's prefix.

        Raises:
            LedgerError: They are not; the message has the first differing token, its neighbours and the cause.
        """
        require_prefix(self.sequence, self._prompt_length, sent_ids, self._renderer.encoder)
        images = self.sequence.images
        if images:
            images = tuple(image for image in images if image.end <= self._prompt_length)
        if images != tuple(sent_images):
            raise LedgerError(
                "the images sent to the engine are not those of the ledger's prefix",
                got=[(image.start, image.image.checksum[:8]) for image in sent_images],
                expected=[(image.start, image.image.checksum[:8]) for image in images],
            )

    def _write_pending(self) -> None:
        if self._may_be_rewritten() and self._is_rewritten():
            self._rewritten_from, self._answers, self.sequence = self.sequence, [], TokenSequence()
        if self._answers:
            self._write_suffix(self._answers[-1])
        else:
            self._write_prompt()
        if not any(self.sequence is known for known in self._trajectory.sequences):
            self._trajectory.sequences.append(self.sequence)

    def _may_be_rewritten(self) -> bool:
        """Return True if the template may show the conversation differently once more messages follow."""
        if not self._answers:
            return False
        answer = self.messages[self._answers[-1].messages - 1]
        drops_text = self._renderer.omits_text_beside_calls and bool(answer.tool_calls and answer.text.strip())
        return self._renderer.rewrites_history or drops_text

    def _is_rewritten(self) -> bool:
        """Return True if the template now shows the conversation differently from the ledger."""
        answer = self._answers[-1]
        suffix = self._renderer.suffix(self.messages[answer.messages :], last_id=answer.last_id)
        kept = self._renderer.encoder.decode([*self.sequence.ids_list()[: answer.tokens], *suffix.ids])
        try:
            rendered = self._renderer.template.render(self.messages, tools=self.tools, generation_prompt=True)
        except TemplateError:  # such as for two calls in one answer: no rendering to compare
            return False
        rendered = unbroken(rendered)
        return not is_same_history(self._renderer, kept, rendered)

    def _render(self) -> RenderedTokens:
        """Return the pending messages as tokens."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        if self._answers:
            answer = self._answers[-1]
            return self._renderer.suffix(self.messages[answer.messages :], last_id=answer.last_id)
        return self._renderer.prompt(self.messages, self.tools)

    def _write_suffix(self, answer: _AnswerEnd) -> None:
        rendered = self._render()
        if len(self.sequence) > answer.tokens:
            self.sequence = self.sequence.fork(answer.tokens)
        self._append(rendered)

    def _write_prompt(self) -> None:
        rendered = self._render()
        known, before = 0, self._rewritten_from
        if before is not None:
            same = common_prefix(before.ids_list(), rendered.ids)
            known = common_tokens(same, before.images, rendered.images)
        if before is not None and known:
            self.sequence = before.fork(known)
        elif len(self.sequence):
            self.sequence = TokenSequence()
        self._append(rendered, known)

    def _append(self, rendered: RenderedTokens, known: int = 0) -> None:
        """Append rendered tokens; the sequence already contains the first `known` ones."""
        start = len(self.sequence)
        if known:
            self.sequence.extend(rendered.ids[known:], rendered.sources[known:])
        else:
            self.sequence.extend(rendered.ids, rendered.sources)
        for image in rendered.images:
            if image.start >= known:
                self.sequence.place(image.shift(start - known))

    def _take_answer_start(self) -> int:
        start, self._answer_start = self._answer_start, None
        if start is None:
            raise LedgerError("an answer without a prompt", hint="call prepare before each answer")
        return start

    def _end_turn(self, start: int, role: str, stop_reason: StopReason, timings: TurnTimings) -> Answer:
        ids = self.sequence.ids_list(start)
        answer = self._renderer.read(ids, stop_reason=stop_reason, tools=self.tools, repairs_calls=self._repairs_calls)
        turn = Turn(
            index=sum(len(sequence.turns) for sequence in self._trajectory.sequences),
            start=start,
            end=len(self.sequence),
            role=role,
            stop_reason=stop_reason.value,
            valid=not answer.problems,
            repaired_calls=len(answer.repairs),
            timings=timings,
        )
        self.sequence.turns.append(turn)
        if self._renderer.keeps_contexts:
            context = TurnContext(messages=self.messages, position=len(self.messages), tools=self.tools)
            self._trajectory.contexts[turn.index] = context
        self.messages.append(answer.message)
        self._answers.append(_AnswerEnd(len(self.messages), turn.end, ids[-1] if ids else None))
        return answer
