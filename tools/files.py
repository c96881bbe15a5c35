"""Files of the episode's sandbox: read, write, edit, list."""

from __future__ import annotations

from agentrl import ToolError, tool
from agentrl.sandbox import Sandbox

MAX_LINES = 2000


@tool
async def read_file(path: str, first_line: int = 1, lines: int = 200, *, sandbox: Sandbox) -> str:
    """Reads lines of a text file.

    Args:
        path: The file; relative paths start at the working folder.
        first_line: The first line to show, counted from 1.
        lines: Number of lines to show.
    """
    if first_line < 1 or not 1 <= lines <= MAX_LINES:
        raise ToolError(
            "first_line or lines is out of range", expected=f"first_line from 1, lines from 1 to {MAX_LINES}"
        )
    text = await _text(sandbox, path)
    found = text.splitlines(keepends=True)
    shown = found[first_line - 1 : first_line - 1 + lines]
    if not shown and found:
        raise ToolError(f"{path} ends before line {first_line}", got=f"{len(found)} lines")
    if len(shown) == len(found):
        return text or "[the file is empty]"
    last = first_line + len(shown) - 1
    return f"[lines {first_line} to {last} of {len(found)}]\n{''.join(shown)}"


@tool
async def write_file(path: str, content: str, *, sandbox: Sandbox) -> str:
    """Creates a file or replaces it.

    Args:
        path: The file; relative paths start at the working folder, missing folders are created.
        content: The whole new content.
    """
    await sandbox.write(path, _encode(content))
    return f"Wrote {len(content.splitlines())} lines to {path}."


@tool
async def edit_file(path: str, old: str, new: str, *, sandbox: Sandbox) -> str:
    """Replaces a text that occurs exactly once in a file.

    Args:
        path: The file.
        old: The text to replace, with its exact line breaks and spaces, and long enough to occur only once.
        new: The new text; empty to remove the old one.
    """
    text = await _text(sandbox, path)
    count = text.count(old) if old else 0
    if count != 1:
        hint = "add lines before or after it" if count > 1 else "read the file: spaces and line breaks count"
        raise ToolError(f"old must occur exactly once in {path}", got=f"{count} times", hint=hint)
    await sandbox.write(path, _encode(text.replace(old, new)))
    line = text[: text.index(old)].count("\n") + 1
    return f"Replaced it in {path}, line {line}."


@tool
async def list_dir(path: str = ".", *, sandbox: Sandbox) -> str:
    """Lists the contents of a folder; names of folders end with a slash.

    Args:
        path: The folder; by default, the working folder.
    """
    entries = await sandbox.list(path)
    return "\n".join(f"{entry.name}/" if entry.is_folder else entry.name for entry in entries) or "[empty]"


async def _text(sandbox: Sandbox, path: str) -> str:
    data = await sandbox.read(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolError(f"{path} is not a text file", got=f"{len(data)} bytes that are not UTF-8") from error


def _encode(text: str) -> bytes:
    """Encode a text; half a surrogate pair, which JSON can contain, becomes a question mark."""
    return text.encode(errors="replace")
