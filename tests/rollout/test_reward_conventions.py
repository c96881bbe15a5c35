"""Reward functions of TRL, verl and verifiers: how they are recognized, and what they are called with."""

import copy
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
from support.rewards import TASK, episode, scored

from agentrl.config.environment import AgentConfig
from agentrl.errors import ConfigError, EnvironmentFailure, Outcome, RewardFailure, UsageError
from agentrl.message import Message, ToolCall, user
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.reward_functions import check_columns, find_reward
from agentrl.trajectory import TokenSequence, Trajectory, Turn, TurnTimings


def of_trl(completions, solution, **kwargs):
    return [1.0 if s in c[-1]["content"] else 0.0 for c, s in zip(completions, solution, strict=True)]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info["index"]) == ("openai/gsm8k", 3)
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


def by_environments(environments, **kwargs):
    return [env.reward for env in environments]


def by_completions_and_environments(completions, environments):
    return [env.reward for env in environments]


@pytest.mark.parametrize("function", [by_environments, by_completions_and_environments])
def test_a_function_of_trls_environments_is_told_where_its_work_belongs(named, function):
    named(theirs=function)
    with pytest.raises(ConfigError, match=r"needs TRL's environments.*Let the environment give the reward.*get_reward"):
        find_reward(AgentConfig(reward="theirs"), ThreadWorker())


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
async def test_a_parameter_of_only_one_library_identifies_the_library(named, function):
    named(theirs=function)
    check_columns(AgentConfig(reward="theirs"), lambda: [TASK])
    assert (await scored("theirs")).reward == 1.0


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
    words = r"match no known signature.*expected def reward\(trajectory, task\).*TRL .*verl .*verifiers"
    with pytest.raises(ConfigError, match=words):
        find_reward(AgentConfig(reward="unclear"), ThreadWorker())


async def test_a_function_for_trl_reads_the_step_of_the_weights_that_played(named):
    named(early=lambda completions, trainer_state: [10.0 + trainer_state.global_step])
    trajectory = episode()
    trajectory.sequences[0].extend_sampled([9, 9], logprobs=[-1.0, -1.0], versions=[3, 4])
    trajectory.sequences.append(TokenSequence())
    trajectory.sequences[1].extend_sampled([9], logprobs=[-1.0], versions=[2])
    assert (await scored("early", trajectory)).reward == 14.0
    assert (await scored("early")).reward == 10.0
    named(late=lambda completions, trainer_state: [trainer_state.max_steps])
    with pytest.raises(
        EnvironmentFailure, match=r"trainer_state.max_steps is not available .*only trainer_state.global_st"
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
    assert (seen["ground_truths"], seen["kwargs"]) == (["42"], {})
    assert seen["extra_infos"] == [{"index": 3, "num_turns": 4, "rollout_reward_scores": {}}]


async def test_a_function_for_verl_gets_the_task_type_and_empty_info_for_null_columns(named):
    seen = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.update(source=data_source, extra=extra_info, truth=ground_truth)
        return 0.25

    named(theirs=compute_score)
    task = replace(TASK, ground_truth=0, columns={"data_source": None, "extra_info": None})
    assert (await scored("theirs", episode(), task)).reward == 0.25
    assert seen == {"source": "sums", "extra": {"num_turns": 2, "rollout_reward_scores": {}}, "truth": 0}


async def test_a_function_for_trl_may_return_an_iterator_and_read_the_id_and_type_of_a_row(named):
    def of_kind(completions, id, type, **columns):
        return (float(kind == "sums") + number for kind, number in zip(type, id, strict=True))

    named(theirs=of_kind)
    task = replace(TASK, columns={"id": 7, "type": "sums"})
    assert (await scored("theirs", episode(), task)).reward == 8.0


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


async def test_a_function_for_verifiers_sees_several_turns_and_parses_the_last(named):
    seen = {}

    def keeping(completion, state, parser):
        seen.update(turn=state["turn"], parsed=parser.parse_answer(completion), roles=[m["role"] for m in completion])
        seen["texts"] = [step["completion"][0]["content"] for step in state["trajectory"]]
        return 1.0

    named(keeping=keeping)
    await scored("keeping", reply(episode()))
    assert seen["roles"] == ["assistant", "user", "assistant"]
    assert (seen["turn"], seen["parsed"]) == (2, "Yes, 42")
    assert seen["texts"] == [ANSWER["content"], "Yes, 42"]


def timed() -> Trajectory:
    trajectory = reply(episode())
    trajectory.outcome = Outcome.TRUNCATED_TURNS
    turns = trajectory.sequences[0].turns
    turns[0].timings = TurnTimings(queue=0.5, prefill=0.25, decode=1.0, tool=2.0, env=0.125)
    turns.append(Turn(index=1, start=4, end=4, timings=TurnTimings(decode=4.0)))
    return trajectory


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda state: state["timing"]["generation_ms"], 7875.0),
        (lambda state: state["timing"]["total_ms"] + state["timing"].get("scoring_ms"), 7875.0),
        (lambda state: state["timing"].generation.duration + state["timing"].total, 15.75),
        (lambda state: state["timing"].model.duration, 5.75),
        (lambda state: state["timing"].env.duration - state["timing"].scoring.duration, 2.125),
        (lambda state: copy.deepcopy(state)["timing"].model.duration, 5.75),
        (lambda state: state["is_completed"] + 2 * state["is_truncated"], 3.0),
        (lambda state: float(state["example_id"] == "t-1" and state.get("won", "no") == "no"), 1.0),
        (lambda state: float([state[k] for k in ("error", "reward", "metrics", "advantage")] == [None] * 4), 1.0),
    ],
)
async def test_a_function_for_verifiers_reads_the_usual_keys_of_the_state(named, read, value):
    named(reading=lambda state: read(state))
    assert (await scored("reading", timed())).reward == value


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda state: state["timing"]["start_time"],
            r"state\['timing'\]\['start_time'\] is not .*: its keys are gen",
        ),
        (
            lambda state: state["timing"].start_time,
            r"state\['timing'\]\.start_time is not .* parts are model, env",
        ),
        (lambda state: state["timing"].model.start, "start of a time span is not available.*only its duration is"),
        (lambda state: state["sandbox_id"], r"state\['sandbox_id'\] is not available.*its keys are prompt, completion"),
        (lambda state: state["trajectory"][1]["tokens"], r"state\['trajectory'\]\[1\]\['tokens'\] is not available"),
    ],
)
async def test_keys_of_the_state_that_do_not_exist_are_named_with_those_that_do(named, read, message):
    named(reading=lambda state: read(state))
    with pytest.raises(RewardFailure, match=message):
        await scored("reading", timed())


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, level: [float(level)],
        lambda data_source, solution_str, level: float(level),
        lambda completion, level: float(level),
    ],
    ids=["trl", "verl", "verifiers"],
)
async def test_an_option_comes_before_a_column_of_its_name(named, function):
    named(theirs=function)
    task = replace(TASK, columns={**TASK.columns, "level": 3})
    assert (await scored({"name": "theirs", "level": 5}, task=task)).reward == 5.0


async def test_a_column_comes_before_the_tasks_ground_truth_in_functions_for_trl(named):
    named(theirs=lambda completions, ground_truth: [float(ground_truth == ["own"])])
    task = replace(TASK, columns={"ground_truth": "own"})
    assert (await scored("theirs", task=task)).reward == 1.0
    assert (await scored("theirs")).reward == 0.0


async def test_a_call_in_a_conversation_stays_a_call(named):
    seen = []
    named(keeping=lambda completions: seen.extend(completions[0]) or [0.0])
    trajectory = episode()
    answer = Message(role="assistant", content="I add.", tool_calls=(ToolCall(name="add", arguments={"a": 1}),))
    trajectory.conversations[-1][-1], trajectory.answers[-1] = answer, answer
    trajectory.completions[-1] = 'I add.<tool_call>{"name": "add"}</tool_call>'
    await scored("keeping", trajectory)
    (message,) = seen
    assert message["content"] == "I add."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


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


async def test_an_answer_among_the_prompts_examples_is_not_the_policys(named):
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
