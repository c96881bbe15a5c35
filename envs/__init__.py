"""The shipped environments; each is a plug-in like any other."""

if __name__ != "agentrl.envs":
    raise ImportError(f"{__name__} is the folder of agentrl.envs in a checkout: import agentrl.envs instead")

PLUGINS: dict[str, dict[str, str]] = {
    "environment": {
        "alfworld": "agentrl.envs.household.alfworld.spec:SPEC",
        "frozen_lake": "agentrl.envs.frozen_lake:SPEC",
        "guess_number": "agentrl.envs.guess_number:SPEC",
        "household": "agentrl.envs.household.spec:SPEC",
    },
}
