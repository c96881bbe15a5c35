"""How a supervisor is sent into a sandbox: a few words for Python's command line, and what it then reads first."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import marshal
import struct
from typing import Any

OLDEST_PYTHON = (3, 10)
TOO_OLD = "this Python is too old"
_MODULES = ("agentrl.sandbox.supervisor_files", "agentrl.sandbox.supervisor")
_BOOT = f"""
import sys, os
if sys.version_info < {OLDEST_PYTHON}:
    os.write(2, b"{TOO_OLD}: " + sys.version.split()[0].encode())
    os._exit(1)
import marshal, _frozen_importlib_external
def read(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or os._exit(0)
    return data
for name, magic, code, source in marshal.loads(read(int.from_bytes(read(4), "little"))):
    module = sys.modules[name] = type(sys)(name)
    same = magic == _frozen_importlib_external.MAGIC_NUMBER
    exec(marshal.loads(code) if same else compile(source, name, "exec"), module.__dict__)
module.main()
"""
BOOT = ("-I", "-S", "-B", "-c", _BOOT)
"""What Python is started with; it reads an `opening`."""


def opening(settings: dict[str, Any]) -> bytes:
    """What the supervisor reads first: its code, and its settings."""
    return b"".join(struct.pack("<I", len(part)) + part for part in (_supervisor_code(), marshal.dumps(settings)))


@functools.cache
def _supervisor_code() -> bytes:
    """Compiled code for a Python like this one, and its source for others."""
    return marshal.dumps([(name, importlib.util.MAGIC_NUMBER, *_code_and_source(name)) for name in _MODULES])


def _code_and_source(name: str) -> tuple[bytes, str]:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert isinstance(found.loader, importlib.machinery.SourceFileLoader)
    source = found.loader.get_source(name)
    assert source is not None
    return marshal.dumps(found.loader.get_code(name)), source
