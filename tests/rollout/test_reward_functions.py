"""Reward functions: several with weights, those of other libraries, and what is never a reward of 0."""

import asyncio
import functools
import itertools
import math
import threading

import numpy as np
import pytest
import torch

from agentrl.builders.rewards import check_reward_weights, find_reward
from agentrl.config import load_config
from agentrl.config.environment import AgentChanges, AgentConfig
from agentrl.errors import ConfigError, EnvironmentFailure, Outcome, UnknownNameError, UsageError
from agentrl.message import Message, ToolCall, system, user
from agentrl.registry import Kind, register, unregister
from agentrl.reward import EnvironmentReward, Score, Scorer, defined_in
from agentrl.rollout.env_pool import ThreadWorker
from agentrl.rollout.reward_functions import FunctionReward
from agentrl.task import Task
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

TASK = Task(
    id="t-1",
    environment="w",
    ground_truth="42",
    type="sums",
    columns={"solution": "42", "data_source": "openai/gsm8k", "extra_info": {"index": 3}},
)


def episode(text="The answer is 42", reward=0.25):
    trajectory = Trajectory(id="g/0.0", task_id="t-1", environment="w", seed=0, group_id="g", outcome=Outcome.FINISHED)
    sequence = TokenSequence()
    sequence.extend([1, 2], Source.PROMPT)
    sequence.extend_sampled([7, 8], logprobs=[-1.0, -1.0], versions=[0, 0])
    sequence.turns.append(Turn(index=0, start=2, end=4, reward=reward))
    trajectory.sequences.append(sequence)
    answer = Message(role="assistant", content=text, reasoning="six times seven")
    trajectory.conversations.append([system("Think."), user("6 x 7?"), answer])
    trajectory.answers.append(answer)
    trajectory.completions.append(f"<think>six times seven</think>{text}")
    return trajectory


def exact(trajectory, task):
    return task.ground_truth in trajectory.final_text


async def slow_length(trajectory, task, *, most=100):
    await asyncio.sleep(0)
    return len(trajectory.final_text) / most


def of_trl(completions, solution, **kwargs):
    return [1.0 if s in c[-1]["content"] else 0.0 for c, s in zip(completions, solution, strict=True)]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("openai/gsm8k", {"index": 3})
    return {"score": float(solution_str.startswith("<think>") and ground_truth in solution_str), "acc": 1}


async def of_verifiers(prompt, completion, answer):
    return float(prompt[-1]["content"] == "6 x 7?" and answer in completion[-1]["content"])


@pytest.fixture
def named():
    """Register functions under names, for one test."""
    given = []

    def give(**functions):
        for name, function in functions.items():
            register(Kind.REWARD, name, function)
            given.append(name)

    yield give
    for name in given:
        unregister(Kind.REWARD, name)


async def scored(reward, trajectory=None):
    thread = ThreadWorker()
    try:
        return await find_reward(AgentConfig(reward=reward), thread).score(trajectory or episode(), TASK)
    finally:
        await thread.close()


async def test_a_function_is_the_reward_and_a_component(named):
    named(exact=exact)
    assert await scored("exact") == Score(reward=1.0, components={"exact": 1.0})


async def test_several_functions_are_added_with_their_weights_and_kept_without_them(named):
    named(exact=exact, slow=slow_length)
    score = await scored(["exact", {"name": "slow", "weight": -0.5, "most": 32}, {"name": "environment", "weight": 2}])
    assert score.reward == 1.0 - 0.5 * 0.5 + 2 * 0.25
    assert score.components == {"exact": 1.0, "slow": 0.5, "environment": 0.25}


async def test_the_environments_own_reward_counts_only_where_it_is_named(named):
    named(exact=exact)
    assert (await scored("exact", episode(text="?", reward=5.0))).reward == 0.0
    assert isinstance(find_reward(AgentConfig(), ThreadWorker()), EnvironmentReward)
    assert await scored({"name": "environment", "weight": 2}) == Score(reward=0.5, components={"environment": 0.25})


@pytest.mark.parametrize("function", [of_trl, of_verl, of_verifiers], ids=lambda function: function.__name__)
@pytest.mark.parametrize(("text", "reward"), [("It is 42.", 1.0), ("It is 41.", 0.0)])
async def test_functions_for_other_libraries_run_unchanged(named, function, text, reward):
    named(theirs=function)
    assert (await scored("theirs", episode(text=text))).reward == reward


async def test_a_function_for_trl_gets_the_columns_that_it_asks_for(named):
    seen = {}

    def keeping(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, ids=completion_ids)
        return [None]

    named(keeping=keeping)
    assert (await scored("keeping")).reward is None  # TRL's way of saying that a function does not apply
    assert seen["prompts"] == [[{"role": "system", "content": "Think."}, {"role": "user", "content": "6 x 7?"}]]
    whole = "<think>six times seven</think>The answer is 42"
    assert seen["completions"] == [[{"role": "assistant", "content": whole}]]
    assert seen["ids"] == [[7, 8]]
    assert (seen["solution"], seen["ground_truth"]) == (["42"], ["42"])


@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float32(1), np.bool_(True), np.array([1.0]), torch.tensor(1.0), torch.tensor([1])]
)
async def test_what_counts_as_a_number(named, value):
    named(constant=lambda trajectory, task: value)
    assert (await scored("constant")).reward == 1.0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, r"NoneType None.*Annotate it with -> float \| None"),
        ("1.0", "str '1.0'"),
        (torch.ones(2), "Tensor tensor"),
        (math.nan, "float nan"),
        (math.inf, "float inf"),
        (10**400, "int an int of 1329 bits"),
        (1e308, "float 1e"),
        ([1.0], "list"),
        ((1.0, {}), "tuple"),
    ],
)
async def test_what_is_no_reward_names_function_file_line_and_task(named, value, words):
    named(wrong=lambda trajectory, task: value)
    place = r"reward function wrong \(.*test_reward_functions.py line \d+\) on task t-1 did not return a reward"
    with pytest.raises(EnvironmentFailure, match=f"(?s){place}: got {words}"):
        await scored("wrong")


def broken(trajectory, task):
    return task.ground_truth["answer"]


async def broken_later(trajectory, task):
    await asyncio.sleep(0)
    raise SystemExit(0)


async def interrupted(trajectory, task):
    await asyncio.sleep(0)
    raise KeyboardInterrupt


async def cancelled(trajectory, task):
    inner = asyncio.ensure_future(asyncio.sleep(60))
    inner.cancel()
    await inner


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (broken, r"TypeError: .*It was raised in .*test_reward_functions.py line \d+: return task.ground_truth\["),
        (broken_later, r"SystemExit: 0.*line \d+: raise SystemExit"),
        (interrupted, r"KeyboardInterrupt: .*line \d+: raise KeyboardInterrupt"),
        (cancelled, "a coroutine that was cancelled from within"),
        (functools.partial(broken), "TypeError"),
        (lambda completions: [1.0, 2.0], "expected a list of one number"),
        (lambda completions, missing: [1.0], "missing 1 required positional argument: 'missing'"),
        (lambda solution_str: {"points": 1}, "KeyError: 'score'"),
    ],
)
async def test_what_a_function_raises_is_a_failure_that_names_it(named, function, words):
    named(theirs=function)
    with pytest.raises(EnvironmentFailure, match=f"(?s)reward function theirs .*on task t-1 failed: got .*{words}"):
        await scored("theirs")


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_function_that_hangs_misses_its_deadline(is_async):
    ended = threading.Event()

    async def waits(trajectory, task):
        await asyncio.sleep(60)

    thread = ThreadWorker()
    function = waits if is_async else lambda trajectory, task: ended.wait(60)
    reward = FunctionReward("slow", function, {}, thread, deadline_s=0.02)
    with pytest.raises(EnvironmentFailure, match=r"function slow .*missed its deadline: got no answer in 0.02 s"):
        await reward.score(episode(), TASK)
    ended.set()
    await thread.close()


async def test_blocking_functions_run_one_after_the_other_beside_the_event_loop(named):
    threads, running = set(), itertools.count()

    def counting(trajectory, task):
        threads.add(threading.get_ident())
        return next(running)

    named(counting=counting)
    thread = ThreadWorker()
    reward = find_reward(AgentConfig(reward="counting"), thread)
    scores = await asyncio.gather(*(reward.score(episode(), TASK) for _ in range(4)))
    await thread.close()
    assert sorted(score.reward for score in scores) == [0, 1, 2, 3]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_a_function_may_say_that_it_does_not_apply_if_it_declares_so(named):
    def sometimes(trajectory, task) -> float | None:
        return None

    named(sometimes=sometimes, exact=exact)
    assert await scored("sometimes") == Score(reward=None)
    assert await scored(["sometimes", "exact"]) == Score(reward=1.0, components={"exact": 1.0})


class Wordy(Scorer):
    def __init__(self, verdict=None):
        self.verdict = verdict

    async def score(self, trajectory, task):
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (0.5, "did not return a score: got float 0.5"),
        (None, "did not return a score: got NoneType"),
        (Score(reward="1"), "gave a reward that is no reward: got str '1'"),
        (Score(reward=1.0, components={"style": math.nan}), "gave a style that is no reward: got float nan"),
        (KeyError("x"), r"failed: got KeyError: 'x'.*It was raised in .*test_reward_functions.py line \d+: raise"),
    ],
)
async def test_a_scorer_that_fails_is_named_with_its_file_and_line(make_runner, play, worlds, verdict, words):
    trajectory = await play(make_runner(worlds.Corridor, "forward", scorer=Wordy(verdict)))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.REWARD_ERROR, None)
    start, _, rest = trajectory.error.partition(" on task t ")
    assert start.startswith("Wordy (")
    assert "test_reward_functions.py line" in start
    with pytest.raises(EnvironmentFailure, match=f"(?s){words}"):
        raise EnvironmentFailure(rest)


NOT_A_FUNCTION = 3


def wrong_arguments(prompt):
    return 0.0


def wrong_order(task, trajectory):
    return float(task is not None)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("no.such.module:f", "cannot import no.such.module"),
        ("agentrl.message:parse_inx", "has no 'parse_inx'. Did you mean 'parse_int'"),
        ("agentrl.message:Message", "cannot be called: got a class, expected def reward"),
        ("agentrl.reward:Any", "cannot be called"),
        ("agentrl.message:parse_int", r"\(.*message.py line \d+\).*got parse_int\(text.*expected def reward\(traj"),
        ({"name": "agentrl.message:tool_result", "most": 3}, "unexpected keyword argument 'most'"),
        (f"{__name__}:wrong_order", r"got wrong_order\(task, trajectory\): the trajectory comes first, then the task"),
        ({"name": "environment", "most": 3}, "options of reward environment do not fit"),
        ("exakt", "unknown reward"),
    ],
)
def test_what_is_no_reward_function_is_refused_before_anything_runs(entry, words):
    with pytest.raises((UsageError, UnknownNameError), match=words):
        find_reward(AgentConfig(reward=entry), ThreadWorker())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[]", "agent.reward is empty"),
        ("[a, a]", "names a more than once"),
        ("{weight: 1}", "names no function"),
        ("[{name: a, weight: heavy}]", "weight of a is 'heavy'"),
        ("[{name: a, weight: .nan}]", "weight of a is nan"),
        ("3", "agent.reward"),
    ],
)
def test_a_wrong_list_of_rewards_is_a_config_error(value, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, ["environment=guess_number", f"agent.reward={value}"])


def test_the_configs_of_older_runs_name_a_scorer():
    assert AgentConfig(scorer="my:Judge").reward == ["my:Judge"]
    assert AgentChanges(scorer=None).reward is None


def test_a_function_whose_file_holds_something_else_has_a_place_all_the_same(tmp_path):
    file = tmp_path / "cell.md"
    file.write_text("(((\n")
    defined = {}
    exec(compile("\ndef reward(trajectory, task):\n    return 1\n", str(file), "exec"), defined)
    assert defined_in(defined["reward"]).words == f" ({file} line 2)"


def test_functions_of_one_name_keep_their_modules_apart(named):
    named(**{"a:exact": exact, "b:exact": slow_length, "c:other": exact})
    reward = find_reward(AgentConfig(reward=["a:exact", "b:exact", "c:other"]), ThreadWorker())
    assert [part.name for part in reward._parts] == ["a:exact", "b:exact", "other"]


def test_weights_that_gdpo_would_ignore_are_refused():
    rewards = "agent.reward=[environment, {name: my:brief, weight: 0.2}]"
    words = ["environment=guess_number", "algorithm=gdpo"]
    with pytest.raises(ConfigError, match=r"weight 0.2 of my:brief.*advantage_options=\{weights: \{brief: 0.2\}\}"):
        check_reward_weights(load_config(None, [*words, rewards]))
    check_reward_weights(load_config(None, [*words, "agent.reward=[environment, my:brief]"]))


def test_tool_calls_are_read_from_the_answers():
    trajectory = episode()
    trajectory.answers.append(Message(role="assistant", tool_calls=(ToolCall(name="add", arguments={"a": 1}),)))
    assert [call.name for call in trajectory.tool_calls] == ["add"]
