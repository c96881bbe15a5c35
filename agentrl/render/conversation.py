"""A conversation as one sequence of the ledger: the only place that writes the tokens of an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.agent_loop import Answer, AnswerSoFar
from agentrl.engine import Generation, StopReason
from agentrl.errors import LedgerError, TemplateError
from agentrl.image import PlacedImage, common_tokens
from agentrl.message import Message
from agentrl.render.check import is_same_history
from agentrl.render.content_guard import unbroken
from agentrl.render.progress import AnswerProgress
from agentrl.render.renderer import Rendered, Renderer
from agentrl.render.tokens import ToolSchema, common_prefix, require_prefix
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn, TurnTimings


@dataclass(frozen=True, slots=True)
class _AnswerEnd:
    """A place at which a history can be shared exactly: right after an answer."""

    messages: int
    """Messages up to and with the answer."""
    tokens: int
    """Tokens of the sequence up to and with the answer."""
    last_id: int | None
    """Last token of the answer; ``None`` when it is empty."""


class LedgerConversation:
    """One growing sequence of messages, kept as tokens.

    A turn is `prepare`, the engine's answer, `accept`; messages are `add`-ed in between and become tokens with the
    next `prepare`:

        conversation = LedgerConversation(renderer, trajectory, [system(...), user(...)])
        ids = conversation.prepare()
        answer = conversation.accept(await engine.generate(request(ids)))
        conversation.add([user("You see a cabinet 1.")])

    Args:
        renderer: Of the model that is asked.
        trajectory: Gets the conversation's sequence with the first `prepare`.
        messages: The first messages.
        tools: Schemas that the template renders into the prompt; with them, answers are searched for tool calls.
        repairs_calls: Also read calls that are not quite in the model's notation. What was sampled stays as it is.

    Raises:
        TemplateError: Tools are offered to a model whose template leaves them out, or whose way of calling them is not
            known.
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
        """The tokens of this conversation; part of the trajectory from the first `prepare` on."""
        self.messages: list[Message] = list(messages)
        """Everything said so far, messages that are not yet tokens included."""
        self._renderer = renderer
        self._trajectory = trajectory
        self.tools = tools
        """Schemas of the tools that the policy may call."""
        self._repairs_calls = repairs_calls
        self._prompt_length = 0
        self._answer_start: int | None = None
        self._asked_from = self.sequence
        self._answers: list[_AnswerEnd] = []
        self._rewritten_from: TokenSequence | None = None
        self._ahead: Rendered | None = None

    def add(self, messages: Sequence[Message]) -> None:
        """Append messages; they become tokens with the next `prepare`.

        Raises:
            LedgerError: The policy has been asked and has not answered.
        """
        if self._answer_start is not None:
            raise LedgerError("messages were added between a prompt and its answer", hint="accept the answer first")
        self._ahead = None
        self.messages.extend(messages)

    @property
    def pending_characters(self) -> int:
        """Characters of the messages that the next `prepare` writes."""
        known = self._answers[-1].messages if self._answers else 0
        return sum(len(message.text) for message in self.messages[known:])

    def render_ahead(self) -> None:
        """Render what the next `prepare` writes, and change nothing else: the one part that may run in a thread."""
        if self._answer_start is None and not self._renderer.rewrites_history:
            self._ahead = self._rendered()

    def prepare(self, prefill: str = "") -> list[int]:
        """Write pending messages and the header of the next answer; the ids to send to the engine.

        Calling it again before `accept` gives the same ids again (a request that is sent a second time).

        Args:
            prefill: Text put in the policy's mouth first, recorded as forced tokens.

        Raises:
            TemplateError: The template refuses the messages.
            LedgerError: The new tokens would change those before them.
        """
        if self._answer_start is None:
            self._asked_from = self.sequence if self._answers else TokenSequence()
            self._write_pending()
            self._answer_start = len(self.sequence)
            self.sequence.extend(self._renderer.prefill(prefill), Source.FORCED)
            self._prompt_length = len(self.sequence)
        return self.sequence.ids_list()

    def progress(self, stop: Sequence[str], tell: Callable[[AnswerSoFar], None]) -> Callable[[Sequence[int]], None]:
        """Return what reads the tokens of the answer that is being sampled, and tells what is certain of it.

        Args:
            stop: Texts that end the answer.
            tell: Gets more and more of the answer.
        """
        return AnswerProgress(self._renderer, self.tools, stop, self._prompt_length, tell).take

    def withdraw(self) -> None:
        """Take a prompt back that was not answered, and its sequence, where that was begun for it."""
        self._answer_start = None
        sequences = self._trajectory.sequences
        if sequences and sequences[-1] is self.sequence and not self.sequence.turns:
            sequences.pop()
        self.sequence = self._asked_from

    def accept(self, generation: Generation, *, role: str = "assistant", trained: bool = True) -> Answer:
        """Append what the engine sampled, as a turn of `role`, and read it.

        Args:
            generation: What the engine gave.
            role: Who speaks.
            trained: ``False`` records the tokens as forced ones.

        Raises:
            LedgerError: The policy was not asked, or ids, log-probabilities and versions differ in number.
        """
        start = self._take_answer_start()
        if trained:
            ids, logprobs, versions = generation.token_ids, generation.logprobs, generation.versions
            self.sequence.extend_sampled(ids, logprobs=logprobs, versions=versions)
        else:
            self.sequence.extend(generation.token_ids, Source.FORCED)
        if generation.routed_experts is not None:
            self.sequence.extend_routed_experts(generation.routed_experts)
        timings = TurnTimings(queue=generation.queue_s, prefill=generation.prefill_s, decode=generation.decode_s)
        return self._end_turn(start, role, generation.stop_reason, timings)

    def demonstrate(self, text: str, *, role: str = "assistant", source: Source = Source.FORCED) -> Answer:
        """Take a turn with an answer that the policy did not sample: tokens of `source`, with the end of the turn."""
        self.prepare()
        start = self._take_answer_start()
        self.sequence.extend(self._renderer.demonstration(text), source)
        return self._end_turn(start, role, StopReason.STOP, TurnTimings())

    def fork(self, messages: Sequence[Message]) -> LedgerConversation:
        """A conversation whose history is rewritten to `messages`.

        A history that begins like this one, up to an answer, keeps that answer's sampled tokens: the sequence goes on
        where nothing follows that answer yet, and forks there otherwise. Any other history is rendered anew and shares
        the longest common prefix of tokens. Shared tokens are stored, and trained, once.
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
        """Check that what an engine was sent for the current, or else the latest, answer is the ledger's prefix.

        Raises:
            LedgerError: It is not; shows the first differing token, its neighbours and the cause.
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
        if self._answers and self._renderer.rewrites_history and self._is_rewritten():
            self._rewritten_from, self._answers, self.sequence = self.sequence, [], TokenSequence()
        if self._answers:
            self._write_suffix(self._answers[-1])
        else:
            self._write_prompt()
        if not any(self.sequence is known for known in self._trajectory.sequences):
            self._trajectory.sequences.append(self.sequence)

    def _is_rewritten(self) -> bool:
        """Return True if the template now shows the conversation otherwise than the ledger has it."""
        answer = self._answers[-1]
        suffix = self._renderer.suffix(self.messages[answer.messages :], last_id=answer.last_id)
        kept = self._renderer.encoder.decode([*self.sequence.ids_list()[: answer.tokens], *suffix.ids])
        try:
            rendered = self._renderer.template.render(self.messages, tools=self.tools, generation_prompt=True)
        except TemplateError:  # such as two calls in one answer: there is no rendering of it that could differ
            return False
        rendered = unbroken(rendered)
        return not is_same_history(self._renderer, kept, rendered)

    def _rendered(self) -> Rendered:
        """Return what is pending as tokens."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        if self._answers:
            answer = self._answers[-1]
            return self._renderer.suffix(self.messages[answer.messages :], last_id=answer.last_id)
        return self._renderer.prompt(self.messages, self.tools)

    def _write_suffix(self, answer: _AnswerEnd) -> None:
        rendered = self._rendered()
        if len(self.sequence) > answer.tokens:
            self.sequence = self.sequence.fork(answer.tokens)
        self._append(rendered)

    def _write_prompt(self) -> None:
        rendered = self._rendered()
        known, before = 0, self._rewritten_from
        if before is not None:
            same = common_prefix(before.ids_list(), rendered.ids)
            known = common_tokens(same, before.images, rendered.images)
        if before is not None and known:
            self.sequence = before.fork(known)
        elif len(self.sequence):
            self.sequence = TokenSequence()
        self._append(rendered, known)

    def _append(self, rendered: Rendered, known: int = 0) -> None:
        """Write what was rendered, of which the first `known` tokens are in the sequence already."""
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
            raise LedgerError("an answer came without a prompt", hint="call prepare before each answer")
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
        self.messages.append(answer.message)
        self._answers.append(_AnswerEnd(len(self.messages), turn.end, ids[-1] if ids else None))
        return answer
