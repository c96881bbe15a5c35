"""Environments with one fault each, for the environment check."""

import asyncio
import importlib
import os
import signal
import sys
import threading
from typing import Any

import gymnasium
import numpy as np

Step = tuple[Any, ...]


class Sound(gymnasium.Env[str, str]):
    """Nothing is wrong with it; the others are made of it."""

    observation_space = action_space = gymnasium.spaces.Text(200)
    limit = 6

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.room, self.steps = int(self.np_random.integers(1, 100_000)), 0
        return f"Room {self.room}.", {}

    def step(self, action: str) -> Step:
        self.steps += 1
        won = action.strip() == str(self.room)
        return self.text(), float(won), won, self.steps >= self.limit, {"success": won}

    def text(self) -> str:
        return f"No. Turn {self.steps}."


class Surrogate(Sound):
    def text(self) -> str:
        return "bad \ud800"


class WordOfSuccess(Sound):
    def step(self, action: str) -> Step:
        return *super().step(action)[:4], {"success": "yes"}


class WordOfReward(Sound):
    def final_reward(self) -> Any:
        return "good"


class PaidForNothing(Sound):
    def final_reward(self) -> Any:
        return 1.0, {"success": True}


class JudgedPlace(Sound):
    """Nothing is wrong with it: it judges only states after an action."""

    def final_reward(self) -> Any:
        return (0.5, {"success": False}) if self.steps else None


class Blocking(Sound):
    def step(self, action: str) -> Step:
        threading.Event().wait()
        return super().step(action)


class BlockingReset(Sound):
    def reset(self, **given: Any) -> Any:
        threading.Event().wait()


class Threaded(Sound):
    """Leaves a thread for which Python waits."""

    def reset(self, **given: Any) -> Any:
        threading.Thread(target=threading.Event().wait, daemon=False).start()
        return super().reset(**given)


class Endless(Sound):
    limit = 10**9


class Exiting(Sound):
    def step(self, action: str) -> Step:
        sys.exit(3)


class Interrupting(Sound):
    def step(self, action: str) -> Step:
        raise KeyboardInterrupt


class Dying(Sound):
    def step(self, action: str) -> Step:
        os._exit(5)


class ArrayReward(Sound):
    """Nothing is wrong with it: it pays an array with one element, and calls `asyncio.run`."""

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        asyncio.run(asyncio.sleep(0))
        return observation, np.array([reward]), terminated, truncated, info


class Lines(Sound):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        return (observation, observation), info


class TwoRewards(Sound):
    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, np.array([reward, reward]), terminated, truncated, info


class NoSeed(Sound):
    def reset(self) -> Any:
        return super().reset()


class Alarming(Sound):
    def step(self, action: str) -> Any:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return super().step(action)


class Raising(Sound):
    def step(self, action: str) -> Step:
        raise ValueError("boom")


class FourValues(Sound):
    def step(self, action: str) -> Step:
        return super().step(action)[:4]


class NoInfo(Sound):
    def reset(self, **given: Any) -> Any:
        return super().reset(**given)[0]


class Rarely(Sound):
    """Raises where the process is not the one that imported pytest."""

    def step(self, action: str) -> Step:
        if "pytest" not in sys.modules:
            raise ZeroDivisionError("rare")
        return super().step(action)


class HelplessExpert(Sound):
    def expert(self) -> Any:
        return type("Guesser", (), {"act": lambda _self, _observation: "1"})()


class Easy(Sound):
    def step(self, action: str) -> Step:
        return self.text(), 1.0, True, False, {"success": True}


class EasyExpert(Easy, HelplessExpert):
    pass


class Unrewarded(Sound):
    def step(self, action: str) -> Step:
        text, reward, terminated, truncated, _ = super().step(action)
        return text, reward, terminated, truncated, {"success": truncated and self.room % 2 == 0}


class CountedKey(Sound):
    asked = 0

    def state_key(self) -> str:
        self.asked += 1
        return f"{self.room} {self.asked}"


class InstanceKey(Sound):
    def state_key(self) -> str:
        return f"{self.room} {id(self)}"


class ListedKey(Sound):
    def state_key(self) -> Any:
        return [self.room, self.steps]


class Printing(Sound):
    def step(self, action: str) -> Step:
        print("debug", action)
        return super().step(action)


class Writing(Sound):
    def step(self, action: str) -> Step:
        os.write(1, b"debug\n")
        return super().step(action)


class Nothing(Sound):
    def admissible_actions(self) -> Any:
        return []


class Worded(Sound):
    def admissible_actions(self) -> Any:
        return "look"


class Functions(Sound):
    tools = (len,)


class HintMethod(Sound):
    def action_hint(self) -> str:
        return "an action"


class WrittenKey(Sound):
    state_key = "key"


class NoExpert(Sound):
    def expert(self) -> Any:
        return 1


class NumberedSnapshot(Sound):
    snapshot = restore = 1


class NoList(Sound):
    def admissible_actions(self) -> Any:
        return None


class Deaf(Sound):
    def admissible_actions(self) -> Any:
        return ["fly"]

    def step(self, action: str) -> Step:
        return *super().step(action)[:4], {"valid": False}


class Numpy(Sound):
    """No fault: numpy's scalars are numbers and flags."""

    def step(self, action: str) -> Step:
        text, reward, terminated, truncated, info = super().step(action)
        return text, np.float32(reward), np.bool_(terminated), np.bool_(truncated), info


class Passing(Sound):
    """No fault: what it is given, it passes on."""

    def reset(self, **k: Any) -> Any:
        return super().reset(**k)


class Doubled(Sound):
    """Changes the data type of the whole process."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        torch = importlib.import_module("torch")  # a global name would be native code of this module
        torch.set_default_dtype(torch.float64)
        return super().reset(seed=seed, options=options)


class Moved(Sound):
    """Changes the current folder."""

    def step(self, action: str) -> Any:
        os.chdir("/")
        return super().step(action)


def number() -> int:
    """Not an environment."""
    return 7
