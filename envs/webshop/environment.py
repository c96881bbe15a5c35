"""The web shop as a Gymnasium environment."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from typing import Any

import gymnasium
import orjson
from agentrl.envs.content_space import ContentSpace
from gymnasium.spaces import Space, Text

from agentrl.errors import UsageError
from agentrl.message import Content, TextPart

from .expert import WebShopExpert, goal_words
from .goals import GoalKind, purchase_price
from .nouns import NounTagger, find_tagger
from .options import MAX_STEPS, VALID_GOALS, Observation, RewardKind, parse_options
from .pages import Element, done_page
from .pictures import picture_of
from .rendering import html_page, plain_text, rich_text
from .reward import Verdict, judge
from .session import Page, Session, State
from .shop import open_shop
from .tasks import chosen_goal, draw_goal, source_of

PLACEHOLDER = "<your query>"


class WebShopEnv(gymnasium.Env[Content, str]):
    """WebShop: find a product, choose its options, buy it. An episode is a function of options and task.

    The reward is 0 until a product is bought, which ends the episode: then it is the share of the goal's requirements
    that the purchase meets (see `agentrl.envs.webshop.reward`). A share of 1 is a success. An invalid action shows the
    page again and costs a step.

    `reset` takes these options: ``task_id`` (a task of a split), or ``goal`` (WebShop's number of a goal); without them
    the seed draws a training goal by weight.

    Args:
        data: Folder with WebShop's own files; the generated catalogue if left out.
        products: Maximum number of products, the first ones; by default all of the files, or 6,000 generated ones.
        goals: ``human`` or ``synthetic``.
        observation: ``text``, ``text_rich``, ``html`` or ``url``.
        show_attributes: Give products a page with their attributes.
        compat: Compute the reward with WebShop's quirks.
        nouns: Method to find nouns for the reward: ``spacy``, ``rule`` or ``auto``: spaCy for `data`, otherwise the
            rule. The last info contains the chosen method.
        max_steps: Steps after which an episode is truncated.
        pictures: Show a product's picture on its page, if `data` names a file of it.
        placeholder: The first page's admissible action is ``search[<your query>]``, which finds nothing, instead of a
            search with the words of the instruction.
        reward: ``score``, or ``success``: 1 for a purchase with the full score, else 0.
        valid_goals: Number of goals after the 500 test goals that are for validation; the rest are for training.
    """

    action_hint = "search[words] or click[text on the page], for example: search[blue cotton shirt]"

    def __init__(
        self,
        *,
        data: str | None = None,
        products: int | None = None,
        goals: str = GoalKind.HUMAN,
        observation: str = Observation.TEXT,
        show_attributes: bool = False,
        compat: bool = True,
        nouns: str = NounTagger.AUTO,
        max_steps: int = MAX_STEPS,
        pictures: bool = False,
        placeholder: bool = False,
        reward: str = RewardKind.SCORE,
        valid_goals: int = VALID_GOALS,
    ) -> None:
        self.options = parse_options(
            data=data,
            products=products,
            goals=goals,
            observation=observation,
            show_attributes=show_attributes,
            compat=compat,
            nouns=nouns,
            max_steps=max_steps,
            pictures=pictures,
            placeholder=placeholder,
            reward=reward,
            valid_goals=valid_goals,
        )
        self.observation_space: Space[Content] = (
            ContentSpace(1 << 20) if pictures else Text(1 << 20, min_length=0, charset=string.printable)
        )
        self.action_space = Text(256, charset=string.printable)
        self.shop = open_shop(source_of(self.options))
        self.goals = self.shop.goals(self.options.goals)
        self._nouns = find_tagger(self.options.nouns)
        self._session: Session | None = None
        self._goal_number = 0
        self._steps = 0

    @property
    def session(self) -> Session:
        """Current session.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._session is None:
            raise UsageError("the webshop environment has no episode yet", expected="reset before anything else")
        return self._session

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start an episode.

        Raises:
            UsageError: an option is unknown, or the goal does not exist.
        """
        super().reset(seed=seed)
        number = chosen_goal(options or {}, len(self.goals), self.options.valid_goals)
        if number is None:
            draw = int(self.np_random.integers(2**31)) if seed is None else seed
            number = draw_goal(self.goals, draw, self.options.valid_goals)
        self._enter(number, State(), steps=0)
        is_hidden = self.options.observation is Observation.URL
        goal = self.session.goal.instruction if is_hidden else ""  # other pages repeat it
        return self._observe(None), {**self._info(None), "goal": goal}

    def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Search or click.

        Raises:
            UsageError: the episode is over.
        """
        session = self.session
        if session.is_done() or self._steps >= self.options.max_steps:
            raise UsageError("the webshop episode is over", expected="reset before the next step")
        self._steps += 1
        is_understood = session.act(action)
        verdict = self._judge() if session.is_done() else None
        truncated = verdict is None and self._steps >= self.options.max_steps
        info = {**self._info(verdict), "valid": is_understood}
        return self._observe(verdict), self._reward(verdict), verdict is not None, truncated, info

    def admissible_actions(self) -> list[str]:
        """Return the clickable actions, or one search on the first page."""
        session = self.session
        if not session.has_search_bar:
            return session.clicks()
        words = PLACEHOLDER if self.options.placeholder else goal_words(session.goal.instruction)
        return [f"search[{words}]"]

    def expert(self) -> WebShopExpert:
        """Return a policy that reads text pages and reaches reward 1 for every goal of the generated catalogue.

        Raises:
            UsageError: pages are not shown as text.
        """
        if self.options.observation not in (Observation.TEXT, Observation.TEXT_RICH):
            raise UsageError(
                "the webshop expert reads text only", got=self.options.observation, expected="text or text_rich"
            )
        return WebShopExpert(self.options.max_steps)

    def state_key(self) -> str:
        """Return a key of goal and page, independent of the number of steps, and of visited products if they show."""
        state = self.session.state.to_plain()
        if self.options.observation is not Observation.TEXT_RICH:
            del state["visited"]
        return hashlib.blake2b(orjson.dumps([self._goal_number, state]), digest_size=16).hexdigest()

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return {"goal": self._goal_number, "state": self.session.state.to_plain(), "steps": self._steps}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot, in this environment or another one with the same options."""
        self._enter(snapshot["goal"], State.from_plain(snapshot["state"]), steps=snapshot["steps"])

    def _enter(self, goal_number: int, state: State, *, steps: int) -> None:
        self._goal_number, self._steps = goal_number, steps
        goal = self.shop.goal(self.goals, goal_number)
        show = self.options.show_attributes
        self._session = Session(self.shop, goal, name=str(goal_number), show_attributes=show, state=state)

    def _judge(self) -> Verdict:
        session = self.session
        return judge(
            session.product,
            session.goal,
            price=purchase_price(session.product),
            chosen=session.state.options,
            nouns=self._nouns,
            compat=self.options.compat,
        )

    def _reward(self, verdict: Verdict | None) -> float:
        if verdict is None:
            return 0.0
        return verdict.reward if self.options.reward is RewardKind.SCORE else float(verdict.reward == 1.0)

    def _info(self, verdict: Verdict | None) -> dict[str, Any]:
        info = {"success": verdict is not None and verdict.reward == 1.0, "task_type": self.session.goal.category}
        if verdict is None:
            return info
        parts = {"reward_components": verdict.components(), "nouns": self.options.nouns.value}
        return {**info, "score": verdict.reward, **parts}

    def web_page(self) -> str:
        """Return the page for a browser: HTML in which ``data-action`` holds the action of a click."""
        state = self.session.state
        page = self._elements(self._judge() if self.session.is_done() else None)
        return html_page(page, chosen=state.options.items(), for_person=True)

    def _elements(self, verdict: Verdict | None) -> list[Element]:
        state = self.session.state
        return self.session.elements() if verdict is None else done_page(state.asin, state.options, verdict.reward)

    def _observe(self, verdict: Verdict | None) -> Content:
        text = self._page_text(verdict)
        if not self.options.pictures or self.options.data is None:
            return text
        part, session = TextPart(text=text), self.session
        if session.state.page is not Page.ITEM:
            return (part,)
        picture = picture_of(session.product.image, self.options.data, session.product.title)
        return (part,) if picture is None else (part, picture)

    def _page_text(self, verdict: Verdict | None) -> str:
        session, page = self.session, self._elements(verdict)
        state = session.state
        match self.options.observation:
            case Observation.TEXT:
                return plain_text(page)
            case Observation.TEXT_RICH:
                return rich_text(page, address=session.address, visited=state.visited)
            case Observation.HTML:
                return html_page(page, chosen=state.options.items())
            case Observation.URL:
                return session.address
