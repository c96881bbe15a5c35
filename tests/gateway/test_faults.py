"""Failures of an external agent's surroundings are never scored as the policy's, and no reward is paid twice."""

import asyncio
import math
import sys
import threading
import time
from contextlib import suppress

import gymnasium
import numpy
import openai
import pytest
from agentrl.agent_loops.external import External
from support import SLACK
from support.gateway_client import post

from agentrl.errors import LedgerError, Outcome, UsageError
from agentrl.render.conversation import LedgerConversation
from agentrl.rollout.budget import EpisodeLimits
from agentrl.serving.scripted import Failure, ScriptedAnswer

HANGS = ScriptedAnswer(token_ids=[1], failure=Failure.HANG)
FAILS = ScriptedAnswer(token_ids=[1], failure=Failure.RAISE)
SOON = EpisodeLimits(answer_timeout_s=3.2)


@pytest.fixture
def played_by(run_loop, monkeypatch):
    """Play one episode with a function of an external task."""

    async def run(function, *answers, make=None, limits=None, **options):
        monkeypatch.setattr(sys.modules[__name__], "now_plays", function, raising=False)
        fields = {"make": make} if make else {}
        if limits:
            fields["limits"] = limits
        trajectory, _ = await run_loop(External(function=f"{__name__}:now_plays", **options), *answers, **fields)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            with suppress(openai.APIError):
                await task
        return trajectory

    return run


async def ask(task, text="What is 6 times 7?", model="policy", retries=0, **options):
    message = {"role": "user", "content": text}
    async with openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, max_retries=retries) as client:
        reply = await client.chat.completions.create(model=model, messages=[message], **options)
        return reply.choices[0].message.content


async def test_a_request_that_runs_when_the_answer_is_there_changes_nothing(played_by):
    async def play(task):
        answer = await ask(task)
        asyncio.create_task(ask(task, "a second thought"))  # noqa: RUF006
        await asyncio.sleep(0.1)
        return answer

    trajectory = await played_by(play, "42", HANGS)
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.FINISHED, 1.0, 1)


async def test_a_request_that_is_refused_changes_nothing_either(played_by):
    async def play(task):
        answer = await ask(task)
        with pytest.raises(openai.BadRequestError):
            await ask(task, logit_bias={"3": 1})
        return answer

    trajectory = await played_by(play, "42")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)


async def test_what_only_the_gateway_cannot_do_is_not_the_policys_fault(played_by):
    async def play(task):
        await ask(task)
        await ask(task, response_format={"type": "json_object"})

    trajectory = await played_by(play, "42")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "response_format" in trajectory.error


@pytest.mark.usefixtures("time_from_the_first_request")
@pytest.mark.parametrize("answer", [FAILS, HANGS])
@pytest.mark.parametrize("gives_up", [True, False])
async def test_a_failing_engine_is_never_the_policys_fault(played_by, answer, gives_up):
    async def play(task):
        await ask(task)
        try:
            await ask(task, "and now?")
        except openai.APIStatusError:
            if gives_up:
                raise
        return "41"

    trajectory = await played_by(play, "42", answer, limits=SOON, seconds=3)
    assert trajectory.outcome is Outcome.ENGINE_ERROR


async def test_a_ledger_that_disagrees_is_never_the_policys_fault(played_by, monkeypatch):
    async def play(task):
        with suppress(openai.APIStatusError):
            await ask(task)
        return "41"

    def disagree(*_arguments):
        raise LedgerError("the ids sent are not the ledger's")

    monkeypatch.setattr(LedgerConversation, "verify", disagree)
    trajectory = await played_by(play, "42")
    assert trajectory.outcome is Outcome.ENGINE_ERROR


async def test_an_answer_to_one_request_does_not_make_up_for_another_that_failed(played_by):
    async def play(task):
        await asyncio.gather(*(ask(task, text) for text in ("one", "two", "three")), return_exceptions=True)
        return "41"

    assert (await played_by(play, "42", FAILS, "42")).outcome is Outcome.ENGINE_ERROR


@pytest.mark.slow
async def test_a_retry_that_is_answered_makes_up_for_its_failure(played_by):
    async def play(task):
        return await ask(task, retries=3)

    trajectory = await played_by(play, FAILS, "42", limits=EpisodeLimits(max_turns=1))
    assert (trajectory.outcome, trajectory.reward, len(trajectory.sequences)) == (Outcome.FINISHED, 1.0, 1)


async def test_a_function_that_never_asks_in_its_time_is_not_the_policy(played_by):
    async def play(task):
        await asyncio.sleep(60)

    trajectory = await played_by(play, "42", seconds=0.2)
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "no request within its time" in trajectory.error


async def test_a_functions_own_timeout_is_an_error_of_its_own(played_by):
    async def play(task):
        await ask(task)
        raise TimeoutError("the shop did not answer")

    trajectory = await played_by(play, "42")
    assert trajectory.outcome is Outcome.POLICY_ERROR
    assert "the shop did not answer" in trajectory.error


@pytest.mark.usefixtures("time_from_the_first_request")
async def test_time_in_which_the_engine_computes_is_not_the_programs(played_by):
    async def play(task):
        return await ask(task)

    slow = ScriptedAnswer(token_ids=[1], first_delay_s=1.3)
    assert (await played_by(play, slow, seconds=1)).outcome is Outcome.FINISHED


@pytest.mark.usefixtures("time_from_the_first_request")
async def test_a_time_that_is_over_after_an_answer_is_the_policys(played_by):
    async def play(task):
        await ask(task)
        await asyncio.sleep(60)

    trajectory = await played_by(play, "42", seconds=0.5)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED_TIME, 0.0)


async def test_no_answer_comes_after_the_end(played_by):
    """Several equal requests, and several answers to one, all end with their episode."""

    async def play(task):
        answer = await ask(task)
        for n in (1, 1, 3):
            asyncio.create_task(ask(task, "more", n=n))  # noqa: RUF006
        await asyncio.sleep(0.1)
        return answer

    slow = ScriptedAnswer(token_ids=[1], first_delay_s=0.3)
    trajectory = await played_by(play, "42", *[slow] * 5)
    await asyncio.sleep(0.5)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.FINISHED, 1)


@pytest.mark.slow
async def test_a_retry_samples_only_what_its_request_lacks(played_by):
    async def play(task):
        return await ask(task, n=3, retries=3)

    trajectory = await played_by(play, "42", "42", FAILS, "42")
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.FINISHED, 3)


class Slow(gymnasium.Env):
    """Pays 1 for each action; an action takes its time."""

    observation_space = action_space = gymnasium.spaces.Text(1000)
    running = 0
    taken = 0

    def reset(self, *, seed=None, options=None):
        Slow.running += 1
        return "go", {}

    def step(self, action):
        if action == "break":
            raise UsageError("the environment's data set is not there")
        time.sleep(0.2)
        Slow.taken += 1
        return "on", 1.0, action == "end", False, {}


async def test_an_action_in_flight_is_waited_for(played_by):
    async def play(task):
        await ask(task)
        asyncio.create_task(task.step("go"))  # noqa: RUF006
        await asyncio.sleep(0.05)

    Slow.taken = 0
    trajectory = await played_by(play, "42", make=Slow, answer="none")
    assert (Slow.taken, trajectory.reward, trajectory.outcome) == (1, 1.0, Outcome.FINISHED)


async def test_an_environment_that_cannot_work_stops_the_run(played_by):
    async def play(task):
        await ask(task)
        await task.step("break")

    with pytest.raises(UsageError, match="data set"):
        await played_by(play, "42", make=Slow, answer="none")


async def test_actions_need_the_secret_and_end_with_the_environment(played):
    async def play(gateway, session):
        url = gateway.url_of(session)
        assert (await post(f"{url}/step", session.secret, {"action": "42"}))[0] == 400, "nothing was asked yet"
        assert (await post(f"{url}/v1/responses", session.key, {"model": "m", "input": "hm"}))[0] == 200
        for key in (session.key, "", "ä"):
            assert (await post(f"{url}/step", key, {"action": "42"}))[0] == 401
        assert await post(f"{url}/step", session.secret, {"action": "42"}) == (
            200,
            {"observation": "Right.", "done": True},
        )
        assert (await post(f"{url}/step", session.secret, {"action": "42"}))[0] == 403

    trajectory, _ = await played(play, "42")
    assert trajectory.reward == 1.0


async def test_a_program_whose_answer_is_its_action_takes_no_others(played_by):
    async def play(task):
        answer = await ask(task)
        await task.step(answer)
        return answer

    trajectory = await played_by(play, "42")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert "agent.options.answer=none" in trajectory.error


async def test_a_reward_that_is_posted_again_is_paid_once(played):
    async def play(gateway, session):
        url = gateway.url_of(session)
        _, reply = await post(f"{url}/v1/responses", session.key, {"model": "m", "input": "hm"})
        for reward in (0.25, 0.5, 0.5):
            assert (await post(f"{url}/reward", session.secret, {"reward": reward}))[0] == 200
            assert (await post(f"{url}/reward", session.secret, {"reward": reward, "reply": reply["id"]}))[0] == 200

    trajectory, _ = await played(play, "42")
    assert trajectory.reward == 1.0


async def test_a_spent_budget_does_not_throw_the_answer_away(played_by):
    async def play(task):
        answer = await ask(task)
        assert await ask(task, "more") == ""
        return answer

    trajectory = await played_by(play, "42", limits=EpisodeLimits(max_turns=1))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED_TURNS, 1.0)


async def test_functions_that_hang_hold_up_no_others(run_loop):
    try:
        loops = [
            External(function=f"{__name__}:{name}", seconds=s) for name, s in [*[("waits", 0.5)] * 40, ("plays", 60)]
        ]
        async with asyncio.timeout(10 * SLACK):
            found = await asyncio.gather(*(run_loop(loop, "42") for loop in loops))
    finally:
        RELEASED.set()
    outcomes = [trajectory.outcome for trajectory, _ in found]
    assert outcomes == [Outcome.ENVIRONMENT_ERROR] * 40 + [Outcome.FINISHED]


RELEASED = threading.Event()


def waits(task):
    RELEASED.wait(20 * SLACK)


def plays(task):
    with openai.OpenAI(base_url=task.openai_url, api_key=task.api_key) as client:
        return client.responses.create(model="policy", input=task.prompt).output_text


@pytest.mark.parametrize(
    ("returned", "outcome", "reward"),
    [
        (numpy.float32(0.5), Outcome.FINISHED, 0.5),
        (float("nan"), Outcome.ENVIRONMENT_ERROR, None),
        ([1], Outcome.ENVIRONMENT_ERROR, None),
    ],
)
async def test_a_returned_reward_is_one_or_an_error(played_by, returned, outcome, reward):
    async def play(task):
        await ask(task)
        return returned

    trajectory = await played_by(play, "42")
    assert (trajectory.outcome, trajectory.reward) == (outcome, reward)


@pytest.mark.parametrize("text", ["NaN", "1e999", '"1"', '{"reward": 1, "success": "yes"}', "[" * 5000, "", "\xff"])
async def test_a_file_without_a_usable_reward_costs_one_episode(run_loop, program, text):
    command = program(f'ask("hm")\nopen("reward", "w", encoding="latin-1").write({text!r})')
    trajectory, _ = await run_loop(External(command=command, reward_file="reward"), "42")
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR


async def test_a_side_call_is_no_answer_of_the_agent(played_by):
    async def play(task):
        answer = await ask(task)
        await ask(task, "a title, please", model="small")
        return answer

    trajectory = await played_by(play, "42", "Sums", side_models=["small"])
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.0]


class Asked(gymnasium.Env):
    """Gives a prompt of 200 KB."""

    observation_space = action_space = gymnasium.spaces.Text(1000)

    def reset(self, *, seed=None, options=None):
        return "ü" * 100_000, {}

    def step(self, action):
        return "", float(action == "100000 given in full"), True, False, {}


async def test_a_long_prompt_stands_in_the_file_and_on_the_input(run_loop, program):
    command = program("""
        ask("hm")
        assert "AGENTRL_PROMPT" not in os.environ
        prompt = json.load(open(os.environ["AGENTRL_TASK"]))["prompt"]
        assert sys.stdin.read() == prompt
        print(len(prompt), "given in full")
    """)
    limits = EpisodeLimits(max_observation_tokens=10**6)
    trajectory, _ = await run_loop(External(command=command), "42", make=Asked, limits=limits)
    assert trajectory.reward == 1.0, trajectory.log


async def test_a_child_that_holds_the_output_open_does_not_hold_the_episode(run_loop, program):
    command = program("""
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
        print(ask("hm"))
    """)
    async with asyncio.timeout(10 * SLACK):
        trajectory, _ = await run_loop(External(command=command), "42")
    assert trajectory.reward == 1.0


async def test_of_much_output_the_end_is_read_and_kept(run_loop, program):
    command = program('ask("hm")\nprint("x" * 5_000_000)\nprint("the answer is 42")')
    trajectory, _ = await run_loop(External(command=command), "42")
    assert trajectory.reward == 1.0
    assert len(trajectory.log) <= 64 * 1024
    assert trajectory.log.endswith("42\n")


@pytest.mark.usefixtures("time_from_the_first_request")
@pytest.mark.slow
async def test_what_a_program_said_is_kept_when_its_time_is_over(run_loop, program):
    command = program('ask("hm")\nprint("so far", flush=True)\nimport time; time.sleep(60)')
    trajectory, _ = await run_loop(External(command=command, seconds=2), "42")
    assert (trajectory.outcome, trajectory.log) == (Outcome.TRUNCATED_TIME, "so far\n")


async def test_a_program_gets_no_secrets_of_this_process(run_loop, program, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    command = program("""
        assert not {"HF_TOKEN", "HTTP_PROXY", "OPENAI_ORG_ID"} & set(os.environ), os.environ
        assert os.environ["MINE"] == "yes"
        print(ask("hm"))
    """)
    trajectory, _ = await run_loop(External(command=command, variables={"MINE": "yes"}), "42")
    assert trajectory.reward == 1.0, trajectory.log


async def test_a_program_is_found_from_the_folder_of_the_run(run_loop, program, tmp_path, monkeypatch):
    python, _ = program('print(ask("hm"))')
    monkeypatch.chdir(tmp_path)
    trajectory, _ = await run_loop(External(command=[python, "./agent.py"]), "42")
    assert trajectory.reward == 1.0


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.5, 9e-4, 1e-5])
async def test_a_log_probability_that_none_can_be_is_the_engines_failure(played_by, renderer, logprob):
    ids = [*renderer.encoder.encode("42"), renderer.boundary.end_id]
    answer = ScriptedAnswer(token_ids=ids, logprobs=[-1.0] * (len(ids) - 1) + [logprob])
    trajectory = await played_by(ask, answer)
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert str(logprob) in trajectory.error
    assert not trajectory.sampled_tokens


async def test_a_program_that_asks_on_when_the_budget_is_spent_is_ended(run_loop, program):
    lines = """
        import time, urllib.error
        while True:
            try:
                ask("What is 6 times 7?")
            except urllib.error.HTTPError as error:
                time.sleep(0.05)
    """
    loop = External(command=program(lines), grace_seconds=0.3, seconds=60)
    trajectory, _ = await run_loop(loop, "42", limits=EpisodeLimits(max_turns=1))
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS
    assert len(trajectory.turns) == 1
