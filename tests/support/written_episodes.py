"""Episodes that tests write into a run's store, token by token, with contents that no small model would sample."""

from __future__ import annotations

import io
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from agentrl.errors import Outcome
from agentrl.message import ImagePart, Message, TextPart, ToolCall, plainly_written, system, tool_result, user
from agentrl.observe.trajectory_store import TrajectoryStore
from agentrl.trajectory import SOLE_ROLE, Source, TokenSequence, Trajectory, Turn, TurnTimings

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> &amp; </pre></template>"
    " \u202egnp.exe\u202c zero\u200bwidth \x1b[31mred\x1b[0m bell\x07 שלום עולם مرحبا {{7*7}} ${window.hacked=3}"
    " javascript:window.hacked=4 \N{PILE OF POO} \N{WOMAN}\u200d\N{PERSONAL COMPUTER}"
)


def picture() -> ImagePart:
    """Return a small picture of a shelf."""
    image = Image.new("RGB", (160, 80), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((10, 10, 70, 70), fill="royalblue")
    draw.ellipse((90, 10, 150, 70), fill="orange")
    file = io.BytesIO()
    image.save(file, "PNG")
    return ImagePart(data=file.getvalue(), alternative="a blue box and an orange ball")


@dataclass(frozen=True, kw_only=True)
class Script:
    """An episode as messages; every assistant message is a turn."""

    id: str
    messages: Sequence[Message]
    reward: float | None
    success: bool | None
    group: str = "9-shop"
    task: str = "shop-17"
    task_type: str | None = "refund"
    outcome: Outcome = Outcome.FINISHED
    error: str | None = None
    invalid: frozenset[int] = frozenset()
    version: int = 3
    role: str = SOLE_ROLE
    log: str = ""


def call(name: str, **arguments: Any) -> ToolCall:
    """Return a tool call."""
    return ToolCall(id=f"call-{name}", name=name, arguments=arguments)


def refund(last: str, reward: float, member: int) -> Script:
    """Return a refund whose last answer differs between members."""
    look_up = call("find_order", customer="Ada Lovelace", limit=3, filters={"status": "delivered", "days": 30})
    refuse = call("refund_order", order="#1042", amount="19,90")
    repay = call("refund_order", order="#1042", amount=19.9, reason="damaged")
    messages = [
        system("You are the assistant of a shop. Look orders up before you refund them.\nRefunds need an amount."),
        user((TextPart(text="My lamp arrived broken. Here is a picture.\n"), picture())),
        Message(
            role="assistant",
            content="Let me find your order.",
            reasoning="The customer wants a refund. The rules say that I look the order up first,\nthen refund it.",
            tool_calls=(look_up,),
        ),
        tool_result(
            look_up, '{"orders": [{"id": "#1042", "item": "desk lamp", "amount": 19.9, "status": "delivered"}]}'
        ),
        Message(role="assistant", tool_calls=(refuse,)),
        user("Your last answer was not a valid call: the argument `amount` is not a number."),
        Message(role="assistant", reasoning="The amount must be a number.", tool_calls=(repay,)),
        tool_result(repay, "refunded 19.90 to card ending 4242"),
        Message(role="assistant", content=last),
    ]
    return Script(
        id=f"9-shop/{member}.0", messages=messages, reward=reward, success=reward > 0.5, invalid=frozenset({1})
    )


def scripts() -> list[Script]:
    """Return all written episodes."""
    long = "\n".join(
        f"{n}: the shelf {n % 7} holds box {n * 37 % 101}, which is not the wanted one." for n in range(260)
    )
    hostile = call(HOSTILE[:60], **{HOSTILE[:40]: HOSTILE, "order": "1"})
    return [
        refund("I refunded 19.90 to your card. Sorry for the broken lamp!", 1.0, 0),
        refund("Your refund is on its way.", 0.7, 1),
        refund("I cannot help with that.", 0.0, 2),
        Script(
            id="9-hostile/0.0",
            group="9-hostile",
            task=f"hostile {HOSTILE}",
            task_type="hostile",
            reward=0.0,
            success=False,
            outcome=Outcome.ENVIRONMENT_ERROR,
            error=f"the environment failed: {HOSTILE}",
            messages=[
                user(HOSTILE),
                Message(role="assistant", content=HOSTILE, reasoning=HOSTILE, tool_calls=(hostile,)),
                tool_result(hostile, HOSTILE + "x" * 9000 + "THE-END"),
            ],
        ),
        Script(
            id="9-long/0.0",
            group="9-long",
            task="long-1",
            task_type="search",
            reward=0.25,
            success=None,
            outcome=Outcome.TRUNCATED_TOKENS,
            role="searcher",
            log=f"searcher started\n{HOSTILE}\nsearcher ended",
            messages=[user("Find the wanted box."), Message(role="assistant", content=long)],
        ),
    ]


STALE = "stale"
PAUSE_S = 0.2
"""Seconds before each turn, and before the first one."""


class EpisodeWriter:
    """Writer of episodes into a run's store.

    Args:
        run: Folder of the run.
        tokenizer: The run's tokenizer.
    """

    def __init__(self, run: Path, tokenizer: Any) -> None:
        self._run, self._tokenizer = run, tokenizer
        self._random = random.Random(7)

    def write(self, step: int, episodes: Sequence[Script]) -> list[Trajectory]:
        """Append episodes to the file of a step."""
        played = []
        with TrajectoryStore(self._run / "trajectories", step=step) as store:
            for script in episodes:
                trajectory = self._play(script)
                store.start(trajectory)
                store.end(trajectory)
                played.append(trajectory)
        return played

    def write_tables(self, step: int, episodes: Sequence[Trajectory]) -> None:
        """Write the trainer's tables of the step: values per token, and one row per episode."""
        folder = self._run / "tokens"
        folder.mkdir(exist_ok=True)
        rewards = [trajectory.reward or 0.0 for trajectory in episodes]
        mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)
        tokens = [row for one in episodes for row in self._token_rows(one, ((one.reward or 0.0) - mean) / spread)]
        pq.write_table(pa.Table.from_pylist(tokens), folder / f"step-{step:06d}.parquet")
        rows = [
            {
                "episode": one.id,
                "group": one.group_id,
                "advantage_mean": ((one.reward or 0.0) - mean) / spread,
                "group_mean": mean,
                "group_std": spread,
            }
            for one in episodes
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"episodes-{step:06d}.parquet")

    def _token_rows(self, trajectory: Trajectory, advantage: float) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, sequence in enumerate(trajectory.sequences):
            for position in sequence.loss_mask.nonzero()[0].tolist():
                logprob, drift = float(sequence.logprobs[position]), self._random.gauss(0, 0.12)
                turn = next(turn for turn in sequence.turns if turn.start <= position < turn.end)
                rows.append(
                    {
                        "episode": trajectory.id,
                        "sequence": number,
                        "position": position,
                        "token": int(sequence.token_ids[position]),
                        "advantage": advantage * (-0.6 if turn.index == 1 else 0.5 + 0.25 * turn.index),
                        "episode_return": trajectory.reward,
                        "engine_logprob": logprob,
                        "trainer_logprob": logprob + drift,
                        "ratio": math.exp(drift),
                        "entropy": self._random.expovariate(1.5) if logprob < -0.1 else 0.01,
                        "clipped": abs(drift) > 0.2,
                        "masked_by": STALE if turn.index == 1 and not turn.valid else None,
                    }
                )
        return rows

    def _play(self, script: Script) -> Trajectory:
        sequence = TokenSequence()
        answers = [message for message in script.messages if message.role == "assistant"]
        for message in script.messages:
            self._say(sequence, message, script)
        return Trajectory(
            id=script.id,
            task_id=script.task,
            environment="shop" if script.group == "9-shop" else "letters:Letters",
            seed=17,
            group_id=script.group,
            sequences=[sequence],
            outcome=script.outcome,
            error=script.error,
            reward=script.reward,
            success=script.success,
            task_type=script.task_type,
            metrics={"tool_calls": 2.0, "seconds": sum(_length(turn.timings) + PAUSE_S for turn in sequence.turns)},
            reward_components={"environment": script.reward or 0.0},
            reward_sources={"environment/step": script.reward or 0.0},
            log=script.log,
            conversations=[list(script.messages)],
            answers=answers,
            completions=[plainly_written(answer) for answer in answers],
        )

    def _say(self, sequence: TokenSequence, message: Message, script: Script) -> None:
        source = Source.PROMPT if not sequence.turns else Source.OBSERVATION
        sequence.extend(self._ids(f"<|im_start|>{message.role}\n"), Source.TEMPLATE)
        if message.role != "assistant":
            sequence.extend(self._ids(message.text), source)
            sequence.extend(self._ids("<|im_end|>\n"), Source.TEMPLATE)
            return
        thought = f"<think>{message.reasoning}</think>\n" if message.reasoning else ""
        ids = self._ids(f"{thought}{plainly_written(message)}<|im_end|>")
        start, number = len(sequence), len(sequence.turns)
        logprobs = [-(self._random.expovariate(1.4) ** 1.6) for _ in ids]
        half = len(ids) // 2 if number % 2 else 0
        sequence.extend_sampled(
            ids, logprobs=logprobs, versions=[script.version] * (len(ids) - half) + [script.version + 1] * half
        )
        is_last = message is script.messages[-1]
        ended = sum(_length(turn.timings) + PAUSE_S for turn in sequence.turns)
        seconds = TurnTimings(
            queue=0.04,
            prefill=0.08,
            decode=0.01 * len(ids),
            tool=0.0 if is_last else 0.3,
            env=0.05 + 0.1 * number,
            scoring=0.45 if is_last else 0.0,
            started=ended + PAUSE_S,
        )
        sequence.turns.append(
            Turn(
                index=number,
                start=start,
                end=len(sequence),
                reward=(script.reward or 0.0) if is_last else 0.0,
                role=script.role,
                valid=number not in script.invalid,
                timings=seconds,
            )
        )
        sequence.extend(self._ids("\n"), Source.TEMPLATE)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _length(timings: TurnTimings) -> float:
    return timings.engine + timings.tool + timings.env + timings.scoring
