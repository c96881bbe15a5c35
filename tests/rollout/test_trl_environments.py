"""Environments as TRL's `environment_factory` takes them: classes of its documentation, played without changes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import pickle
import random
import sys
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import BaseModel, Field

import agentrl
from agentrl.config import load_config
from agentrl.config.environment import EnvironmentConfig
from agentrl.env import Isolation
from agentrl.env.lookup import is_trl_environment, resolve_environment, spec_of, tool_methods
from agentrl.errors import ConfigError, EnvironmentFailure, Outcome, ToolError, UsageError
from agentrl.message import ImagePart, TextPart
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.rollout.task_source import task_source
from agentrl.task import Task
from agentrl.testing.task_validation import TaskStatus, validate_tasks
from agentrl.tool import Tool
from agentrl.tool.random_call import random_arguments


class EchoToolEnv:
    """Pays for the length of an echo."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        self.given = kwargs
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        self.reward = len(message) / 10
        return message


class WordleEnv:
    """A word is guessed; the game is over after the right one."""

    closed = 0

    def __init__(self, word: str = "crane"):
        self._word = word

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        self.done = False
        return "Guess a word of five letters."

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = guess == f"[{self._word}]"
        self.reward = float(self.done)
        return "Right." if self.done else "Wrong."

    def give_up(self) -> None:
        """Give up."""
        self.reward = "nothing"

    def _note(self):
        raise AssertionError

    def close(self):
        WordleEnv.closed += 1


class OwnReward:
    """Judges the number at the end; the attribute is the author's own."""

    def __init__(self):
        self.judged = 0

    def reset(self, **kwargs):
        self.reward, self.number = 5.0, 0
        return "Count to 3."

    def add(self, amount: int) -> str:
        """
        Add.

        Args:
            amount: The amount.
        """
        self.number += amount
        return str(self.number)

    def get_reward(self) -> float:
        self.judged += 1
        return self.judged * float(self.number == 3)


class LaterReward(OwnReward):
    async def get_reward(self) -> float:
        return super().get_reward()


class Awaited(EchoToolEnv):
    """Awaits in every method; each needs the event loop of the one before."""

    async def reset(self, **kwargs):
        super().reset()
        self.loop = asyncio.get_running_loop()
        return "Say something."

    async def echo(self, message: str) -> str:
        """
        Echo.

        Args:
            message: The message to echo
        """
        await self._check()
        if message == "no":
            raise ValueError("not this one")
        return super().echo(message)

    async def close(self):
        await self._check()

    async def _check(self):
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self.loop


class OldGym:
    def reset(self):
        return "x"

    def step(self, action):
        return "x", 0.0, False, {}


class WithoutTools:
    def reset(self, **kwargs):
        return "x"

    @staticmethod
    def score(text):
        return 0.0

    @property
    def size(self):
        raise AssertionError


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def run(make_runner, play):
    """Play an episode of a class with the answers that are given."""

    async def run(kind, *answers, options=None, prompt=None):
        spec = spec_of(kind)
        runner = make_runner(spec.make, *answers, loop="tool_calling", isolation=spec.isolation)
        return await play(runner, options=options, prompt=prompt)

    return run


async def test_the_return_of_an_episode_is_the_reward_at_its_end(run, texts):
    answers = (call("echo", message="Hello World!"), call("echo", message="Hello"), "Done.")
    trajectory = await run(EchoToolEnv, *answers, prompt="Try to echo 'Hello World!' in the environment.")
    assert trajectory.outcome is Outcome.FINISHED
    assert [turn.reward for turn in trajectory.turns] == pytest.approx([1.2, -0.7, 0.0])
    assert trajectory.reward == pytest.approx(0.5)
    assert texts(trajectory)[:2] == ["Hello World!", "Hello"]


async def test_an_exception_for_the_model_becomes_the_tools_answer_and_is_not_a_failure(run, texts):
    answers = (call("guess", guess="[stone]"), *[call("guess", guess="[crane]")] * 2, "Solved.")
    trajectory = await run(WordleEnv, *answers)
    assert texts(trajectory) == ["Wrong.", "Right.", "Error: Game over."]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)


async def test_a_reward_that_is_not_a_number_fails_the_episode(run):
    trajectory = await run(WordleEnv, call("give_up"), "I stop.")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "reward of WordleEnv is 'nothing'" in trajectory.error
    env = spec_of(WordleEnv).make()
    env.reset(seed=0)
    env._inner._inner.reward = "nothing"
    with pytest.raises(EnvironmentFailure, match="reward of WordleEnv is 'nothing', expected a finite number"):
        env.step("I stop.")


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_asynchronous_methods_are_awaited_in_one_loop(make_runner, play, isolation):
    calls = [call("echo", message="no"), call("echo", message="hello")]
    runner = make_runner(spec_of(Awaited).make, *calls, "Done.", loop="tool_calling", isolation=isolation)
    trajectory = await play(runner)
    assert trajectory.outcome is Outcome.FINISHED
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.5, 0.0]
    assert trajectory.metrics["tool/echo/errors"] == 1


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("kind", [OwnReward, LaterReward])
@pytest.mark.parametrize("answers", [("Done.",), ()], ids=["the policy ends it", "a limit ends it"])
async def test_get_reward_is_called_once_at_the_end_and_is_not_a_tool(make_runner, play, kind, answers, isolation):
    assert tool_methods(kind) == ["add"]
    spec = spec_of(kind)
    calls = [call("add", amount=1), call("add", amount=2)]
    limits = EpisodeLimits(max_turns=2 + len(answers))
    runner = make_runner(spec.make, *calls, *answers, loop="tool_calling", isolation=isolation, limits=limits)
    trajectory = await play(runner)
    assert trajectory.outcome is (Outcome.FINISHED if answers else Outcome.TRUNCATED_TURNS)
    assert [turn.reward for turn in trajectory.turns][-1] == trajectory.reward == 1.0


def test_reset_gets_the_options_of_the_task_and_its_text_is_the_observation():
    env = spec_of(EchoToolEnv).make()
    assert env.reset(seed=1, options={"level": 3}) == ("", {})
    assert env._inner._inner.given == {"level": 3}
    assert spec_of(WordleEnv).make(word="stone").reset(seed=1) == ("Guess a word of five letters.", {})


def test_arguments_of_reset_that_no_task_gives_are_named():
    class Wanted(EchoToolEnv):
        def reset(self, word, **row):
            return word

    assert spec_of(Wanted).make().reset(seed=1, options={"word": "a", "level": 2}) == ("a", {})
    with pytest.raises(
        UsageError, match=r"reset of Wanted .*got level: missing a required argument: 'word'.*tasks=FILE"
    ):
        spec_of(Wanted).make().reset(seed=1, options={"level": 2})


def test_tasks_that_are_only_seeds_are_not_validated_one_by_one_where_reset_needs_columns():
    class Wanted(EchoToolEnv):
        def reset(self, word):
            return word

    spec = spec_of(Wanted)
    with pytest.raises(UsageError, match=r"missing a required argument: 'word'.*--tasks FILE for .*env validate"):
        list(validate_tasks(spec, {}, [Task(id=str(seed), environment="w", seed=seed) for seed in range(9)]))
    rows = [Task(id="1", environment="w", options={"word": "a"}), Task(id="2", environment="w", options={"b": 1})]
    results = list(validate_tasks(spec, {}, rows))
    assert [result.status for result in results] == [TaskStatus.UNKNOWN, TaskStatus.INVALID]


def test_rows_of_a_data_set_for_trl_are_tasks(tmp_path):
    class Wanted(EchoToolEnv):
        def reset(self, word):
            return word

    asked = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Echo this:"}]
    rows = [
        {"prompt": asked, "word": "mug", "answer": 3},
        {"prompt": "Echo.", "word": "cup", "options": {"word": "pan"}},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = spec_of(EchoToolEnv)
    assert spec.reset_columns
    config = EnvironmentConfig(name=f"{__name__}:EchoToolEnv", tasks=str(tmp_path / "rows.jsonl"))
    first, second = task_source(spec, config)
    assert [message.text for message in first.messages] == ["Play.", "Echo this:"]
    assert first.prompt == "Play.\n\nEcho this:"
    assert first.columns == {"word": "mug", "answer": 3}
    assert second.prompt == "Echo."
    assert second.options["word"] == "pan"
    env = spec.make()
    env.reset(seed=1, options=dict(first.options))
    assert env._inner._inner.given == {"prompt": asked, "word": "mug", "answer": 3}
    with pytest.raises(UsageError, match="got word, answer: got an unexpected keyword argument 'answer'"):
        spec_of(Wanted).make().reset(seed=1, options=dict(first.options))
    named = {"prompt": "Echo.", "word": "mug"}
    assert spec_of(Wanted).make().reset(seed=1, options=named) == ("mug", {}), "reset does not want the prompt"
    fields = {"id": 3, "type": "easy", "ground_truth": 5, "word": "mug"}
    assert spec_of(Wanted).make().reset(seed=1, options=fields) == ("mug", {}), "nor other fields of a task"


def test_reset_may_return_content_blocks():
    class Pictured(EchoToolEnv):
        def reset(self, **kwargs):
            return [{"type": "text", "text": "See:"}, {"type": "image", "image": "data:image/png;base64,eA=="}]

    observation, _ = spec_of(Pictured).make().reset(seed=1)
    assert observation == (TextPart(text="See:"), ImagePart(data=b"x"))


def test_public_methods_are_tools_in_their_order_and_close_is_called():
    assert tool_methods(WordleEnv) == ["guess", "give_up"]
    env = spec_of(WordleEnv).make()
    [guess, _] = env.tools
    function = guess.schema["function"]
    assert (function["name"], function["description"]) == ("guess", "Make a guess in the Wordle environment.")
    assert function["parameters"]["properties"]["guess"]["description"] == "The guessed word, formatted as '[abcde]'"
    with pytest.raises(ToolError, match="unknown argument word"):
        guess.validate({"word": "[a]"})
    before = WordleEnv.closed
    env.close()
    spec_of(EchoToolEnv).make().close()
    assert WordleEnv.closed == before + 1


@pytest.mark.parametrize("kind", [OldGym, WithoutTools, int, EchoToolEnv()])
def test_other_classes_are_no_such_environments(kind):
    assert not is_trl_environment(kind)
    with pytest.raises(UsageError, match=r"a class with reset\(\) and tools as other methods"):
        spec_of(kind)


def test_a_class_is_named_by_its_module_and_can_be_sent_to_a_worker_process():
    spec = resolve_environment(f"{__name__}:WordleEnv")
    assert spec.description == "A word is guessed; the game is over after the right one."
    assert spec.isolation is Isolation.THREAD
    assert pickle.loads(pickle.dumps(spec)).make().reset(seed=0)[0].startswith("Guess")


def test_a_class_in_a_file_is_found(tmp_path):
    (tmp_path / "echo_env.py").write_text(
        "class Echo:\n"
        '    """Echoes."""\n'
        "    def reset(self, **kwargs):\n        return 'Say something.'\n"
        "    def echo(self, message: str) -> str:\n"
        '        """Echo.\n\n        Args:\n            message: What to say.\n        """\n'
        "        return message\n"
    )
    env = resolve_environment(f"{tmp_path}/echo_env.py:Echo").make()
    assert env.reset(seed=0) == ("Say something.", {})
    assert env.tools[0](message="a").value == "a"
    sys.modules.pop("echo_env", None)


class Owner(BaseModel):
    name: str
    level: int = Field(ge=1, le=3)


class Unpaid:
    """Gives no reward, although the docstring of a tool mentions one."""

    def reset(self, **kwargs):
        self.count = 0

    def add(self) -> str:
        """Add 1; the reward is a function's."""
        self.count += 1
        return str(self.count)


class PaidByAttribute(Unpaid):
    reward: float


class PaidInside(Unpaid):
    def add(self) -> str:
        """Add 1."""
        [setattr(self, "reward", 1.0) for _ in range(2)]
        return super().add()


def counted(completions, **columns):
    return [1.0 for _ in completions]


@pytest.mark.parametrize("kind", [EchoToolEnv, OwnReward, LaterReward, PaidByAttribute, PaidInside])
def test_a_class_whose_code_mentions_a_reward_gives_one(kind):
    assert spec_of(kind).reward_range == (-math.inf, math.inf)


def test_a_reward_that_is_only_annotated_counts_in_each_version_of_python():
    source = "class Annotated:\n    reward: float\n    def reset(self):\n        return 'x'\n"
    found: dict[str, type] = {}
    exec(compile(source, "annotated.py", "exec", dont_inherit=True), found)  # annotations are values here
    found["Annotated"].echo = EchoToolEnv.echo
    assert spec_of(found["Annotated"]).reward_range == (-math.inf, math.inf)


def test_a_class_without_any_reward_needs_a_reward_function():
    from agentrl.builders.rewards import check_rewards  # slow; worker processes import this file

    words = [f"environment={__name__}:Unpaid", "environment.split=train"]
    with pytest.raises(ConfigError, match=r"Unpaid does not give rewards.*or get_reward\(\) or the attribute reward"):
        check_rewards(load_config(None, words))
    check_rewards(load_config(None, [*words, f"agent.reward={__name__}:counted"]))


def test_the_advice_on_an_unknown_success_fits_a_class_for_trl(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    agentrl.evaluate(f"{__name__}:EchoToolEnv", policy="random", tasks=1)
    told = capsys.readouterr().err
    assert "read the mean reward" in told
    assert "as the info" not in told
    spec = dataclasses.replace(spec_of(EchoToolEnv), success_threshold=0.1)
    assert agentrl.evaluate(spec, policy="random", tasks=1).success is not None


class Thermostat:
    """Only calls of its tools count."""

    kinds: ClassVar[set[tuple[str, str]]] = set()

    def reset(self, **row):
        self.reward = 0.0
        return "Say mug-7."

    def set(self, degrees: Annotated[int, Field(ge=20, le=22)], mode: Literal["heat", "cool"], note: str) -> str:
        """Set the temperature.

        Args:
            degrees: Temperature.
            mode: Kind of work.
            note: Note for the owner.
        """
        assert degrees in (20, 21, 22)
        Thermostat.kinds.add((mode, note))
        self.reward = 1.0
        return "Done."

    def fill(self, amounts: list[float], owner: Owner | None = None) -> str:
        """Fill.

        Args:
            amounts: Amounts.
            owner: Who asks.
        """
        assert len(amounts) >= 1
        return "Full."


async def test_a_random_policy_calls_the_tools_of_an_environment_without_actions(make_runner, play):
    Thermostat.kinds.clear()
    spec = spec_of(Thermostat)
    policy = ScriptedEpisodePolicy(ScriptedPolicy.RANDOM)
    limits = EpisodeLimits(max_turns=12)
    runner = make_runner(spec.make, policy=policy, loop="tool_calling", isolation=spec.isolation, limits=limits)
    seen = [await play(runner, seed=seed) for seed in range(8)]
    assert all(turn.valid for trajectory in seen for turn in trajectory.turns)
    assert all(trajectory.reward == 1.0 for trajectory in seen)
    assert {mode for mode, _ in Thermostat.kinds} == {"heat", "cool"}
    assert {note for _, note in Thermostat.kinds} >= {"help", "Done."}, "common words, and those of the observation"


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_a_random_policy_calls_asynchronous_tools(make_runner, play, isolation):
    policy, limits = ScriptedEpisodePolicy(ScriptedPolicy.RANDOM), EpisodeLimits(max_turns=3)
    spec = spec_of(Awaited)
    runner = make_runner(spec.make, policy=policy, loop="tool_calling", isolation=isolation, limits=limits)
    trajectory = await play(runner)
    assert (trajectory.outcome, trajectory.error) == (Outcome.TRUNCATED_TURNS, None)
    assert sum(turn.reward for turn in trajectory.turns) == trajectory.reward > 0


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize(
    "bounds",
    [
        {"ge": 3},
        {"lt": -2},
        {"gt": 0, "lt": 2},
        {"ge": -5, "le": -5},
        {"gt": 1.5, "lt": 3.5},
        {"ge": 0.5, "gt": 2, "le": 4},
        {"gt": 0, "lt": 1},
        {"ge": 0.2, "le": 0.3},
        {"ge": 1.5, "lt": 2},
    ],
)
def test_random_numbers_fit_the_bounds_of_their_schema(kind, bounds):
    if kind is int and (bounds == {"gt": 0, "lt": 1} or any(bound % 1 for bound in bounds.values())):
        pytest.skip("no whole number fits, or pydantic refuses the bounds")

    def turn(amount) -> str:
        """Turn.

        Args:
            amount: How far.
        """
        return str(amount)

    turn.__annotations__["amount"] = Annotated[kind, Field(**bounds)]
    tool = Tool(turn)
    for seed in range(50):
        drawn = random_arguments(tool.schema, random.Random(seed))
        assert tool.validate(drawn)["amount"] == drawn["amount"]
