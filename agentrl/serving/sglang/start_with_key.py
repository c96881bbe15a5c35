"""Starts an SGLang server with the key that it asks of its clients, where other users of the machine do not see it.

SGLang takes its key on the command line, which everybody can read; this program takes it from the environment. Run by
its file name, with SGLang's interpreter and arguments.
"""

from __future__ import annotations

import os
import runpy
import sys

VARIABLE = "AGENTRL_SGLANG_API_KEY"


def main() -> None:
    """Become ``python -m sglang.launch_server ARGUMENTS --api-key KEY``."""
    del sys.path[0]  # the folder of this file, whose modules are not SGLang's
    sys.argv += ["--api-key", os.environ.pop(VARIABLE)]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
