import pytest

from agentrl.errors import Outcome
from agentrl.observe.metrics import trajectory_metrics
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn


def trajectory(reward, *, outcome=Outcome.FINISHED, success=None, turns=1, version=0, metrics=None):
    sequence = TokenSequence()
    sequence.extend([1, 2, 3], Source.PROMPT)
    for index in range(turns):
        start = len(sequence)
        sequence.extend_sampled([4, 5], logprobs=[-1, -1], versions=[version, version + 1])
        turn = Turn(index=index, start=start, end=start + 2)
        turn.timings.decode, turn.timings.env = 3.0, 1.0
        sequence.turns.append(turn)
    return Trajectory(
        id="t", task_id="t", environment="e", seed=0, group_id="g", sequences=[sequence],
        reward=reward, outcome=outcome, success=success, metrics=metrics or {},
    )  # fmt: skip


def test_numbers_of_a_step_by_hand():
    numbers = trajectory_metrics(
        [
            trajectory(0.0, success=False, version=3, turns=3, metrics={"invalid_answers": 2, "seconds": 8}),
            trajectory(1.0, success=True, version=5, outcome=Outcome.TRUNCATED_TURNS),
            trajectory(None, outcome=Outcome.ENGINE_ERROR, version=1, turns=40),
        ],
        version=6,
    )
    assert numbers["episodes"] == 3
    assert (numbers["reward/mean"], numbers["reward/min"], numbers["reward/max"]) == (0.5, 0, 1)
    assert numbers["reward/std"] == pytest.approx(0.5**0.5)
    assert numbers["success/mean"] == 0.5
    assert numbers["outcome/finished"] == numbers["outcome/engine_error"] == pytest.approx(1 / 3)
    assert numbers["turns/mean"] == 2
    assert (numbers["tokens/total"], numbers["tokens/sampled"], numbers["tokens/longest_sequence"]) == (14, 8, 9)
    assert (numbers["staleness/mean"], numbers["staleness/max"]) == (2, 3)
    assert numbers["episode/invalid_answers"] == 1
    assert numbers["time/episode/seconds"] == 4
    assert numbers["time/share/engine"] == 0.75


def test_an_episode_without_success_has_failed_if_others_of_its_environment_report_it():
    cut = trajectory(0.0, outcome=Outcome.TRUNCATED_TURNS)
    unknown = trajectory(0.5)
    unknown.environment = "prompts"
    assert (
        trajectory_metrics([trajectory(1.0, success=True), cut, cut, cut, unknown], version=0)["success/mean"] == 0.25
    )
    assert "success/mean" not in trajectory_metrics([cut, unknown], version=0)


def test_seconds_are_those_of_all_episodes_and_the_rest_of_the_trained_ones():
    failed = trajectory(None, outcome=Outcome.ENGINE_ERROR, turns=4)
    for turn in failed.turns:
        turn.timings.decode, turn.timings.tool, turn.timings.env = 0.0, 2.0, 0.0
    numbers = trajectory_metrics([trajectory(1.0), failed], version=0)
    assert (numbers["time/turns/decode_s"], numbers["time/turns/tool_s"], numbers["time/turns/env_s"]) == (3, 8, 1)
    shares = [numbers[f"time/share/{name}"] for name in ("engine", "tool", "environment")]
    assert shares == pytest.approx([3 / 12, 8 / 12, 1 / 12])
    assert (numbers["turns/mean"], numbers["tokens/longest_sequence"]) == (1, 5)


def test_each_role_has_its_own_returns_and_turns():
    """The planner earns 0.5 in one episode, the worker 2 in both; the environment pays 0.25 to all."""
    several = []
    for own in (0.5, None):
        played = trajectory(0.25, turns=3)
        played.turns[0].role, played.turns[1].role, played.turns[2].role = "planner", "worker", "worker"
        played.turns[1].own_reward = 2.0
        if own is None:
            played.sequences[0].turns = played.sequences[0].turns[1:]
        else:
            played.turns[0].own_reward = own
        several.append(played)
    numbers = trajectory_metrics(several, version=0)
    returns = [found.role_returns for found in several]
    assert [set(one) for one in returns] == [{"planner", "worker"}, {"worker"}]
    assert numbers["role/planner/return/mean"] == returns[0]["planner"]
    assert numbers["role/worker/return/mean"] == (returns[0]["worker"] + returns[1]["worker"]) / 2
    assert (numbers["role/planner/turns/mean"], numbers["role/worker/turns/mean"]) == (1, 2)
    assert returns[0]["planner"] != returns[0]["worker"] != several[0].reward


def test_repaired_calls_of_a_step_are_added_up():
    several = [
        trajectory(1.0, version=3, metrics={"calls/repaired": 2}),
        trajectory(0.0, version=3, metrics={"calls/repaired": 3}),
        trajectory(None, outcome=Outcome.ENGINE_ERROR, metrics={"calls/repaired": 7}),
    ]
    numbers = trajectory_metrics(several, version=3)
    assert numbers["calls/repaired"] == 5
    assert "episode/calls/repaired" not in numbers
    assert "calls/repaired" not in trajectory_metrics([trajectory(1.0, version=3)], version=3)


def test_tokens_that_branches_share_are_counted_once():
    """Three prompt tokens and two turns of two; a branch after the first turn adds one observed and two sampled."""
    branched = trajectory(1.0, turns=2)
    branch = branched.sequences[0].fork(5)
    branch.extend([9], Source.OBSERVATION)
    branch.extend_sampled([4, 5], logprobs=[-1, -1], versions=[0, 0])
    branch.turns.append(Turn(index=2, start=6, end=8))
    branched.sequences.append(branch)
    numbers = trajectory_metrics([branched, trajectory(0.0)], version=1)
    assert numbers["tokens/total"] == (3 + 4) + (1 + 2) + (3 + 2)
    assert numbers["tokens/sampled"] == 6 + 2
    assert numbers["tokens/per_episode"] == 7.5
    assert numbers["tokens/sampled_per_episode"] == 4
    assert numbers["tokens/longest_sequence"] == 8, "with what it shares"


def test_groups_whose_members_sampled_the_same_tokens_are_counted():
    def member(group, *tokens):
        found = trajectory(0.0)
        found.group_id, found.sequences = group, [TokenSequence()]
        found.sequences[0].extend_sampled(tokens, logprobs=[-1] * len(tokens), versions=[0] * len(tokens))
        return found

    alike = [member("a", 1, 2), member("a", 1, 2), member("a", 1, 2)]
    apart = [member("b", 1, 2), member("b", 1, 2), member("b", 1, 3)]
    longer = [member("c", 1, 2), member("c", 1, 2, 2)]
    assert trajectory_metrics([*alike, *apart, *longer], version=0)["groups/identical"] == pytest.approx(1 / 3)
    assert trajectory_metrics([*alike, member("d", 1, 2)], version=0)["groups/identical"] == 1
    assert "groups/identical" not in trajectory_metrics([member("d", 1, 2)], version=0)


def test_a_step_of_failures_has_no_reward():
    numbers = trajectory_metrics([trajectory(None, outcome=Outcome.ENVIRONMENT_ERROR)], version=0)
    assert "reward/mean" not in numbers
    assert numbers["outcome/environment_error"] == 1


def test_a_step_without_tokens_has_no_stale_ones():
    failed = trajectory(None, outcome=Outcome.ENGINE_ERROR, turns=0)
    assert trajectory_metrics([failed], version=3)["staleness/max"] == 0.0
