"""The external loop: programs and functions that play episodes."""

import asyncio
import json
import sys
import threading
import venv
from contextlib import suppress
from pathlib import Path

import openai
import pytest
from agentrl.agent_loops.external import External
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.cli import main
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, Outcome, UsageError
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.runner import EpisodeRunner
from agentrl.serving.scripted import Failure, ScriptedAnswer
from agentrl.task import SeedTasks
from agentrl.weights import write_served_model

ENDED = threading.Event()


async def test_what_a_program_prints_is_its_answer(run_loop, program):
    command = program('print("thinking", file=sys.stderr)\nprint(ask(sys.stdin.read()))')
    trajectory, script = await run_loop(External(command=command), "it is 42")
    assert (trajectory.outcome, trajectory.reward, trajectory.success) == (Outcome.FINISHED, 1.0, True)
    assert trajectory.log == "it is 42\nthinking\n"
    script.check(trajectory)


async def test_the_task_stands_in_variables_and_in_a_file(run_loop, program):
    command = program("""
        task = json.load(open(os.environ["AGENTRL_TASK"]))
        assert task["prompt"] == os.environ["AGENTRL_PROMPT"] == "What is 6 times 7?", task
        assert (task["id"], task["instructions"]) == ("t", ""), task
        print(ask(task["prompt"]))
    """)
    trajectory, _ = await run_loop(External(command=command), "42")
    assert trajectory.reward == 1.0


async def test_the_users_variables_come_before_those_of_the_gateway(run_loop, program):
    command = program("""
        names = ("AGENTRL_PROMPT", "OPENAI_API_BASE", "NO_PROXY", "EXTRA", "no_proxy")
        print({name: os.environ[name] for name in names}, file=sys.stderr)
        print(ask("hm"))
    """)
    own = {"AGENTRL_PROMPT": "mine", "OPENAI_API_BASE": "http://127.0.0.1:9/own", "NO_PROXY": "*", "EXTRA": "1"}
    trajectory, _ = await run_loop(External(command=command, variables=own), "42")
    assert trajectory.reward == 1.0, trajectory.error
    assert str({**own, "no_proxy": "127.0.0.1,localhost"}) in trajectory.log


async def test_a_program_has_the_packages_of_the_environment_whose_python_runs_it(run_loop, program, tmp_path):
    venv.create(tmp_path / "own", symlinks=True)
    (site,) = (tmp_path / "own").glob("lib/python*/site-packages")
    (site / "only_here.py").write_text("ANSWER = '42'")
    command = [str(tmp_path / "own/bin/python"), *program('import only_here\nask("hm")\nprint(only_here.ANSWER)')[1:]]
    trajectory, _ = await run_loop(External(command=command), "hm")
    assert trajectory.reward == 1.0, trajectory.error


@pytest.mark.parametrize(
    ("options", "has"),
    [
        ({"reward_file": "reward"}, False),
        ({"answer": "none"}, True),
        ({"answer": "none", "reward_file": "reward"}, True),
    ],
)
async def test_the_secret_is_given_to_programs_that_need_it(run_loop, program, options, has):
    command = program("""
        ask("hm")
        print(sorted(name for name in os.environ if name == "AGENTRL_SECRET"))
        open("reward", "w").write("1")
    """)
    trajectory, _ = await run_loop(External(command=command, **options), "hm")
    assert ("['AGENTRL_SECRET']" in trajectory.log) is has, trajectory.log


async def test_a_program_acts_in_the_environment_itself(run_loop, program):
    command = program("""
        answer = ask("hm")
        told = post("/step", os.environ["AGENTRL_SECRET"], {"action": answer})
        assert told == {"observation": "Right.", "done": True}, told
    """)
    trajectory, _ = await run_loop(External(command=command, answer="none"), "42")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)


async def test_a_file_gives_the_reward(run_loop, program):
    command = program('ask("hm")\njson.dump({"reward": 0.25, "success": True}, open("reward.json", "w"))')
    trajectory, _ = await run_loop(External(command=command, reward_file="reward.json"), "42")
    assert (trajectory.reward, trajectory.success) == (0.25, True)


@pytest.mark.parametrize(
    ("lines", "options", "outcome", "says"),
    [
        ('ask("hm")\nsys.exit(3)', {}, Outcome.POLICY_ERROR, "the program ended with 3"),
        ('ask("hm")\nsys.exit(3)', {"reward_file": "none.json"}, Outcome.POLICY_ERROR, "the program ended with 3"),
        (
            'ask("hm")\nraise ValueError("broken")',
            {"crash": "environment_error"},
            Outcome.ENVIRONMENT_ERROR,
            "ValueError: broken",
        ),
        ('print("42")', {}, Outcome.ENVIRONMENT_ERROR, "never got an answer from the gateway"),
        ('ask("hm")', {"reward_file": "none.json"}, Outcome.ENVIRONMENT_ERROR, "left no reward in none.json"),
        ('ask("hm")\nimport time; time.sleep(60)', {"seconds": 2}, Outcome.TRUNCATED_TIME, None),
    ],
)
@pytest.mark.usefixtures("time_from_the_first_request")
async def test_a_program_that_fails_says_whose_fault_it_is(run_loop, program, lines, options, outcome, says):
    trajectory, _ = await run_loop(External(command=program(lines), **options), "42")
    assert trajectory.outcome is outcome
    assert says is None or says in trajectory.error


async def test_a_users_own_task_file_comes_before_the_written_one(run_loop, program):
    command = program('ask("hm")\nprint(os.environ["AGENTRL_TASK"])')
    trajectory, _ = await run_loop(External(command=command, variables={"AGENTRL_TASK": "my own"}), "42")
    assert trajectory.log == "my own\n"


async def test_a_program_inherits_the_language_and_no_secrets(run_loop, program, monkeypatch):
    monkeypatch.setenv("LC_OF_TEST", "de_DE")
    monkeypatch.setenv("SECRET_OF_TEST", "hidden")
    command = program("""
        ask("hm")
        print(os.environ.get("LC_OF_TEST"), os.environ.get("SECRET_OF_TEST"), "PATH" in os.environ)
    """)
    trajectory, _ = await run_loop(External(command=command), "42")
    assert trajectory.log == "de_DE None True\n"


async def test_the_end_of_a_long_output_is_kept(run_loop, program, monkeypatch):
    monkeypatch.setattr("agentrl.agent_loops.external_programs.MAX_LOG_CHARS", 9)
    command = program('ask("hm")\nprint("abcdefghij")\nprint("xyz", file=sys.stderr)')
    trajectory, _ = await run_loop(External(command=command), "42")
    assert trajectory.log == "ghij\nxyz\n"


@pytest.mark.usefixtures("time_from_the_first_request")
@pytest.mark.slow
async def test_waits_for_answers_do_not_count_as_the_programs_time(run_loop, renderer):
    ids = [*renderer.encoder.encode("it is 42"), renderer.boundary.end_id]
    late = ScriptedAnswer(token_ids=ids, first_delay_s=2.2)
    trajectory, _ = await run_loop(External(function=f"{__name__}:plays", seconds=2.0), late)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)


async def asks_on_the_side(task):
    async with openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key) as client:
        for model, system in (("small", "Play."), ("policy", "Now make a title."), ("policy", "Play.")):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": task.prompt}]
            reply = await client.chat.completions.create(model=model, messages=messages)
        return reply.choices[0].message.content


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, [True, True, True]),
        ({"side_models": ["tiny", "small"]}, [False, True, True]),
        ({"side_markers": ["nothing", "make a title"]}, [True, False, True]),
    ],
)
async def test_side_calls_are_chosen_by_model_and_by_text(run_loop, options, trained):
    trajectory, _ = await run_loop(External(function=f"{__name__}:asks_on_the_side", **options), "42")
    masks = {}
    for sequence in trajectory.sequences:
        for turn in sequence.turns:
            masks[turn.index] = bool(sequence.loss_mask[turn.start : turn.end].any())
    assert [masks[index] for index in range(3)] == trained


async def test_a_program_that_gives_up_on_a_lost_engine_has_not_failed_by_itself(run_loop, program):
    lost = ScriptedAnswer(token_ids=[1], failure=Failure.RAISE)
    trajectory, _ = await run_loop(External(command=program('ask("hm")')), lost)
    assert trajectory.outcome is Outcome.ENGINE_ERROR


async def test_what_a_program_has_started_ends_with_it(run_loop, program, tmp_path):
    command = program(f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL)
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        print(ask("hm"))
    """)
    await run_loop(External(command=command), "42")
    status = Path("/proc") / tmp_path.joinpath("pid").read_text() / "stat"
    for _ in range(6000):
        with suppress(FileNotFoundError):
            if status.read_text().rpartition(")")[2].split()[0] not in "ZX":
                await asyncio.sleep(0.01)
                continue
        return
    pytest.fail("the child lives on")


async def test_episodes_that_begin_together_share_one_gateway_which_is_closed_with_the_pool(run_loop):
    loop = External(function=f"{__name__}:plays")
    pool = EnvPool(EnvironmentSpec(name="w", make=lambda: None, tasks=SeedTasks, isolation=Isolation.INLINE))
    EpisodeRunner(pool=pool, loop=loop, policy=None)
    gateways = await asyncio.gather(*(loop._gateway() for _ in range(8)))
    assert {gateway.url for gateway in gateways} == {gateways[0].url} != {""}
    await pool.close()
    assert not loop._gateways


def breaks_at_once(task):
    raise ValueError("no such client")


async def test_a_program_that_fails_before_it_asks_is_not_the_policys_fault(run_loop):
    trajectory, _ = await run_loop(External(function=f"{__name__}:breaks_at_once"), "42")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "ValueError: no such client" in trajectory.error


async def plays(task):
    async with openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key) as client:
        message = {"role": "user", "content": task.prompt}
        reply = await client.chat.completions.create(model="policy", messages=[message])
        return reply.choices[0].message.content


def plays_and_steps(task):
    with openai.OpenAI(base_url=task.openai_url, api_key=task.api_key) as client:
        reply = client.responses.create(model="policy", input=task.prompt)
        assert task.step(reply.output_text).done


def judges_itself(task):
    plays_and_steps(task)
    return 0.5


def judges_with_success(task):
    plays_and_steps(task)
    return {"reward": 0.25, "success": True}


async def finds_the_environment_broken(task):
    await plays(task)
    raise EnvironmentFailure("the disk of the task is full")


async def test_a_function_says_what_is_not_the_policys_fault(run_loop):
    trajectory, _ = await run_loop(External(function=f"{__name__}:finds_the_environment_broken"), "42")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "the disk of the task is full" in trajectory.error


def exits(task):
    with openai.OpenAI(base_url=task.openai_url, api_key=task.api_key) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
    sys.exit(3)


async def exits_in_the_loop(task):
    await plays(task)
    sys.exit(3)


@pytest.mark.parametrize("function", ["exits", "exits_in_the_loop"])
async def test_a_function_that_exits_after_an_answer_has_failed(run_loop, function):
    trajectory, _ = await run_loop(External(function=f"{__name__}:{function}", seconds=20.0), "42")
    assert trajectory.outcome is Outcome.POLICY_ERROR
    assert "SystemExit: 3" in trajectory.error


async def never_ends(task):
    await plays(task)
    while not ENDED.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("time_from_the_first_request")
@pytest.mark.slow
async def test_a_function_that_swallows_its_cancellation_is_left_running(run_loop, caplog):
    ENDED.clear()
    async with asyncio.timeout(60):
        trajectory, _ = await run_loop(External(function=f"{__name__}:never_ends", seconds=1.0), "42")
    assert trajectory.outcome is Outcome.TRUNCATED_TIME
    assert "the external function did not end when it was cancelled" in caplog.text
    ENDED.set()


@pytest.mark.parametrize(
    ("function", "answer", "reward"),
    [
        ("plays", "step", 1.0),
        ("plays_and_steps", "none", 1.0),
        ("judges_itself", "none", 1.5),
        ("judges_with_success", "none", 1.25),
    ],
)
async def test_a_function_plays(run_loop, function, answer, reward):
    trajectory, script = await run_loop(External(function=f"{__name__}:{function}", answer=answer), "it is 42")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, reward)
    script.check(trajectory)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"command": "true", "function": "a:b"},
        {"command": ""},
        {"command": "'"},
        {"function": "nowhere:at_all"},
        {"function": "json"},
        {"command": "true", "seconds": 0},
        {"command": "true", "crash": "nobody"},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(UsageError):
        External(**options)


@pytest.mark.slow
def test_an_evaluation_plays_with_a_program(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer("qwen3")
    write_served_model(tiny_model(vocab_size=len(tokenizer), max_context=2048), tokenizer, tmp_path / "model")
    words = ["--env", "math_problems", "--model", str(tmp_path / "model"), "--tasks", "2", "--json", "result.json"]
    with pytest.raises(SystemExit) as ended:
        main(["eval", *words, "--program", " ".join(program("print(ask(sys.stdin.read()))"))])
    assert ended.value.code == 0, capsys.readouterr().err
    assert json.loads(Path("result.json").read_text())["outcomes"] == {"finished": 2}
