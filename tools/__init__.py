"""The shipped tools; each is a plug-in like any other."""

PLUGINS: dict[str, dict[str, str]] = {
    "tool": {
        "calculator": "agentrl.tools.calculator:calculator",
    },
}
