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
