"""The program behind the interpreter, in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from support.waiting import PATIENCE_S

from agentrl.sandbox.interpreter import PROGRAM
from agentrl.sandbox.interpreter_main import HEAD, TAIL


class Program:
    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-u", "-c", PROGRAM], text=True, **pipes)
        assert json.loads(self.process.stdout.readline()) == {"id": 0, "output": "", "raised": False}

    def send(self, code):
        self.process.stdin.write(json.dumps({"id": 7, "code": code}) + "\n")
        self.process.stdin.flush()

    def receive(self):
        reply = json.loads(self.process.stdout.readline())
        assert reply["id"] == 7
        return reply["output"]

    def run(self, code):
        self.send(code)
        return self.receive()


@pytest.fixture(scope="module")
def program():
    program = Program()
    yield program
    with program.process:  # which closes its pipes
        program.process.stdin.close()
        assert program.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2\n"),
        ("None", ""),
        ("x = 3", ""),
        ("print('a')\n'b'", "a\n'b'\n"),
        ("for i in range(2):\n    i\n", ""),
        ("", ""),
        ("# nothing", ""),
        ("import os; os.system('echo child'); print('after')", "child\nafter\n"),
        ("import sys; print('e', file=sys.stderr); sys.stdout.write('o')", "e\no1\n"),
        ("exit()", "[exit() was called; the interpreter keeps running]\n"),
        ("exit('no data')", "no data\n[exit() was called; the interpreter keeps running]\n"),
        ("'\\ud800'", "'\\ud800'\n"),
        ("print('\\ud800')", "?\n"),
        ("'naïve 木'", "'naïve 木'\n"),
        ("import sys; sys.stdin.read()", "''\n"),
    ],
)
def test_output_of_code(program, code, output):
    assert program.run(code) == output


def test_variables_persist(program):
    program.run("def twice(n):\n    return 2 * n\nkept = twice(4)")
    assert program.run("kept") == "8\n"
    assert program.run("_ + 1") == "9\n"


def test_tracebacks_show_the_users_code_alone(program):
    program.run("import json\ndef load(text):\n    return json.loads(text)")
    output = program.run("load('{')")
    assert output.startswith('Traceback (most recent call last):\n  File "<cell ')
    assert "return json.loads(text)" in output
    assert "decoder.py" not in output
    assert output.endswith("Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n")
    assert program.run("def (").endswith("SyntaxError: invalid syntax\n")
    assert "ZeroDivisionError" in program.run(
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError from e"
    )


def test_floods_are_cut_in_the_middle(program):
    output = program.run("print('begin'); print('x' * 200_000); print('end')")
    assert output.startswith("begin\nxx")
    assert output.endswith("xx\nend\n")
    assert "bytes omitted …]" in output
    assert len(output) < HEAD + TAIL + 100
    assert program.run("1") == "1\n"


def test_an_interrupt_stops_code_and_nothing_else(program):
    program.process.send_signal(signal.SIGINT)
    assert program.run("kept = 5; kept") == "5\n"
    program.send("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass")
    assert program.receive().endswith("KeyboardInterrupt\n")
    assert program.run("kept") == "5\n"
