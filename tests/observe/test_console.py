"""No control code of a model, a tool, a server or a file name reaches the terminal."""

import io
import logging
import os
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentrl.errors import UsageError
from agentrl.observe import console
from agentrl.observe.console import VisibleConsole, VisibleFormatter, note, print_error, visible
from agentrl.observe.run_folder import logging_to

EVIL = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x7f\u202egnp.exe"
HARMFUL = "\x1b\x9b\x07\x08\r\x7f\u202e"


@pytest.mark.parametrize("fault", ["closed", "replaced"])
def test_results_are_printed_after_the_users_code_closed_or_replaced_standard_output(capfd, monkeypatch, fault):
    with os.fdopen(os.dup(1), "w") as standard_output:
        monkeypatch.setattr(sys, "stdout", standard_output)
        with console.kept_streams():
            if fault == "closed":
                sys.stdout.close()
            else:
                monkeypatch.setattr(sys, "stdout", io.StringIO())
            console.out.print("the result")
            note("the note")
    assert capfd.readouterr() == ("the result\n", "the note\n")


@pytest.mark.parametrize("lost", ["pipe", "terminal", "disk"])
def test_messages_may_be_lost_without_ending_the_program(monkeypatch, lost):
    reader, writer = os.openpty() if lost == "terminal" else os.pipe()
    os.close(reader)
    if lost == "disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with suppress(OSError), os.fdopen(writer, "w") as standard_error:
        monkeypatch.setattr(sys, "stderr", standard_error)
        with console.kept_streams():
            note("a note")
            with Live(Text("a panel"), console=console.err):
                note("another note")
        note("a note to the stream itself")
        written = True
    assert written


def test_results_that_cannot_be_written_are_an_error_in_one_line(monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with console.kept_streams(), pytest.raises(UsageError, match="cannot be written: got No space left on device"):
            console.out.print("a result")
    assert "Traceback" not in capfd.readouterr().err


def printed(thing, **options):
    target = io.StringIO()
    VisibleConsole(file=target, width=200, **options).print(thing)
    return target.getvalue()


def table(text):
    made = Table(text, title=text)
    made.add_row(text)
    return made


@pytest.mark.parametrize("wrap", [str, Text, table, lambda text: Panel(text, title=text)])
def test_nothing_that_is_printed_controls_the_terminal(wrap):
    assert not set(HARMFUL) & set(printed(wrap(EVIL)))
    assert "owned" in printed(wrap(EVIL))


def test_the_consoles_own_codes_stay():
    assert printed(Text("bold\x1b[0m", style="bold"), force_terminal=True, color_system="standard") == (
        "\x1b[1mbold\N{SYMBOL FOR ESCAPE}[0m\x1b[0m\n"
    )


def test_a_live_panel_shows_them_too():
    target = io.StringIO()
    with Live(console=VisibleConsole(file=target, force_terminal=True), auto_refresh=False) as live:
        live.update(Text("\x9bowned\x07"), refresh=True)
    assert "\x9b" not in target.getvalue()
    assert "owned" in target.getvalue()


@given(st.text())
def test_only_control_characters_change(text):
    shown = visible(text)
    assert len(shown) == len(text)
    assert visible(shown) == shown
    assert all(a == b or not a.isprintable() for a, b in zip(text, shown, strict=True))
    assert all(character.isprintable() or character in "\n\t" or ord(character) > 0x9F for character in shown)


def test_errors_notes_and_logs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "err", VisibleConsole(stderr=True, soft_wrap=True))
    print_error(UsageError(EVIL, got=EVIL))
    note(EVIL)
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter())
    logging.getLogger("agentrl.test_console").addHandler(handler)
    with logging_to(tmp_path / "log", lambda text: None):
        logging.getLogger("agentrl.test_console").warning("said %s", EVIL)
    logging.getLogger("agentrl.test_console").removeHandler(handler)
    said = capsys.readouterr().err
    assert said.count("owned") >= 4
    assert not set(HARMFUL) & set(said)
    assert not set(HARMFUL) & set((tmp_path / "log").read_text())


def test_a_reader_that_is_gone_ends_the_program_without_a_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    code = "from agentrl.observe.console import kept_streams, out\nwith kept_streams():\n    out.print('a')"
    ended = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")
