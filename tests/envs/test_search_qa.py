"""The search environment: its world, its tasks, its protocol, its expert."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import agentrl.envs.registration
import gymnasium
import pytest
from agentrl.envs.search_qa.environment import SearchQA, make_search_qa
from agentrl.envs.search_qa.expert import SearchExpert
from agentrl.envs.search_qa.protocol import TAGS
from agentrl.envs.search_qa.relations import RELATIONS, parse_chain
from agentrl.envs.search_qa.scoring import f1, normalize
from agentrl.envs.search_qa.spec import REACT_SPEC, SPEC
from agentrl.envs.search_qa.vocabulary import Kind, names
from agentrl.envs.search_qa.world import world_of
from agentrl.envs.task_ids import SPLITS
from gymnasium.utils.env_checker import check_env

import agentrl
from agentrl.errors import ToolError, UsageError

PARTS = {
    "train": (9000, "73cd5af88194e917", "2bccf65d25aa7a16"),
    "valid": (300, "fb02931400e00ca4", "70ab841dd4b669a5"),
    "test": (900, "51858f5abb5422ab", "ecdd2b7c1b660019"),
}


def play(env: SearchQA, task_id: str) -> tuple[int, float, dict[str, Any]]:
    """Steps, reward and final info of the expert's episode."""
    observation, _ = env.reset(options={"task_id": task_id})
    expert, steps = env.expert(), 0
    while True:
        observation, reward, terminated, truncated, info = env.step(expert.act(observation))
        steps += 1
        if terminated or truncated:
            return steps, reward, info


@pytest.mark.slow
def test_gymnasium_accepts_it() -> None:
    check_env(gymnasium.make("agentrl/SearchQa-v0").unwrapped, skip_render_check=True)
    assert "agentrl/SearchQa-v0" in agentrl.envs.registration.ENTRY_POINTS


@pytest.mark.parametrize("kind", Kind)
def test_names_are_unique_and_belong_to_one_split(kind: Kind) -> None:
    of_splits = [names(kind, split) for split in SPLITS]
    everything = [name for of_split in of_splits for name in of_split]
    assert len(set(map(normalize, everything))) == len(everything)
    assert all(of_splits)


def test_names_of_kinds_are_unique() -> None:
    seen = Counter(normalize(name) for kind in Kind for split in SPLITS for name in names(kind, split))
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("split", SPLITS)
def test_the_rule_makes_the_same_tasks_everywhere(split: str) -> None:
    source, world = SPEC.tasks(split), world_of(split)
    rows = [json.dumps([q.id, q.text, q.golden, q.type]) for q in source.questions]
    passages = [json.dumps(passage) for passage in world.passages]
    assert (len(source), digest(rows), digest(passages)) == PARTS[split]


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("split", SPLITS)
def test_every_question_has_one_answer_that_it_does_not_tell(split: str) -> None:
    world = world_of(split)
    questions = SPEC.tasks(split).questions
    assert len({question.text for question in questions}) == len(questions)
    assert len(set(Counter(question.type for question in questions).values())) == 1
    for question in questions:
        chain = parse_chain(question.text)
        assert chain is not None
        assert question.golden == (world.follow(chain)[-1],)
        assert question.golden[0] not in question.text


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.slow
def test_every_passage_states_its_facts_once(split: str) -> None:
    world = world_of(split)
    kind_of = {name: kind for kind in Kind for name in world.names[kind]}
    for passage in world.passages:
        relations = [relation for relation in RELATIONS if relation.of is kind_of[passage.title]]
        for relation in RELATIONS:
            expected = world.facts[passage.title, relation.noun] if relation in relations else None
            assert relation.read(passage.text) == expected, (relation.noun, passage)


def test_a_capital_lies_in_its_country() -> None:
    for split in SPLITS:
        facts = world_of(split).facts
        for country in names(Kind.COUNTRY, split):
            assert facts[facts[country, "capital"], "country"] == country


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_answers_everything_in_as_many_searches_as_hops(split: str) -> None:
    env = SearchQA()
    hops = {"one_hop": 1, "two_hops": 2, "three_hops": 3}
    for number in range(0, 300, 2):
        steps, reward, info = play(env, f"{split}-{number}")
        assert (reward, info["success"]) == (1.0, True)
        assert steps == hops[info["task_type"]] + 1


def test_expert_reports_unknown_requests() -> None:
    with pytest.raises(UsageError, match="no question of the fact world"):
        SearchExpert().act("How are you?")
    expert = SearchExpert()
    expert.act("Question: Who wrote The Silent Tide?")
    assert expert.act("<information>Nothing was found.</information>").startswith("<search>The Silent Tide")
    with pytest.raises(UsageError, match="cannot find a passage"):
        expert.act("<information>Nothing was found.</information>")


def test_random_text_has_the_stated_score() -> None:
    env, solved = SearchQA(), 0
    env.action_space.seed(0)
    for number in range(60):
        env.reset(options={"task_id": f"valid-{number}"})
        done = False
        while not done:
            observation, _, terminated, truncated, info = env.step(env.action_space.sample())
            assert (info["valid"], terminated) == (False, False)
            assert "neither a search nor an answer" in observation
            done = truncated
        solved += info["success"]
    assert solved == SPEC.scores["random"] * 60


@pytest.mark.parametrize(
    ("answer", "golden", "score"),
    [
        ("red red", ["red"], 2 / 3),
        ("red", ["red red"], 2 / 3),
        ("red red", ["red red"], 1.0),
        ("red red blue", ["red blue blue"], 2 / 3),
        ("The red!", ["blue", "red"], 1.0),
        ("", ["red"], 0.0),
    ],
)
def test_f1_counts_repeated_words_as_often_as_both_have_them(answer: str, golden: list[str], score: float) -> None:
    assert f1(answer, golden) == pytest.approx(score)


def test_the_reward_is_exact_match_or_f1() -> None:
    env = SearchQA(reward="f1")
    _, info = env.reset(options={"task_id": "valid-0"})
    golden = env.episode.question.golden[0]
    assert info == {"success": False, "task_type": "one_hop", "goal": f"Question: {env.episode.question.text}"}
    observation, reward, terminated, _, info = env.step(f"<answer>perhaps {golden}</answer>")
    assert (observation, terminated, info["success"]) == ("That is not the answer.", True, False)
    words = len(golden.split())
    assert reward == pytest.approx(2 * words / (2 * words + 1))
    assert info["reward_components"] == {"exact_match": 0.0, "f1": reward}
    with pytest.raises(UsageError, match="episode is over"):
        env.step("<answer>again</answer>")


def test_an_episode_is_truncated_at_its_limit() -> None:
    env = SearchQA(max_steps=2)
    env.reset(seed=3)
    assert env.step("<search>river</search>")[2:4] == (False, False)
    assert env.step("hm")[2:4] == (False, True)


def test_the_tool_searches_and_keeps_a_step_for_the_answer() -> None:
    env = SearchQA(max_steps=3, topk=1)
    env.reset(options={"task_id": "valid-0"})
    (tool,) = env.tools
    assert tool.schema["function"]["parameters"]["required"] == ["query"]
    title = world_of("valid").passages[0].title
    assert env.search(title).startswith(f'Doc 1(Title: "{title}")')
    with pytest.raises(ToolError, match="query is empty"):
        env.search(" ")
    assert env.search("zzz") == "Nothing was found."
    with pytest.raises(ToolError, match="no search is left"):
        env.search(title)
    assert env.step("<answer>x</answer>")[2]


def test_episode_continues_from_a_snapshot() -> None:
    env, other = SearchQA(), SearchQA()
    env.reset(options={"task_id": "test-5"})
    before = env.state_key()
    env.step("<search>river</search>")
    assert env.state_key() != before
    other.restore(json.loads(json.dumps(env.snapshot())))
    assert other.state_key() == env.state_key()
    assert env.step("<search>mayor</search>") == other.step("<search>mayor</search>")
    assert env.state_key() == other.state_key()


def test_seeds_draw_training_questions_of_the_chosen_hops() -> None:
    env = SearchQA(hops=[2])
    drawn = {env.reset(seed=seed)[0]: env.episode.question for seed in range(20)}
    assert len(drawn) > 15
    assert {question.type for question in drawn.values()} == {"two_hops"}
    assert {question.id.partition("-")[0] for question in drawn.values()} == {"train"}
    assert len(SPEC.tasks("valid", hops=[2])) == 100
    with pytest.raises(UsageError, match="under these options"):
        env.reset(options={"task_id": "valid-0"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hops": [4]}, "unknown hops"),
        ({"hops": "12"}, "unknown hops"),
        ({"reward": "bleu"}, "exact_match or f1"),
        ({"topk": 0}, "topk of search_qa is too small"),
        ({"max_steps": 0}, "max_steps of search_qa is too small"),
        ({"timeout_s": 0, "url": "http://127.0.0.1:1"}, "timeout_s of search_qa is too small"),
        ({"corpus": "a", "url": "b"}, "two retrievers"),
        ({"timeout_s": 3.0}, "timeout_s of search_qa is ignored without url"),
        ({"questions": "a"}, "no passages to search"),
        ({"corpus": "a"}, "no questions about it"),
        ({"corpus": "a", "questions": "b/{split}", "hops": [1]}, "hops of search_qa is ignored"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_search_qa(**options)


@pytest.mark.parametrize("options", [{"task": "valid-1"}, {"task_id": "none-1"}, {"task_id": "valid-300"}])
def test_wrong_reset_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"cannot reset with these options|no such search_qa task"):
        SearchQA().reset(options=options)


def test_there_is_no_other_split_and_nothing_works_before_a_reset() -> None:
    with pytest.raises(UsageError, match="train or valid or test"):
        SPEC.tasks("dev")
    with pytest.raises(UsageError, match="no episode yet"):
        SearchQA().step("<answer>x</answer>")


@pytest.mark.parametrize("loop", ["react_text", "tool_calling"])
def test_react_s_actions_solve_the_same_questions(loop: str) -> None:
    result = agentrl.evaluate("search_react/valid", policy="expert", tasks=6, overrides=[f"agent.loop={loop}"])
    assert result.success.mean == 1.0
    with pytest.raises(TypeError, match="protocol"):
        REACT_SPEC.make(protocol="tags")
    assert not REACT_SPEC.make().tools


@pytest.mark.parametrize(
    ("make", "remind", "line"),
    [
        (SPEC.make, None, ""),
        (
            SPEC.make,
            True,
            TAGS.reminder,
        ),
        (REACT_SPEC.make, None, "Actions: search[words], finish[answer]"),
        (REACT_SPEC.make, False, ""),
    ],
)
def test_observations_list_the_moves_if_enabled(make: Any, remind: bool | None, line: str) -> None:
    env = make(remind=remind)
    expert = env.expert()
    observation, _ = env.reset(options={"task_id": "valid-0"})
    done, reward = False, 0.0
    while not done:
        last = observation.splitlines()[-1]
        assert last == line if line else last.startswith(("Question:", "Doc", "<information>"))
        observation, reward, done, _, _ = env.step(expert.act(observation))
    assert reward == 1.0


def test_a_query_is_worth_the_rank_of_the_first_passage_with_an_answer() -> None:
    env = SearchQA(reward="rank", topk=5, hops=[1])
    assert env.tools == ()
    env.reset(options={"task_id": "train-0"})
    question = env.episode.question
    found = env._find(question.text)
    rank = next(number for number, one in enumerate(found, 1) if normalize(question.golden[0]) in normalize(one.text))
    _, reward, terminated, _, info = env.step(f"<search>{question.text}</search>")
    assert (reward, terminated, info["success"]) == (1 / rank, True, rank == 1)
    env.reset(options={"task_id": "train-0"})
    _, reward, terminated, _, info = env.step("<search>zzz</search>")
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    env.reset(options={"task_id": "train-0"})
    _, reward, terminated, _, info = env.step(f"<answer>{question.golden[0]}</answer>")
    assert (reward, terminated, info["valid"]) == (0.0, True, False)
