"""Viewing episodes, and exporting the model of a run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors import safe_open
from yarl import URL

from agentrl.cli.view import choose_token, serve
from agentrl.viewer.server import ViewerSettings

Cli = Callable[..., Any]


def test_a_page_of_the_latest_episodes(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    ended = agentrl("view", str(trained_run), "--count", "3", "--output", "page.html")
    assert ended.code == 0, ended.err
    page = (workplace / "page.html").read_text()
    assert page.count("<details") == 3
    assert 'class="sampled' in page
    assert "I am thinking of a whole number from 1 to 100." in re.sub("<[^<>]*>", "", page)


def test_episodes_are_chosen_by_step_and_task(agentrl: Cli, trained_run: Path) -> None:
    everything = agentrl("view", str(trained_run), "--terminal", "--count", "99").out
    tasks = [line.split()[0] for line in everything.splitlines() if line.startswith("train-")]
    assert len(tasks) == 8
    one = agentrl("view", str(trained_run), "--terminal", "--task", tasks[-1], "--step", "2").out
    assert {line.split()[0] for line in one.splitlines() if line.startswith("train-")} == {tasks[-1]}
    none = agentrl("view", str(trained_run), "--step", "99", "--terminal")
    assert none.code == 2
    assert "no matching episode" in none.err
    assert "got 99, expected 1 to 2" in none.err


@pytest.mark.slow
def test_an_evaluations_episodes_can_be_viewed(agentrl: Cli, trained_run: Path) -> None:
    assert agentrl("eval", "--model", str(trained_run), "--tasks", "2", "--seed", "8").code == 0
    folder = max((trained_run / "evaluations").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    ended = agentrl("view", str(folder), "--terminal", "--count", "1")
    assert ended.code == 0, ended.err
    assert "turns" in ended.out


@pytest.mark.slow
def test_view_and_eval_find_the_same_run(agentrl: Cli, trained_run: Path) -> None:
    latest = trained_run.parent / "latest"
    for folder in (latest, latest.parent, latest / "checkpoints" / "step-000002"):
        words = ("--tasks", "2", "--seed", "8")
        assert agentrl("eval", str(folder), *words).code == 0
        ended = agentrl("view", str(folder), "--terminal", "--count", "1")
        assert ended.code == 0, ended.err
    two = agentrl("eval", str(latest), "--model", "other")
    assert "two models were given" in two.err


@pytest.mark.slow
def test_an_evaluation_outside_a_run_can_be_viewed(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    model = trained_run / "model"
    shutil.copytree(model, workplace / "model")
    words = ("--env", "guess_number", "--model", "model", "agent.loop=react_text", "agent.max_answer_tokens=8")
    assert agentrl("eval", *words, "--tasks", "1", "agent.max_turns=2", "agent.max_tokens=512").code == 0
    (folder,) = (workplace / "runs" / "evaluations").iterdir()
    shown = agentrl("view", str(folder), "--count", "1", "--output", str(folder))
    assert shown.code == 0, shown.err
    assert 'class="sampled' in (folder / "episodes.html").read_text()
    assert "--step needs a training run" in agentrl("view", str(folder), "--step", "3", "--terminal").err


def test_episodes_without_tokens_are_shown_as_text(agentrl: Cli, workplace: Path) -> None:
    words = ("eval", "--env", "guess_number", "--policy", "expert", "--tasks", "1")
    assert agentrl(*words, "agent.loop=react_text", "agent.options={format: plain}").code == 0
    (folder,) = (workplace / "runs" / "evaluations").iterdir()
    shown = agentrl("view", str(folder), "--terminal").out
    assert "finished, reward 1 (environment/step 1), " in shown
    assert "[user]\nI think of a number from 1 to 100. Guess.\n[assistant · turn 1]\n50\n[user]\n" in shown
    assert re.search(r"\[assistant · turn \d · reward 1\]\n\d+\n", shown)
    assert agentrl("view", str(folder), "--output", str(folder)).code == 0
    page = (folder / "episodes.html").read_text()
    assert "reward 1 (environment/step 1) ·" in page
    assert '<span class="forced">50</span><span class="turn">assistant · turn 1</span>' in page
    assert "in the loss" not in page  # the legend of tokens
    for name in ("runs/evaluations", None):  # both are short for it
        assert agentrl("view", *([name] if name else []), "--terminal").out == shown
    stored = folder / "episodes.jsonl"
    stored.write_bytes(b"")
    assert f"no finished episode in {folder}" in agentrl("view", str(folder), "--terminal").err


async def test_the_server_prints_an_address_that_shows_the_filtered_episodes(
    trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for token in (None, "a-long-token"):
        stop, settings = asyncio.Event(), ViewerSettings(folders=[trained_run], token=token)
        serving = asyncio.create_task(serve(settings, {"success": "false", "step_from": "2"}, stop, opens=False))
        printed = ""
        async with asyncio.timeout(100):
            while not printed.endswith("\n"):
                await asyncio.sleep(0.02)
                printed += capsys.readouterr().out
        address = URL(printed.strip())
        assert address.path == f"/r/{trained_run.name}/episodes"
        shown = {} if token is None else {"token": token}
        assert dict(address.query) == {"success": "false", "step_from": "2", **shown}
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        page = address.with_path(f"/api/r/{trained_run.name}").with_query({})
        async with aiohttp.ClientSession(headers=headers) as http, http.get(page) as answer:
            assert (await answer.json())["kind"] == "run"
        stop.set()
        await serving


def test_another_host_gets_a_token_of_its_own() -> None:
    assert choose_token("127.0.0.1", None) is None
    assert choose_token("127.0.0.1", "mine") == "mine"
    assert choose_token("0.0.0.0", "mine") == "mine"
    made = choose_token("0.0.0.0", None)
    assert made is not None
    assert len(made) >= 32
    assert made != choose_token("0.0.0.0", None)


def test_an_empty_folder_has_nothing_to_view(agentrl: Cli, workplace: Path) -> None:
    alone = agentrl("view", "--terminal")
    assert (alone.code, "no episodes found in" in alone.err, "agentrl eval" in alone.err) == (2, True, True)
    served = agentrl("view")
    assert (served.code, "no folder runs in" in served.err, "agentrl eval" in served.err) == (2, True, True)
    assert "nowhere is not a run or evaluation: got no such folder" in agentrl("view", "nowhere").err
    assert "show one run: got 2 folders" in agentrl("view", ".", ".", "--terminal").err
    named = agentrl("view", str(workplace), "--terminal")
    assert named.code == 2
    assert f"{workplace} is not a run or evaluation: got a folder without config.yaml" in named.err
    assert "got no such folder" in agentrl("view", "nowhere", "--terminal").err


def test_without_an_argument_the_newest_episodes_are_shown(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    shutil.copytree(trained_run, workplace / "runs" / "mine")
    assert agentrl("eval", "--env", "guess_number", "--policy", "random", "--tasks", "1").code == 0
    assert agentrl("view", "--terminal").out.startswith("valid-")
    os.utime(next((workplace / "runs" / "mine" / "trajectories").glob("step-*2.jsonl")))
    assert agentrl("view", "--terminal").out.startswith("train-")


def test_without_colours_the_sources_have_names(agentrl: Cli, trained_run: Path) -> None:
    shown = agentrl("view", str(trained_run), "--terminal", "--count", "1").out
    assert "\n[prompt]\n" in shown
    assert re.search(r"\n\[sampled · turn 1.*\]\n", shown)
    assert re.search(r"\n  '.*'  token \d+, id \d+, log-probability -\d+\.\d+ \(p = .*%\), version \d", shown)


def test_an_exported_model_is_a_folder_of_its_own(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    ended = agentrl("export", str(trained_run), "my-model")
    assert ended.code == 0, ended.err
    folder = workplace / "my-model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    again = agentrl("export", str(trained_run), "my-model")
    assert again.code == 2
    assert "already exists" in again.err


def test_a_whole_model_is_exported_in_another_format_and_in_parts(
    agentrl: Cli, trained_run: Path, workplace: Path
) -> None:
    ended = agentrl("export", str(trained_run), "parts", "--dtype", "bfloat16", "--shard-size", "20KB")
    assert ended.code == 0, ended.err
    assert (workplace / "parts" / "model.safetensors.index.json").is_file()
    assert json.loads((workplace / "parts" / "config.json").read_text())["dtype"] == "bfloat16"


def formats(folder: Path) -> set[str]:
    """Return the number formats of the weights in a folder."""
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            names = weights.keys()
            found |= {weights.get_slice(name).get_dtype() for name in names}
    return found


def test_the_size_of_parts_alone_keeps_the_number_format(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    assert formats(trained_run / "model") == {"F32"}
    assert agentrl("export", str(trained_run), "short", "--dtype", "bfloat16").code == 0
    assert formats(workplace / "short") == {"BF16"}
    assert agentrl("export", "short", "parts", "--shard-size", "20KB").code == 0
    assert formats(workplace / "parts") == {"BF16"}
    assert json.loads((workplace / "parts" / "config.json").read_text())["dtype"] == "bfloat16"
    assert len(list((workplace / "parts").glob("model-*.safetensors"))) > 1
    assert agentrl("export", "parts", "whole", "--dtype", "float32").code == 0
    assert formats(workplace / "whole") == {"F32"}
    assert [file.name for file in (workplace / "whole").glob("*.safetensors")] == ["model.safetensors"]


def test_the_number_format_is_read_under_its_older_name_too(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    """Most published models have `torch_dtype` in their config."""
    assert agentrl("export", str(trained_run), "short", "--dtype", "bfloat16").code == 0
    file = workplace / "short" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({"torch_dtype": config.pop("dtype"), **config}))
    assert "dtype" not in json.loads(file.read_text())
    assert agentrl("export", "short", "parts", "--shard-size", "20KB").code == 0
    assert formats(workplace / "parts") == {"BF16"}


class Hub:
    """What the hub's library would be asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.refuses = False

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        if self.refuses:
            raise ConnectionError("no route to the hub\nmore")
        self.asked.append((name, private, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.asked.append((repo_id, {file.name for file in folder_path.iterdir()}))


def test_an_export_may_go_to_the_hub(
    agentrl: Cli, trained_run: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setattr("agentrl.cli.export.HfApi", lambda: hub)
    ended = agentrl("export", str(trained_run), "hub://me/my-model")
    assert ended.code == 0, ended.err
    assert "to https://huggingface.co/me/my-model" in ended.err
    (made, (name, files)) = hub.asked
    assert made == ("me/my-model", True, True)
    assert name == "me/my-model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)  # type: ignore[call-overload]
    assert list(workplace.iterdir()) == []
    assert agentrl("export", str(trained_run), "hub://me/my-model", "--public").code == 0
    assert hub.asked[2] == ("me/my-model", False, True)
    hub.refuses = True
    refused = agentrl("export", str(trained_run), "hub://me/my-model")
    assert refused.code == 2
    assert (
        "cannot push to me/my-model on the Hugging Face hub: got no route to the hub, expected a token" in refused.err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hub://my-model",), "hub://my-model is not a repository on the hub, expected hub://OWNER/NAME"),
        (("hub://a/b/c",), "is not a repository"),
        (("folder", "--public"), "--public needs a repository on the hub"),
    ],
)
def test_what_is_no_repository_is_refused(words: tuple[str, ...], said: str, agentrl: Cli, trained_run: Path) -> None:
    ended = agentrl("export", str(trained_run), *words)
    assert ended.code == 2
    assert said in ended.err


def test_the_page_goes_into_a_folder_that_is_made(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    assert agentrl("view", str(trained_run), "--output", "new/dir/x.html").code == 0
    assert "<details" in (workplace / "new" / "dir" / "x.html").read_text()
    assert agentrl("view", str(trained_run), "--output", "new").code == 0
    assert (workplace / "new" / "episodes.html").is_file()
    (workplace / "file").write_text("")
    refused = agentrl("view", str(trained_run), "--output", "file/x.html")
    assert refused.code == 2
    assert "cannot write file/x.html" in refused.err
    (workplace / "game.py").write_text("mine")
    refused = agentrl("view", str(trained_run), "--output", "game.py")
    assert (refused.code, (workplace / "game.py").read_text()) == (2, "mine")
    assert "game.py already exists" in refused.err
    assert agentrl("view", str(trained_run), "--output", "new/dir/x.html").code == 0, "a page may be written again"


def test_failed_episodes_alone_are_shown(agentrl: Cli, workplace: Path) -> None:
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "12", "--json", "r.json")
    assert agentrl(*words).code == 0
    solved = round(12 * json.loads((workplace / "r.json").read_text())["success"]["mean"])
    assert 0 < solved < 12, "the fixture needs both"
    shown = agentrl("view", "--terminal", "--failed", "--count", "99").out
    assert len(re.findall(r"^valid-", shown, re.MULTILINE)) == 12 - solved


def test_printed_commands_keep_paths_with_spaces_together(agentrl: Cli, trained_run: Path, workplace: Path) -> None:
    run = workplace / "my runs" / "first"
    shutil.copytree(trained_run, run)
    ended = agentrl("eval", str(run), "--tasks", "1")
    (command,) = re.findall(r"read them: (agentrl view .*)", ended.err)
    words = shlex.split(command)
    assert len(words) == 3
    assert agentrl(*words[1:], "--terminal").code == 0
