"""An environment for tests of whole runs, whose tasks are proposed: a letter to write, with two attempts at each."""

import gymnasium as gym

from agentrl.env import EnvironmentSpec
from agentrl.task import ProposedTasks, Task

KINDS = ("vowel", "consonant")


class Proposed(gym.Env):
    observation_space = action_space = gym.spaces.Text(100)
    action_hint = "some letters"

    def reset(self, *, seed=None, options=None):
        self.kind, self.letter = options["kind"], options.get("letter")
        self.players = ["solver"] if self.letter else ["proposer", "solver#1", "solver#2"]
        self.turn = 0
        return self.show(), {"players": self.players, "player": self.players[0], "task_type": self.kind}

    def show(self):
        return f"Write {self.letter}." if self.letter else f"Write a {self.kind}."

    def step(self, action):
        self.turn += 1
        info = {"player": self.players[min(self.turn, len(self.players) - 1)], "valid": True}
        if self.letter is None:
            found = [letter for letter in action if letter.isalpha() and (letter in "aeiou") == (self.kind == "vowel")]
            if not found:
                return "No.", 0.0, True, False, {"success": False, "valid": False}
            self.letter = found[0]
            return self.show(), 0.0, False, False, {**info, "proposals": [{"kind": self.kind, "letter": found[0]}]}
        is_right, is_over = self.letter in action, self.turn == len(self.players)
        reward = float(is_right and self.players == ["solver"])
        return self.show(), reward, is_over, False, {**info, "success": is_right, "valid": bool(action.strip())}


class Tasks(ProposedTasks):
    def __init__(self, split):
        super().__init__(capacity=8, kinds=KINDS)

    def request(self, kind, rng, buffer):
        return Task(id=f"request-{kind}-{rng.getrandbits(40)}", environment="proposed", options={"kind": kind})

    def pose(self, proposal, rng):
        task_id = f"write-{proposal['letter']}-{rng.getrandbits(40)}"
        return Task(id=task_id, environment="proposed", options=dict(proposal), type=proposal["kind"])


SPEC = EnvironmentSpec(name="proposed", make=Proposed, tasks=Tasks, splits=("train",))
