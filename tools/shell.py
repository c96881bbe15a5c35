"""Shell commands in the episode's sandbox."""

from __future__ import annotations

from agentrl import ToolContext, ToolResult, tool
from agentrl.sandbox import Limits, Sandbox

SHARE = 0.8
"""Fraction of the call's time limit that the command may use; its output until then is shown."""
OUTPUT_BYTES = 64 * 1024
_ONE_STREAM = 'exec 2>&1; if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'


@tool
async def bash(command: str, *, sandbox: Sandbox, context: ToolContext) -> ToolResult:
    """Runs a shell command and shows its output. Each call starts a new shell in the working folder; files are kept.

    Args:
        command: One or more lines for bash.
    """
    limits = Limits(seconds=SHARE * context.timeout_s, output_bytes=OUTPUT_BYTES)
    ended = await sandbox.exec(["/bin/sh", "-c", _ONE_STREAM, command], limits=limits)
    output = ended.stdout + ended.stderr  # standard error says why the shell itself did not start
    text = output.decode(errors="replace")
    if ended.truncated:
        middle = len(ended.stdout) // 2
        begin, end = output[:middle].decode(errors="replace"), output[middle:].decode(errors="replace")
        text = f"{begin}\n[the middle of the output was cut]\n{end}"
    notes = []
    if ended.timed_out:
        notes.append(f"[killed after {SHARE * context.timeout_s:g} s]")
    elif ended.out_of_memory:
        notes.append("[killed: out of memory]")
    elif ended.exit_code:
        notes.append(f"[exit code {ended.exit_code}]")
    if text and not text.endswith("\n") and notes:
        text += "\n"
    return ToolResult(text + "\n".join(notes) or "[no output]", metrics={"failed": float(not ended.is_success)})
