"""The table of the core's own named parts; read like any plugin's (see `agentrl.registry`)."""

PLUGINS: dict[str, dict[str, str]] = {
    "engine": {
        "local": "agentrl.serving.local:LocalEngine",
        "scripted": "agentrl.serving.scripted:ScriptedEngine",
        "openai": "agentrl.serving.openai:OpenAIEngine",
    },
    "tracker": {
        "tensorboard": "agentrl.observe.trackers:TensorBoardTracker",
        "wandb": "agentrl.observe.trackers:WandbTracker",
    },
    "tool_parser": {
        "hermes": "agentrl.render.tool_parsers.hermes:parse",
        "llama3_json": "agentrl.render.tool_parsers.llama3_json:parse",
        "qwen3_coder": "agentrl.render.tool_parsers.qwen3_coder:parse",
    },
    "scorer": {"environment": "agentrl.reward:EnvironmentReward"},
}
