"""The shipped environments' ids in Gymnasium's registry.

Importing this module registers them. Gymnasium 1.0 and later load no plug-ins by themselves, but import what stands
before a colon: ``gymnasium.make("agentrl.envs.registration:agentrl/Household-v0")``. agentrl finds the ids without it.
"""

from __future__ import annotations

import gymnasium

ENTRY_POINTS = {
    "agentrl/Alfworld-v0": "agentrl.envs.household.alfworld.environment:make_alfworld",
    "agentrl/FrozenLake-v0": "agentrl.envs.frozen_lake:FrozenLake",
    "agentrl/GuessNumber-v0": "agentrl.envs.guess_number:GuessNumber",
    "agentrl/Household-v0": "agentrl.envs.household.environment:HouseholdEnv",
}


def register_all() -> None:
    """Register every id that is not registered yet; also the entry point of the group ``gymnasium.envs``."""
    for env_id, entry_point in ENTRY_POINTS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=entry_point, reward_threshold=1.0)


register_all()
