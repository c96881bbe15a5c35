"""Rewards that are refused before anything runs: no functions, wrong options, missing columns, ignored weights."""

from dataclasses import replace

import pytest
from support.rewards import TASK, exact

from agentrl.builders.rewards import check_reward_weights
from agentrl.config import load_config
from agentrl.config.environment import AgentConfig
from agentrl.errors import ConfigError, UnknownNameError, UsageError
from agentrl.reward import Score
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.reward_functions import check_columns, find_reward


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda completions, solution, **kwargs: [1.0], []),
        (lambda completions, ground_truth: [1.0], []),
        (lambda completions, level, hardness=3: [1.0], ["level"]),
        (lambda prompts, completions, completion_ids, trainer_state, log_metric, log_extra: [1.0], []),
        (lambda completions, prompt: [1.0], ["prompt"]),
        (lambda data_source, solution_str, ground_truth, extra_info: 1.0, []),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: [1.0], []),
        (lambda solution_str, level, index: 1.0, ["level", "index"]),
        (lambda prompt, completion, answer, state, info, task, parser: 1.0, []),
        (lambda completion, *rest, level: 1.0, ["level"]),
        (lambda trajectory, task: 1.0, []),
    ],
)
def test_columns_that_a_row_lacks_are_named(named, function, missing):
    named(theirs=function)
    config = AgentConfig(reward="theirs")
    if not missing:
        check_columns(config, lambda: [TASK])
        return
    columns = "the columns data_source, extra_info, ground_truth, solution, expected"
    words = f"theirs .* needs columns that task t-1 does not have: got {columns} {', '.join(missing)}"
    full = replace(TASK, id="t-0", columns={**TASK.columns, **dict.fromkeys(missing)})
    with pytest.raises(ConfigError, match=words):
        check_columns(config, lambda: [full, TASK])
    check_columns(config, lambda: (full, TASK))  # generated tasks: the first stands for all
    check_columns(config, lambda: [full])


def test_a_truth_that_no_row_has_is_named(named):
    bare = replace(TASK, columns={}, ground_truth=None)
    named(verl=lambda solution_str, ground_truth: 1.0, verifiers=lambda completion, answer: 1.0)
    for name, missing in (("verl", "ground_truth"), ("verifiers", "answer")):
        with pytest.raises(ConfigError, match=f"got the columns prompt only, expected {missing}"):
            check_columns(AgentConfig(reward=["environment", name]), lambda: [bare])
    with pytest.raises(ConfigError, match="got the columns answer, expected answer"):
        check_columns(AgentConfig(reward="verifiers"), lambda: [replace(bare, columns={"answer": None})])
    check_columns(AgentConfig(reward="verifiers"), lambda: [replace(bare, columns={"answer": None}, ground_truth=0)])
    check_columns(AgentConfig(reward="verifiers"), lambda: [replace(bare, columns={"answer": 0})])
    check_columns(AgentConfig(reward="verl"), lambda: [replace(bare, ground_truth=0)])


def test_tasks_are_only_read_for_functions_that_ask_for_columns(named):
    named(exact=exact)
    check_columns(AgentConfig(reward=["exact", "environment"]), lambda: pytest.fail("the tasks were read"))


def own_with_options(trajectory, task, *, most=100):
    return 0.0


def for_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


def wrong_order(task, trajectory):
    return float(task is not None)


class Called:
    def __call__(self, trajectory, task):
        return 1.0


class Scored:
    async def score(self, trajectory, task):
        return Score(reward=1.0)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("no.such.module:f", "cannot import no.such.module"),
        ("agentrl.message:parse_inx", "has no 'parse_inx'. Did you mean 'parse_int'"),
        (
            "agentrl.message:Message",
            r"cannot be called: got a class, expected def reward.* Write a function; or a class",
        ),
        (
            f"{__name__}:Called",
            r"got a class, .* Make an object of the class, reward = Called\(\), and give that instead",
        ),
        (f"{__name__}:Scored", r"got a class, .* Derive the class from agentrl\.reward\.Scorer"),
        (f"{__name__}:Called.__call__", r"this is a method of the class; make an object of it"),
        ("agentrl.reward:Any", "cannot be called"),
        ("agentrl.message:parse_int", r"\(.*message.py line \d+\).*got parse_int\(text.*expected def reward\(traj"),
        ({"name": f"{__name__}:own_with_options", "last": 3}, "got 'last', expected one of most. Did you mean 'most'"),
        ({"name": "repetition", "size": 0}, "repetition: option size is out of range: got 0, expected greater than 0"),
        ({"name": "repetition", "penalty": float("inf")}, "penalty is out of range: got inf, expected a finite number"),
        ({"name": "mrr", "k": -1}, "mrr: option k is out of range: got -1"),
        ({"name": "language_consistency", "script": "greek"}, "script .*got 'greek', expected one of latin, han, kana"),
        ({"name": "tag_count_format", "tags": "think"}, "tags has the wrong type: got 'think', expected a list of str"),
        ({"name": "gui_r1", "accuracy": 2}, "accuracy is out of range"),
        ({"name": f"{__name__}:for_verl", "least": 3}, "unexpected keyword argument 'least'"),
        ("agentrl.message:tool_result", r"got tool_result\(call.*the names of its parameters match no known.*answer"),
        (
            f"{__name__}:wrong_order",
            r"got wrong_order\(task, trajectory\): the trajectory must come first, then the task",
        ),
        ({"name": "environment", "most": 3}, "options of reward environment are invalid"),
        ("exakt", "unknown reward"),
        ("./my_rewards.py", r"unknown reward.*Add the name of the object in the file: \./my_rewards\.py:NAME"),
        ("my_rewards.exact", r"unknown reward.*Did you mean my_rewards:exact\?"),
    ],
)
def test_objects_that_are_not_reward_functions_are_rejected_before_the_run(entry, words):
    with pytest.raises((UsageError, UnknownNameError), match=words):
        find_reward(AgentConfig(reward=entry), ThreadWorker())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[]", "agent.reward is empty"),
        ("[a, a]", "names a more than once"),
        ("{weight: 1}", "does not name a function"),
        ("[{name: a, weight: heavy}]", "weight of a is 'heavy'"),
        ("[{name: a, weight: .nan}]", "weight of a is nan"),
        ("3", "agent.reward"),
    ],
)
def test_a_wrong_list_of_rewards_is_a_config_error(value, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, ["environment=guess_number", f"agent.reward={value}"])


def test_weights_that_gdpo_would_ignore_are_refused():
    rewards = "agent.reward=[environment, {name: my:brief, weight: 0.2}]"
    words = ["environment=guess_number", "algorithm=gdpo"]
    with pytest.raises(ConfigError, match=r"weight 0.2 of my:brief.*advantage_options=\{weights: \{brief: 0.2\}\}"):
        check_reward_weights(load_config(None, [*words, rewards]))
    check_reward_weights(load_config(None, [*words, "agent.reward=[environment, my:brief]"]))
