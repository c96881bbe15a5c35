"""Reward functions: several with weights, those of other libraries, and what is never a reward of 0."""

import asyncio
import functools
import itertools
import math
import re
import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.builders.rewards import check_columns, check_reward_weights, find_reward
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


def by_answer(answer, info, **kwargs):
    return float(kwargs["completion"][-1]["content"].endswith(answer) and info["solution"] == "42")


def by_state(state):
    return float(state["completion"][-1]["content"].endswith(state["answer"]))


def by_state_and_more(state, **kwargs):
    return float(state["prompt"] == kwargs["prompt"] and kwargs["completion"][-1]["content"].endswith("42"))


def by_state_and_facts(state, info):
    return float(state["completion"][-1]["content"].endswith(info["solution"]))


def by_prompt(prompt, answer):
    return float(prompt[-1]["content"] == "6 x 7?" and answer == "42")


def by_info(info):
    return float(info["solution"] == "42")


def by_parser(parser, **kwargs):
    return float(parser.parse_answer(kwargs["completion"]).endswith("42"))


def by_ids(completion_ids, **kwargs):
    return [float(completion_ids == [[7, 8]] and kwargs["completions"][0][0]["content"].endswith("42"))]


def by_prompts(prompts, solution):
    return [float(prompts[0][-1]["content"] == "6 x 7?" and solution == ["42"])]


def by_source(data_source, ground_truth, **kwargs):
    return float(data_source == "openai/gsm8k" and kwargs["solution_str"].endswith(ground_truth))


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


async def scored(reward, trajectory=None, task=TASK):
    thread = ThreadWorker()
    try:
        return await find_reward(AgentConfig(reward=reward), thread).score(trajectory or episode(), task)
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


@pytest.mark.parametrize(
    "function",
    [
        *(by_answer, by_state, by_state_and_more, by_state_and_facts, by_prompt, by_info, by_parser),
        *(by_ids, by_prompts, by_source),
    ],
    ids=lambda function: function.__name__,
)
async def test_any_parameter_that_one_library_alone_has_names_that_library(named, function):
    named(theirs=function)
    check_columns(AgentConfig(reward="theirs"), lambda: [TASK])
    assert (await scored("theirs")).reward == 1.0


@pytest.mark.parametrize(
    "function",
    [
        lambda trajectory, task, *, answer=42, prompt=None, completion=None: task.ground_truth == str(answer),
        lambda _, task: task.ground_truth == "42",
        lambda trajectory, _task: trajectory.final_text.endswith("42"),
        lambda *both: both[0].final_text.endswith(both[1].ground_truth),
        lambda one, two, /: one.final_text.endswith(two.ground_truth),
    ],
)
async def test_a_trajectory_and_a_task_come_first_in_functions_for_agentrl(named, function):
    named(own=function)
    assert (await scored("own")).reward == 1.0


async def test_annotations_tell_what_parameters_of_other_names_are(named):
    def annotated(answer: Trajectory, info: "Task"):
        return answer.final_text.endswith(info.ground_truth)

    named(annotated=annotated)
    assert (await scored("annotated")).reward == 1.0


@pytest.mark.parametrize(
    "function",
    [
        lambda response, ground_truth: 1.0,
        lambda response, ground_truth, **kwargs: 1.0,
        lambda a, b: 1.0,
        lambda x: 1.0,
        lambda: 1.0,
        lambda *args, **kwargs: 1.0,
        lambda **kwargs: 1.0,
        lambda task: 1.0,
        lambda response, task: 1.0,
        lambda trajectory, *, task: 1.0,
        lambda trajectory, ground_truth: 1.0,
    ],
)
def test_a_function_whose_parameters_do_not_name_a_library_is_refused(named, function):
    named(unclear=function)
    words = r"do not say which .*expected def reward\(trajectory, task\).*TRL .*verl .*verifiers"
    with pytest.raises(ConfigError, match=words):
        find_reward(AgentConfig(reward="unclear"), ThreadWorker())


async def test_a_function_for_trl_reads_the_step_of_the_weights_that_played(named):
    named(early=lambda completions, trainer_state: [10.0 + trainer_state.global_step])
    trajectory = episode()
    trajectory.sequences[0].extend_sampled([9, 9], logprobs=[-1.0, -1.0], versions=[3, 4])
    assert (await scored("early", trajectory)).reward == 14.0
    assert (await scored("early")).reward == 10.0
    named(late=lambda completions, trainer_state: [trainer_state.max_steps])
    with pytest.raises(
        EnvironmentFailure, match=r"trainer_state.max_steps is not known .*only trainer_state.global_st"
    ):
        await scored("late", trajectory)


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


def trl_length(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def trl_think_format(completions, **kwargs):
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    return [1.0 if re.match(pattern, text, re.DOTALL) else 0.0 for text in completions]


def trl_text(prompts, completions, **kwargs):
    (prompt,), (completion,) = prompts, completions
    return [float(prompt == "Say it." and completion.endswith("42"))]


def reply(trajectory, text="Is it 42?", answer="Yes, 42"):
    """Let the user say something, and the policy answer again."""
    message = Message(role="assistant", content=answer)
    trajectory.conversations[-1] += [user(text), message]
    trajectory.answers.append(message)
    trajectory.completions.append(answer)
    return trajectory


@pytest.mark.parametrize(
    ("function", "reward"), [(trl_length, -abs(20 - 46)), (trl_think_format, 1.0), (trl_text, 1.0)]
)
async def test_a_function_for_trl_gets_texts_where_the_prompt_is_text(named, function, reward):
    named(theirs=function)
    task = replace(TASK, prompt="Say it.")
    assert (await scored("theirs", episode(), task)).reward == reward
    messages = (user("Say it."),)
    with pytest.raises(EnvironmentFailure) if function is trl_think_format else nullcontext():
        conversational = await scored("theirs", episode(), replace(task, messages=messages))
        assert conversational.reward == (-19 if function is trl_length else 0.0) or function is trl_text


async def test_a_text_completion_of_several_turns_is_all_that_was_said(named):
    seen = {}

    def keeping(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions)
        return [0]

    named(keeping=keeping)
    await scored("keeping", reply(episode()), replace(TASK, prompt="Say it."))
    whole = "<think>six times seven</think>The answer is 42"
    assert seen == {"prompts": ["Say it."], "completions": [f"{whole}\nIs it 42?\nYes, 42"]}


async def test_the_one_answer_is_a_text_completion_with_its_calls(named):
    seen = []
    named(keeping=lambda completions: seen.extend(completions) or [0.0])
    trajectory = episode(text="")
    answer = Message(role="assistant", tool_calls=(ToolCall(name="add", arguments={"a": 1}),))
    trajectory.conversations[-1][-1], trajectory.answers[-1] = answer, answer
    trajectory.completions[-1] = '<tool_call>{"name": "add"}</tool_call>'
    await scored("keeping", trajectory, replace(TASK, prompt="Say it."))
    assert seen == ['<tool_call>{"name": "add"}</tool_call>']


async def test_a_function_for_trl_may_log(named):
    def logging(completions, log_metric, log_extra):
        log_metric("length", 3.0)
        log_extra("text", ["x"])
        return [0.5]

    named(logging=logging)
    assert (await scored("logging")).reward == 0.5


async def test_a_function_for_batches_of_verl_gets_lists_of_one(named):
    seen = {}

    def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
        seen.update(locals())
        return [{"score": 0.5, "acc": 1}]

    named(batched=compute_scores)
    assert (await scored("batched", reply(episode()))).reward == 0.5
    assert (seen["data_sources"], seen["solution_strs"]) == (["openai/gsm8k"], ["Yes, 42"])
    assert (seen["ground_truths"], seen["extra_infos"], seen["kwargs"]) == (["42"], [{"index": 3}], {})


async def test_a_function_for_verl_gets_the_type_and_no_facts_where_columns_are_null(named):
    seen = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.update(source=data_source, extra=extra_info, truth=ground_truth)
        return 0.25

    named(theirs=compute_score)
    task = replace(TASK, ground_truth=0, columns={"data_source": None, "extra_info": None})
    assert (await scored("theirs", episode(), task)).reward == 0.25
    assert seen == {"source": "sums", "extra": {}, "truth": 0}


ANSWER = {"role": "assistant", "content": "<think>six times seven</think>The answer is 42"}


async def test_a_function_for_verifiers_gets_what_a_rubric_gives(named):
    seen = {}

    async def keeping(prompt, completion, answer, info, state, task, parser, level, **kwargs):
        seen.update(answer=answer, info=info, task=task, level=level, state=state, rest=kwargs)
        seen["parsed"] = (parser.parse_answer(completion), parser.parse("x"), parser.parse_answer("text"))
        assert parser.get_assistant_messages(completion) == [ANSWER]
        assert state["prompt"] == prompt
        return 1.0

    named(keeping=keeping)
    columns = {"answer": "43", "info": '{"tests": [0]}', "level": 3, "other": None}
    assert (await scored("keeping", episode(), replace(TASK, columns=columns))).reward == 1.0
    assert (seen["answer"], seen["info"], seen["task"], seen["level"]) == ("43", {"tests": [0]}, "sums", 3)
    assert seen["parsed"] == (ANSWER["content"], "x", "text")
    state = seen["state"]
    assert (state["answer"], state["info"], state["id"], state["turn"]) == ("43", {"tests": [0]}, "t-1", 1)
    assert state["trajectory"] == [{"completion": [ANSWER]}]
    assert state["input"] == {"answer": "43", "info": '{"tests": [0]}', "level": 3}
    assert seen["rest"] == {}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (TASK, ("42", dict(TASK.columns), "sums")),
        (replace(TASK, columns={"answer": None, "info": {"a": 1}, "task": "own"}), ("42", {"a": 1}, "own")),
        (replace(TASK, columns={}, ground_truth=None, type=None), ("", {}, "default")),
        (replace(TASK, columns={"answer": 0}, type=None), (0, {"answer": 0}, "default")),
    ],
)
async def test_answer_info_and_task_of_verifiers(named, task, expected):
    seen = []
    named(keeping=lambda completion, answer, info, task: seen.append((answer, info, task)) or 0.0)
    await scored("keeping", episode(), task)
    assert seen == [expected]


class Upper:
    def parse_answer(self, completion):
        return completion[-1]["content"].upper()


PARSER = Upper()


async def test_the_parser_of_a_function_for_verifiers_can_be_named(named):
    named(shouted=lambda completion, parser: float(parser.parse_answer(completion).endswith("THE ANSWER IS 42")))
    assert (await scored({"name": "shouted", "parser": f"{__name__}:PARSER"})).reward == 1.0
    with pytest.raises(UsageError, match="has no 'PARSE'"):
        find_reward(AgentConfig(reward={"name": "shouted", "parser": f"{__name__}:PARSE"}), ThreadWorker())


async def test_the_answer_of_an_example_in_the_prompt_is_not_the_policys(named):
    seen = {}

    def keeping(prompts, completions, **columns):
        seen.update(prompts=prompts[0], completions=completions[0])
        return [0]

    named(keeping=keeping)
    trajectory = episode()
    trajectory.conversations[-1][1:1] = [user("1 x 1?"), Message(role="assistant", content="The answer is 1")]
    await scored("keeping", trajectory)
    assert [message["content"] for message in seen["prompts"]] == ["Think.", "1 x 1?", "The answer is 1", "6 x 7?"]
    assert seen["completions"] == [ANSWER]


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
        (Score(reward="1"), "gave an invalid reward: got str '1'"),
        (Score(reward=1.0, components={"style": math.nan}), "gave an invalid style: got float nan"),
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
        with pytest.raises(ConfigError, match=f"got the columns prompt alone, expected {missing}"):
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
        ({"name": f"{__name__}:own_with_options", "least": 3}, "unexpected keyword argument 'least'"),
        ({"name": f"{__name__}:of_verl", "least": 3}, "unexpected keyword argument 'least'"),
        ("agentrl.message:tool_result", r"got tool_result\(call.*the names of its parameters do not say which.*answer"),
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
        ("{weight: 1}", "does not name a function"),
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
