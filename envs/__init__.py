"""The shipped environments; each is a plug-in like any other."""

PLUGINS: dict[str, dict[str, str]] = {
    "environment": {
        "household": "agentrl.envs.household.spec:SPEC",
    },
}
