"""Whether an action or a tool gives away files of this machine."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agentrl.testing.env_rules.watched_file import watched
from agentrl.testing.env_session import EnvSession, plain_text
from agentrl.testing.env_subject import Finding, Subject, Suspect
from agentrl.tool import Tool


def reads_no_files(subject: Subject) -> Finding:
    """No action and no tool of the episode opens a file that lies beside it: answers and tests do, too."""
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder, subject.session() as session:
        path = Path(folder) / "answer.txt"
        path.write_text(mark, encoding="utf-8")
        tried = 0
        with watched(path) as file:
            for what, shown in _tries(session, subject, str(path)):
                tried += 1
                if mark in shown:
                    raise Suspect(f"{what} shows a file of this machine: let it run in a sandbox")
                if file.was_opened():
                    raise Suspect(f"{what} opens a file of this machine: let it run in a sandbox")
    return Finding(detail=f"{tried} ways tried")


def _tries(session: EnvSession, subject: Subject, path: str) -> Iterator[tuple[str, str]]:
    """What was tried, and what it showed."""
    command, program = f"cat {path}", f"print(open({path!r}).read())"
    texts = (path, command, f"open({path!r}).read()", program, f"file://{path}")
    for text in (*texts, f"```bash\n{command}\n```", f"```python\n{program}\n```"):
        session.reset(subject.tasks[0])
        yield f"the action {text.replace(path, 'FILE')!r}", plain_text(session.step(text).observation)
    session.reset(subject.tasks[0])
    for tool in session.find("tools") or ():
        if tool.is_stateful:
            continue
        for text in texts:
            yield f"the tool {tool.name}", session.call_tool(tool, dict.fromkeys(_text_arguments(tool), text))


def _text_arguments(tool: Tool) -> list[str]:
    parameters = tool.schema["function"]["parameters"]["properties"]
    return [name for name, described in parameters.items() if described.get("type") == "string"]
