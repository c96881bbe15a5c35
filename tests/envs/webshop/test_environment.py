"""The shop as a Gymnasium environment: pages in four forms, clicks, rewards, contract, expert and random play."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import agentrl.envs.registration
import gymnasium
import pytest
from agentrl.envs.webshop.analysis import words_of
from agentrl.envs.webshop.environment import WebShopEnv
from agentrl.envs.webshop.expert import Result, goal_words, read_results, read_wishes, texts_of
from agentrl.envs.webshop.generator import FAMILY
from agentrl.envs.webshop.goals import purchase_price
from agentrl.envs.webshop.nouns import nouns_by_rule
from agentrl.envs.webshop.options import Observation, parse_options
from agentrl.envs.webshop.reward import judge
from agentrl.envs.webshop.spec import SPEC
from agentrl.envs.webshop.tasks import WebShopTasks, split_goals
from gymnasium.utils.env_checker import check_env

from agentrl.config import load_config
from agentrl.env.lookup import resolve_environment
from agentrl.errors import UsageError

GOLDEN = Path(__file__).parent / "data"
SCRIPT = (
    "search[Long Lasting lotion]",
    "click[next >]",
    "click[< Prev]",
    "click[b000aaaaa1]",
    "click[6.76 fl oz]",
    "click[description]",
    "click[< prev]",
    "click[features]",
    "click[< prev]",
    "click[reviews]",
    "click[< prev]",
    "click[attributes]",
    "click[< prev]",
    "click[1 fl oz]",
    "click[nothing]",
    "click[< prev]",
    "click[back to search]",
    'search["1 fl oz" lotion]',
    "click[b000aaaaa1]",
    "click[1 fl oz]",
    "click[buy now]",
)
"""Sees every page."""


@pytest.fixture(scope="module")
def shop_env() -> WebShopEnv:
    return WebShopEnv(products=300)


def official_env(folder: Path, **options: Any) -> WebShopEnv:
    return WebShopEnv(**{"data": str(folder), "nouns": "rule", "max_steps": 100, **options})


def lotion_goal(env: WebShopEnv) -> int:
    return next(i for i in range(len(env.goals)) if env.shop.goal(env.goals, i).asin == "B000AAAAA1")


def transcript(env: WebShopEnv) -> str:
    observation, _ = env.reset(options={"goal": lotion_goal(env)})
    told = [observation]
    for action in SCRIPT:
        observation, reward, terminated, truncated, info = env.step(action)
        told += [f"> {action}  {reward} {terminated} {truncated} {info['valid']} {info['success']}", observation]
    return "\n".join(told) + "\n"


@pytest.mark.parametrize("observation", Observation)
def test_pages_look_as_they_did(official_folder: Path, observation: Observation) -> None:
    env = official_env(official_folder, observation=observation, show_attributes=True)
    assert transcript(env) == (GOLDEN / f"{observation}.txt").read_text(encoding="utf-8")


def test_text_pages_are_webshops(official_folder: Path) -> None:
    env = official_env(official_folder)
    first, _ = env.reset(options={"goal": lotion_goal(env)})
    wish = env.session.goal.instruction
    top = f"Instruction: [SEP] {wish} [SEP] Back to Search"
    assert first == f"WebShop [SEP] Instruction: [SEP] {wish} [SEP] Search"
    results = env.step("search[long lasting lotion]")[0]
    row = "B000AAAAA1 [SEP] Zenia Body Lotion for Dry Skin [SEP] $12.5"
    assert results.startswith(f"{top} [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] {row}")
    assert env.step("click[next >]")[0] == f"{top} [SEP] Page 2 (Total results: 2) [SEP] < Prev [SEP] Next >"
    env.step("click[< prev]")
    item = (
        f"{top} [SEP] < Prev [SEP] size [SEP] 6.76 fl oz [SEP] 1 fl oz [SEP] Zenia Body Lotion for Dry Skin [SEP]"
        " Price: $12.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert env.step("click[B000AAAAA1]")[0] == item
    assert env.step("click[1 fl oz]")[0] == item
    assert env.step("click[features]")[0] == f"{top} [SEP] < Prev [SEP] Long lasting care [SEP] For dry skin"
    assert env.step("click[reviews]")[4]["valid"] is False
    env.step("click[< prev]")
    last, reward, terminated, *_, info = env.step("click[buy now]")
    assert last.startswith("Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk")
    assert "[SEP] Your score (min 0.0, max 1.0) [SEP] 1.0 [SEP] Reward Details [SEP] None" in last
    assert (reward, terminated, info["success"], info["reward_components"]["r_option"]) == (1.0, True, True, 1.0)


class VisibleText(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.hidden = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden = tag == "title"

    def handle_data(self, data: str) -> None:
        if data.strip() and not self.hidden:
            self.texts.append(data.strip())


def test_all_forms_show_the_same_texts(official_folder: Path) -> None:
    envs = {form: official_env(official_folder, observation=form) for form in ("text", "text_rich", "html")}
    pages = {form: [env.reset(options={"goal": lotion_goal(env)})[0]] for form, env in envs.items()}
    for action in SCRIPT:
        for form, env in envs.items():
            pages[form].append(env.step(action)[0])
    for plain, rich, html in zip(*pages.values(), strict=True):
        reader = VisibleText()
        reader.feed(html)
        assert reader.texts == plain.split(" [SEP] ") == texts_of(rich)


def test_clickables_are_in_webshops_order(official_folder: Path) -> None:
    env = official_env(official_folder, goals="synthetic")
    number = next(i for i in range(len(env.goals)) if env.shop.goal(env.goals, i).asin == "B000AAAAA3")
    env.reset(options={"goal": number})
    assert (env.session.has_search_bar, list(env.session.clickables())) == (True, ["search"])
    env.step("search[long lasting lotion]")
    found = ["b000aaaaa1", "b000aaaaa2"]
    assert list(env.session.clickables()) == ["back to search", "next >", *found]
    env.step("click[next >]")
    assert list(env.session.clickables()) == ["back to search", "< prev", "next >"]
    env.step("search[shoes]")
    env.step("click[b000aaaaa3]")
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert list(env.session.clickables()) == [
        *buttons,
        "red | white",
        "wide",
        "m [40]",
    ]  # the option "features" is a button, too
    env.step("click[features]")
    assert list(env.session.clickables()) == ["back to search", "< prev"]


def shoes_page(env: WebShopEnv) -> None:
    env.reset(options={"goal": lotion_goal(env)})
    for action in ("search[shoes]", "click[b000aaaaa3]"):
        env.step(action)


def test_only_accepted_actions_are_admissible(official_folder: Path) -> None:
    env = official_env(official_folder)
    shoes_page(env)
    assert "m [40]" in env.session.clickables()
    assert env.admissible_actions()[-2:] == ["click[red | white]", "click[wide]"]
    assert env.step("click[m [40]]")[4]["valid"] is False  # nor does WebShop understand it
    here = env.snapshot()
    for action in env.admissible_actions():
        assert env.step(action)[4]["valid"], action
        env.restore(here)


def test_placeholder_replaces_the_search_words(shop_env: WebShopEnv) -> None:
    env = WebShopEnv(products=300, placeholder=True)
    env.reset(options={"task_id": "train-0"})
    shop_env.reset(options={"task_id": "train-0"})
    assert env.admissible_actions() == ["search[<your query>]"] != shop_env.admissible_actions()
    assert env.step("search[<your query>]")[4]["valid"]
    assert not any(action.startswith("click[b0") for action in env.admissible_actions())


def test_options_stay_until_the_results_are_shown_again(official_folder: Path) -> None:
    env = official_env(official_folder)
    env.reset(options={"goal": lotion_goal(env)})
    for action in ("search[lotion]", "click[b000aaaaa1]", "click[6.76 fl oz]", "click[1 FL OZ]", "click[reviews]"):
        assert env.step(action)[4]["valid"]
    assert env.session.state.options == {"size": "1 fl oz"}
    env.step("click[< prev]")
    assert env.session.state.options == {"size": "1 fl oz"}
    env.step("click[< prev]")
    assert (env.session.state.options, env.session.state.visited) == ({}, ["B000AAAAA1"])
    env.step("click[back to search]")
    assert env.session.state.visited == []


@pytest.mark.parametrize(
    "action",
    [
        "",
        "buy now",
        "click[buy now]",
        "click[search]",
        "click[]",
        "search[]",
        "Search[lotion]",
        "click lotion",
        "think[search[x]",
        "click[back to search",
        "search[a\nb]",
        "[x]",
    ],
)
def test_what_is_not_understood_shows_the_page_again(shop_env: WebShopEnv, action: str) -> None:
    first, _ = shop_env.reset(options={"task_id": "train-0"})
    key = shop_env.state_key()
    observation, reward, terminated, truncated, info = shop_env.step(action)
    assert (observation, reward, terminated, truncated, info["valid"]) == (first, 0.0, False, False, False)
    assert shop_env.state_key() == key


@pytest.mark.parametrize("action", ["search[a b]", "search[lotion] please", "search[[x]", "search[<r>]", "search[<c>]"])
def test_what_is_understood_as_a_search(shop_env: WebShopEnv, action: str) -> None:
    shop_env.reset(options={"task_id": "train-0"})
    expected = action != "search[[x]"  # the last bracket opens, and "search[" is no action
    assert shop_env.step(action)[4]["valid"] is expected


def test_searches_by_chance_are_the_same_after_a_restore(shop_env: WebShopEnv) -> None:
    shop_env.reset(options={"task_id": "train-0"})
    first = shop_env.step("search[<r>]")[0]
    saved = json.loads(json.dumps(shop_env.snapshot()))
    second = shop_env.step("click[next >]")[0]
    other = WebShopEnv(products=300)
    other.restore(saved)
    assert other.step("click[next >]")[0] == second
    shop_env.reset(options={"task_id": "train-0"})
    assert shop_env.step("search[<r>]")[0] == first != second


def test_the_reward_without_quirks(shop_env: WebShopEnv) -> None:
    strict = WebShopEnv(products=300, compat=False)
    wanted = [shop_env.shop.goal(shop_env.goals, number) for number in range(len(shop_env.goals))]
    number = next(
        number
        for number, goal in enumerate(wanted)
        if "large" in {option.value for option in goal.options}
        and "x-large" in shop_env.shop.product_of(goal.asin).options.get("size", ())
    )
    rewards = [buy_x_large(env, number) for env in (shop_env, strict)]
    parts = len(wanted[number].attributes) + len(wanted[number].options) + 1
    assert rewards == [1.0, pytest.approx(1 - 1 / parts)]  # to WebShop, "x-large" is "large"


def buy_x_large(env: WebShopEnv, number: int) -> float:
    env.reset(options={"goal": number})
    goal = env.session.goal
    others = [option.value for option in goal.options if option.value != "large"]
    for word in (f"search[{goal.title}]", *(f"click[{text}]" for text in (goal.asin.lower(), "x-large", *others))):
        assert env.step(word)[4]["valid"], word
    return env.step("click[buy now]")[1]


def test_reward_for_success_alone_keeps_the_score_in_the_info(shop_env: WebShopEnv) -> None:
    strict = WebShopEnv(products=300, reward="success")
    for wrong, paid in ((False, 1.0), (True, 0.0)):
        shop_env.reset(options={"goal": 3})
        goal = shop_env.session.goal
        values = [] if wrong else [option.value for option in goal.options]
        clicks = [f"click[{text}]" for text in (goal.asin.lower(), *values, "buy now")]
        last: list[Any] = []
        for env in (shop_env, strict):
            env.reset(options={"goal": 3})
            last.append([env.step(action) for action in (f"search[{goal.title} {goal.options[0].value}]", *clicks)][-1])
        (_, score, *_, info), (_, reward, *_, strict_info) = last
        assert (reward, strict_info["success"], strict_info["score"]) == (paid, not wrong, score)
        assert info["score"] == score < 1 if wrong else score == 1


def test_the_published_setting_plays_the_goals_of_the_published_run(official_folder: Path) -> None:
    data = f"environment.options.data={official_folder}"
    config = load_config("webshop/published_gigpo_qwen2.5-1.5b", [data, "environment.options.nouns=rule"])
    environment, evaluation = config.sole_environment, config.evaluation
    options = parse_options(**environment.options)
    assert (options.products, options.goals, options.valid_goals, options.reward) == (1000, "synthetic", 0, "success")
    assert (environment.split, evaluation.split, config.agent.max_turns) == ("train", "test", 15)
    tested, trained = (WebShopTasks(split, options) for split in (evaluation.split, environment.split))
    assert [task.seed for task in tested] + [task.seed for task in trained] == list(range(6))
    env = WebShopEnv(**environment.options)
    env.reset(options=dict(trained[0].options))
    assert env.snapshot()["goal"] == trained[0].seed == 1
    assert split_goals("test", 6910, 0) == range(500)
    assert split_goals("train", 6910, 0) == range(500, 6910)
    with pytest.raises(UsageError, match=r"webshop/valid contains no task.*more valid_goals"):
        WebShopTasks("valid", options)


def test_gymnasium_accepts_it() -> None:
    assert "agentrl/WebShop-v0" in agentrl.envs.registration.ENTRY_POINTS
    check_env(gymnasium.make("agentrl/WebShop-v0", products=300).unwrapped, skip_render_check=True)
    assert resolve_environment("agentrl/WebShop-v0") is resolve_environment("webshop") is SPEC


def play_expert(env: WebShopEnv) -> tuple[float, int]:
    observation = env._observe(None)
    expert, steps, done = env.expert(), 0, False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(expert.act(observation))
        done, steps = terminated or truncated, steps + 1
    return reward, steps


@pytest.mark.parametrize("observation", ["text", "text_rich"])
@pytest.mark.slow
def test_expert_buys_the_requested_product(observation: str) -> None:
    env = WebShopEnv(observation=observation)
    tasks = [f"{split}-{i}" for split, count in (("test", 200), ("valid", 40), ("train", 40)) for i in range(count)]
    for task_id in tasks:
        env.reset(options={"task_id": task_id})
        reward, steps = play_expert(env)
        assert (reward, task_id) == (1.0, task_id)
        assert 3 <= steps <= 15


def cheapest(results: Sequence[Result]) -> Result:
    return min(results, key=lambda result: min(result.prices))


def most_alike(results: Sequence[Result], words: str) -> Result:
    return max(results, key=lambda result: len(set(words_of(words)) & set(words_of(result.title))))


SCRIPTS: dict[str, Callable[[list[Result], str], Result]] = {
    "first": lambda results, _: results[0],
    "cheapest": lambda results, _: cheapest(results),
    "most alike": most_alike,
}
"""Ways to take a product from the first page of results, without looking at the product."""


@pytest.mark.parametrize("is_within_limit", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_does_not_compare_products_seldom_succeeds(script: str, is_within_limit: bool) -> None:
    env, rewards = WebShopEnv(), []
    for number in range(80):
        observation, _ = env.reset(options={"task_id": f"test-{number}"})
        instruction = texts_of(observation)[2]
        words, limit = goal_words(instruction), read_wishes(instruction).limit
        results = read_results(texts_of(env.step(f"search[{words}]")[0]))
        cheap = [result for result in results if max(result.prices) <= limit]
        chosen = SCRIPTS[script]((is_within_limit and cheap) or results, words)
        env.step(f"click[{chosen.asin.lower()}]")
        for action in env.admissible_actions():
            if re.search(rf"(?<![\w.-]){re.escape(action[6:-1])}(?![\w-]|\.\d)", words):
                env.step(action)
        rewards.append(env.step("click[buy now]")[1])
    assert statistics.fmean(reward == 1 for reward in rewards) < 0.4
    assert statistics.fmean(rewards) < 0.8


def test_siblings_lack_the_requested_attributes(shop_env: WebShopEnv) -> None:
    products = list(shop_env.shop.products())
    family = {product.asin: number // FAMILY for number, product in enumerate(products)}
    good = Counter[int]()
    for number in range(len(shop_env.goals)):
        goal = shop_env.shop.goal(shop_env.goals, number)
        for sibling in products[family[goal.asin] * FAMILY :][:FAMILY]:
            chosen = {
                name: option.value
                for option in goal.options
                for name in sibling.options
                if option.value in sibling.options[name]
            }
            price = purchase_price(sibling)
            verdict = judge(sibling, goal, price=price, chosen=chosen, nouns=nouns_by_rule, compat=False)
            assert verdict.type_match.reward == 1
            assert sibling.asin != goal.asin or verdict.reward == 1
            good[number] += verdict.reward == 1
    assert max(good.values()) <= 3
    assert statistics.fmean(good.values()) < 1.4


def test_the_expert_does_its_best_in_other_shops(official_folder: Path) -> None:
    for goals in ("human", "synthetic"):
        env = official_env(official_folder, goals=goals)
        for number in range(len(env.goals)):
            env.reset(options={"goal": number})
            assert play_expert(env)[1] <= 15


def test_the_expert_reads_wishes_and_nothing_else() -> None:
    wishes = read_wishes("show me some wrinkle free polo shirt with a narrow cut, size extra large, color dark red")
    assert (wishes.kind, set(wishes.attributes)) == ("polo shirt", {"wrinkle free", "slim fit"})
    assert set(wishes.options) == {"x-large", "dark red"}
    env = WebShopEnv(products=300, observation="html")
    with pytest.raises(UsageError, match="reads text only"):
        env.expert()
    with pytest.raises(UsageError, match="states no webshop instruction"):
        WebShopEnv(products=300).expert().act("hello")


def play_randomly(env: WebShopEnv, seed: int, steps: int = 15) -> list[tuple[Any, ...]]:
    rng, moments = random.Random(seed), list[tuple[Any, ...]]()
    for _ in range(steps):
        action = rng.choice(env.admissible_actions())
        moments.append((action, *env.step(action), env.state_key()))
        if moments[-1][3] or moments[-1][4]:
            break
    return moments


@pytest.mark.slow
def test_random_play_has_the_stated_score() -> None:
    env, solved = WebShopEnv(), []
    for number in range(500):
        env.reset(options={"task_id": f"test-{number}"})
        solved.append(play_randomly(env, number)[-1][5]["success"])
    assert abs(statistics.fmean(solved) - SPEC.scores["random"]) <= 0.01


@pytest.mark.parametrize("observation", Observation)
def test_episode_continues_identically_from_a_snapshot(observation: Observation) -> None:
    options = {"products": 300, "observation": observation}
    env, other = WebShopEnv(**options), WebShopEnv(**options)
    for number in range(20):
        env.reset(options={"goal": number})
        if play_randomly(env, number, steps=number % 8)[-1:] and env.session.state.page == "done":
            continue
        saved, key = json.loads(json.dumps(env.snapshot())), env.state_key()
        here = play_randomly(env, number + 100)
        for _ in range(2):  # restoring must not tie the environment to the snapshot's own lists
            other.restore(saved)
            assert other.state_key() == key
            assert play_randomly(other, number + 100) == here


PROGRAM = """
import hashlib, random
from agentrl.envs.webshop.environment import WebShopEnv
digest, env = hashlib.sha256(), WebShopEnv(products=300, observation="text_rich")
for seed in range(20):
    digest.update(env.reset(seed=seed)[0].encode())
    for step in range(12):
        action = random.Random(step).choice([*env.admissible_actions(), "search[<r>]"])
        observation, reward, terminated, truncated, _ = env.step(action)
        digest.update(f"{observation}{reward}{env.state_key()}".encode())
        if terminated or truncated:
            break
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_every_process_sees_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        command = [sys.executable, "-c", PROGRAM]
        digests.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1


def test_a_seed_and_a_task_id_decide_the_episode(shop_env: WebShopEnv) -> None:
    other = WebShopEnv(products=300)
    task = WebShopTasks("valid", parse_options(products=300))[3]
    assert shop_env.reset(seed=5) == other.reset(seed=5)
    assert shop_env.reset()[0] == other.reset()[0]
    by_task = shop_env.reset(seed=task.seed, options=dict(task.options))
    assert by_task == other.reset(options={"goal": task.seed})
    assert by_task[1]["task_type"] == task.type
    numbers = {shop_env.reset(seed=seed) and shop_env.snapshot()["goal"] for seed in range(100)}
    train = {task.seed for task in WebShopTasks("train", parse_options(products=300))}
    assert numbers <= train
    assert len(numbers) > 50


def test_an_episode_is_truncated_at_its_limit_and_ends_there() -> None:
    env = WebShopEnv(products=300, max_steps=3)
    env.reset(seed=1)
    assert [env.step("search[x]")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]
    with pytest.raises(UsageError, match="episode is over"):
        env.step("search[x]")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "valid-1"}, "cannot reset with these options"),
        ({"task_id": "valid-1", "goal": 3}, "cannot reset with these options"),
        ({"goal": 10**6}, "no such webshop goal"),
        ({"task_id": "trial-1"}, "no such webshop task"),
    ],
)
def test_wrong_reset_options_are_rejected(shop_env: WebShopEnv, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shop_env.reset(options=options)


@pytest.mark.parametrize(
    "options",
    [
        {"goals": "humans"},
        {"observation": "rich"},
        {"nouns": "none"},
        {"products": 0},
        {"max_steps": 0},
        {"reward": "win"},
        {"valid_goals": -1},
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=re.escape(next(iter(options)))):
        parse_options(**options)


def test_nothing_works_before_a_reset() -> None:
    with pytest.raises(UsageError, match="no episode yet"):
        WebShopEnv(products=300).step("search[x]")
