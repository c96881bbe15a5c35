"""An external agent: a function that uses OpenAI's package plays through the gateway, and is trained unchanged.

    python examples/08_external_agent.py                 needs: pip install openai

The gateway answers the agent's requests with the policy and records every token as it was sampled. A program in any
language works as well (`agent.options.command`): it finds the gateway in OPENAI_BASE_URL. The folder examples/agents
has recipes for other packages.

Prints the agent's reward before training, and the metrics of the last step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import openai

import agentrl


def play(task: Any) -> None:
    """Guess until the environment is done or the episode's budget is spent."""
    with openai.OpenAI(base_url=task.openai_url, api_key=task.api_key) as client:
        messages: list[Any] = [
            {"role": "system", "content": task.instructions},
            {"role": "user", "content": task.prompt},
        ]
        while True:
            reply = client.chat.completions.create(model="policy", messages=messages)
            answer = reply.choices[0].message.content or ""
            if not answer and reply.choices[0].finish_reason == "length":
                return
            result = task.step(answer)
            if result.done:
                return
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": result.observation}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="scratch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="further config keys, key=value")
    given = parser.parse_args()
    function = f"{Path(__file__).stem}:play"
    words = ["agent.loop=external", f"agent.options={{function: '{function}', answer: none}}", *given.overrides]
    print(agentrl.evaluate("guess_number", model=given.model, tasks=2, overrides=words))
    run = agentrl.train(env="guess_number", model=given.model, steps=given.steps, overrides=words)
    print({name: run.metrics[name] for name in ("reward/mean", "turns/mean", "tokens/sampled")})


if __name__ == "__main__":
    main()
