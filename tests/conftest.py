"""A limit on what failed tests leave behind, and the fixtures of `support.fixtures` where tests run."""

import faulthandler
import gc
import logging
import os
import sys

import pytest

TEARDOWN_LIMIT_S = 300

gc.disable()  # until everything is imported and collected: nothing of that is garbage


def pytest_configure(config):
    """The process that gives tests to workers runs none, so that it needs no libraries and starts them sooner."""
    if getattr(config.option, "numprocesses", None):
        gc.enable()
    else:
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
    gc.freeze()
    gc.enable()
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen  # counting a million objects takes 60 ms, at the start of each run
    # pytest attaches its handlers to each logger that does not propagate, six times a test; torch has sixty of them.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    # Tests write modules and change them within a second, so that bytecode of the first would be taken for the second.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def pytest_sessionfinish():
    """Nor may such a thread keep the process from ending."""
    faulthandler.dump_traceback_later(TEARDOWN_LIMIT_S, exit=True)
