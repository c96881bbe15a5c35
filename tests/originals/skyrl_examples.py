"""An environment of SkyRL's kind, with a tool."""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool


class Adder(ToolGroup):
    """A calculator."""

    def __init__(self) -> None:
        super().__init__(name="adder")

    @tool
    def add(self, text: str) -> str:
        """Add the numbers of a text."""
        return str(sum(map(int, text.split("+"))))


class Sums(BaseTextEnv):
    """Adds for the policy, which has to repeat the sum; each call costs 0.1."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.truth = extras["reward_spec"]["ground_truth"]
        self.cost = env_config.cost
        self.max_turns = extras.get("max_turns", 3)
        self.init_tool_groups([Adder()])

    def init(self, prompt: Any) -> Any:
        """Add a hint to the prompt."""
        return [*prompt, {"role": "user", "content": "You may write <add>1+2</add>."}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Call the tool, or judge the answer."""
        self.turns += 1
        if "<add>" not in action or self.turns >= self.max_turns:
            return BaseTextEnvStepOutput(observations=[], reward=float(self.truth in action), done=True, metadata={})
        told = self._execute_tool("adder", "add", [action.split("<add>")[1].split("</add>")[0]])
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": told}], reward=-self.cost, done=False, metadata={}
        )

    def get_metrics(self) -> dict[str, Any]:
        """Count the turns."""
        return {"turns": self.turns, "truth": self.truth}
