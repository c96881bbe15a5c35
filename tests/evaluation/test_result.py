"""Statistics of episodes, and the JSON of a result."""

from __future__ import annotations

import dataclasses
import json

import pytest

from agentrl.config import load_config
from agentrl.errors import Outcome
from agentrl.evaluation.panel import EvaluatedEpisode, Panel
from agentrl.evaluation.result import find_problems, summarize
from agentrl.observe.incidents import Incidents
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

PANEL = Panel(environment="world/test", policy="engine", model="m", n_tasks=2, samples=2, seed=0)


def episode(
    task: str,
    sample: int,
    *,
    success: bool | None = None,
    reward: float | None = None,
    outcome: Outcome = Outcome.FINISHED,
    task_type: str | None = None,
    turn_tokens: tuple[int, ...] = (),
    attempt: int = 0,
) -> EvaluatedEpisode:
    sequence = TokenSequence()
    for index, count in enumerate(turn_tokens):
        sequence.extend([7], Source.PROMPT if index == 0 else Source.OBSERVATION)
        start = len(sequence)
        sequence.extend_sampled([1] * count, logprobs=[-1.0] * count, versions=[0] * count)
        sequence.turns.append(Turn(index=index, start=start, end=len(sequence)))
    trajectory = Trajectory(
        id=f"{task}/{sample}",
        task_id=task,
        environment="world",
        seed=0,
        group_id=task,
        sequences=[sequence],
        outcome=outcome,
        success=success,
        reward=reward,
        task_type=task_type,
        attempt=attempt,
    )
    return EvaluatedEpisode(task_id=task, sample=sample, trajectory=trajectory)


def test_estimates_by_hand() -> None:
    result = summarize(
        PANEL,
        [
            episode("a", 0, success=True, reward=1.0, task_type="clean", turn_tokens=(2, 4)),
            episode("b", 0, success=False, reward=0.0, task_type="heat", turn_tokens=(3,)),
            episode("a", 1, success=True, reward=1.0, task_type="clean", turn_tokens=(1,)),
            episode("b", 1, success=True, reward=0.5, task_type="heat", outcome=Outcome.TRUNCATED_TURNS),
        ],
        seconds=2.5,
    )
    assert result.success is not None
    assert result.success.mean == 0.75
    assert result.reward is not None
    assert result.reward.mean == 0.625
    assert result.pass_at_k == {1: 0.75, 2: 1.0}
    assert result.pass_hat_k == {1: 0.75, 2: 0.5}
    assert result.turns == 1.0
    assert result.tokens == 2.5
    assert list(result.by_task_type) == ["clean", "heat"]
    assert result.by_task_type["heat"].reward == 0.25
    assert result.outcomes == {Outcome.FINISHED: 3, Outcome.TRUNCATED_TURNS: 1}


def test_each_task_counts_once_in_the_mean_reward_whatever_its_samples() -> None:
    """Three samples of one task and one of another: the mean over samples would be 0.75."""
    panel = dataclasses.replace(PANEL, samples=3)
    found = [episode("a", sample, success=True, reward=1.0) for sample in range(3)]
    result = summarize(panel, [*found, episode("b", 0, success=False, reward=0.0)], seconds=1.0)
    assert result.reward is not None
    assert (result.reward.mean, result.reward.low, result.reward.high) == (0.5, 0.0, 1.0)
    assert result.pass_at_k == {1: 0.5, 2: 1.0, 3: 1.0}
    assert result.pass_hat_k == {1: 0.5, 2: 1.0, 3: 1.0}
    assert (result.by_task_type["all"].n_tasks, result.by_task_type["all"].reward) == (2, 0.75)


def test_reused_episodes_are_counted_with_the_time_of_the_first() -> None:
    found = [
        dataclasses.replace(episode(task, 0, reward=1.0), played_at=time)
        for task, time in (("a", 3000.0), ("b", 1000.0), ("c", 2000.0), ("d", 500.0))
    ]
    earlier = {one.trajectory.id for one in found[:3]}
    result = summarize(dataclasses.replace(PANEL, n_tasks=4), found, seconds=1.0, found=earlier)
    assert (result.reused, result.reused_since) == (3, 1000.0)
    assert result.reused_words.startswith("3 of 4 reused, played since ")


def test_tokens_that_a_service_counted_are_tokens() -> None:
    """Turns in text have no tokens in the ledger."""
    played = episode("a", 0, turn_tokens=(2, 0))
    played.trajectory.sequences[0].turns[1].counted_tokens = 5
    assert summarize(PANEL, [played], seconds=2.0).tokens == 7.0


def test_tokens_per_second_are_those_of_episodes_that_this_run_played() -> None:
    episodes = [episode("a", 0, turn_tokens=(2, 4)), episode("b", 0, turn_tokens=(3,))]
    assert summarize(PANEL, episodes, seconds=3.0).tokens_per_s == 3.0
    assert summarize(PANEL, episodes, seconds=3.0, found={episodes[0].trajectory.id}).tokens_per_s == 1.0


def test_turns_and_tokens_of_the_environment_s_roles_are_not_the_agent_s() -> None:
    played = episode("a", 0, turn_tokens=(2, 4))
    played.trajectory.sequences[0].turns[1].role = "user"
    result = summarize(PANEL, [played], seconds=1.0, others=("user",))
    assert (result.turns, result.tokens, result.tokens_per_s) == (1.0, 2.0, 2.0)


def test_failures_of_the_machinery_count_in_no_estimate() -> None:
    broken = episode("b", 0, outcome=Outcome.ENGINE_ERROR, attempt=2)
    result = summarize(PANEL, [episode("a", 0, success=True, reward=1.0), broken], seconds=1.0)
    assert result.success is not None
    assert (result.success.mean, result.reward and result.reward.mean) == (1.0, 1.0)
    assert (result.failures, result.retries) == (1, 2)
    assert result.outcomes[Outcome.ENGINE_ERROR] == 1


def test_repaired_calls_of_measured_episodes_are_counted() -> None:
    first, second = episode("a", 0, turn_tokens=(2, 4, 1)), episode("b", 0, turn_tokens=(3,))
    broken = episode("c", 0, turn_tokens=(1,), outcome=Outcome.ENGINE_ERROR)
    for one, counts in ((first, (2, 0, 1)), (second, (4,)), (broken, (8,))):
        for turn, count in zip(one.trajectory.turns, counts, strict=True):
            turn.repaired_calls = count
    result = summarize(PANEL, [first, second, broken], seconds=1.0)
    assert (result.repaired_calls, result.to_json()["repaired_calls"]) == (7, 7)


def test_nothing_known_is_null_and_not_zero() -> None:
    result = summarize(PANEL, [episode("a", 0), episode("b", 0, outcome=Outcome.ENGINE_ERROR)], seconds=1.0)
    assert (result.success, result.reward, result.pass_at_k) == (None, None, {})
    content = json.loads(json.dumps(result.to_json()))
    assert content["success"] is None
    assert content["reward"] is None


def test_an_episode_that_cannot_tell_counts_as_unsolved_where_others_can() -> None:
    result = summarize(PANEL, [episode("a", 0, success=True), episode("b", 0)], seconds=1.0)
    assert result.success is not None
    assert result.success.mean == 0.5


def test_json_has_every_promised_key() -> None:
    content = summarize(PANEL, [episode("a", 0, success=True, reward=1.0)], seconds=1.0).to_json()
    promised = "env policy model n_tasks samples success reward by_task_type outcomes seconds"
    assert set(promised.split()) | {"pass_at_k", "pass_hat_k", "turns", "tokens"} <= set(content)
    assert set(content["success"]) == {"mean", "low", "high"}
    assert content["env"] == "world/test"


def test_text_for_people() -> None:
    result = summarize(PANEL, [episode("a", 0, success=True, reward=1.0)], seconds=1.0)
    assert str(result) == "m on world/test: success 100.0 % (20.7 to 100.0), reward 1.000, 1 episodes"


@pytest.mark.parametrize("change", [{"seed": 1}, {"policy": "random"}, {"settings": {"temperature": 0.5}}])
def test_the_key_tells_panels_apart_but_not_their_sizes(change: dict[str, object]) -> None:
    base: dict[str, object] = {"environment": "w", "policy": "engine", "model": "m", "seed": 0, "settings": {}}
    key = Panel(n_tasks=1, samples=1, **base).key()  # type: ignore[arg-type]
    assert Panel(n_tasks=9, samples=4, **base).key() == key  # type: ignore[arg-type]
    assert Panel(n_tasks=1, samples=1, **{**base, **change}).key() != key  # type: ignore[arg-type]


def test_prompts_are_not_told_to_report_a_success_that_they_cannot_have() -> None:
    played = [episode("a", 0, reward=1.0), episode("b", 0, reward=0.0)]
    prompts = summarize(dataclasses.replace(PANEL, environment="prompts/valid"), played, seconds=1.0)
    advice = prompts.advice_on_success or ""
    assert "prompts have only rewards: read the mean reward" in advice
    assert "reward_threshold" not in advice
    assert "reward_threshold" in (summarize(PANEL, played, seconds=1.0).advice_on_success or "")
    known = summarize(PANEL, [episode("a", 0, reward=1.0, success=True)], seconds=1.0)
    unmeasured = summarize(PANEL, [episode("a", 0)], seconds=1.0)
    assert (known.advice_on_success, unmeasured.advice_on_success) == (None, None)


def test_an_evaluation_tells_the_environment_s_limit_of_turns_from_the_agent_s() -> None:
    played = [
        episode("a", number, outcome=Outcome.TRUNCATED_TURNS, reward=0.0, turn_tokens=(1, 1)) for number in range(4)
    ]
    config = load_config(None, ["environment=guess_number", "agent.max_turns=50"])
    (own,) = find_problems(played, Incidents(), {}, config)
    assert "the environment's own steps" in own.text
    (budget,) = find_problems(played, Incidents(), {}, load_config(None, ["environment=a", "agent.max_turns=2"]))
    assert "set agent.max_turns=4 (now 2)" in budget.text
