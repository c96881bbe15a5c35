"""Program that starts an SGLang server with an API key that other users of the machine cannot see.

SGLang takes its key on the command line, which all users can read; this program takes it from the environment. Run it
by file name, with SGLang's interpreter and arguments.
"""

from __future__ import annotations

import os
import runpy
import sys

VARIABLE = "AGENTRL_SGLANG_API_KEY"


def main() -> None:
    """Run ``python -m sglang.launch_server ARGUMENTS --api-key KEY`` in this process."""
    if not getattr(sys.flags, "safe_path", False):  # older Pythons do not know PYTHONSAFEPATH
        del sys.path[0]  # the folder of this file, whose modules could shadow others
    sys.argv += ["--api-key", os.environ.pop(VARIABLE)]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
