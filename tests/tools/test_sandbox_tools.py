"""Python, bash and files in a real sandbox."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("needs_local_sandbox")


async def test_python_keeps_variables_and_shares_files_with_the_other_tools(desk):
    async with desk("local") as tools:
        assert await tools.text("python", code="x = 41\nprint('hi')\nx + 1") == "hi\n42\n"
        assert await tools.text("python", code="open('x.txt', 'w').write(str(x))") == "2\n"
        assert await tools.text("bash", command="cat x.txt; echo; pwd") == "41\n/work\n"
        assert await tools.text("python", code="pass") == "[no output]"
        raised = await tools.call("python", code="1 / 0")
        assert raised.result.text.endswith("ZeroDivisionError: division by zero\n")
        assert raised.result.metrics == {"raised": 1.0}


async def test_an_interpreter_that_is_lost_is_started_again_and_the_policy_is_told(desk):
    async with desk("local", timeout_s=300.0) as tools:
        await tools.text("python", code="x = 1")
        lost = await tools.call("python", code="import os; os._exit(3)")
        assert lost.result.text.startswith("The interpreter ended with exit code 3. The interpreter was started again")
        assert lost.result.metrics["restarts"] == 1
        assert "NameError" in await tools.text("python", code="x")


async def test_a_policy_that_closes_its_folder_can_open_it_again(desk):
    async with desk("local", timeout_s=300.0) as tools:
        await tools.text("bash", command="chmod 000 .")
        assert await tools.text("bash", command="ls; echo here") == (
            "ls: cannot open directory '.': Permission denied\nhere\n"
        )
        lost = await tools.call("python", code="import os; os._exit(3)")
        assert lost.result.text.startswith("The interpreter ended with exit code 3.")
        assert await tools.text("python", code="6 * 7") == "42\n"
        assert await tools.text("bash", command="chmod 755 /work; ls -a") == ".\n..\n"


@pytest.mark.slow
async def test_shell_commands_say_how_they_ended(desk):
    async with desk("local", timeout_s=2.5) as tools:
        assert await tools.text("bash", command="echo a; echo b >&2; exit 3") == "a\nb\n[exit code 3]"
        assert await tools.text("bash", command="true") == "[no output]"
        assert await tools.text("bash", command="echo begun; sleep 60") == "begun\n[killed after 2 s]"
        assert await tools.text("bash", command="printf '%s' \"it's\"") == "it's"
        assert "embedded null" in await tools.text("bash", command="echo a\0b")
        long = await tools.text("bash", command=f": {'x' * 200_000}")
        assert long == "/bin/sh: Argument list too long\n[exit code 126]"


async def test_the_end_of_long_output_is_shown(desk):
    async with desk("local") as tools:
        shown = await tools.text(
            "bash", command="echo begin; head -c 300000 /dev/zero | tr '\\0' x; echo; echo end; exit 2"
        )
        assert len(shown) < 70_000
        assert shown.startswith("begin\nxxx")
        assert "x\n[the middle of the output was cut]\nx" in shown
        assert shown.endswith("xxx\nend\n[exit code 2]")


async def test_files_are_written_read_edited_and_listed(desk):
    async with desk("local") as tools:
        assert await tools.text("list_dir") == "[empty]"
        assert await tools.text("write_file", path="d/a.txt", content="one\ntwo\ntwo\n") == "Wrote 3 lines to d/a.txt."
        assert await tools.text("list_dir") == "d/"
        assert await tools.text("read_file", path="d/a.txt") == "one\ntwo\ntwo\n"
        shown = await tools.text("read_file", path="d/a.txt", first_line=2, lines=1)
        assert shown == "[lines 2 to 2 of 3]\ntwo\n"
        assert "got 2 times" in await tools.error("edit_file", path="d/a.txt", old="two", new="2")
        assert "got 0 times" in await tools.error("edit_file", path="d/a.txt", old="three", new="3")
        edited = await tools.text("edit_file", path="d/a.txt", old="one\ntwo", new="1\n2")
        assert edited == "Replaced it in d/a.txt, line 1."
        assert await tools.text("read_file", path="d/a.txt") == "1\n2\ntwo\n"
        assert "ends before line 9" in await tools.error("read_file", path="d/a.txt", first_line=9)
        await tools.text("bash", command="printf '\\377' > raw; ln -s /proc/self/environ link")
        assert "raw is not a text file" in await tools.error("read_file", path="raw")
        assert await tools.error("read_file", path="nothing")
        assert await tools.error("write_file", path="/etc/passwd", content="x")
