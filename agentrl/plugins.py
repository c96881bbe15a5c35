"""The table of the core's own named parts; read like any plugin's (see `agentrl.registry`)."""

PLUGINS: dict[str, dict[str, str]] = {
    "advantage": {
        "grpo": "agentrl.algorithms.group_advantages:grpo",
        "dr_grpo": "agentrl.algorithms.group_advantages:dr_grpo",
        "rloo": "agentrl.algorithms.group_advantages:rloo",
        "gigpo": "agentrl.algorithms.step_advantages:gigpo",
        "reinforce": "agentrl.algorithms.return_advantages:reinforce",
        "reinforce++": "agentrl.algorithms.return_advantages:reinforce_plus_plus",
        "reinforce++_baseline": "agentrl.algorithms.group_advantages:reinforce_plus_plus_baseline",
    },
    "engine": {
        "local": "agentrl.serving.local:LocalEngine",
        "scripted": "agentrl.serving.scripted:ScriptedEngine",
        "vllm": "agentrl.serving.vllm:VLLMServer",
        "sglang": "agentrl.serving.sglang:SGLangServer",
        "openai": "agentrl.serving.openai:OpenAIEngine",
    },
    "tracker": {
        "tensorboard": "agentrl.observe.trackers:TensorBoardTracker",
        "wandb": "agentrl.observe.trackers:WandbTracker",
    },
    "tool_parser": {
        "deepseek_v3": "agentrl.render.tool_parsers.deepseek:parse_v3",
        "deepseek_v31": "agentrl.render.tool_parsers.deepseek:parse_v31",
        "deepseek_v32": "agentrl.render.tool_parsers.deepseek_v32:parse",
        "glm": "agentrl.render.tool_parsers.glm:parse",
        "harmony": "agentrl.render.tool_parsers.harmony:parse",
        "hermes": "agentrl.render.tool_parsers.hermes:parse",
        "kimi_k2": "agentrl.render.tool_parsers.kimi_k2:parse",
        "llama3_json": "agentrl.render.tool_parsers.llama3_json:parse",
        "minimax_m2": "agentrl.render.tool_parsers.minimax_m2:parse",
        "mistral": "agentrl.render.tool_parsers.mistral:parse",
        "pythonic": "agentrl.render.tool_parsers.pythonic:parse",
        "qwen3_coder": "agentrl.render.tool_parsers.qwen3_coder:parse",
    },
    "sandbox": {
        "local": "agentrl.sandbox.local:LocalSandbox",
        "docker": "agentrl.sandbox.docker:DockerSandbox",
        "http": "agentrl.sandbox.http:HttpSandbox",
    },
    "scorer": {"environment": "agentrl.reward:EnvironmentReward"},
    "loss": {
        "ppo": "agentrl.algorithms.policy_losses:ppo",
        "dapo": "agentrl.algorithms.policy_losses:dapo",
        "gspo": "agentrl.algorithms.policy_losses:gspo",
        "cispo": "agentrl.algorithms.policy_losses:cispo",
        "reinforce": "agentrl.algorithms.policy_losses:reinforce",
    },
}
