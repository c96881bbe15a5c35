"""Python programs and notebooks: objects as keywords, a running event loop, other threads, Ctrl-C, progress."""

import asyncio
import json
import pathlib
import signal
import threading

import gymnasium
import numpy as np
import pytest
from support.waiting import join

import agentrl
from agentrl import registry
from agentrl.agent_loop import AgentLoop
from agentrl.algorithms.advantages import centred_returns
from agentrl.algorithms.types import plain_loss
from agentrl.config import load_config
from agentrl.errors import ConfigError, UnknownNameError, UsageError
from agentrl.message import Message, user
from agentrl.observe.progress import RunWatcher
from agentrl.registry import Kind
from agentrl.runs.api import override_words, tool_overrides
from agentrl.runs.start import RunResult

SMALL = {
    "trainer.tasks_per_step": 1,
    "algorithm.group_size": 2,
    "agent.max_turns": 2,
    "agent.max_answer_tokens": 4,
    "model.scratch": {"hidden_size": 32, "layers": 1},
}


EVALUATED = {"env": "guess_number", "policy": "expert", "progress": False}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tasks": "a"}, "tasks is not valid: got 'a', expected a whole number, 1 or more"),
        ({"tasks": 2.5}, "tasks is not valid: got 2.5"),
        ({"tasks": 0}, "tasks is not valid: got 0"),
        ({"samples": True}, "samples is not valid: got True"),
        ({"seed": -5}, "seed is not valid: got -5, expected a whole number, 0 or more"),
        ({"seed": 2**70}, "seed is not valid: got 1180591620717411303424"),
        ({"overrides": "agent.max_turn=3"}, "agent.max_turn"),
    ],
)
def test_wrong_numbers_of_an_evaluation_are_usage_errors(wrong, message):
    with pytest.raises((UsageError, ConfigError), match=message):
        agentrl.evaluate(**EVALUATED, **wrong)


def test_one_override_and_one_tool_need_no_list(tmp_path):
    found = agentrl.evaluate(
        **EVALUATED, tasks=1, tools="calculator", overrides=f"run.directory={tmp_path}", config=None
    )
    assert len(found.episodes) == 1
    assert override_words(None) == []


def make_objects():
    """What a notebook defines: nothing of it can be imported."""

    class Game(gymnasium.Env):
        """Say anything."""

        observation_space = action_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            return "Speak.", {}

        def step(self, action):
            return "Well.", 1.0, True, False, {"success": True}

    class Loop(AgentLoop):
        """One question with a tool in the prompt."""

        offers_tools = True

        async def run(self, episode):
            conversation = episode.open([user(await episode.reset())], tools=list(episode.tools.values()))
            await episode.step((await conversation.generate()).text)

        def demonstrate(self, action):
            return Message(role="assistant", content=action)

    @agentrl.tool
    def double(number: int) -> int:
        """Twice a number.

        Args:
            number: Any.
        """
        return 2 * number

    def length(trajectory, task):
        return len(trajectory.completions[0])

    async def one(trajectory, task):
        return 1

    def centred(episodes):
        return episodes.to_tokens(centred_returns(episodes))

    def plain(tokens):
        return plain_loss(-tokens.advantage * tokens.logp)

    return {
        "env": Game,
        "loop": Loop,
        "tools": [double],
        "reward": [length, (one, 0.5)],
        "algorithm": centred,
        "loss": plain,
    }


@pytest.fixture(autouse=True)
def _workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in Kind:
        monkeypatch.setitem(registry._session, kind, {})


def in_a_loop(call):
    """The result of a call in a thread whose event loop runs, as a notebook's does."""

    async def cell():
        return call()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


@pytest.mark.slow
def test_a_notebook_trains_with_its_own_objects_and_goes_on(capsys, tmp_path):
    objects = make_objects()
    run = in_a_loop(lambda: agentrl.train(**objects, model="scratch", steps=1, overrides=SMALL))
    metrics = run.metrics
    assert metrics["reward/mean"] == pytest.approx(metrics["reward/component/length"] + 0.5)
    assert "step 1/1" in capsys.readouterr().err
    config = load_config(run.folder / "config.yaml")
    assert config.agent.reward == ["python:length", {"name": "python:one", "weight": 0.5}]

    registry._session[Kind.REWARD].clear()  # as in a new session
    with pytest.raises(
        UnknownNameError, match=r"reward length was an object of another Python session.*agentrl.resume"
    ):
        agentrl.resume(run, steps=2, progress=False)
    again = in_a_loop(lambda: agentrl.resume(run, **objects, steps=2, progress=False))
    assert (again.step, again.folder) == (2, run.folder.resolve())
    assert capsys.readouterr().err == ""

    found = in_a_loop(lambda: agentrl.evaluate(env=objects["env"], model=run.checkpoint, tasks=2, progress=False))
    assert (len(found.episodes), found.failures) == (2, 0)


class Killer(RunWatcher):
    """Interrupts the main thread at the first step, as Ctrl-C does."""

    def on_step(self, step, metrics):
        if step == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.fixture
def _notices_ctrl_c():
    """Python's own handler, as a notebook has it; a shell lets its background jobs ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_notices_ctrl_c")
def test_ctrl_c_in_a_notebook_stops_a_run_with_a_checkpoint():
    objects = make_objects()
    run = in_a_loop(lambda: agentrl.train(**objects, model="scratch", steps=500, overrides=SMALL, watcher=Killer()))
    assert run.interrupted
    assert 1 <= run.step < 500
    assert run.checkpoint


@pytest.mark.usefixtures("_notices_ctrl_c")
def test_ctrl_c_in_a_script_stops_the_script_too(capsys):
    objects = make_objects()
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step \d+: continue with agentrl.resume"):
        agentrl.train(**objects, model="scratch", steps=500, overrides=SMALL, watcher=Killer())
    assert "continue with agentrl.resume('" in capsys.readouterr().err
    newest = max(pathlib.Path("runs/latest/checkpoints").glob("step-*"))
    assert 1 <= int(newest.name.removeprefix("step-")) < 500


@pytest.mark.usefixtures("_notices_ctrl_c")
def test_ctrl_c_in_a_notebook_ends_a_warm_start_and_an_evaluation():
    def interrupt(episode):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    for call in (
        lambda: agentrl.evaluate("guess_number", policy="random", tasks=50, concurrency=1, on_episode=interrupt),
        lambda: agentrl.sft(env="guess_number", model="scratch", episodes=64, overrides=SMALL, watcher=Interrupter()),
    ):
        with pytest.raises(KeyboardInterrupt):
            in_a_loop(call)


class Interrupter(RunWatcher):
    def on_start(self, folder, status):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.slow
def test_a_run_and_an_evaluation_tell_their_size_before_they_begin(capsys):
    words = {**SMALL, "trainer.tasks_per_step": 3}
    agentrl.train(env="guess_number", model="scratch", steps=1, overrides=words)
    told = capsys.readouterr().err.splitlines()
    size = "1 step of 6 episodes (3 tasks x 2): 6 episodes of at most 2 turns x 4 tokens, up to 48 sampled tokens"
    assert size in told
    assert told.index(size) < next(i for i, line in enumerate(told) if line.startswith("step 1/1"))
    agentrl.evaluate(model="runs/latest", tasks=3, samples=2)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "3 tasks x 2 samples: 6 episodes of at most 2 turns x 4 tokens, up to 48 sampled tokens"


@pytest.mark.slow
def test_an_unknown_success_is_explained(capsys):
    class Silent(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(20)

        def reset(self, *, seed=None, options=None):
            return "Speak.", {}

        def step(self, action):
            return "Well.", 1.0, True, False, {}

        def admissible_actions(self):
            return ["a"]

    assert "success unknown" in str(agentrl.evaluate(Silent, policy="random", tasks=1))
    assert "success is unknown because the environment does not report it" in capsys.readouterr().err


@pytest.mark.slow
def test_results_are_one_line_and_a_small_table():
    found = agentrl.evaluate("guess_number", policy="expert", tasks=2, progress=False)
    assert (
        repr(found)
        == str(found)
        == "expert on guess_number/valid: success 100.0 % (34.2 to 100.0), reward 1.000, 2 episodes"
    )
    assert "<tr><th>success (95 % interval)</th><td>100.0 % (34.2 to 100.0)</td></tr>" in found._repr_html_()
    again = agentrl.evaluate("guess_number", policy="expert", tasks=2, progress=False)
    assert (again.reused, "(2 of 2 reused, played since 20" in repr(again)) == (2, True)
    assert agentrl.evaluate("guess_number", policy="expert", tasks=2, progress=False, fresh=True).reused == 0
    run = RunResult(
        folder=pathlib.Path("runs/<a>"), step=3, checkpoint="", metrics={"success/mean": 0.25}, interrupted=True
    )
    assert repr(run) == "RunResult('runs/<a>', stopped after step 3, success 0.250)"
    assert "<tr><th>run</th><td>runs/&lt;a&gt;</td></tr>" in run._repr_html_()
    assert "<tr><th>success</th><td>0.250</td></tr>" in run._repr_html_()


def test_the_public_names_are_listed():
    assert set(agentrl.__all__) <= set(dir(agentrl))
    assert not {"importlib", "os", "Any"} & set(dir(agentrl))


def test_errors_come_out_of_a_running_loop_as_they_are():
    with pytest.raises(UsageError, match="unknown environment"):
        in_a_loop(lambda: agentrl.train(env="gess_number", model="scratch"))


def test_another_thread_evaluates():
    found = []
    thread = threading.Thread(
        target=lambda: found.append(agentrl.evaluate("guess_number", policy="expert", tasks=2, progress=False))
    )
    thread.start()
    join(thread)
    assert found[0].failures == 0


@pytest.mark.parametrize(("progress", "told"), [(True, "2/2 episodes"), (False, "")])
def test_progress_can_be_silent(capsys, progress, told):
    agentrl.evaluate("guess_number", policy="random", tasks=2, progress=progress)
    err = capsys.readouterr().err
    assert told in err
    assert bool(err) is progress


def test_a_function_may_make_environments_and_a_cell_may_run_again():
    for length in (1, 2):

        def make(length=length):
            return make_objects()["env"]()

        found = agentrl.evaluate(make, policy="random", tasks=1, progress=False)
        assert found.failures == 0
    with pytest.raises(UsageError, match="is a single environment, but every episode needs its own"):
        agentrl.evaluate(make_objects()["env"](), policy="random")


@pytest.mark.parametrize("loop", [3, dict, lambda: 0])
def test_what_is_no_agent_loop_is_refused_without_a_folder(tmp_path, loop):
    with pytest.raises(UsageError, match=r"is not an agent loop.*expected a subclass of agentrl.AgentLoop"):
        agentrl.train(env="guess_number", model="scratch", loop=loop)
    assert list(tmp_path.iterdir()) == []


def test_an_agent_loop_without_run_is_refused(tmp_path):
    class Started(AgentLoop):
        async def start(self, episode):
            await episode.reset()

    with pytest.raises(UsageError, match=r"Started has no run\(\): got .*expected async def run\(self, episode\)"):
        agentrl.train(env="guess_number", model="scratch", loop=Started)


def test_what_can_be_imported_is_named_by_its_module():
    assert registry.name_of(Kind.ADVANTAGE, centred_returns) == "agentrl.algorithms.advantages:centred_returns"
    assert registry.name_of(Kind.REWARD, lambda trajectory, task: 1.0) == "python:<lambda>"
    assert registry.name_of(Kind.REWARD, make_objects) == f"{__name__}:make_objects"


def test_other_processes_need_what_they_can_import():
    objects = make_objects()
    with pytest.raises(UsageError, match=r"environment.isolation process needs objects that other.*Game, defined in"):
        agentrl.train(env=objects["env"], model="scratch", overrides={"environment.isolation": "process"})
    with pytest.raises(UsageError, match=r"trainer.processes 2 needs objects.*got plain, defined"):
        agentrl.train(env="guess_number", model="scratch", loss=objects["loss"], overrides={"trainer.processes": 2})


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ((len, 1.0, 2.0), "a reward is not a pair"),
        ([lambda trajectory, task: 0, lambda trajectory, task: 1], "two reward functions have the same name"),
        ((lambda trajectory, task: 0, lambda trajectory, task: 1), "a reward is not a pair"),
        ({"exact": 1.0}, "a reward has no name: got {'exact': 1.0}, expected the key name"),
        (lambda other: 0, "does not take the arguments of a reward function"),
        (3, "cannot be called: got int"),
    ],
)
def test_what_is_no_reward_is_refused_without_a_folder(tmp_path, reward, words):
    with pytest.raises(UsageError, match=words):
        agentrl.train(env="guess_number", model="scratch", reward=reward)
    assert list(tmp_path.iterdir()) == []


def test_values_of_overrides_become_text_and_numbers():
    overrides = {
        "run.directory": pathlib.Path("my runs"),
        "trainer.learning_rate": np.float64(0.5),
        "run.seed": np.int64(3),
    }
    words = ['run.directory="my runs"', "trainer.learning_rate=0.5", "run.seed=3"]
    assert override_words(overrides) == words
    with pytest.raises(UsageError, match=r"the override of agent.reward is not valid: got function.*Pass objects by"):
        override_words({"agent.reward": make_objects})
    with pytest.raises(UsageError, match=r"the override of agent.options is not valid: got object"):
        override_words({"agent.options": {"format": object()}})


def test_a_single_tool_is_a_list_of_one():
    (double,) = make_objects()["tools"]
    assert tool_overrides(double) == tool_overrides([double])
    entry = {"name": "sql", "database": pathlib.Path("shop.db")}
    assert tool_overrides(entry) == ['agent.tools=[{"name": "sql", "database": "shop.db"}]']


def test_rows_are_not_a_file_of_prompts():
    with pytest.raises(UsageError, match="prompts is not a file: got list"):
        agentrl.evaluate(prompts=[{"prompt": "Hi"}], policy="random", reward="boxed")
    with pytest.raises(ConfigError, match="a config is not a file: got dict"):
        agentrl.train(config={"environment": "guess_number"})


def test_prompts_and_a_function_are_enough(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(3)))
    found = agentrl.evaluate(prompts=file, policy="random", reward=lambda trajectory, task: 0.5, progress=False)
    assert {episode.trajectory.reward for episode in found.episodes} == {0.5}
    tiny = {**SMALL, "agent.options": {"format": "plain"}}
    run = agentrl.train(
        tasks=file, loop="react_text", reward=lambda trajectory, task: 0.5, model="scratch", steps=1, overrides=tiny
    )
    assert run.metrics["reward/mean"] == 0.5
    assert load_config(run.folder / "config.yaml").agent.loop == "react_text"
    with pytest.raises(UsageError, match=r"cannot read task file none.jsonl"):
        agentrl.train(env="guess_number", tasks="none.jsonl", model="scratch")


def test_a_warm_start_on_conversations_needs_no_environment(tmp_path):
    model = agentrl.train(env="guess_number", model="scratch", steps=1, overrides=SMALL, progress=False).checkpoint
    chat = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "I say 50."}]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat}) + "\n")
    run = agentrl.sft(data=file, model=str(model), overrides={"sft.epochs": 2}, progress=False)
    assert pathlib.Path(run.checkpoint).is_dir()
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 2
    file.write_text(json.dumps({"messages": chat[:1]}) + "\n")
    with pytest.raises(UsageError, match="line 1 has nothing to learn"):
        agentrl.sft(data=file, model=str(model), progress=False)


def test_rows_in_memory_are_no_file_of_tasks():
    with pytest.raises(UsageError, match="tasks is not a file: got list") as caught:
        agentrl.train(tasks=[{"prompt": "a"}], reward=lambda trajectory, task: 0.0, model="scratch")
    assert 'lines like {"prompt": "..."}' in str(caught.value)
