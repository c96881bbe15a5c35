"""An unknown model name is reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.builders.models import resolve_model
from agentrl.cli import main
from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.observe.model_folder import check_fetchable


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No model is in the cache, and the hub that is asked has none; which addresses it was asked for."""
    addresses: list[str] = []

    def no_network(url: str, *, timeout: float) -> None:
        addresses.append(url)
        raise ConnectionError("no network\nand a second line")

    monkeypatch.setattr("agentrl.observe.model_folder.get_hf_file_metadata", no_network)
    monkeypatch.setattr("agentrl.observe.model_folder.try_to_load_from_cache", lambda *_: None)
    return addresses


def test_a_name_that_cannot_be_fetched_is_asked_for_once(asked: list[str]) -> None:
    with pytest.raises(
        UsageError, match=r"model nosuch/model-xyz not found: got no such folder.*no network, expected"
    ) as told:
        check_fetchable("nosuch/model-xyz")
    assert "second line" not in str(told.value)
    assert "only engine openai accepts a service's model name" in str(told.value)
    assert len(asked) == 1


def test_a_name_that_no_model_can_have_is_told() -> None:
    with pytest.raises(UsageError, match="model a b not found"):
        check_fetchable("a b")


def test_a_name_that_cannot_be_fetched_suggests_a_model_that_is_here(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_MODELS", str(tmp_path / "added"))
    for folder in ("added/qwen-small", "runs/shop"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text("{}")
    with pytest.raises(UsageError, match="Did you mean 'qwen-small'"):
        check_fetchable("qwen-smal")
    with pytest.raises(UsageError, match="Did you mean 'runs/shop'"):
        check_fetchable("run/shop")


def test_a_folder_and_a_cached_model_are_not_asked_for(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_fetchable(str(tmp_path))
    monkeypatch.setattr("agentrl.observe.model_folder.try_to_load_from_cache", lambda *_: "cached/config.json")
    check_fetchable("some/model")
    assert asked == []


def test_runs_and_servers_ask_before_they_begin(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="model nosuch/model not found"):
        resolve_model(load_config(None, ["environment=a", "model.path=nosuch/model"]))
    with pytest.raises(SystemExit) as end:
        main(["serve", "--engine", "vllm", "--model", "nosuch/model", "--folder", str(tmp_path / "serve")])
    assert end.value.code == 2
    assert "model nosuch/model not found" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
