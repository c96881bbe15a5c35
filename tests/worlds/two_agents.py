"""A loop of two agents for tests of whole runs: one tells the letter that the other has to write."""

from agentrl.agent_loop import AgentLoop
from agentrl.message import Message, user


class Telling(AgentLoop):
    roles = ("teller", "writer")

    async def run(self, episode):
        observation = await episode.reset()
        teller = episode.open([user(observation)], role="teller")
        while True:
            told = (await teller.generate()).text
            writer = episode.open([user(told)], role="writer")
            result = await episode.step((await writer.generate()).text)
            episode.give_reward(0.1 * (len(told) < 4), role="teller")
            if result.done:
                return
            teller.add(user(result.observation))

    def demonstrate(self, action):
        return Message(role="assistant", content=action)


class Opposites(AgentLoop):
    """Two agents answer one prompt, and are rewarded for opposite letters: one policy could not please both."""

    roles = ("early", "late")

    async def run(self, episode):
        observation = await episode.reset()
        for role, letters in (("early", "abcdefghijklm"), ("late", "nopqrstuvwxyz")):
            said = (await episode.open([user(observation)], role=role).generate()).text.lower()
            found = sum(letter in letters for letter in said) - sum(letter.isalpha() for letter in said) / 2
            episode.give_reward(max(-1.0, min(1.0, found / 4)), role=role)
        await episode.step("done")
