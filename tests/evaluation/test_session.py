"""The key of an evaluation: each of its entries distinguishes two evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.result import summarize
from agentrl.evaluation.session import EvaluationRequest, describe

LOCAL = ("environment=guess_number/valid", "agent.loop=react_text", "model.path=MODEL")
SERVICE = ("environment=guess_number/valid", "engine={type: openai, url: 'http://localhost/v1', model: m}")


def key(folder: Path, *words: str, policy: PolicyKind = PolicyKind.ENGINE, seed: int = 0, served: Any = None) -> str:
    config = load_config(None, [word.replace("MODEL", str(folder / "model")) for word in words])
    request = EvaluationRequest(
        config=config, policy=policy, n_tasks=4, samples=1, seed=seed, folder=folder / "evaluations"
    )
    return describe(request, config, served=served).key()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two models of equal files, and their evaluations."""
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text("1")
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        "environment.split=test",
        "environment.options={a: 1}",
        "agent.max_turns=3",
        "agent.system_prompt=Play.",
        "agent.options={format: plain}",
        "agent.reward=[{name: environment, weight: 2}]",
        "sampling.temperature=0.5",
        "sampling.top_p=0.9",
        "engine.max_num_seqs=2",
        "engine.max_context=99",
        "model.dtype=bfloat16",
        "model.lora={rank: 4}",
        "model.chat_template=chatml",
        "model.path=MODEL/../other",
    ],
)
def test_a_setting_of_a_model_is_part_of_the_key(change: str, folder: Path) -> None:
    assert key(folder, *LOCAL) == key(folder, *LOCAL)
    assert key(folder, *LOCAL, change) != key(folder, *LOCAL)


@pytest.mark.parametrize("change", ["engine.url=http://other/v1", "engine.model=n"])
def test_a_setting_of_a_service_is_part_of_the_key(change: str, folder: Path) -> None:
    assert key(folder, *SERVICE, change) != key(folder, *SERVICE)


def test_policy_seed_version_and_what_services_tell_are_part_of_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [
        key(folder, *LOCAL),
        key(folder, *LOCAL, seed=1),
        key(folder, *LOCAL, policy=PolicyKind.EXPERT),
        key(folder, *LOCAL, policy=PolicyKind.RANDOM),
        key(folder, *SERVICE),
        key(folder, *SERVICE, served={"m": {"root": "a"}}),
        key(folder, *SERVICE, served={"m": {"root": "b"}}),
    ]
    monkeypatch.setattr("agentrl.evaluation.session.importlib.metadata.version", lambda name: "9.9")
    keys.append(key(folder, *LOCAL))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("file", ["model/model.safetensors", "model/config.json", "reader/model.safetensors"])
def test_weights_are_part_of_the_key(file: str, folder: Path) -> None:
    (folder / "reader").mkdir()
    (folder / "reader" / "config.json").write_text("{}")
    (folder / "reader" / "model.safetensors").write_text("1")
    words = (*LOCAL, f"agent.reward_model={{path: '{folder}/reader'}}")
    before = key(folder, *words)
    (folder / file).write_text("2")
    assert key(folder, *words) != before


@pytest.mark.parametrize("name", ["model.chat_template", "environment.tasks"])
def test_the_content_of_a_named_file_is_part_of_the_key(name: str, folder: Path) -> None:
    file = folder / "named.jinja"
    words = ("environment={name: guess_number}", "agent.loop=react_text", "model.path=MODEL", f"{name}='{file}'")
    found = []
    for text in ("{{ messages }}", "{{ messages }} "):
        file.write_text(text)
        found.append(key(folder, *words))
    assert found[0] != found[1]
    file.unlink()
    if name == "environment.tasks":  # of a file that is not there, only the name is known
        assert key(folder, *words) != key(folder, *words[:-1], f"{name}='{file}2'")


def test_how_fast_it_is_played_is_not_part_of_the_key(folder: Path) -> None:
    faster = ("rollout.max_concurrent=3", "environment.workers=2", "environment.isolation=thread")
    assert key(folder, *LOCAL, *faster) == key(folder, *LOCAL)


def test_secrets_in_the_settings_of_a_result_are_hidden(folder: Path) -> None:
    config = load_config(
        None,
        [
            *("environment=guess_number/valid", "environment.options={api_key: own-key, high: 9}"),
            "engine={type: openai, url: 'http://me:password-1@localhost/v1', model: m}",
            "agent.tools=[{name: calculator, token: sk-0123456789abcdefghij}]",
        ],
    )
    request = EvaluationRequest(
        config=config, policy=PolicyKind.ENGINE, n_tasks=4, samples=1, seed=0, folder=folder / "evaluations"
    )
    panel = describe(request, config)
    shown = json.dumps(summarize(panel, [], 1.0).to_json())
    assert [one in json.dumps(dict(panel.settings)) for one in ("own-key", "password-1", "sk-012")] == [True] * 3
    assert [one in shown for one in ("own-key", "password-1", "sk-012", '"high": 9')] == [False] * 3 + [True]
