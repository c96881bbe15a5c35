"""Few-shot examples: turns of the expert that are shown and never trained."""

import pytest
from support.tokenizers import TOKENIZER_FAMILIES, build_tokenizer

from agentrl.errors import Outcome, UsageError
from agentrl.message import ImagePart, Message, TextPart, system, user
from agentrl.render.renderer import Renderer
from agentrl.rollout.few_shot import ANNOUNCED, NEXT, FewShotExamples, with_examples
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.task import SeedTasks, Task
from agentrl.trajectory import Source


@pytest.fixture
def tasks():
    return SeedTasks("world", "train")


def test_examples_stand_between_the_system_message_and_the_task():
    examples = [user("1 + 1"), Message(role="assistant", content="2")]
    found = with_examples([system("Add."), user("2 + 3")], examples)
    assert [message.text for message in found] == [f"Add.\n\n{ANNOUNCED}", "1 + 1", "2", "2 + 3"]
    assert [message.text for message in with_examples([user("2 + 3")], examples)] == ["1 + 1", "2", "2 + 3"]
    assert with_examples([user("2 + 3")], ()) == [user("2 + 3")]


def test_the_observation_after_the_last_example_precedes_the_task():
    examples = [user("1 + 1"), Message(role="assistant", content="2"), user("Right.")]
    found = with_examples([system("Add."), user("2 + 3")], examples)
    assert [message.text for message in found[1:]] == ["1 + 1", "2", f"Right.\n\n{NEXT}\n2 + 3"]
    picture = ImagePart(data=b"png")
    (*_, last) = with_examples([user((picture, TextPart(text="?")))], examples)
    assert (last.content[-2], last.text) == (picture, f"Right.\n\n{NEXT}\n?")


@pytest.mark.parametrize(("count", "led_to"), [(1, 1), (2, 2), (3, 2)])  # an episode's last turn leads to nothing
async def test_examples_show_what_each_turn_led_to(make_runner, play, worlds, tasks, renderer, count, led_to):
    class Walk(worlds.Corridor):
        def step(self, action):
            return ("You go on.", *super().step(action)[1:])

    runner = make_runner(
        Walk, "forward", loop="react_text", options={"format": "plain"}, policy_wrapper=FewShotExamples(count, tasks)
    )
    first = (await play(runner)).sequences[0]
    prompt = renderer.encoder.decode(first.ids_list()[: first.turns[0].start])
    assert prompt.count("You go on.") == led_to


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("react_text", {"format": "react"}),
        ("react_text", {"format": "action_tag", "prefill": "<action>"}),
        ("step_independent", {"format": "plain"}),
        ("tool_calling", {}),
    ],
)
async def test_every_prompt_shows_turns_of_the_expert(make_runner, play, worlds, tasks, renderer, loop, options, count):
    runner = make_runner(
        worlds.Corridor, "forward", loop=loop, options=options, policy_wrapper=FewShotExamples(count, tasks)
    )
    trajectory = await play(runner)
    first = trajectory.sequences[0]
    prompt = renderer.encoder.decode(first.ids_list()[: first.turns[0].start])
    example = runner.loop.demonstrate("forward")
    written = renderer.answer_text(example) if example.tool_calls else example.text
    assert prompt.count(f"<|im_start|>assistant\n{written}<|im_end|>") == count
    assert prompt.count(ANNOUNCED) == 1
    assert all(
        (sequence.sources[: sequence.turns[0].start] != Source.SAMPLED).all() for sequence in trajectory.sequences
    )


async def test_the_scorer_reads_the_episode_without_examples(make_runner, play, worlds, tasks):
    read = []

    class Reading:
        async def score(self, trajectory, task):
            read.append([message.role for message in trajectory.messages])
            from agentrl.reward import Score

            return Score(reward=0.0)

    runner = make_runner(worlds.Corridor, "forward", scorer=Reading(), policy_wrapper=FewShotExamples(4, tasks))
    await play(runner)
    assert read == [["system", "user", *["assistant", "user"] * 2, "assistant"]]


async def test_an_environment_without_an_expert_has_no_examples(make_runner, play, worlds, tasks):
    class Alone(worlds.Corridor):
        expert = None

    with pytest.raises(UsageError, match="the environment has no expert"):
        await play(make_runner(Alone, "forward", policy_wrapper=FewShotExamples(1, tasks)))


async def test_too_few_turns_are_named(make_runner, play, worlds, tasks):
    with pytest.raises(UsageError, match=r"too few turns: got 60 in 20 episodes.*agent.few_shot_turns=61"):
        await play(make_runner(worlds.Corridor, "forward", policy_wrapper=FewShotExamples(61, tasks)))


@pytest.mark.parametrize("family", [name for name in TOKENIZER_FAMILIES if name not in ("gemma", "qwen2.5-vl")])
async def test_examples_of_tool_calls_are_written_in_each_familys_way(make_runner, play, worlds, tasks, family):
    policy = ScriptedEpisodePolicy(ScriptedPolicy.EXPERT, Renderer(build_tokenizer(family)))
    played = await play(
        make_runner(worlds.Corridor, policy=policy, loop="tool_calling", policy_wrapper=FewShotExamples(2, tasks))
    )
    assert (played.outcome, played.success, len(played.turns)) == (Outcome.FINISHED, True, 3)


async def test_no_prompt_shows_turns_of_its_own_task(make_runner, play, worlds, renderer):
    class Numbered(worlds.Corridor):
        def reset(self, *, seed=None, options=None):
            _, info = super().reset(seed=seed)
            return f"This is corridor {seed}.", info

    tasks = [Task(id=f"task {seed}", environment="world", seed=seed) for seed in range(3)]
    runner = make_runner(Numbered, "forward", policy_wrapper=FewShotExamples(4, tasks))
    for task in tasks:
        trajectory = await runner.run(task, group_id="g", member=0, seed=0)
        text = renderer.encoder.decode(trajectory.sequences[0].ids_list())
        assert text.count(f"This is corridor {task.seed}.") == 1
        assert text.count("This is corridor") == 3
