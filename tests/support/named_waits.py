"""What `agentrl status` says while a run hangs."""

import time

from agentrl.cli.status import describe
from agentrl.observe.console import out
from agentrl.observe.run_status import read_status

SITES = {
    "reset": "environment  reset of",
    "step": "environment  step of",
    "close": "environment  close of",
    "loop": "loop         Loop",
    "tool": "tool         waiting",
    "thread_tool": "tool         blocking",
    "toolset": "toolset      the tools of toolsets",
    "end_session": "end_session  the end of its sessions",
    "scorer": "scorer       Single",
    "thread_reward": "scorer       ",
    "group_scorer": "group_scorer Together",
}
"""What a status says of each site of `tests/worlds/hanging.py`."""


def status_text(folder):
    """Return what `agentrl status` prints for a run."""
    snapshot = read_status(folder)
    if snapshot is None:
        return ""
    with out.capture() as printed:
        out.print(describe(folder, snapshot, time.time()))
    return printed.get()


def wait_until_named(folder, sites, *, within_s=60):
    """Wait until the status of a run names all sites; return it."""
    until = time.monotonic() + within_s
    while True:
        text = status_text(folder)
        missing = [site for site in sites if SITES[site] not in text]
        if not missing:
            return text
        assert time.monotonic() < until, f"the status does not name {', '.join(missing)}:\n{text}"
        time.sleep(0.1)
