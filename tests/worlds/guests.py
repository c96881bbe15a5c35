"""An environment with the role `user`, played by the runtime: the agent has to say the letter that the user knows."""

import random

import gymnasium

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.task import SeedTasks

STOP = "#STOP#"


class Guests(gymnasium.Env):
    """Whatever the agent says is heard by the guest, who answers; the right letter ends the episode."""

    observation_space = action_space = gymnasium.spaces.Text(100)
    action_hint = "a letter, for example: a"

    def __init__(self, played="role", most=4):
        self.played, self.most = played, most

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = "abc"[random.Random(seed).randrange(3)]
        self.next, self.heard, self.said = "user", [], []
        return "A desk opens.", {
            "players": ["agent", "user"],
            "player": "user",
            "instructions": {"user": f"Your secret is {self.secret}."},
        }

    def step(self, action):
        asked, self.next = self.next, "user" if self.next == "agent" else "agent"
        if asked == "agent":
            self.heard.append(action)
            return f"The agent says: {action}", 0.25, False, False, {"player": "user"}
        self.said.append(action)
        gone = action.endswith(STOP) or len(self.heard) >= self.most
        solved = bool(self.heard) and self.secret in self.heard[-1]
        info = {"player": "agent", "success": solved, "reward_components": {"heard": 1.0}}
        return f"The guest says: {action}", float(solved), gone or solved, False, info

    def expert(self):
        return self

    def act(self, observation):
        return f"I was told {self.secret}" if self.next == "user" else self.secret

    def state_key(self):
        return f"{self.heard} {self.said}"


def roles_of(played="role", **_options):
    return ("user",) if played == "role" else ()


def tasks(split, played="role", most=4):
    return SeedTasks("guests", split)


SPEC = EnvironmentSpec(
    name="guests",
    make=Guests,
    tasks=tasks,
    roles_of=roles_of,
    options={"played": "role", "most": 4},
    isolation=Isolation.INLINE,
    instructions="Say the letter.",
)
