"""Each setting of the agent section reaches the part that reads it; all values differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.rewards import TASK, episode
from support.tokenizers import build_tokenizer

from agentrl.agent_loop import AgentRole
from agentrl.builders import rewards
from agentrl.builders.adapter_checks import roles_of_adapters, trained_roles
from agentrl.builders.episodes import _answer_timeout_s, build_env_pool, build_loop, build_runner, build_task_sampler
from agentrl.builders.group_extras import _policies
from agentrl.builders.roles import RolePolicy, build_roles, check_roles
from agentrl.config import load_config
from agentrl.config.config import ModelConfig
from agentrl.config.derived import make_agent_loop
from agentrl.config.environment import RewardModelConfig
from agentrl.config.resume_rules import Change, check_same_run, rule_of
from agentrl.engine import ChatAnswer, ChatPolicy, SamplingParams, StopReason
from agentrl.errors import ConfigError
from agentrl.message import Message, user
from agentrl.render.renderer import Renderer
from agentrl.reward import Score
from agentrl.rollout.judges import build_judge
from agentrl.rollout.judges.client import JUDGE_FILE
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.serving.scripted import ScriptedEngine

GUESS = ("environment=guess_number/valid", "agent.loop=react_text")
SERVICE = {"url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("engine", "seconds"),
    [
        ("{type: local, timeout_s: 7}", 7),
        ("{type: vllm, timeout_s: 7, start_timeout_s: 40}", 47),
        ("{type: vllm, timeout_s: 7, servers: ['http://gpu:8000'], lost_timeout_s: 30}", 37),
        (f"{{type: openai, timeout_s: 7, url: '{SERVICE['url']}', model: m}}", 7),
    ],
)
def test_an_answer_may_take_as_long_as_a_restart_of_its_server(engine: str, seconds: float) -> None:
    assert _answer_timeout_s(load_config(None, [*GUESS, f"engine={engine}"]).engine) == seconds


@pytest.mark.parametrize(
    ("options", "default", "expected"),
    [("{}", "", "react"), ("{}", "plain", "plain"), ("{format: action_tag}", "plain", "action_tag")],
)
def test_the_users_format_comes_before_that_of_the_environment(options: str, default: str, expected: str) -> None:
    config = load_config(None, [*GUESS, f"agent.options={options}"])
    loop: Any = build_loop(config.agent, default)
    assert loop.format == expected
    assert build_loop(load_config(None, [GUESS[0], "agent.loop=tool_calling"]).agent, "plain")


async def test_a_runner_gets_the_settings_of_the_config() -> None:
    config = load_config(
        None,
        [
            *GUESS,
            "rollout.retries=5",
            "agent.system_prompt=Play well.",
            "agent.max_turns=6",
            "agent.max_tokens=700",
            "agent.max_answer_tokens=8",
            "agent.max_seconds=90",
            "agent.max_parse_failures=9",
            "agent.max_rejected_actions=11",
            "agent.max_observation_tokens=13",
            "agent.tool_timeout_s=17",
            "engine.timeout_s=19",
        ],
    )
    pool = build_env_pool(config)
    policy = ScriptedEpisodePolicy(ScriptedPolicy.RANDOM)
    try:
        runner = build_runner(config, pool, policy)
        assert [build_runner(config, pool, policy, retries=number).retries for number in (0, 2)] == [0, 2]
        assert (runner.retries, runner.spec.instructions) == (5, "Play well.")
        limits = runner.limits
        assert (limits.max_turns, limits.max_tokens, limits.max_answer_tokens, limits.max_seconds) == (6, 700, 8, 90)
        found = (limits.max_parse_failures, limits.max_rejected_actions, limits.max_observation_tokens)
        assert found == (9, 11, 13)
        assert (limits.tool_timeout_s, limits.answer_timeout_s) == (17, 19)
    finally:
        await pool.close()


def test_environments_are_drawn_by_their_weights() -> None:
    config = load_config(
        None, ["environments={a: {name: guess_number, weight: 3}, b: {name: bandit}}", "agent.loop=react_text"]
    )
    sampler = build_task_sampler(config)
    drawn = [sampler.next().environment for _ in range(16)]
    assert (drawn.count("a"), drawn.count("b")) == (12, 4)


ROLES = (
    *("environment=guess_number/valid", "agent.loop=debate"),
    f"agent.roles.debater_1={{engine: {SERVICE}, temperature: 0.25, max_answer_tokens: 7, system_prompt: Be first.}}",
    "agent.roles.debater_2={policy: random, system_prompt: Be second.}",
    "agent.roles.judge={max_answer_tokens: 9}",
)


def test_roles_have_settings_of_their_own_and_train_unless_another_policy_plays_them() -> None:
    agent = load_config(None, list(ROLES)).agent
    found = {setup.role.name: setup for setup in build_roles(agent, make_agent_loop(agent.loop, agent.options))}
    assert {name: setup.role for name, setup in found.items()} == {
        "debater_1": AgentRole(name="debater_1", system_prompt="Be first.", trained=False, max_answer_tokens=7),
        "debater_2": AgentRole(name="debater_2", system_prompt="Be second.", trained=False),
        "judge": AgentRole(name="judge", max_answer_tokens=9),
    }
    service, scripted = found["debater_1"].policy, found["debater_2"].policy
    assert isinstance(service, RolePolicy)
    assert service.sampling.temperature == 0.25
    assert service.service._service.settings.section == "agent.roles.debater_1.engine", "for hints"
    assert isinstance(scripted, ScriptedEpisodePolicy)
    assert found["judge"].policy is None


def test_a_role_of_the_environment_never_trains() -> None:
    config = load_config(
        None, ["environment=guess_number/valid", "agent.loop=react_text", "agent.roles={guest: {max_answer_tokens: 5}}"]
    )
    loop = make_agent_loop(config.agent.loop, config.agent.options)
    (setup,) = build_roles(config.agent, loop, ["guest"])
    assert setup.role == AgentRole(name="guest", trained=False, max_answer_tokens=5)


class Listening(ChatPolicy):
    """Keeps what it is asked."""

    max_context = 1000

    def __init__(self) -> None:
        self.asked: list[Sequence[Message]] = []

    async def start(self) -> None:
        """Nothing."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams, request_id: str
    ) -> ChatAnswer:
        self.asked.append(messages)
        message = Message(role="assistant", content="so")
        return ChatAnswer(message=message, stop_reason=StopReason.STOP, prompt_tokens=1, answer_tokens=1)

    async def close(self) -> None:
        """Nothing."""


async def test_control_tokens_are_broken_up_for_a_roles_service() -> None:
    service = Listening()
    policy = RolePolicy(service, SamplingParams(), break_up=lambda text: text.replace("<|end|>", "< |end|>"))
    await policy.service.chat([user("one <|end|> two"), user("three")], (), SamplingParams(), "r")
    ((first, second),) = service.asked
    assert (first.text, second.text) == ("one < |end|> two", "three")


def role(*tools: str) -> dict[str, Any]:
    return {"as_tool": {"description": "Helps."}, "tools": list(tools)}


@pytest.mark.parametrize(
    ("roles", "is_refused"),
    [
        ({"a": role("b"), "b": role("c"), "c": role("a")}, True),
        ({"a": role("b"), "b": role("b")}, True),
        ({"a": role("b", "c"), "b": role("c"), "c": role()}, False),
    ],
)
def test_roles_call_each_other_in_one_direction(roles: dict[str, Any], is_refused: bool) -> None:
    agent = load_config(
        None, ["environment=guess_number/valid", "agent.loop=tool_calling", f"agent.roles={roles}"]
    ).agent
    loop = make_agent_loop(agent.loop, agent.options)
    if is_refused:
        with pytest.raises(ConfigError, match="can call itself"):
            build_roles(agent, loop)
    else:
        assert [setup.role.name for setup in build_roles(agent, loop)] == ["a", "b", "c"]


@pytest.mark.parametrize("loops", [("debate", "react_text"), ("react_text", "debate")])
def test_a_weight_may_be_that_of_a_role_in_any_environment(loops: tuple[str, str]) -> None:
    parts = ", ".join(f"{loop}: {{name: guess_number, agent: {{loop: {loop}}}}}" for loop in loops)
    words = [f"environments={{{parts}}}", "algorithm.role_weights={judge: 0.5}"]
    check_roles(load_config(None, words))
    with pytest.raises(ConfigError, match="no agent loop of the run has this role"):
        check_roles(load_config(None, [words[0], "algorithm.role_weights={jury: 0.5}"]))


ADAPTERS = (
    *("environment=guess_number/valid", "agent.loop=debate", "model.lora={rank: 4}"),
    "adapters={strong: {}, weak: {}, old: {path: x, trained: false}}",
)


def test_adapters_are_trained_by_the_roles_that_they_play_and_that_train() -> None:
    roles = "{debater_1: {adapter: strong}, debater_2: {adapter: weak, trained: false}, judge: {adapter: old}}"
    config = load_config(None, [*ADAPTERS, f"agent.roles={roles}"])
    assert roles_of_adapters(config) == {"debater_1": "strong", "debater_2": "weak", "judge": "old"}
    assert trained_roles(config) == {"strong": frozenset({"debater_1"}), "weak": frozenset()}
    roles = "{debater_1: {adapter: strong}, debater_2: {adapter: strong}, judge: {adapter: base}}"
    config = load_config(None, [*ADAPTERS, f"agent.roles={roles}"])
    assert trained_roles(config) == {"strong": frozenset({"debater_1", "debater_2"}), "weak": frozenset()}


@pytest.mark.parametrize(
    ("key", "may_change"),
    [
        *(("engine.max_num_seqs", True), ("engine.max_context", False)),
        *(("agent.max_turns", False), ("agent.tool_timeout_s", True)),
        *(("agent.judge.budget.max_requests", True), ("agent.judge.temperature", False), ("agent.judge.cache", True)),
        *(("agent.judge.engine.url", True), ("agent.judge.engine.model", False)),
        *(("algorithm.group_size", False), ("algorithm.teacher.path", False), ("algorithm.teacher.timeout_s", True)),
        *(("trainer.moe.balance", False), ("trainer.optimizer", False), ("trainer.processes", True)),
        *(("trainer.critic.learning_rate", True), ("trainer.critic.kind", False), ("trainer.learning_rate", True)),
        *(("model.dtype", False), ("model.device", True), ("run.seed", False), ("curriculum.pools.by", False)),
        *(("adapters.a.learning_rate", True), ("adapters.a.path", False), ("adapters.a.max_grad_norm", True)),
        *(("environments.a.evaluation_split", True), ("environments.a.weight", False), ("environment.split", False)),
        *(("evaluation.every", True), ("checkpoint.keep", True), ("sampling.temperature", False)),
        *(("agent.options.port", True), ("agent.options.forms", False), ("engine.base_model", False)),
    ],
)
def test_what_may_change_when_a_run_is_resumed(key: str, may_change: bool) -> None:
    assert rule_of(key).may_change is may_change


@pytest.mark.parametrize(("before", "after"), [("tinker", "local"), ("vllm", "tinker")])
def test_weights_at_a_service_stay_there_when_a_run_is_resumed(before: str, after: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.type: {before} -> {after}"):
        check_same_run((Change("engine.type", before, after),))
    check_same_run((Change("engine.type", "vllm", "sglang"),))


def test_the_greedy_rollout_of_a_group_is_greedy() -> None:
    renderer = Renderer(build_tokenizer("qwen2.5"))
    policy = EngineEpisodePolicy(ScriptedEngine(vocab_size=400), renderer, SamplingParams(temperature=0.5), trains=True)
    found = _policies(load_config(None, [*GUESS, "algorithm.advantage=remax"]), policy)
    (greedy,) = found.values()
    assert isinstance(greedy, EngineEpisodePolicy)
    assert (greedy.sampling.temperature, greedy.trains) == (0.0, True)
    assert _policies(load_config(None, [*GUESS, "algorithm.advantage=grpo"]), policy) == {}


async def test_a_reward_model_and_the_environment_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Model:
        def __init__(self, path: str, **settings: Any) -> None:
            assert settings == {"dtype": "bfloat16", "device": "cpu", "max_tokens": 77}

        def score(self, text: str) -> float:
            read.append(text)
            return 0.5

    monkeypatch.setattr(rewards, "RewardModel", Model)
    monkeypatch.setattr(rewards, "find_model", lambda path: path)
    settings = RewardModelConfig(path="model", environment_weight=2.0, max_tokens=77)
    scorer = rewards.RewardModelScorer(
        settings, ModelConfig(dtype="bfloat16", device="cpu"), lambda ids: "".join(f"<{token}>" for token in ids)
    )
    score = await scorer.score(episode(reward=0.125), TASK)
    assert score == Score(
        reward=0.5 + 2 * 0.125,
        components={"reward_model": 0.5, "environment": 0.125},
        sources={"reward_model": 0.5, "environment/step": 0.25},
    )
    assert "<7><8>" in read[0]


@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [
        ({}, True),
        ({"cache": "memory"}, False),
        ({"cache": "off"}, False),
        ({"cache": "memory", "budget": {"max_requests": 5}}, True),
        ({"cache": "off", "budget": {"max_tokens_total": 5}}, True),
    ],
)
async def test_what_a_judge_has_cost_is_kept_while_it_is_needed(
    settings: dict[str, Any], is_kept: bool, tmp_path: Path
) -> None:
    agent = load_config(None, [*GUESS, f"agent.judge={ {'engine': SERVICE, **settings} }"]).agent
    client = build_judge(agent, folder=tmp_path)
    assert client is not None
    await client.close()
    assert (tmp_path / JUDGE_FILE).exists() == is_kept
    assert build_judge(load_config(None, list(GUESS)).agent, folder=tmp_path) is None
