"""Episodes with one question about an image, and a second answer from the policy's own description of the image."""

from __future__ import annotations

from agentrl.agent_loop import AgentLoop, Episode, EpisodeEnd, TurnOptions
from agentrl.errors import Outcome
from agentrl.message import Message, user
from agentrl.reward.answers import tagged_answer

from .prompting import ActionHint, content_text, opening

DESCRIPTION = "description"
FORM = (
    "Describe the image in <description> </description>, with all that is needed to answer without seeing it. Then"
    " think in <think> </think>, and write the final answer in \\boxed{ }."
)
FROM_DESCRIPTION = (
    "You do not see the image, but this description of it:\n{description}\n\nThink in <think> </think>, and write the"
    " final answer in \\boxed{{ }}."
)


class SelfDescribed(AgentLoop):
    """The policy describes an image and answers; then it answers again from its description, without the image.

    The environment judges the first answer. The second one is for reward functions such as ``vision_sr1``; its tokens
    are not trained (Vision-SR1, arXiv 2508.19652). Without a description, there is no second answer.
    """

    follow_ups = ()
    plays_one_step = True

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        instructions = [episode.spec.instructions, FORM]
        answer = await episode.open(opening(instructions, observation)).generate()
        result = await episode.step(answer.text)
        description = tagged_answer(answer.text, DESCRIPTION)
        if description:
            rule = FROM_DESCRIPTION.format(description=description)
            second = episode.open([user(f"{content_text(observation).strip()}\n\n{rule}")])
            await second.generate(
                options=TurnOptions(trained=False, demonstration=lambda: _answer(episode.action_hint).text)
            )
        if not result.done:
            raise EpisodeEnd(Outcome.TRUNCATED_TURNS)

    def demonstrate(self, action: str) -> Message:
        """Return the answer that contains `action`."""
        text = f"<{DESCRIPTION}>(the image)</{DESCRIPTION}><think>I see.</think>\\boxed{{{action}}}"
        return Message(role="assistant", content=text)


def _answer(action_hint: str) -> Message:
    example = ActionHint.parse(action_hint).example
    return Message(role="assistant", content=f"<think>I read it.</think>\\boxed{{{example}}}")
