"""Scripted policy that answers the fact world's questions from the texts only, like a model, and questions of files."""

from __future__ import annotations

from agentrl.errors import UsageError
from agentrl.message import Content

from .protocol import TAGS, Protocol, read_passages
from .relations import Chain, parse_chain

_PREFIX = "Question: "


class SearchExpert:
    """Expert that looks up one thing after the other: the start of the chain, then the value of each relation.

    Args:
        protocol: Form of the moves.
        answer: Answer to give at once, for questions of files.
    """

    def __init__(self, protocol: Protocol = TAGS, answer: str | None = None) -> None:
        self._protocol = protocol
        self._answer = answer
        self._chain: Chain | None = None
        self._thing = ""
        self._done = 0
        """Number of relations that were followed."""
        self._widened = False

    def act(self, observation: Content) -> str:
        """Return the next action.

        Raises:
            UsageError: the first observation asks no question of the fact world, or a passage cannot be found.
        """
        if self._answer is not None:
            return self._protocol.answer(self._answer)
        text = observation if isinstance(observation, str) else ""
        if self._chain is None:
            self._chain = parse_chain(text.partition(_PREFIX)[2].partition("\n")[0])
            if self._chain is None:
                raise UsageError("the observation asks no question of the fact world", got=repr(text[-120:]))
            self._thing = self._chain.start
            return self._protocol.search(self._thing)
        relation = self._chain.relations[self._done]
        found = next((passage.text for passage in read_passages(text) if passage.title == self._thing), None)
        value = None if found is None else relation.read(found)
        if value is None:
            return self._look_again()
        self._thing, self._done, self._widened = value, self._done + 1, False
        return (
            self._protocol.answer(value) if self._done == len(self._chain.relations) else self._protocol.search(value)
        )

    def _look_again(self) -> str:
        """Search for the name twice: the passage about a thing has the name in its title, too."""
        if self._widened:
            raise UsageError("the search expert cannot find a passage", got=self._thing)
        self._widened = True
        return self._protocol.search(f"{self._thing} {self._thing} is")
