"""Environments of SkyRL are played as SkyRL plays them: same prompts, observations, rewards and ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import skyrl_gym

from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError
from agentrl.rollout.env_pool import EnvPool
from agentrl.testing.env_check import LAZY, check_env

pytestmark = [pytest.mark.originals, pytest.mark.timeout(600)]
SUMS = "skyrl_examples:Sums"
ANSWERS = ("I think it is 5.", "#### 4", "#### 5", "#### 5")


def row(number: int, **columns: Any) -> dict[str, Any]:
    """Return a row of data: a sum."""
    prompt = [
        {"role": "system", "content": "End with #### and the answer."},
        {"role": "user", "content": f"{number}+3?"},
    ]
    return {"prompt": prompt, "reward_spec": {"method": "rule", "ground_truth": str(number + 3)}, **columns}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return data files for both splits, and make the example environment importable."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    for split, numbers in (("train", range(20)), ("test", range(20, 24))):
        rows = [json.dumps(row(number, extra_info={"index": number}, data_source="sums")) for number in numbers]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    return {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}


@pytest.mark.parametrize("options", [{"environment": "gsm8k"}, {"environment": SUMS, "config": {"cost": 0.1}}])
def test_environments_keep_the_rules(files: dict[str, str], options: dict[str, Any]) -> None:
    report = check_env("skyrl_gym", options={"files": files, **options}, episodes=4, skip=[rule.name for rule in LAZY])
    assert report.passed, str(report)


@pytest.mark.parametrize(("name", "max_turns"), [("gsm8k", None), ("gsm8k_multi_turn", 3), ("gsm8k_multi_turn", 5)])
def test_episodes_equal_the_originals(files: dict[str, str], name: str, max_turns: int | None) -> None:
    env: Any = resolve_environment("skyrl_gym").make(files=files, environment=name, max_turns=max_turns)
    extras = {**row(2), "extra_info": {}, **({} if max_turns is None else {"max_turns": max_turns})}
    original = skyrl_gym.make(name, env_config={}, extras=extras)
    original.init(row(2)["prompt"])
    env.reset(options={"row": row(2, extra_info={})})
    ended = False
    for answer in ANSWERS:
        step, theirs = env.step(answer), original.step(answer)
        shown = "\n\n".join(message["content"] for message in theirs["observations"])
        assert step[:3] == (shown, theirs["reward"], theirs["done"])
        ended = theirs["done"]
        if ended:
            break
    assert ended
    with pytest.raises(UsageError, match="is over"):
        env.step("5")


async def test_prompts_and_tools_reach_the_policy(files: dict[str, str]) -> None:
    spec = resolve_environment("skyrl_gym")
    options = {"files": files, "environment": SUMS, "config": {"cost": 0.1}}
    task = spec.tasks("test", **options)[1]
    assert [message.role for message in task.messages] == ["system", "user"]
    pool = EnvPool(spec, options=options, workers=1, reset_timeout_s=300, step_timeout_s=300)
    try:
        async with pool.borrow("one") as env:
            begun = await env.reset(task)
            assert begun.observation == "You may write <add>1+2</add>."
            told = (await env.step("<add>21+3</add>")).result
            assert (told.observation, told.reward, told.done) == ("24", -0.1, False)
            last = (await env.step("24")).result
            assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, False)
            assert last.info["reward_components"] == {"turns": 2.0}
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment": "gsm9k"}, "Did you mean 'gsm8k'"),
        ({}, "the environment for skyrl_gym is not set"),
        ({"environment": "aime"}, "aime of skyrl-gym cannot be created: got reward_model field is required"),
        ({"environment": "search", "config": {"colour": 1}}, "search of skyrl-gym cannot be created: got .*colour"),
        ({"environment": SUMS}, "cannot be created"),
    ],
)
def test_wrong_options_say_what_is_wrong(files: dict[str, str], options: dict[str, Any], words: str) -> None:
    env: Any = resolve_environment("skyrl_gym").make(files=files, **options)
    with pytest.raises(UsageError, match=words):
        env.reset(seed=0)


def test_data_must_have_prompts(tmp_path: Path) -> None:
    spec = resolve_environment("skyrl_gym")
    with pytest.raises(UsageError, match="the option files of skyrl_gym is not set"):
        spec.tasks("train")
    (tmp_path / "train.jsonl").write_text('{"prompt": "text"}')
    with pytest.raises(UsageError, match="line 1 has no prompt"):
        spec.tasks("train", files={"train": str(tmp_path / "train.jsonl")})
