"""An environment for tests of whole runs: write vowels, for three turns. Every policy can improve its reward."""

import itertools
import os
import time

import gymnasium as gym


class Letters(gym.Env):
    observation_space = action_space = gym.spaces.Text(100)
    action_hint = "some letters"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        self.wanted = "aeiou"[int(self.np_random.integers(5))]
        return f"Write {self.wanted}.", {}

    def step(self, action):
        self.turn += 1
        reward = sum(letter in "aeiou" for letter in action) / (1 + len(action))
        return "More.", reward, self.turn == 3, False, {"success": reward > 0.2}

    def expert(self):
        return Expert()


class Expert:
    def act(self, observation):
        return "aeiou"


class Raising(Letters):
    """Fails in every third episode."""

    count = 0

    def step(self, action):
        Raising.count += 1
        if Raising.count % 3 == 0:
            raise RuntimeError("the letters ran out")
        return super().step(action)


class Hanging(Letters):
    """Now and then a step of the policy, never one of the expert, answers long after its deadline."""

    count = itertools.count(1)

    def step(self, action):
        if action != "aeiou" and next(Hanging.count) % 23 == 0:
            time.sleep(0.3)
        return super().step(action)


class Jittering(Letters):
    """Steps of the policy take a time that differs each time."""

    def step(self, action):
        if action != "aeiou":
            time.sleep(os.urandom(1)[0] / 1e5)
        return super().step(action)


class Pausing(Letters):
    """Steps of the policy take a while."""

    def step(self, action):
        if action != "aeiou":
            time.sleep(0.15)
        return super().step(action)


class Gated(Letters):
    """Steps of the policy wait for a file."""

    def __init__(self, gate, **options):
        super().__init__(**options)
        self.gate = gate

    def step(self, action):
        until = time.monotonic() + 240.0
        while action != "aeiou" and not os.path.exists(self.gate):
            if time.monotonic() > until:
                raise TimeoutError(f"nobody opened {self.gate}")
            time.sleep(0.05)
        return super().step(action)


class Changing(Pausing):
    """Shows something else each time that it is played."""

    def step(self, action):
        _, *result = super().step(action)
        return f"More {os.urandom(2).hex()}.", *result


class Saving(Changing):
    """Shows something else each time, but takes snapshots."""

    def snapshot(self):
        return {"turn": self.turn, "wanted": self.wanted}

    def restore(self, data):
        self.turn, self.wanted = data["turn"], data["wanted"]


class Broken(Letters):
    def step(self, action):
        raise RuntimeError("always")


class NotFinite(Letters):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


class Silent(Letters):
    """Does not tell whether it is solved."""

    def step(self, action):
        *result, _ = super().step(action)
        return *result, {}


class Digits(Letters):
    """Another world: digits are wanted, for two turns."""

    def step(self, action):
        self.turn += 1
        reward = sum(letter.isdigit() for letter in action) / (1 + len(action))
        return "Again.", reward, self.turn == 2, False, {"success": reward > 0.1, "task_type": "digits"}


class Alone(gym.Env):
    """Nobody shows how it is done."""

    observation_space = action_space = gym.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Write.", {}

    def step(self, action):
        return "Done.", 1.0, True, False, {}


def has_vowels(trajectory, task):
    text = "".join(trajectory.completions)
    return sum(letter in "aeiou" for letter in text) / (1 + len(text))


def has_others(trajectory, task):
    """What is left of 1, so that every episode earns 1 in all."""
    return 1 - has_vowels(trajectory, task)


def against_success(trajectory, task):
    return 1.0 - 2.0 * bool(trajectory.success) + has_vowels(trajectory, task) / 1000


def constant(trajectory, task):
    return 0.75


def raising(trajectory, task):
    """Fails for answers of an odd length."""
    text = "".join(trajectory.completions)
    if len(text) % 2:
        raise ValueError("an odd answer")
    return has_vowels(trajectory, task)
