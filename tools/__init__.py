"""The shipped tools; each is a plug-in like any other."""

if __name__ != "agentrl.tools":
    raise ImportError(f"{__name__} is the folder of agentrl.tools in a checkout: import agentrl.tools instead")

PLUGINS: dict[str, dict[str, str]] = {
    "tool": {
        "calculator": "agentrl.tools.calculator:calculator",
    },
}
