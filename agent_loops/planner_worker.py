"""A planner writes a plan for the task, and a worker carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.agent_loop import Conversation, Episode, TurnOptions
from agentrl.errors import ConfigError
from agentrl.message import Content, user

from .prompting import goal_of, opening, with_lines
from .text_answers import TextLoop

PLANNER, WORKER = "planner", "worker"
RULE = (
    "Do not act now. Write a plan for a worker, who sees what you see and takes the actions. Write two or three short"
    " sentences: what to do first, and what to do next. For example:\n"
    "First look for the key in the desk. Then open the drawer with it.\n"
    "The worker will follow your plan."
)
REQUEST = "Write the plan for the worker."
PLAN = TurnOptions(demonstration=lambda: "Solve the task step by step.")


@dataclass(kw_only=True, eq=False)
class PlannerWorker(TextLoop):
    """A planner writes a plan from the first observation, and a worker follows it and acts, as text.

    The worker reads the first observation, the plan, and all later observations; the planner reads only the
    observations at which it plans. An empty plan counts as an invalid answer, and the worker continues without one.

    Args:
        replan_every: Number of the worker's steps between two plans; 0 for a single plan.
    """

    roles = (PLANNER, WORKER)

    replan_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        every = self.replan_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError("replan_every is not a number of steps", got=repr(every), expected="0 or more")

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        first = observation = await episode.reset()
        planner = episode.open(
            opening(self._planning(episode), with_lines(observation, [f"\n{REQUEST}"])), role=PLANNER
        )
        shown = await self._show(episode, observation, await self._plan(episode, planner))
        worker = episode.open(opening(self.instructions(episode), shown), role=WORKER)
        steps = 0
        while True:
            reading = self.read(await self.act(worker), episode.action_hint)
            if reading.problem:
                episode.count_invalid(reading.problem)
                worker.add(user(reading.problem))
                continue
            result = await episode.step(reading.action)
            if result.done:
                return
            steps += 1
            plan = ""
            if self.replan_every and steps % self.replan_every == 0:
                goal = goal_of(episode, first)
                planner.add(user(with_lines(result.observation, [goal, f"\n{REQUEST}"])))
                plan = await self._plan(episode, planner)
            worker.add(user(await self._show(episode, result.observation, plan)))

    def _planning(self, episode: Episode) -> list[str]:
        return [episode.spec.instructions, RULE] if self.explain else []

    async def _plan(self, episode: Episode, planner: Conversation) -> str:
        plan = (await planner.generate(options=PLAN)).text.strip()
        if not plan:
            episode.count_invalid("The plan was empty.")
        return plan

    async def _show(self, episode: Episode, observation: Content, plan: str) -> Content:
        return with_lines(observation, [await self.actions(episode), f"\nFollow this plan: {plan}" if plan else ""])
