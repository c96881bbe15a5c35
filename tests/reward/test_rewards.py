"""Shipped reward functions: each on a table of cases, computed by hand or by its source's rule."""

import json
import math

import pytest
from support.tokenizers import build_tokenizer

from agentrl.config.environment import AgentConfig
from agentrl.errors import Outcome
from agentrl.message import Message, ToolCall
from agentrl.registry import PLUGINS, Kind, lookup
from agentrl.render.renderer import Renderer
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.reward_functions import find_reward
from agentrl.task import Task
from agentrl.trajectory import TokenSequence, Trajectory, Turn


def episode(*completions, results=(), calls=(), success=None, reward=0.0):
    """An episode with these answers, the results of tools between them, and tool calls in its first answer."""
    sequence = TokenSequence()
    for number, _ in enumerate(completions):
        own = reward if number == len(completions) - 1 else 0.0
        sequence.turns.append(Turn(index=number, start=number, end=number + 1, reward=own))
    called = tuple(ToolCall(name=name, arguments={}) for name in calls)
    answers = [
        Message(role="assistant", content=text, tool_calls=() if number else called)
        for number, text in enumerate(completions)
    ]
    messages = [Message(role="user", content="?")]
    for number, answer in enumerate(answers):
        messages.append(answer)
        messages += [Message(role="tool", content=text) for text in results[number : number + 1]]
    return Trajectory(
        id="a",
        task_id="t",
        environment="e",
        seed=0,
        group_id="g",
        sequences=[sequence],
        outcome=Outcome.FINISHED,
        success=success,
        conversations=[messages],
        answers=answers,
        completions=list(completions),
    )


def value(name, trajectory, truth=None, **options):
    return lookup(Kind.REWARD, name)(trajectory, Task(id="t", environment="e", ground_truth=truth), **options)


THOUGHT = "<think>a</think>"
GOOD, BARE = f"{THOUGHT}\n<answer>2</answer>", "<answer>2</answer>"
SEARCH = f"{THOUGHT}<search>b</search>"
CALL = f"{THOUGHT}<tool_call>{{}}</tool_call>"
PROGRAM = f"{THOUGHT}<answer>\n```python\npass\n```\n</answer>"


@pytest.mark.parametrize(
    ("name", "trajectory", "truth", "options", "expected"),
    [
        ("boxed", episode(r"so \boxed{\frac{1}{2}}"), None, {}, 1.0),
        ("gui_r1", episode(f"{THOUGHT}<answer>[{{'action': 'enter'}}]</answer>"), {"action": "enter"}, {}, 1.0),
        ("vision_sr1", episode(r"\boxed{2}", r"\boxed{2}"), "2", {}, 1.9),
        ("boxed", episode(r"so \boxed{\frac{1}{2}"), None, {}, 0.0),
        ("boxed", episode(r"\boxed{1}", "no"), None, {}, 0.0),
        ("boxed", episode(), None, {}, 0.0),
        ("solved", episode(r"\boxed{\frac{1}{2}}"), r"\frac{1}{2}", {}, 1.0),
        ("solved", episode("<answer> The  Sea </answer>"), ["ocean", "sea"], {}, 1.0),
        ("solved", episode("the sea"), {"target": ["sea"]}, {}, 1.0),
        ("solved", episode("a lake"), "sea", {}, 0.0),
        ("solved", episode(r"\boxed{18}"), '["18"]', {}, 1.0),  # Skywork-OR1's rows
        ("solved", episode("[1, 2]"), "[1, 2]", {}, 1.0),
        ("solved", episode(""), "", {}, 1.0),
        ("solved", episode(r"<think>\boxed{5}</think> \boxed{6}"), "6", {}, 1.0),
        ("solved", episode(r"<think>Perhaps \boxed{5}"), "5", {}, 0.0),  # PrimeIntellect-ai/verifiers#213
        ("solved", episode(r"<think>\boxed{5}?</think> It is 6."), "5", {}, 0.0),  # TinyZero#120
        ("solved", episode(r"\boxed{5} or rather \fbox{6}"), "6", {}, 1.0),  # THUDM/slime#2150
        ("solved", episode(r"\boxed{-5}"), "5", {}, 0.0),  # allenai/open-instruct#1530
        ("solved", episode(r"\boxed{1.5}"), "15", {}, 0.0),
        ("solved", episode(r"\boxed{3/4}"), "34", {}, 0.0),
        ("solved", episode("2x + 1"), "2x - 1", {}, 0.0),
        ("solved", episode("x-1"), "x1", {}, 0.0),
        ("solved", episode("1,234 Sea-Lions."), "1234 sealions", {}, 1.0),
        ("solved", episode(r"\boxed{12}"), 12.0, {}, 1.0),
        ("solved", episode("9007199254740993"), "9007199254740992", {}, 0.0),
        ("solved", episode(r"\boxed{(A)}"), "A", {}, 1.0),
        ("solved", episode(r"\boxed{a}"), "the", {}, 0.0),
        ("solved", episode("?"), "!", {}, 0.0),
        ("solved", episode(r"\boxed{\text{E}}"), "E", {}, 1.0),  # NVIDIA-NeMo/Gym#1844
        ("solved", episode(r"\boxed {\left\{x\right.}"), r"\left\{x\right.", {}, 1.0),  # modelscope/ms-swift#10147
        ("solved", episode("<think>Then <answer>.</think><answer>sea</answer>"), "sea", {}, 1.0),  # open-r1#359
        ("solved", episode("sea", success=False), "sea", {}, 0.0),
        ("solved", episode("lake", reward=0.5), "sea", {}, 1.0),
        ("solved", episode("sea", reward=-0.5), "sea", {}, 0.0),
        ("answer_f1", episode("<answer>the old sea</answer>"), ["old man sea"], {}, 0.8),
        ("answer_f1", episode(""), ["A"], {}, 0.0),
        ("answer_f1", episode("<answer>lake</answer>"), ["old man sea", "lake"], {}, 1.0),
        ("think_answer_format", episode(GOOD), None, {}, 1.0),
        ("think_answer_format", episode(BARE), None, {}, 0.0),
        ("think_answer_format", episode(GOOD + "."), None, {}, 0.0),
        ("think_answer_format", episode(THOUGHT + GOOD), None, {}, 0.0),
        ("think_answer_format", episode("<answer>2</answer><think>a</think>"), None, {}, 0.0),
        ("think_answer_format", episode(BARE), None, {"tags": ["answer"]}, 1.0),
        ("tag_count_format", episode(GOOD), None, {}, 1.0),
        ("tag_count_format", episode(BARE), None, {}, 0.5),
        ("tag_count_format", episode("<think>a<answer>2</answer>"), None, {}, 0.75),
        ("agent_format", episode(SEARCH, CALL, GOOD), None, {}, 1.0),
        ("agent_format", episode(GOOD), None, {}, 1.0),
        ("agent_format", episode(SEARCH, BARE), None, {}, 0.0),
        ("agent_format", episode(SEARCH, SEARCH), None, {}, 0.0),
        ("agent_format", episode(CALL, GOOD), None, {"actions": ["search"]}, 0.0),
        ("agent_format", episode(), None, {}, 0.0),
        ("tool_call_count", episode("a", calls=["python"] * 3), None, {}, 0.3),
        ("tool_call_count", episode("a", calls=["python"] * 3), None, {"most": 2, "each": -1.0}, -2.0),
        ("tool_call_count", episode("a", calls=["python", "sql"]), None, {"tool": "sql", "each": 1.0}, 1.0),
        ("tool_error_ratio", episode("a", "b", "c", results=["ok", "NameError: x"]), None, {}, 0.5),
        ("tool_error_ratio", episode("a", "b", results=["fine"]), None, {}, 0.0),
        ("tool_error_ratio", episode("a"), None, {}, 0.5),
        ("answer_tag_ratio", episode(GOOD), None, {}, 0.0),
        ("answer_tag_ratio", episode("a", BARE, BARE, BARE), None, {}, 0.5),
        ("answer_tag_ratio", episode(BARE * 4), None, {}, 1.0),
        ("answer_tag_ratio", episode("a"), None, {}, 1.0),
        ("answer_tag_ratio", episode("<answer>2</answer></answer>"), None, {}, 1.0),
        ("repetition", episode("a b c d"), None, {}, 0.0),
        ("repetition", episode("a b A b a b"), None, {"size": 2}, -3 / 5),
        ("repetition", episode("a b c a b c"), None, {"penalty": -0.5}, -0.5 * 1 / 4),
        ("repetition", episode("a b"), None, {}, 0.0),
        ("language_consistency", episode("two words 2"), None, {}, 1.0),
        ("language_consistency", episode("two \u6c34\u706b"), None, {}, 1 / 3),
        ("language_consistency", episode("two \u6c34\u706b"), None, {"script": "han"}, 2 / 3),
        ("language_consistency", episode("3 + 4"), None, {}, 1.0),
        ("recall", episode("d3, d1, d9"), ["d1", "d2"], {}, 0.5),
        ("recall", episode("d3, d1, d9"), ["d1", "d2"], {"k": 1}, 0.0),
        ("recall", episode('<answer>["d1", "d2"]</answer>'), ["d1", "d2"], {}, 1.0),
        ("recall", episode("d1"), [], {}, 0.0),
        ("mrr", episode("d3\nd1"), ["d1"], {}, 0.5),
        ("mrr", episode("d3\nd1"), ["d1"], {"k": 1}, 0.0),
        ("mrr", episode("1. d1\n2. d3"), "d1", {}, 1.0),
        ("ndcg", episode("d1, d2"), ["d1", "d2"], {}, 1.0),
        ("ndcg", episode("d9, d1"), ["d1"], {}, 1 / math.log2(3)),
        ("ndcg", episode("d1, d2"), {"d1": 1, "d2": 2}, {}, (1 + 3 / math.log2(3)) / (3 + 1 / math.log2(3))),
        ("ndcg", episode("d2, d1"), {"d1": 1, "d2": 2}, {"k": 1}, 1.0),
        ("retool", episode("a", success=True), None, {}, 1.0),
        ("retool", episode("a", success=False), None, {}, -1.0),
        ("retool", episode("a", "b", success=False), None, {}, -0.9),
        ("retool", episode(*"abcde", success=False), None, {}, -0.6),
        ("retool", episode(*"abcdefgh", success=False), None, {}, -0.6),
        ("tinyzero", episode(GOOD, success=True), None, {}, 1.0),
        ("tinyzero", episode(GOOD, success=False), None, {}, 0.1),
        ("tinyzero", episode("2", success=True), None, {}, 0.0),
        ("code_r1", episode(PROGRAM, success=True), None, {}, 1.1),
        ("code_r1", episode(PROGRAM, success=False), None, {}, 0.1),
        ("code_r1", episode(GOOD, success=True), None, {}, -1.1),
        ("code_r1", episode("```python\npass\n```", success=True), None, {}, -1.1),
        ("search_r1", episode(SEARCH, GOOD), "2", {}, 1.0),
        ("search_r1", episode(SEARCH, BARE), "2", {}, 0.8),
        ("search_r1", episode(SEARCH, GOOD), "3", {}, 0.2),
        ("search_r1", episode(BARE), "3", {}, 0.1),
        ("search_r1", episode(SEARCH), "3", {}, 0.0),
        ("deepresearcher", episode(CALL, GOOD), ["2"], {}, 1.0),
        ("deepresearcher", episode(CALL, GOOD), ["2 or 3"], {}, 0.5),
        ("deepresearcher", episode(CALL, BARE), ["2"], {}, -1.0),
    ],
)
def test_cases(name, trajectory, truth, options, expected):
    assert value(name, trajectory, truth, **options) == pytest.approx(expected)


def test_every_shipped_function_has_a_case_and_can_be_named():
    shipped = set(PLUGINS["reward"]) - {"environment"}
    marks = next(mark for mark in test_cases.pytestmark if mark.name == "parametrize")
    assert {case[0] for case in marks.args[1]} == shipped
    for name in shipped:
        find_reward(AgentConfig(reward=name), ThreadWorker())


async def test_shipped_functions_are_added_and_recorded_as_components():
    entries = [{"name": "think_answer_format", "weight": 0.1}, "solved", {"name": "answer_tag_ratio", "weight": 0}]
    scorer = find_reward(AgentConfig(reward=entries), ThreadWorker())
    score = await scorer.score(episode(GOOD), Task(id="t", environment="e", ground_truth="2"))
    assert score.reward == pytest.approx(1.1)
    assert score.components == {"think_answer_format": 1.0, "solved": 1.0, "answer_tag_ratio": 0.0}


BOX = {"action": "click", "gt_bbox": [10, 20, 50, 40], "input_text": "no input text"}
POINT = {"action": "click", "gt_bbox": [100, 30]}
TYPED = {"action": "type", "gt_bbox": [0, 0], "input_text": "red shoes"}


def acted(action, **fields):
    return episode(f"{THOUGHT}<answer>[{ ({'action': action} | fields)!r}]</answer>")


@pytest.mark.parametrize(
    ("trajectory", "truth", "expected"),
    [
        (acted("click", point=[12, 30]), BOX, 1.0),
        (acted("click", point=[12, 30]), json.dumps(BOX), 1.0),
        (acted("click", point=[51, 30]), BOX, 0.2),
        (acted("click", point=[239, 30]), POINT, 1.0),
        (acted("click", point=[240, 30]), POINT, 0.2),
        (acted("click"), BOX, 0.0),
        (acted("click", point=["12", 30]), BOX, 0.0),
        (acted(" Click", point=[12, 30]), BOX, 1.0),
        (acted("Click"), BOX, 0.0),
        (acted("click", point=[10**400, 30]), BOX, 0.0),
        (acted("scroll", input_text="up"), BOX, 0.2),
        (acted("type", input_text="red boots"), TYPED, 1.0),
        (acted("type", input_text="blue boots"), TYPED, 0.2),
        (acted("press_back"), {"action": "press_back"}, 1.0),
        (episode("<answer>[{'action': 'click', 'point': [12, 30]}]</answer>"), BOX, 0.0),
        (episode(f"{THOUGHT}<answer>click(12, 30)</answer>"), BOX, 0.0),
        (episode(f"{THOUGHT}<answer>{'[' * 9999}</answer>"), BOX, 0.0),
        (episode(), BOX, 0.0),
    ],
)
def test_actions_on_screens_are_compared_with_boxes_points_and_texts(trajectory, truth, expected):
    assert value("gui_r1", trajectory, truth) == pytest.approx(expected)


def test_a_ground_truth_that_is_no_action_is_an_error():
    with pytest.raises(ValueError, match="ground truth of task t has no action"):
        value("gui_r1", acted("press_back"), {"answer": 3})


SEEN = rf"<description>a square</description>{THOUGHT}\boxed{{4}}"


@pytest.mark.parametrize(
    ("trajectory", "expected"),
    [
        (episode(SEEN, r"\boxed{4}"), 2.0),
        (episode(SEEN, r"\boxed{5}"), 1.0),
        (episode(SEEN), 1.0),
        (episode(rf"{THOUGHT}\boxed{{4}}"), 0.9),
        (episode(SEEN.replace("4", "5"), r"so \boxed{4}"), 1.1),
        (episode("4", "4"), 0.0),
        (episode(), 0.0),
    ],
)
def test_an_answer_from_the_policys_own_description_counts_in_full(trajectory, expected):
    assert value("vision_sr1", trajectory, "4") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("mistral", r"[THINK]Perhaps \boxed{5}[/THINK]I do not know.", 0.0),
        ("mistral", r"[THINK]Perhaps \boxed{5}", 0.0),
        ("mistral", r"[THINK]Perhaps \boxed{6}[/THINK]It is \boxed{5}.", 1.0),
        ("gpt_oss", r"<|channel|>analysis<|message|>Perhaps \boxed{5}<|end|>", 0.0),
        ("gpt_oss", r"<|channel|>final<|message|>\boxed{5}<|return|>", 1.0),
        ("deepseek_v3.1", r"Perhaps \boxed{5}", 0.0),
    ],
)
def test_answers_in_the_thinking_of_any_family_do_not_count(family: str, text: str, expected: float) -> None:
    renderer = Renderer(build_tokenizer(family), enable_thinking=True)
    answer = renderer.read(renderer.encoder.encode(text))
    trajectory = episode(answer.raw_text)
    trajectory.answers[:] = [answer.message]
    assert value("solved", trajectory, "5") == expected
