"""Check, before a run starts, for chat templates that omit tools or calls.

Such a template raises no error: the model never sees the tools that it should call (the published templates of Llama 3
and DeepSeek V3), or a demonstrated call becomes an empty answer (the first template of Kimi K2).
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import TemplateError
from agentrl.message import Message, ToolCall, system, user
from agentrl.render.call_form import PROBE_ARGUMENTS, PROBE_NAME, PROBE_TOOL, shows_call
from agentrl.render.chat_template import ToolSchema
from agentrl.render.content_guard import unbroken
from agentrl.render.renderer import Renderer

_OPENING = (system("You play."), user("start"))


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
