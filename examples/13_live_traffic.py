"""Live traffic: a run serves clients of OpenAI's package, and learns from the rewards that they send back.

    python examples/13_live_traffic.py

A scripted user wants answers with a digit. Each conversation is a session with its own name, which the user rewards at
its end. Meanwhile, the run trains on the rewarded sessions; the newest weights sample the answers.

Prints the share of good answers, 100 sessions at a time.
"""

from __future__ import annotations

import argparse
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import openai

import agentrl

SMALL = ("model.dtype=float32", "trainer.gradient_checkpointing=false", "trainer.learning_rate=3e-3")


def talk(client: openai.OpenAI, address: str) -> bool:
    """Hold one conversation, and reward it."""
    session = client.with_options(base_url=f"{address}/s/{uuid.uuid4()}/v1")
    messages = [{"role": "user", "content": "Which number comes next?"}]
    reply = session.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    is_good = any(letter.isdigit() for letter in reply.choices[0].message.content)
    session.post("/feedback", body={"reward": float(is_good)}, cast_to=object)
    return is_good


def keep_talking(address: str, ended: threading.Event) -> None:
    """Let eight users talk until the run has ended."""
    with openai.OpenAI(base_url=address, api_key="any", max_retries=0) as client, ThreadPoolExecutor(8) as users:
        while not ended.is_set():
            try:
                good = sum(users.map(talk, [client] * 100, [address] * 100))
            except openai.APIError:  # the run does not serve yet, or has ended
                ended.wait(0.5)
            else:
                print(f"good answers: {good} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*", help="further config keys, key=value")
    given = parser.parse_args()
    ended = threading.Event()
    users = threading.Thread(target=keep_talking, args=[f"http://127.0.0.1:{given.port}", ended])
    users.start()
    overrides = [*SMALL, f"agent.options.port={given.port}", *given.overrides]
    try:
        run = agentrl.train("live", model="scratch", steps=given.steps, overrides=overrides)
    finally:
        ended.set()
        users.join()
    print(f"trained on {run.metrics['live/rewarded']:.0f} sessions in the last step: {run.folder}")


if __name__ == "__main__":
    main()
