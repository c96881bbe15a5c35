"""Instructions of the agent, and of the model that plays the customer, in a published task."""

from __future__ import annotations

import functools

from agentrl.env import Instructions
from agentrl.tool import Tool

from ...desks.calls import call_text
from ...desks.toolset import declare_tools, describe_tools
from ...retail.phrases import STOP
from ..options import POLICIES, TelecomOptions
from .company import CompanyTools
from .handset import Handset
from .phone_tools import PhoneTools
from .reading import PublishedTask, read_text
from .task_source import folder_of

TRANSFER, OUT_OF_SCOPE = "###TRANSFER###", "###OUT-OF-SCOPE###"
ENDS = (STOP, TRANSFER, OUT_OF_SCOPE)
"""Marks with which the customer's model ends a conversation."""
DONE = "done"
"""Tool with which an agent without a customer ends an episode."""
_EXAMPLE = call_text("get_customer_by_phone", {"phone_number": "555-123-2002"})
_PHONE_EXAMPLE = call_text("check_app_status", {"app_name": "messaging"})
_SOLO = """
# How to act
You cannot talk to the customer. You get a ticket, and you have the tools of the company and of the customer's phone.
Call one tool in each turn, and write nothing else. When the ticket is solved, or you have handed it over, call the tool
`done`."""
_TALK = """
# How to act
Each turn, either call one tool, or talk to the customer in plain words. Do not do both. Only the customer can use
the phone: tell the customer what to do on it."""


def done() -> str:
    """Ends the work on the ticket."""
    return ""


@functools.cache
def company_tools() -> dict[str, Tool]:
    """Return the company's tools by name, bound to no records."""
    return declare_tools(CompanyTools({}))


@functools.cache
def phone_tools() -> dict[str, Tool]:
    """Return the phone's tools by name, bound to no phone."""
    return declare_tools(PhoneTools(Handset({}, {})))


def agent_tools(options: TelecomOptions) -> dict[str, Tool]:
    """Return the tools of the agent, by name."""
    if options.customer is not None:
        return company_tools()
    return {**company_tools(), **phone_tools(), DONE: Tool(done, inline=True)}


def policy_of(options: TelecomOptions) -> str:
    """Return the published policy.

    Raises:
        UsageError: a file is missing.
    """
    root, solo = folder_of(options).root, "" if options.customer else "_solo"
    main = read_text(root, f"main_policy{solo}.md")
    support = read_text(
        root, "tech_support_manual.md" if options.policy == POLICIES[0] else f"tech_support_workflow{solo}.md"
    )
    return f"<main_policy>\n{main}\n</main_policy>\n<tech_support_policy>\n{support}\n</tech_support_policy>\n"


def instruct(options: TelecomOptions) -> Instructions:
    """Return the agent's instructions: the published policy, and how to act.

    Raises:
        UsageError: a file is missing.
    """
    native = policy_of(options) + (_TALK if options.customer else _SOLO)
    text = (
        f"{native}\n\nThe tools are:\n\n{describe_tools(agent_tools(options))}\n\n"
        f"To call a tool, write one JSON object and nothing else, for example:\n{_EXAMPLE}"
    )
    return Instructions(text=text, tools=native)


def scenario_text(task: PublishedTask) -> str:
    """Return who the customer is, what it knows and wants."""
    scenario = task.row.user_scenario
    parts = [] if scenario.persona is None else [f"Your character:\n{scenario.persona.strip()}"]
    if isinstance(scenario.instructions, str):
        parts.append(scenario.instructions.strip())
    else:
        titles = {
            "reason_for_call": "Why you call",
            "known_info": "What you know",
            "unknown_info": "What you do not know",
            "task_instructions": "How you behave",
        }
        found = {title: scenario.instructions.get(name) for name, title in titles.items()}
        parts += [f"{title}:\n{str(text).strip()}" for title, text in found.items() if text]
    return "\n\n".join(parts)


def customer_tools(task: PublishedTask) -> dict[str, Tool]:
    """Return the tools of the customer: those of the phone, or some of them if the task names them."""
    names = task.row.user_tools
    return {name: tool for name, tool in phone_tools().items() if names is None or name in names}


def brief_customer(task: PublishedTask) -> str:
    """Return the instructions of the model that plays the customer."""
    return f"""\
You play a customer who writes to a telephone company's support. Stay in this role, and never say that you are a model.

{scenario_text(task)}

How to act: in each turn, either write one short message to the agent, or call one tool on your phone. Do not do both.
- Call a tool only if the agent asks for what it does, or to answer a question. Do one thing at a time: if the agent
  asks for several, say so. Tell the agent only what the tools have shown. Only you see their results.
- Say only what is written here, and only when you are asked. If you do not know something, say so.
- When your problem is solved, end your message with {STOP}. When the agent has handed you over to someone else, end it
  with {TRANSFER}. If you cannot go on with what is written here, end it with {OUT_OF_SCOPE}.

The tools on your phone are:

{describe_tools(customer_tools(task))}

To call a tool, write one JSON object and nothing else, for example:
{_PHONE_EXAMPLE}"""
