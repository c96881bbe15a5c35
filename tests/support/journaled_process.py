"""Worlds, and a process that plays an episode in them and is killed, for tests of journals."""

import itertools
import shutil

import gymnasium

import agentrl
from agentrl.config.derived import make_agent_loop
from agentrl.engine import SamplingParams
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.journal import JournalFolder
from agentrl.rollout.journal_replay import JournaledEngine, JournaledRunner
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.waits import WaitTracker
from agentrl.serving.scripted import ScriptedAnswer, ScriptedEngine
from agentrl.task import Task

LENGTH = 5


class Walk(gymnasium.Env):
    """Walk forward five times; `taken` has the actions of all worlds."""

    action_hint = "forward"
    observation_space = action_space = gymnasium.spaces.Text(100)
    taken = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.number = 0, int(self.np_random.integers(1000))
        return f"You are at 0 of {self.number}.", {}

    def step(self, action):
        self.taken.append(action)
        self.place += 1
        return self.look(), 0.25, self.place == LENGTH, False, {"place": self.place}

    def look(self):
        return f"You are at {self.place} of {self.number}."

    def admissible_actions(self):
        return [f"forward {self.place}"]


class Changing(Walk):
    """Each observation differs from all earlier ones."""

    count = itertools.count()

    def look(self):
        return f"{super().look()} It is {next(Changing.count)} o'clock."


class Kept(Changing):
    """Changes, but takes snapshots."""

    def snapshot(self):
        return {"place": self.place, "number": self.number, "large": 2**100}

    def restore(self, data):
        assert data["large"] == 2**100
        self.place, self.number = data["place"], data["number"]

    def state_key(self):
        return f"{self.number} {self.place}"


class Hiding(Walk):
    """Looks the same each time, but is in another state."""

    def state_key(self):
        return f"state {next(Changing.count)}"


class Paying(Walk):
    """Looks the same each time, but pays something else."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(next(Changing.count)), *rest


class Forgetful(Kept):
    """Restores another place than the saved one."""

    def restore(self, data):
        super().restore(data | {"place": 1})


class Stuck(Kept):
    def restore(self, data):
        raise RuntimeError("stuck")


class Breaking(Walk):
    """Some steps fail, counted over all worlds."""

    fails = iter(())

    def step(self, action):
        if next(Breaking.fails, False):
            raise RuntimeError("broken")
        return super().step(action)


class Stairs(Walk):
    """Is walked with a tool of its own, whose result differs each time."""

    action_hint = None
    count = itertools.count()

    @property
    def tools(self):
        return (agentrl.tool(self.climb),)

    def climb(self) -> str:
        """Go one step up."""
        self.taken.append("climb")
        self.place += 1
        return f"You are at {self.place}, {self.noise()}."

    def noise(self):
        return "as always"


class KeptStairs(Stairs):
    def noise(self):
        return next(Stairs.count)

    snapshot, restore = Kept.snapshot, Kept.restore


class Slippery(KeptStairs):
    """Its second step fails."""

    def reset(self, **options):
        self.slipped = False
        return super().reset(**options)

    def climb(self) -> str:
        """Go one step up."""
        if self.place == 1 and not self.slipped:
            self.slipped = True
            raise agentrl.ToolError("You slip.")
        return super().climb()


class Still(Walk):
    """Looks the same each time, and takes snapshots."""

    snapshot, restore = Kept.snapshot, Kept.restore


class Process:
    """What one process plays: an episode whose journal is copied before request number `kill_at` of the engine."""

    def __init__(self, path, world, parts, *, kill_at=None, version=0, answers=("forward",), clock=None, **options):
        renderer, make_spec = parts
        self.path, self.kill_at, self.answers, self.renderer = path, kill_at, answers, renderer
        self.copy = path.with_name(f"{path.name}-killed")
        self.stamps = None
        self.told, self.requests, self.taken, self.ended = [], [], [], []
        waits = WaitTracker(clock) if clock else WaitTracker()
        self.journals = JournalFolder(path, waits.clock, self.told.append)
        engine = ScriptedEngine(script=self._script, vocab_size=400, version=version)
        policy = EngineEpisodePolicy(JournaledEngine(engine, self.journals.active), renderer, SamplingParams())
        self.observer = Ends(self.ended, self.journals)
        if kill_at == "end":
            self.observer.before_end = self._copy
        self.pool = EnvPool(
            make_spec(type(world.__name__, (world,), {"taken": self.taken})), waits=waits, step_timeout_s=10_000.0
        )
        loop, loop_options = options.pop("loop", "react_text"), options.pop("loop_options", {"format": "plain"})
        self.runner = JournaledRunner(
            pool=self.pool,
            loop=make_agent_loop(loop, loop_options) if isinstance(loop, str) else loop,
            policy=policy,
            journals=self.journals,
            observer=self.observer,
            **options,
        )

    def _script(self, request):
        turn = int(request.request_id.rpartition("-")[2])
        self.requests.append(turn)
        if turn == self.kill_at:
            self.kill_at = None
            self._copy()
        ids = self.renderer.encoder.encode(self.answers[turn % len(self.answers)])
        return ScriptedAnswer(token_ids=ids, version=self.stamps[turn] if self.stamps else None)

    def _copy(self):
        self.journals.writer.flush()
        shutil.copytree(self.path, self.copy)

    async def play(self, group_id="4-t"):
        task = Task(id="t", environment="world", seed=5)
        trajectory = await self.runner.run(task, group_id=group_id, member=1, seed=1)
        await self.runner.close()
        self.journals.writer.flush()
        return trajectory


class Ends(RolloutObserver):
    def __init__(self, ended, journals):
        self.ended, self.journals = ended, journals
        self.before_end = lambda: None

    def on_start(self, trajectory):
        self.journals.begin(trajectory.id)

    def on_end(self, trajectory):
        self.before_end()
        self.journals.end_replay(trajectory)
        self.ended.append((trajectory.id, trajectory.outcome))
        self.journals.end(trajectory)
