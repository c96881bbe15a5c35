"""Environments of verifiers, one of each kind, over data that is made here."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

SECRETS = ("3", "8", "5")


def load_single_turn(**options: Any) -> Any:
    """Sums, judged by a rubric of two functions."""

    def right(completion: Any, answer: str) -> float:
        return float(answer == str(completion[-1].content).strip())

    def short(completion: Any) -> float:
        return float(len(str(completion[-1].content)) < 10)

    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=_sums(30), system_prompt="Answer with a number.", rubric=rubric, **options)


def load_tools(**options: Any) -> Any:
    """Sums with a tool, and data of their own for evaluation."""

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a + b

    def right(completion: Any, answer: str) -> float:
        return float(answer in str(completion[-1].content))

    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(dataset=_sums(4), eval_dataset=_sums(2), tools=[add], rubric=rubric, max_turns=3, **options)


class HotOrCold(vf.MultiTurnEnv):  # type: ignore[misc]
    """Find a digit."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """Whether the digit is higher."""
        guess = str(messages[-1].content).strip()
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right!"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "Higher." if guess < state["answer"] else "Lower."}]


def load_multi_turn(**options: Any) -> Any:
    """Find a digit in four turns."""

    def found(state: Any) -> float:
        return float(state["final_env_response"] is not None)

    rows = [{"question": f"Find digit {i}.", "answer": SECRETS[i % len(SECRETS)]} for i in range(40)]
    return HotOrCold(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]), max_turns=4, **options)


def _sums(count: int) -> Any:
    rows = [{"question": f"What is {i} plus {i + 1}?", "answer": str(2 * i + 1)} for i in range(count)]
    return Dataset.from_list(rows)
