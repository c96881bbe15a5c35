"""The policy writes a memory of bounded size, and sees nothing else of the past (Yu et al., 2025, MemAgent)."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.agent_loop import Conversation, Episode, TurnOptions
from agentrl.errors import ConfigError
from agentrl.message import Content

from .prompting import after, goal_of, opening, text_with_image_marks, with_lines
from .text_answers import TextLoop

EMPTY = "(empty)"
WRITE = "Write your new memory: the facts from your memory and the new facts."


@dataclass(kw_only=True, eq=False)
class Memory(TextLoop):
    """The policy rewrites a memory of bounded size after each observation, and acts on the memory and the observation.

    One call writes the memory, and another one acts. A long observation is read in parts, with a call for each part.
    Each call is a separate sequence that is trained with the episode's return.

    Args:
        memory_tokens: Maximum tokens of the memory; a longer one is cut off.
        part_tokens: Maximum tokens of a part of an observation.
        trained: True if the calls that write the memory are trained; those that act always are.
    """

    follow_ups = ()
    sequence_per_turn = True
    turns_are_steps = False

    memory_tokens: int = 128
    part_tokens: int = 512
    trained: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, tokens in (("memory_tokens", self.memory_tokens), ("part_tokens", self.part_tokens)):
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
                raise ConfigError(f"{name} is not a number of tokens", got=repr(tokens), expected="at least 1")
        if not isinstance(self.trained, bool):
            raise ConfigError(
                "agent.options.trained is not a boolean", got=repr(self.trained), expected="true or false"
            )

    async def run(self, episode: Episode) -> None:
        """Play one episode."""
        first = observation = await episode.reset()
        writing = _MemoryWriter(self, episode)
        acting: Conversation | None = None
        goal, action, problem = episode.goal or "", "", ""
        while True:
            if not problem:
                seen = await writing.read(goal, action, observation)
            actions = await self.actions(episode)
            shown = with_lines(_show(goal, writing.memory, seen), [actions, problem])
            messages = opening(self.instructions(episode), shown)
            acting = episode.open(messages) if acting is None else acting.fork(messages)
            reading = self.read(await self.act(acting), episode.action_hint)
            problem, action = reading.problem, reading.action
            if problem:
                episode.count_invalid(problem)
                continue
            result = await episode.step(action)
            if result.done:
                return
            goal, observation = goal_of(episode, first), result.observation

    def writing_rule(self) -> str:
        """Return the instructions for writing the memory."""
        return (
            "You cannot see earlier messages, so you keep a memory. Do not act now; write your new memory. It replaces"
            " the old one, so repeat what is still needed, correct what has changed, and add what is new. Write short"
            f" facts and nothing else, at most {max(1, self.memory_tokens * 3 // 4)} words. For example, if your memory"
            " is:\nThe door is locked.\nand this is new:\nIt rained. Tom found a key in the desk.\n"
            "then write:\nThe door is locked. Tom has the key.\n"
            "Next time, you will see only this memory and the next observation."
        )


class _MemoryWriter:
    """The memory of one episode, and the calls that write it."""

    def __init__(self, loop: Memory, episode: Episode) -> None:
        self.memory = ""
        self._loop = loop
        self._episode = episode
        self._conversation: Conversation | None = None

    async def read(self, goal: str, action: str, observation: Content) -> Content:
        """Rewrite the memory for each part of an observation; return the part that the policy sees when it acts."""
        parts = self._episode.split_text(text_with_image_marks(observation), self._loop.part_tokens)
        for part in parts:
            await self._write(goal, f"Your last action: {action}\n{part}" if action and part is parts[0] else part)
        return observation if len(parts) == 1 else parts[-1]

    async def _write(self, goal: str, part: str) -> None:
        loop, episode = self._loop, self._episode
        shown = _show(goal, self.memory, f"New:\n{part}\n\n{WRITE}")
        messages = opening([episode.spec.instructions, loop.writing_rule()] if loop.explain else [], shown)
        conversation = self._conversation
        conversation = episode.open(messages) if conversation is None else conversation.fork(messages)
        self._conversation = conversation
        known = f"{self.memory}\n{part}".strip()
        options = TurnOptions(
            max_tokens=loop.memory_tokens,
            trained=loop.trained,
            demonstration=lambda: episode.split_text(known, loop.memory_tokens)[-1].strip(),
        )
        written = (await conversation.generate(options=options)).text.strip()
        if written:
            self.memory = written
        else:
            episode.count_invalid("The memory was empty.")


def _show(goal: str, memory: str, seen: Content) -> Content:
    """Return the user message: the goal if there is one, the memory, and the new content."""
    asked = f"Task: {goal}\n\n" if goal else ""
    return after(f"{asked}Your memory:\n{memory or EMPTY}\n\n", seen)
