"""Episodes with one question about an image, answered by a reasoner that reads only a captioner's description of it."""

from __future__ import annotations

from agentrl.agent_loop import Episode, EpisodeEnd, TurnOptions
from agentrl.errors import Outcome

from .prompting import content_text, opening
from .single_turn import SingleTurn

CAPTIONER, REASONER = "captioner", "reasoner"
CAPTION_RULE = (
    "Someone else will answer a question about this image, but cannot see it. Describe the image in detail, with"
    " everything that the question needs. Do not answer the question."
)
FROM_CAPTION = "Description of the image, which you cannot see yourself:\n{caption}\n\nThe task: {question}"
CAPTION = TurnOptions(demonstration=lambda: "The image shows what the question is about.")


class CaptionReasoner(SingleTurn):
    """A captioner describes an image for a question, and a reasoner answers the question from the description.

    The environment judges only the reasoner's answer, so that the captioner learns to describe what a reasoner needs
    (RACRO, arXiv 2506.04559). There, the reasoner is another model, which is not trained; set
    ``agent.roles.reasoner.engine``. An empty description counts as an invalid answer and ends the episode.

    Args:
        tag: Pass only the text in ``<tag>…</tag>`` of the reasoner's answer to the environment.
    """

    roles = (CAPTIONER, REASONER)

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        observation = await episode.reset()
        captioner = episode.open(opening([CAPTION_RULE], observation), role=CAPTIONER)
        caption = (await captioner.generate(options=CAPTION)).text.strip()
        if not caption:
            episode.count_invalid("The description was empty.")
            raise EpisodeEnd(Outcome.POLICY_ERROR)
        question = FROM_CAPTION.format(caption=caption, question=content_text(observation).strip())
        rules = [episode.spec.instructions, self.rule(episode.action_hint)]
        await self.answer(episode, episode.open(opening(rules, question), role=REASONER))
