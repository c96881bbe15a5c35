"""Scripted policies in all loops: the same tokens as sampled answers, but marked as forced."""

import itertools
import pickle
import re
from io import BytesIO

import pytest
from support.tokenizers import TOKENIZER_FAMILIES, build_tokenizer

import agentrl
from agentrl.builders.group_extras import _may_be_of
from agentrl.errors import Outcome, UsageError
from agentrl.message import Message, ToolCall
from agentrl.render.renderer import Renderer
from agentrl.rollout import env_processes
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy, StoredExpert
from agentrl.task import Task
from agentrl.trajectory import Source, TokenSequence, Trajectory

LOOPS = [
    ("react_text", {}),
    ("react_text", {"format": "action_tag", "restate_goal": True, "list_actions": True}),
    ("react_text", {"format": "plain", "explain": False}),
    ("tool_calling", {}),
    ("step_independent", {"history": 2}),
]


@pytest.mark.parametrize(("loop", "options"), LOOPS)
async def test_a_demonstration_is_what_a_perfect_policy_would_write(make_runner, play, worlds, renderer, loop, options):
    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer)
    shown = await play(make_runner(worlds.Corridor, policy=policy, loop=loop, options=options))
    message = make_runner(worlds.Corridor, loop=loop, options=options).loop.demonstrate("forward")
    text = renderer.answer_text(message) if message.tool_calls else renderer.plain_answer(message.text)
    end = renderer.boundary.end_id
    perfect = [*renderer.encoder.encode(text), end]
    from agentrl.serving.scripted import ScriptedEngine

    engine = ScriptedEngine(script=lambda request: perfect, vocab_size=400)
    played = await play(make_runner(worlds.Corridor, engine=engine, loop=loop, options=options))
    assert (shown.outcome, shown.reward, shown.success) == (Outcome.FINISHED, 1.0, True)
    assert [s.ids_list() for s in shown.sequences] == [s.ids_list() for s in played.sequences]
    assert [(t.start, t.end, t.reward, t.valid) for t in shown.turns] == [
        (t.start, t.end, t.reward, t.valid) for t in played.turns
    ]
    for forced, sampled in zip(shown.sequences, played.sequences, strict=True):
        assert (forced.sources == Source.FORCED).tolist() == (sampled.sources == Source.SAMPLED).tolist()
    assert shown.sampled_tokens == 0


@pytest.mark.parametrize("family", [name for name in TOKENIZER_FAMILIES if name not in ("gemma", "qwen2.5-vl")])
async def test_tool_calls_are_demonstrated_in_each_familys_way(make_runner, play, worlds, family):
    renderer = Renderer(build_tokenizer(family))
    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer)
    shown = await play(make_runner(worlds.Corridor, policy=policy, loop="tool_calling"))
    assert (shown.outcome, shown.success, len(shown.turns)) == (Outcome.FINISHED, True, 3)


@pytest.mark.parametrize(("loop", "is_asked"), [("tool_calling", True), ("react_text", False)])
async def test_an_environment_makes_the_calls_of_its_own_tools(make_runner, play, worlds, loop, is_asked):
    class Clerk(worlds.Corridor):
        asked = 0

        def tool_message(self, action):
            type(self).asked += 1
            return Message(role="assistant", content=action)

    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT)
    shown = await play(make_runner(Clerk, policy=policy, loop=loop))
    assert Clerk.asked == (len(shown.turns) if is_asked else 0)


async def test_an_expert_is_not_played_without_the_tools_through_which_it_acts(make_runner, play, worlds):
    @agentrl.tool
    def walk() -> str:
        """Walk on."""
        return "You walk."

    class Clerk(worlds.Corridor):
        tools = (walk,)

        def tool_message(self, action):
            return Message(role="assistant", tool_calls=(ToolCall(name="walk", arguments={}),))

    expert, others = (ScriptedEpisodePolicy(kind) for kind in ScriptedPolicy)
    words = r"expert acts through a tool that assistant may not call: got walk, expected one of act.*agent.roles.assi"
    with pytest.raises(UsageError, match=words):
        await play(make_runner(Clerk, policy=expert, loop="tool_calling", options={"offer": []}))
    await play(make_runner(Clerk, policy=others, loop="tool_calling", options={"offer": []}))


@pytest.mark.parametrize(("loop", "options"), LOOPS)
async def test_scripted_policies_need_no_model(make_runner, play, worlds, loop, options):
    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT)
    trajectory = await play(make_runner(worlds.Corridor, policy=policy, loop=loop, options=options))
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.FINISHED, 1.0, 3)


async def test_a_random_policy_follows_its_seed(make_runner, play, worlds):
    async def walk(seed):
        runner = make_runner(worlds.Corridor, policy=ScriptedEpisodePolicy(ScriptedPolicy.RANDOM))
        return [turn.state_key for turn in (await play(runner, seed=seed)).turns]

    walks = [await walk(seed) for seed in (1, 1, 2, 3)]
    assert walks[0] == walks[1]
    assert len({tuple(w) for w in walks}) > 1


@pytest.mark.parametrize(("loop", "options"), LOOPS)
async def test_mistakes_are_tokens_of_their_own_kind(make_runner, play, worlds, renderer, loop, options):
    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer, mistakes=0.5)
    runner = make_runner(worlds.Stumbler, policy=policy, loop=loop, options=options)
    played = [await play(runner, seed=seed) for seed in range(8)]
    kinds = {Source.FORCED: "forward", Source.MISTAKE: "stumble|trip"}
    found = []
    for trajectory in played:
        found.append([])
        for turn, sequence in ((turn, s) for s in trajectory.sequences for turn in s.turns):
            (kind,) = {Source(source) for source in sequence.sources[turn.start : turn.end]}
            assert re.search(
                kinds[kind], renderer.encoder.decode(sequence.ids_list(turn.start)[: turn.end - turn.start])
            )
            found[-1].append(kind)
        assert trajectory.success
        assert found[-1].count(Source.FORCED) == 3
        assert (Source.MISTAKE, Source.MISTAKE) not in itertools.pairwise(found[-1])
    assert 0 < sum(kinds.count(Source.MISTAKE) for kinds in found) < 24
    again = [await play(runner, seed=seed) for seed in range(8)]
    assert [t.sequences[0].ids_list() for t in again] == [t.sequences[0].ids_list() for t in played]


async def test_an_expert_without_mistakes_makes_none_that_it_could(make_runner, play, worlds, renderer):
    runner = make_runner(worlds.Stumbler, policy=ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer))
    assert [t.valid for t in (await play(runner)).turns] == [True] * 3


async def test_demonstrations_keep_to_the_token_budget(make_runner, play, worlds, renderer):
    from agentrl.rollout.budget import EpisodeLimits

    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer)
    trajectory = await play(make_runner(worlds.Corridor, policy=policy, limits=EpisodeLimits(max_tokens=20)))
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS


async def test_a_loop_that_cannot_be_demonstrated_says_so(make_runner, play, worlds):
    from agentrl.agent_loop import AgentLoop
    from agentrl.message import user

    class Mute(AgentLoop):
        async def run(self, episode):
            await episode.open([user(await episode.reset())]).generate()

    runner = make_runner(worlds.Corridor, policy=ScriptedEpisodePolicy(ScriptedPolicy.EXPERT))
    runner.loop = Mute()
    with pytest.raises(UsageError, match="demonstrate"):
        await play(runner)


async def test_a_stored_expert_shows_the_best_valid_episodes_of_a_task():
    def played(name, reward, outcome=Outcome.FINISHED, seed=1):
        sequence = TokenSequence()
        sequence.extend([5, 6], Source.PROMPT)
        sequence.extend_sampled([7], logprobs=[-0.5], versions=[3])
        return Trajectory(
            id=name,
            task_id="t",
            environment="e",
            seed=seed,
            group_id="g",
            sequences=[sequence],
            reward=reward,
            outcome=outcome,
        )

    episodes = [
        played("worse", 0.5),
        played("best", 1.0, Outcome.TRUNCATED_TURNS),
        played("running", 9.0, None),
        played("broken", 9.0, Outcome.ENVIRONMENT_ERROR),
        played("unscored", None),
        played("elsewhere", 9.0, seed=2),
    ]
    task = Task(id="t", environment="e", seed=1)
    experts = [StoredExpert(episodes, place=place) for place in range(3)]
    assert [expert.can_play(task) for expert in experts] == [True, True, False]
    shown = [await expert.run(task, group_id="h", member=4, seed=0) for expert in experts[:2]]
    assert [(one.reward, one.id, one.group_id, one.sampled_tokens) for one in shown] == [
        (1.0, "h/4.0", "h", 0),
        (0.5, "h/4.0", "h", 0),
    ]
    assert shown[0].sequences[0].sources.tolist() == [Source.PROMPT, Source.PROMPT, Source.FORCED]
    assert shown[0].oldest_version is None
    assert episodes[1].sampled_tokens == 1


@pytest.mark.parametrize(
    ("label", "labels", "used"),
    [
        ("easy", {"easy", "hard"}, ["easy", "easy~1", "", "other"]),
        ("easy~1", {"easy", "hard"}, ["easy", "easy~1", "", "other"]),
        ("", {""}, ["easy", "easy~1", "hard", "", "other"]),
    ],
)
def test_stored_episodes_of_another_environment_of_the_run_are_no_experts(label, labels, used):
    """The rows of both environments' files may have the same ids."""

    def stored(of):
        return Trajectory(id="x", task_id="1", environment="e", seed=0, group_id="-".join(filter(None, ["7", of, "1"])))

    sources = ["easy", "easy~1", "hard", "", "other"]
    assert [source for source in sources if _may_be_of(label, stored(source), labels)] == used


@pytest.mark.parametrize(("value", "told"), [(lambda: 1, "cannot be sent"), (b"x" * 300, "has 3"), ((1, 2), None)])
def test_a_result_that_a_worker_cannot_send_is_an_environment_failure(monkeypatch, value, told):
    monkeypatch.setattr(env_processes, "MAX_REPLY_BYTES", 250)
    sent = BytesIO()
    env_processes._reply(sent, (True, value))
    is_result, reply = pickle.loads(sent.getvalue()[env_processes.HEADER.size :])
    assert is_result == (told is None)
    assert reply == value if told is None else told in reply[1]


async def test_a_demonstration_begins_with_the_prefill_as_a_sampled_answer_does(make_runner, play, worlds, renderer):
    from agentrl.serving.scripted import ScriptedEngine

    options = {"format": "action_tag", "prefill": "<action>"}
    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer)
    shown = await play(make_runner(worlds.Corridor, policy=policy, options=options))
    rest = [*renderer.encoder.encode("forward</action>"), renderer.boundary.end_id]
    engine = ScriptedEngine(script=lambda request: rest, vocab_size=400)
    played = await play(make_runner(worlds.Corridor, engine=engine, options=options))
    assert (shown.success, played.success) == (True, True)
    assert [s.ids_list() for s in shown.sequences] == [s.ids_list() for s in played.sequences]
    assert [(t.start, t.end) for t in shown.turns] == [(t.start, t.end) for t in played.turns]
    prefilled = len(renderer.encoder.encode("<action>"))
    sources = played.sequences[0].sources
    assert all((sources[t.start : t.start + prefilled] == Source.FORCED).all() for t in played.turns)
    assert all((sources[t.start + prefilled : t.end] == Source.SAMPLED).all() for t in played.turns)


async def test_a_prefill_that_no_demonstration_begins_with_is_named(make_runner, play, worlds, renderer):
    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, renderer)
    runner = make_runner(worlds.Corridor, policy=policy, options={"format": "action_tag", "prefill": "<think>"})
    with pytest.raises(UsageError, match=r"does not begin with the prefill: got '<action>forward.*'<think>'"):
        await play(runner)


async def test_a_prefilled_call_is_finished_by_the_policy(make_runner, play, worlds, renderer):
    from agentrl.serving.scripted import ScriptedEngine

    rest = [*renderer.encoder.encode('forward"}}\n</tool_call>'), renderer.boundary.end_id]
    engine = ScriptedEngine(script=lambda request: rest, vocab_size=400)
    runner = make_runner(worlds.Corridor, engine=engine, loop="tool_calling", options={"prefill": True})
    played = await play(runner)
    assert (played.outcome, played.success, len(played.turns)) == (Outcome.FINISHED, True, 3)
