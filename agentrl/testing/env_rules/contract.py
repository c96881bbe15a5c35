"""What an environment says and accepts."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import gymnasium
from gymnasium.spaces import Text
from gymnasium.utils.env_checker import check_env as check_gymnasium

from agentrl.testing.env_session import EnvSession, random_policy
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject

_COLOUR = re.compile(r"\x1b\[\d+m")
_STATES_TRIED = 10
"""States of an episode in which every admissible action is tried."""
NONSENSE = ("", " ", "\n\n", "x" * 20_000, "naïve 🦆 \u202e\x00", "<action></action>", '{"name": null}', "-1e999")


class _AnyText(Text):
    """Text of any characters: a space's default character set has not even a blank."""

    def contains(self, x: Any) -> bool:
        """Text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length


def keeps_gymnasium_rules(subject: Subject) -> Finding:
    """Gymnasium's own checker finds nothing; `Text` spaces may hold any characters."""
    env = subject.spec.make(**subject.options)
    if not isinstance(env, gymnasium.Env):
        raise Missing("an AsyncEnv is no gymnasium.Env")
    bare = env.unwrapped
    for name in ("observation_space", "action_space"):
        space = getattr(bare, name, None)
        if isinstance(space, Text):
            setattr(bare, name, _AnyText(space.max_length))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_gymnasium(bare, skip_render_check=True)
        except AssertionError as error:
            raise Broken(str(error)) from error
    return Finding(detail="; ".join(_COLOUR.sub("", str(warning.message)) for warning in caught) or "no complaints")


def speaks_properly(subject: Subject) -> Finding:
    """Observations are text or parts, flags are booleans, rewards are finite, returns are in the stated range."""
    low, high = subject.spec.reward_range
    played = subject.random_episodes
    for episode in played:
        for result in episode.results:
            if not isinstance(result.observation, str | tuple):
                raise Broken(f"an observation is a {type(result.observation).__name__}, not text or parts")
            if not math.isfinite(result.reward):
                raise Broken(f"a reward is {result.reward}")
            if type(result.terminated).__name__ != "bool" or type(result.truncated).__name__ != "bool":
                raise Broken("terminated and truncated must be True or False")
        if episode.done and not low <= episode.total <= high:
            raise Broken(f"a return is {episode.total:g}, outside {low:g} to {high:g}")
    return Finding(detail=f"returns {min(e.total for e in played):g} to {max(e.total for e in played):g}")


def ends_properly(subject: Subject) -> Finding:
    """The last observation belongs to the episode that ended, not to a next one."""
    ended = [episode for episode in subject.random_episodes if episode.done]
    if not ended:
        raise Missing(f"no random episode ended within {subject.limit} steps")
    told_apart = [episode for episode in ended if len(episode.moments) > 2]
    if told_apart and all(episode.moments[-1].observation == episode.moments[0].observation for episode in told_apart):
        raise Broken("the last observation of every episode is its first one again: does the environment reset?")
    return Finding(detail=f"{len(ended)} episodes ended with an observation of their own")


def accepts_admissible_actions(subject: Subject) -> Finding:
    """Every action that is called admissible is understood."""
    tried = 0
    with subject.session() as session:
        for task in subject.tasks:
            session.reset(task)
            walk = random_policy(task.seed)
            for _ in range(min(subject.limit, _STATES_TRIED)):
                tried += _try_admissible(session)
                if session.step(walk(session, "")).done:
                    break
    return Finding(detail=f"{tried} actions accepted")


def _try_admissible(session: EnvSession) -> int:
    actions = session.call("admissible_actions")
    if actions is None:
        raise Missing("no admissible_actions()")
    if session.find("restore") is None:
        raise Missing("no snapshot() and restore() to try them all from one state")
    here = session.call("snapshot")
    for action in actions:
        if session.step(action).info.get("valid") is False:
            raise Broken(f"{action!r} is called admissible, but not accepted")
        session.call("restore", here)
    return len(actions)


def bears_nonsense(subject: Subject) -> Finding:
    """No text is refused by an exception: what a model says wrong is answered in words."""
    with subject.session() as session:
        for text in NONSENSE:
            session.reset(subject.tasks[0])
            try:
                result = session.step(text)
            except Exception as error:
                raise Broken(f"the action {text[:20]!r} raises {type(error).__name__}: {error}") from error
            if not isinstance(result.observation, str | tuple):
                raise Broken(f"the action {text[:20]!r} is answered by a {type(result.observation).__name__}")
    return Finding(detail=f"{len(NONSENSE)} texts answered")
