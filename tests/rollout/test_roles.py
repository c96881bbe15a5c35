"""Several agents in one episode: turns, prompts, tools and rewards by role."""

from dataclasses import replace

import pytest

from agentrl.agent_loop import AgentLoop, AgentRole
from agentrl.engine import AdapterVersions, ChatAnswer, ChatPolicy, SamplingParams, StopReason
from agentrl.errors import Outcome, UsageError
from agentrl.message import Message, ToolCall, user
from agentrl.rollout.episode import RuntimeEpisode
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.roles.role_policies import AdapterPolicy, RoleAdapters, RolePolicy
from agentrl.rollout.roles.run_roles import RoleEpisode, RoleSetup
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.serving.scripted import ScriptedEngine
from agentrl.tool import tool
from agentrl.training.roles import role_members
from agentrl.trajectory import SOLE_ROLE, Source


class Pair(AgentLoop):
    """The planner says something once; the worker acts, with the planner's words before it."""

    roles = ("planner", "worker")
    offers_tools = True

    async def run(self, episode):
        observation = await episode.reset()
        planner = episode.open([user(observation)], role="planner")
        plan = (await planner.generate()).text
        worker = episode.open([user(f"{plan} {observation}")], role="worker")
        while True:
            answer = await worker.generate()
            if answer.tool_calls:
                worker.add(*await episode.call_tools(answer.tool_calls))
                continue
            result = await episode.step(answer.text)
            await self.after(episode)
            if result.done:
                return
            worker.add(user(result.observation))

    async def after(self, episode):
        return

    def demonstrate(self, action):
        return user(action)


@tool
def look(where: str) -> str:
    """Look somewhere.

    Args:
        where: The place.
    """
    return f"Nothing in {where}."


@tool
def listen() -> str:
    """Listen."""
    return "Silence."


@pytest.fixture
def pair(renderer, make_runner, worlds):
    """A runner in which the roles say the given texts, one per turn."""

    def make(*answers, loop=None, **fields):
        def script(request):
            turn = int(request.request_id.rpartition("-")[2])
            return [*renderer.encoder.encode(answers[min(turn, len(answers) - 1)]), renderer.boundary.end_id]

        policy = EngineEpisodePolicy(ScriptedEngine(script=script, vocab_size=400), renderer, SamplingParams())
        pool = make_runner(worlds.Corridor, "forward").pool
        return EpisodeRunner(pool=pool, loop=loop or Pair(), policy=policy, **fields)

    return make


def text_of(renderer, trajectory, role):
    (sequence,) = (s for s in trajectory.sequences if s.turns[0].role == role)
    return renderer.encoder.decode(sequence.ids_list())


class Kept(AgentLoop):
    """Keeps its episode and ends after an answer."""

    async def run(self, episode):
        self.episode = episode
        await episode.open([user(await episode.reset())], role=next(iter(self.roles), SOLE_ROLE)).generate()


async def test_a_single_agent_has_an_episode_without_roles(pair, play):
    alone, several = Kept(), Kept()
    several.roles = ("planner",)
    for loop, kind in ((alone, RuntimeEpisode), (several, RoleEpisode)):
        trajectory = await play(pair("forward", loop=loop))
        assert trajectory.outcome is Outcome.FINISHED, trajectory.error
        assert type(loop.episode) is kind
    assert (alone.episode.roles, alone.episode.players, alone.episode.player_names) == ({}, {}, ())
    assert list(several.episode.roles) == ["planner"]


async def test_instructions_for_players_that_nothing_plays_are_refused(make_runner, play, worlds):
    def told(instructions):
        class Told(worlds.Corridor):
            def reset(self, **options):
                observation, info = super().reset(**options)
                return observation, {**info, "instructions": instructions}

        return Told

    with pytest.raises(UsageError, match=r"instructions for user, which the runtime does not play.*roles_of"):
        await play(make_runner(told({"user": "Be rude."}), "forward"))
    trajectory = await play(make_runner(told("Walk."), "forward"))
    assert trajectory.outcome is Outcome.FINISHED, trajectory.error


async def test_turns_carry_their_role_and_each_role_is_a_sequence(pair, play):
    trajectory = await play(pair("Go on.", "forward"))
    assert trajectory.outcome is Outcome.FINISHED
    assert [turn.role for turn in trajectory.turns] == ["planner", "worker", "worker", "worker"]
    assert [[turn.role for turn in s.turns] for s in trajectory.sequences] == [["planner"], ["worker"] * 3]
    assert trajectory.role_returns == {"planner": 1.0, "worker": 1.0}


async def test_a_role_has_its_own_prompt_and_tools(pair, play, renderer):
    roles = [
        RoleSetup(role=AgentRole(name="planner", system_prompt="You plan."), tools=()),
        RoleSetup(role=AgentRole(name="worker", system_prompt="You work."), tools=[look]),
    ]
    call = '<tool_call>\n{"name": "look", "arguments": {"where": "hall"}}\n</tool_call>'
    other = '<tool_call>\n{"name": "listen", "arguments": {}}\n</tool_call>'
    trajectory = await play(pair("Go.", call, other, "forward", tools=[listen], roles=roles))
    planner, worker = (text_of(renderer, trajectory, role) for role in ("planner", "worker"))
    assert "You plan." in planner
    assert "You work." not in planner
    assert '"look"' not in planner
    assert "You work." in worker
    assert '"look"' in worker
    assert "Nothing in hall." in worker
    assert "Silence." not in worker
    assert '"name": "listen"' in worker


async def test_a_role_that_does_not_train_is_recorded_as_forced(pair, play):
    trajectory = await play(pair("Go.", "forward", roles=[RoleSetup(role=AgentRole(name="worker", trained=False))]))
    planner, worker = trajectory.sequences
    assert planner.loss_mask.any()
    assert not worker.loss_mask.any()
    assert Source.SAMPLED not in worker.sources.tolist()
    assert trajectory.turns[0].reward == 1.0  # what came in the end is the doing of the last that trains
    assert trajectory.role_returns == {"planner": 1.0}


async def test_a_role_can_be_played_by_another_policy(pair, play):
    setup = RoleSetup(role=AgentRole(name="worker", trained=False), policy=ScriptedEpisodePolicy(ScriptedPolicy.EXPERT))
    trajectory = await play(pair("Go.", roles=[setup]))
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.success
    assert [turn.role for turn in trajectory.turns] == ["planner", "worker", "worker", "worker"]
    assert trajectory.role_returns == {"planner": 1.0}


async def test_an_adapter_plays_its_role_and_stamps_its_own_version(pair, play):
    versions = AdapterVersions()
    versions.publish(0, {"a": 5})
    runner = pair("Go on.", "forward")
    engine, renderer = runner.policy.engine, runner.policy.renderer
    engine.capabilities = replace(engine.capabilities, adapters=frozenset({"a"}))
    adapters = RoleAdapters(by_role={"planner": "a"}, versions=versions)
    policy = AdapterPolicy(engine, renderer, SamplingParams(temperature=0.5), adapters=adapters)
    for own in (policy, policy.with_sampling(SamplingParams(), trains=False)):
        trajectory = await play(runner.with_policy(own))
        assert [turn.adapter for turn in trajectory.turns] == ["a", None, None, None], trajectory.error
        stamped = [set(sequence.versions[sequence.loss_mask].tolist()) for sequence in trajectory.sequences]
        assert stamped == [{5}, {0}]
    assert policy.with_sampling(SamplingParams(), trains=False).trains is False


class Overreaching(Pair):
    """Calls a tool of the planner after a turn of the worker, whatever the worker said."""

    async def after(self, episode):
        (self.result,) = await episode.call_tools([ToolCall(name="listen", arguments={}, id="1")])


async def test_a_tool_of_another_role_cannot_be_called(pair, play):
    roles = [
        RoleSetup(role=AgentRole(name="planner"), tools=[listen]),
        RoleSetup(role=AgentRole(name="worker"), tools=[look]),
    ]
    loop = Overreaching()
    trajectory = await play(pair("Go.", "forward", loop=loop, roles=roles))
    assert trajectory.metrics["tool_errors"] == 3
    assert "listen" in loop.result.text
    assert "Silence" not in loop.result.text


class Saying(ChatPolicy):
    """A text service that says the same again and again."""

    max_context = 1000

    def __init__(self, text):
        self.text, self.seen = text, []

    async def start(self):
        self.seen.append("start")

    async def chat(self, messages, tools, params, request_id):
        self.seen.append([message.text for message in messages])
        message = Message(role="assistant", content=self.text)
        return ChatAnswer(message=message, stop_reason=StopReason.STOP, prompt_tokens=1, answer_tokens=1)

    async def close(self):
        self.seen.append("close")


async def test_a_role_played_by_a_service_starts_it_at_the_first_answer_and_never_trains(pair, play):
    service = Saying("Go on.")
    setup = RoleSetup(role=AgentRole(name="planner", trained=False), policy=RolePolicy(service, SamplingParams()))
    runner = pair("forward", roles=[setup])
    assert service.seen == []
    trajectories = [await play(runner, member=member) for member in range(2)]
    assert [len(each.turns) for each in trajectories] == [4, 4]
    assert trajectories[0].role_returns == {"worker": 1.0}
    assert [member.id for member in role_members(trajectories)] == ["g/0.0:worker", "g/1.0:worker"]
    await runner.pool.close()  # an evaluation that fails closes only the pool
    opening = ["You are at 0. Your task is to: reach 3."]
    assert service.seen == ["start", opening, opening, "close"]


async def test_the_wait_for_a_service_names_the_setting_of_its_own_section(pair, play):
    remedies = []

    class Watching(Saying):
        section = "agent.roles.planner.engine"

        async def chat(self, *request):
            remedies.append([wait.unblocked_by for wait in runner.waits.list_waits()])
            return await super().chat(*request)

    service = Watching("Go on.")
    setup = RoleSetup(role=AgentRole(name="planner", trained=False), policy=RolePolicy(service, SamplingParams()))
    runner = pair("forward", roles=[setup])
    await play(runner)
    assert "agent.roles.planner.engine.timeout_s" in remedies[0]


class Rewarding(Pair):
    def __init__(self, **reward):
        self.reward = reward

    async def after(self, episode):
        episode.give_reward(0.25, **self.reward)


async def test_a_reward_of_one_role_counts_for_it_alone(pair, play):
    trajectory = await play(pair("Go.", "forward", loop=Rewarding(role="planner")))
    assert trajectory.role_returns == {"planner": 1.75, "worker": 1.0}
    assert trajectory.reward == 1.75
    assert trajectory.own_rewards == {"planner": 0.75}
    assert trajectory.reward_sources == {"environment/step": 1.0, "role/planner": 0.75}
    assert trajectory.metrics["reward_of/planner"] == 0.75


async def test_a_reward_of_a_loop_for_all_roles_is_named_after_it(pair, play):
    trajectory = await play(pair("Go.", "forward", loop=Rewarding()))
    assert trajectory.reward_sources == {"environment/step": 1.0, "agent_loop": 0.75}


async def test_a_roles_reward_counts_for_its_latest_turn_or_the_given_one(pair, play):
    latest = await play(pair("Go.", "forward", loop=Rewarding(role="worker")))
    assert [turn.own_reward for turn in latest.turns] == [0.0, 0.25, 0.25, 0.25]
    named = await play(pair("Go.", "forward", loop=Rewarding(role="worker", turn=1)))
    assert [turn.own_reward for turn in named.turns] == [0.0, 0.75, 0.0, 0.0]


async def test_a_reward_of_an_untrained_role_counts_for_nobody(pair, play):
    roles = [RoleSetup(role=AgentRole(name="worker", trained=False))]
    trajectory = await play(pair("Go.", "forward", loop=Rewarding(role="worker"), roles=roles))
    assert (trajectory.reward, trajectory.role_returns) == (1.0, {"planner": 1.0})
    assert trajectory.metrics["reward_of/worker"] == 0.75


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"role": "planer"}, r"has no role 'planer'.*expected planner, worker.*planner"),
        ({"role": "planner", "turn": 1}, r"turn 1 is not a turn of role planner"),
    ],
)
async def test_rewards_of_nobody_are_refused(pair, play, reward, message):
    with pytest.raises(UsageError, match=message):
        await play(pair("Go.", "forward", loop=Rewarding(**reward)))


class Undeclared(Pair):
    roles = ()


async def test_a_role_that_the_loop_does_not_declare_is_refused(pair, play):
    with pytest.raises(UsageError, match=r"has no role .planner..*a loop whose `roles`"):
        await play(pair("Go.", loop=Undeclared()))


def players(worlds, rewards):
    class Game(worlds.Corridor):
        def step(self, action):
            observation, _, done, cut, info = super().step(action)
            return observation, 0.0, done, cut, info | ({"rewards": rewards} if done else {})

    return Game


class Seats(Pair):
    async def after(self, episode):
        assert episode.players == {"X": "planner", "O": "worker"}

    async def run(self, episode):
        episode.players = {"X": "planner", "O": "worker"}
        await super().run(episode)


async def test_an_environment_rewards_its_players(pair, play, make_runner, worlds):
    runner = pair("Go.", "forward", loop=Seats())
    runner.pool = make_runner(players(worlds, {"X": 1.0, "O": -1.0}), "forward").pool
    trajectory = await play(runner)
    assert (trajectory.reward, trajectory.role_returns) == (0.0, {"planner": 1.0, "worker": -1.0})


async def test_a_player_with_an_unusable_reward_is_the_environments_failure(pair, play, make_runner, worlds):
    runner = pair("Go.", "forward", loop=Seats())
    runner.pool = make_runner(players(worlds, {"X": float("nan")}), "forward").pool
    trajectory = await play(runner)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "gave player X an invalid reward" in trajectory.error


@pytest.mark.parametrize("rewards", [{"a": 1.0}, [1.0, 2.0]])
async def test_rewards_of_players_mean_nothing_to_a_loop_of_one_agent(make_runner, play, worlds, rewards):
    class Telling(worlds.Corridor):
        def step(self, action):
            observation, reward, done, cut, info = super().step(action)
            return observation, reward, done, cut, {**info, "rewards": rewards}

    trajectory = await play(make_runner(Telling, "forward", "forward", "forward"))
    assert trajectory.outcome is Outcome.FINISHED, trajectory.error
    assert trajectory.own_rewards == {}
