"""Small worlds for the runtime's tests; a module of its own so that worker processes can import it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import gymnasium

import agentrl


class Corridor(gymnasium.Env):
    """Walk forward `length` times."""

    action_hint = "forward or back"
    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self, length=3, tell_success=True):
        self.length = length
        self.tell_success = tell_success
        self.place = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = (options or {}).get("length", self.length)
        self.place = 0
        return f"You are at 0. Your task is to: reach {self.length}.", {"task_type": "walk"}

    def step(self, action):
        valid = action in ("forward", "back")
        self.place += {"forward": 1, "back": -1}.get(action, 0)
        done = self.place >= self.length
        info = {"valid": valid, "reward_components": {"walked": 1.0}}
        if done and self.tell_success:
            info["success"] = True
        return f"You are at {self.place}.", float(done), done, False, info

    def admissible_actions(self):
        return ["forward", "back"]

    def state_key(self):
        return f"place {self.place}"

    def expert(self):
        return Forward()


class Forward:
    def act(self, observation):
        return "forward"


class Stumbler(Corridor):
    """Its expert knows what to do, and what not to do."""

    def step(self, action):
        self.actions = [*getattr(self, "actions", []), action]
        return super().step(action)

    def expert(self):
        return Stumbling()


class Stumbling(Forward):
    def mistake(self, rng):
        return rng.choice(["stumble", "trip"])


@agentrl.tool
def whisper(text: str) -> str:
    """Say something to nobody.

    Args:
        text: What to say.
    """
    return f"{os.getpid()} heard {text}"


class Faulty(gymnasium.Env):
    """Goes wrong in the way that `fault` says, in step number `at`."""

    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self, fault="none", at=1):
        self.fault = fault
        self.at = at
        self.steps = 0
        if fault == "make":
            raise RuntimeError("no such world")

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        self.fault = (options or {}).get("fault", self.fault)
        if self.fault == "child":
            with open(options["pipe"], "wb") as pipe:  # waits for the reader, so that the child has it for certain
                subprocess.Popen(["sleep", "1000"], stdout=pipe, start_new_session=options.get("apart", False))
        if self.fault == "reset":
            raise RuntimeError("the world is gone")
        return "Hello.", {"process": os.getpid()}

    def step(self, action):
        self.steps += 1
        if self.steps < self.at:
            return "Go on.", 0.0, False, False, {}
        if self.fault == "talk":
            print("noise", sys.stdin.read(), flush=True)
        if self.fault == "raise":
            raise ValueError("boom")
        if self.fault == "signal":
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        if self.fault == "run":
            with contextlib.closing(asyncio.sleep(0)) as work:
                asyncio.run(work)
        if self.fault == "hang":
            time.sleep(30)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        return {
            "nan": ("x", float("nan"), False, False, {}),
            "reward": ("x", "many", False, False, {}),
            "component": ("x", 0.0, False, False, {"reward_components": {"style": float("nan")}}),
            "four": ("x", 0.0, False, {}),
            "flag": ("x", 0.0, None, False, {}),
            "info": ("x", 0.0, False, False, None),
            "success": ("x", 0.0, False, False, {"success": "no"}),
            "task_type": ("x", 0.0, False, False, {"task_type": 5}),
            "surrogate": ("x \ud83d", 0.0, False, False, {}),
            "observation": (17, 0.0, False, False, {}),
            "function": ("x", 0.0, False, False, {"f": lambda: None}),
        }.get(self.fault, ("Bye.", 1.0, True, False, {"process": os.getpid()}))

    def go_wrong(self, fault):
        """Hang, or end the process, whatever the task says."""
        self.fault, self.at = fault, 0
        return self.step("x")


def unreadable():
    raise RuntimeError("nothing to read here")


class Unreadable:
    """It can be sent, and not received."""

    def __reduce__(self):
        return unreadable, ()


class Whispering(Faulty):
    """Brings a tool of its own."""

    tools = (whisper,)


@agentrl.tool(max_tokens=9)
def tip(amount: float) -> agentrl.ToolResult:
    """Leave something.

    Args:
        amount: How much.
    """
    return agentrl.ToolResult("thanks", reward=-amount, metrics={"tips": 1})


class Tipping(Corridor):
    """Brings a tool that gives rewards."""

    tools = (tip,)


class Stairs(Corridor):
    """A corridor that is walked with a tool."""

    action_hint = None

    @property
    def tools(self):
        return (agentrl.tool(self.climb),)

    def climb(self) -> str:
        """Go one step up."""
        self.place += 1
        return "You climb."


class Remote(agentrl.AsyncEnv):
    """An asynchronous world that may never answer."""

    def __init__(self, hang=False):
        self.hang = hang
        self.closed = False

    async def reset(self, *, seed=None, options=None):
        return "Hello.", {}

    async def step(self, action):
        await asyncio.sleep(30 if self.hang else 0)
        return "Bye.", 1.0, True, False, {}

    async def close(self):
        self.closed = True


class Judged(Corridor):
    """Pays for the place where an unfinished episode ends, once."""

    judgement = None
    """What `final_reward` returns instead of the place."""

    def __init__(self, judgement=None, **options):
        super().__init__(**options)
        self.judgement = judgement
        self.tools = [agentrl.tool(self.leave)]

    def reset(self, **given):
        self.judged = 0
        return super().reset(**given)

    def leave(self) -> agentrl.ToolResult:
        """Leave the corridor."""
        return agentrl.ToolResult("You left.", reward=0.25, stop=True)

    def final_reward(self):
        self.judged += 1
        if self.judgement is not None:
            return self.judgement
        return self.judged * self.place / 10, {"success": self.place == 2, "reward_components": {"place": self.place}}
