"""A limit on what failed tests leave behind, and the fixtures of `support.fixtures` where tests run."""

import faulthandler
import gc
import os
import sys

import pytest

TEARDOWN_LIMIT_S = 300


def pytest_configure(config):
    """The process that gives tests to workers runs none, so that it needs no libraries and starts them sooner."""
    if not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("support.fixtures")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown():
    """The time limit of a test ends when it fails: a thread that it left behind would hold up the others for ever."""
    faulthandler.dump_traceback_later(TEARDOWN_LIMIT_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish():
    """Garbage collections leave out the libraries, which runs otherwise look at one by one when they start.

    Bytecode of our sources and tests is kept, but that of modules which tests write is not.
    """
    gc.collect()
    gc.freeze()
    # Tests write modules and change them within a second, so that bytecode of the first would be taken for the second.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def pytest_sessionfinish():
    """Nor may such a thread keep the process from ending."""
    faulthandler.dump_traceback_later(TEARDOWN_LIMIT_S, exit=True)
