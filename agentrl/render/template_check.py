"""Check, before a run starts, for chat templates that rewrite history, or that omit tools or calls.

The ledger only grows. If a template shows an earlier turn differently once more messages follow (Qwen3 drops earlier
thinking, others move the tools or rename roles), training and deployment see different prompts. Text that the model
sampled must be shown unchanged. White space that a template trims, and blocks that the template itself writes, may
differ: the ledger keeps them.

A template that omits tools or calls raises no error: the model never sees the tools that it should call (the published
templates of Llama 3 and DeepSeek V3), or a demonstrated call becomes an empty answer (the first template of Kimi K2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentrl.errors import TemplateError
from agentrl.message import Content, ImagePart, Message, Role, TextPart, ToolCall, system, user
from agentrl.render.call_form import PROBE_ARGUMENTS, PROBE_NAME, PROBE_TOOL, shows_call
from agentrl.render.chat_template import ToolSchema, common_prefix
from agentrl.render.content_guard import unbroken
from agentrl.render.renderer import OmittedText, Renderer, without_space

_OPENING = (system("You play."), user("start"))
_AROUND = 60
_TURNS = 3
_MOVE = "go north"
_THOUGHT = "it is cold here"
_LOOK: ToolSchema = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


class RewrittenHistory(TemplateError):
    """Error of a chat template that shows an earlier turn differently once more messages follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeAnswers:
    """Answer for each turn of a conversation that is rendered as a whole and turn by turn."""

    what: str
    message: Message
    """Parsed answer."""
    sampled: str
    """Text of the answer as the model writes it."""


def _text_probe(renderer: Renderer, what: str, text: str) -> _ProbeAnswers:
    if not renderer.thinks:
        message = Message(role="assistant", content=text)
        return _ProbeAnswers(what=what, message=message, sampled=renderer.plain_answer(text))
    message = Message(role="assistant", content=text, reasoning=_THOUGHT)
    sampled = renderer.plain_answer(text, thought=_THOUGHT)
    return _ProbeAnswers(what="answers with thinking", message=message, sampled=sampled)


def _call_probe(renderer: Renderer, tool: ToolSchema, *, thinks: bool) -> _ProbeAnswers:
    name = tool["function"]["name"]
    call = ToolCall(name=name, arguments={"direction": "north"}, id=renderer.call_id(name, 0))
    message = Message(role="assistant", tool_calls=(call,), reasoning=_THOUGHT if thinks else None)
    return _ProbeAnswers(what="tool calls", message=message, sampled=renderer.answer_text(message))


def check_template(
    renderer: Renderer, *, roles: Sequence[Role] = ("user",), tools: Sequence[ToolSchema] = (), has_calls: bool = False
) -> None:
    """Check that rendering turn by turn gives the same prompts as rendering the whole conversation.

    Args:
        renderer: Renderer of the run's model.
        roles: Roles of the messages that the agent loop adds after an answer, ``user`` or ``tool`` or both.
        tools: Tools that the run offers.
        has_calls: True if answers call tools, although no message of the role ``tool`` may follow.

    Raises:
        RewrittenHistory: The template would change or drop sampled text; the message has the two renderings around the
            first difference and the next step.
        TemplateError: The template refuses a role, or omits tools or calls.
    """
    for fault in template_faults(renderer, roles=roles, tools=tools, has_calls=has_calls):
        raise fault


def template_faults(
    renderer: Renderer, *, roles: Sequence[Role], tools: Sequence[ToolSchema] = (), has_calls: bool = False
) -> Iterator[TemplateError]:
    """List what is wrong with a chat template: tools or calls that it leaves out, else history that it rewrites.

    The arguments are those of `check_template`; `roles` is empty if no message follows an answer.
    """
    checks: list[Callable[[], None]] = []
    if tools:
        checks.append(lambda: check_tools_shown(renderer, tools))
    if has_calls or "tool" in roles or (roles and tools):
        checks.append(lambda: check_calls_shown(renderer))
    is_shown = True
    for check in checks:
        for fault in _collect_errors(renderer, check):
            is_shown = False
            yield fault
    if is_shown:
        yield from _collect_errors(renderer, lambda: _check_history(renderer, roles, tools))


def find_omitted_text(renderer: Renderer) -> RewrittenHistory | None:
    """Return the fault of a template that omits text next to tool calls, which a policy may sample; else ``None``.

    The published templates of Hermes 2 Pro, Llama 3.1 and Mistral (versions 3 and 7) do.
    """
    call = ToolCall(name=PROBE_NAME, arguments=PROBE_ARGUMENTS, id=renderer.call_id(PROBE_NAME, 0))
    try:
        with renderer.template.trial():
            renderer.answer_text(Message(role="assistant", content=_THOUGHT, tool_calls=(call,)))
    except OmittedText as error:
        return RewrittenHistory(error.what, got=error.got, expected=error.expected, hint=error.hint)
    except TemplateError:  # other checks find it
        return None
    return None


def _collect_errors(renderer: Renderer, check: Callable[[], None]) -> Iterator[TemplateError]:
    try:
        with renderer.template.trial():
            check()
    except TemplateError as fault:
        yield fault


def _check_history(renderer: Renderer, roles: Sequence[Role], tools: Sequence[ToolSchema]) -> None:
    texts = [
        _text_probe(renderer, "plain answers", _MOVE),
        _text_probe(renderer, "answers with white space around them", f"  {_MOVE} \n"),
    ]
    for text in texts if "user" in roles else ():
        _compare(renderer, [(text, "user")], tools)
    if "tool" not in roles:
        return
    call = _call_probe(renderer, tools[0] if tools else _LOOK, thinks=renderer.thinks)
    _compare(renderer, [(call, "tool")], tools)
    if "user" in roles:
        _compare(renderer, [(call, "tool"), (texts[0], "user")], tools)


def _compare(renderer: Renderer, turns: Sequence[tuple[_ProbeAnswers, Role]], tools: Sequence[ToolSchema]) -> None:
    """Render three turns both ways, with images if the model reads images.

    `turns` are the answers, with the roles of the messages after them, which are used in rotation.
    """
    has_images = renderer.images is not None
    messages = [system("You play."), user(_content("start", image=has_images))]
    kept = renderer.template.render(messages, tools=tools, generation_prompt=True)
    for turn in range(_TURNS):
        probe, role = turns[turn % len(turns)]
        follow = _follow_up(role, turn, probe, image=has_images)
        messages += [probe.message, follow]
        kept += probe.sampled + renderer.after_answer([follow])
        rendered = renderer.template.render(messages, tools=tools, generation_prompt=True)
        if rendered != kept:
            if not is_same_history(renderer, kept, rendered):
                raise _history_error(renderer, probe, kept, rendered)
            return


def _follow_up(role: Role, turn: int, probe: _ProbeAnswers, *, image: bool) -> Message:
    if role == "tool":
        (call,) = probe.message.tool_calls
        content = _content(f"result {turn}", image=image)
        return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)
    return user(_content(f"observation {turn}", image=image))


def _content(text: str, *, image: bool) -> Content:
    return (TextPart(text=text), ImagePart(data=b"")) if image else text


def is_same_history(renderer: Renderer, kept: str, rendered: str) -> bool:
    """Return True if a rendering equals the ledger's text, apart from white space and the template's own blocks."""
    found = without_space(rendered)
    return found in (without_space(kept), without_space(_with_headers_of_history(renderer, kept)))


def _history_error(renderer: Renderer, probe: _ProbeAnswers, kept: str, rendered: str) -> RewrittenHistory:
    at = common_prefix(kept, rendered)
    return RewrittenHistory(
        f"the chat template rewrites history (it changes {probe.what})",
        got=f"{_around(rendered, at)} from the template",
        expected=f"{_around(kept, at)} as it was sampled",
        hint=_hint(renderer, probe),
    )


def _with_headers_of_history(renderer: Renderer, kept: str) -> str:
    """Return `kept` with the header of past answers in place of the header of new ones, except at its end."""
    question, reply = [user("x")], "@@REPLY@@"
    start = len(renderer.template.render(question))
    answered = [*question, Message(role="assistant", content=reply), user("y")]
    history = renderer.template.render(answered)[start:].partition(reply)[0]
    asking = renderer.template.render(question, generation_prompt=True)[start:]
    if asking == history or not asking.startswith(history):
        return kept
    past, now, rest = kept.rpartition(asking)
    return past.replace(asking, history) + (history if rest else now) + rest  # Gemma 4 goes on without a header


def _hint(renderer: Renderer, probe: _ProbeAnswers) -> str:
    ways = [
        "use the agent loop step_independent, whose turns have separate prompts",
        "use a chat template that only appends",
    ]
    if probe.message.reasoning is not None and renderer.enable_thinking and not renderer.thinking.always:
        ways.insert(0, "set agent.enable_thinking to false")
    return "; or ".join(ways)


def _around(text: str, at: int) -> str:
    before, after = text[max(0, at - _AROUND) : at], text[at : at + _AROUND]
    return f"{before!r} → {after!r}"


def check_tools_shown(renderer: Renderer, tools: Sequence[ToolSchema]) -> None:
    """Check that the prompt of a conversation names every tool.

    Raises:
        TemplateError: A tool's name is not in the prompt, or the template refuses the tools.
    """
    without = renderer.template.render(_OPENING, generation_prompt=True)
    shown = unbroken(renderer.template.render(_OPENING, tools=tools, generation_prompt=True))
    missing = [name for tool in tools if shown.count(name := tool["function"]["name"]) <= without.count(name)]
    if missing:
        raise renderer.tool_not_shown(missing[0])


def check_calls_shown(renderer: Renderer) -> None:
    """Check that an answer with a tool call shows the call in a form that the model's parser reads.

    Raises:
        TemplateError: The call's name or arguments are missing, or the parser does not read the call.
    """
    call = ToolCall(name=PROBE_NAME, arguments=PROBE_ARGUMENTS, id=renderer.call_id(PROBE_NAME, 0))
    thought = "it is cold here" if renderer.thinks else None
    text = renderer.answer_text(Message(role="assistant", tool_calls=(call,), reasoning=thought))
    if not shows_call(text, call):
        raise renderer.call_not_shown(call, text)
    ids = renderer.demonstration(text)
    if renderer.stop_token_ids & {*ids[:-1]}:
        raise TemplateError(
            "the chat template ends the turn before the end of an answer with tool calls",
            got=repr(text),
            expected="one end of turn, after the calls",
            hint=renderer.ways_around_tools,
        )
    if renderer.parser_name is None:
        return
    read = renderer.read(ids, tools=[PROBE_TOOL])
    found = [(one.name, one.arguments) for one in read.tool_calls]
    if found != [(call.name, call.arguments)] or read.message.text or read.problems:
        raise TemplateError(
            f"the tool-call parser {renderer.parser_name} does not read calls as the chat template writes them",
            got=f"{text!r}, read as {read.message.text!r} with the calls {[one.name for one in read.tool_calls]}"
            + "".join(f"; {problem}" for problem in read.problems),
            expected=f"one call of {call.name} with the arguments {dict(call.arguments)}",
            hint="set agent.tool_parser to the parser of the template's notation, or model.chat_template to a template "
            "of the model's family",
        )
