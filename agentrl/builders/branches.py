"""Runners and checks of groups whose episodes branch (``agent.branch``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentrl.algorithms.traits import uses_branches
from agentrl.builders.episodes import RunEnvironment
from agentrl.config.config import Config
from agentrl.config.derived import agent_loop_class, make_agent_loop, per_environment_configs
from agentrl.config.estimate import EstimateRow
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup
from agentrl.rollout.branches import BranchRunner
from agentrl.rollout.groups import Group
from agentrl.rollout.roles.environment_roles import roles_of_environment


def build_branch_runners(environments: Sequence[RunEnvironment]) -> dict[str, BranchRunner]:
    """Build the runners of groups whose episodes branch, by the label of their environment; empty without branches."""
    return {
        environment.label: BranchRunner(environment.runner, branch)
        for environment in environments
        if (branch := environment.config.agent.branch) is not None
    }


def branch_starts(runners: Mapping[str, BranchRunner]) -> Callable[[Group, int], Awaitable[None] | None]:
    """Join the runners' `BranchRunner.wait_to_start` into one function, which finds the runner of a group."""

    def wait_to_start(group: Group, member: int) -> Awaitable[None] | None:
        runner = runners.get(group.draw.settings)
        return None if runner is None else runner.wait_to_start(group, member)

    return wait_to_start


def check_branches(config: Config) -> None:
    """Check that episodes can branch as ``agent.branch`` requires, and that the estimator uses it.

    Raises:
        ConfigError: an agent loop, roles or another feature does not work with branches; or only one of branches and
            an estimator that uses them is configured.
        UnknownNameError: the estimator or an agent loop is not registered.
    """
    parts = per_environment_configs(config)
    for part in parts:
        _check_estimator(part.config)
    branch, algorithm = config.agent.branch, config.algorithm
    if branch is None:
        return
    if algorithm.group_size <= branch.roots:
        raise ConfigError(
            "no episode of a group can branch",
            got=f"algorithm.group_size {algorithm.group_size} with agent.branch.roots {branch.roots}",
            expected=f"algorithm.group_size of at least {branch.roots + 1}",
        )
    _check_features(config)
    for part in parts:
        _check_loop(part.config)


def _check_estimator(config: Config) -> None:
    """Check that the estimator compares episodes that branch if, and only if, episodes branch."""
    name = config.algorithm.advantage
    compares = uses_branches.of(lookup(Kind.ADVANTAGE, name))
    if compares and config.agent.branch is None:
        raise ConfigError(
            f"the advantage estimator {name} compares episodes that branch, but agent.branch is not set",
            got="no agent.branch",
            expected="agent.branch={turns: [1]}, or algorithm.advantage=rloo, which is the same without branches",
        )
    if config.agent.branch is not None and not compares:
        raise ConfigError(
            f"the advantage estimator {name} compares episodes as if they were independent",
            got="agent.branch, whose episodes share turns",
            expected="algorithm.advantage=tree",
        )


def _check_features(config: Config) -> None:
    judge = config.agent.judge
    excluded = {
        "algorithm.expert": config.algorithm.expert and "set",
        "agent.judge.compare": judge and judge.compare and "set",
        "adapters": ", ".join(config.named_adapters),
        "trainer.moe.router_replay": config.trainer.router_replay,
    }
    for key, value in excluded.items():
        if value:
            raise ConfigError(
                f"{key} does not work with agent.branch", got=f"{key} {value}", expected="only one of the two"
            )


def _check_loop(config: Config) -> None:
    agent = config.agent
    loop, environment_roles = make_agent_loop(agent.loop, agent.options), roles_of_environment(config)
    roles = [*loop.roles, *agent.called_roles, *environment_roles]
    if roles:
        raise ConfigError(
            "agent.branch needs episodes of one agent: roles may answer in a different order when turns are repeated",
            got=f"the roles {', '.join(roles)}",
            expected="a loop and an environment without roles, or agent.branch=null",
        )
    if not agent_loop_class(agent.loop).is_deterministic:
        raise ConfigError(
            f"episodes of the agent loop {agent.loop} cannot be continued from one of their turns",
            got="agent.branch",
            expected="a loop whose requests depend only on the episode, or agent.branch=null",
        )


def branch_rows(config: Config) -> list[EstimateRow]:
    """Return a dry run's row about branches: name, value, source."""
    branch = config.agent.branch
    if branch is None:
        return []
    if branch.by_entropy:
        where = "before the least certain turns"
    elif branch.every is not None:
        where = f"after every {branch.every} turns"
    else:
        where = f"after turns {', '.join(map(str, branch.turns or ()))}"
    others = config.algorithm.group_size - branch.roots
    return [("branches per group", f"{others} from {branch.roots} roots", f"{where} (agent.branch)")]
