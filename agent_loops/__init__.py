"""The shipped agent loops, which are ordinary plug-ins."""

if __name__ != "agentrl.agent_loops":
    raise ImportError(
        f"{__name__} is the folder of agentrl.agent_loops in a checkout: import agentrl.agent_loops instead"
    )

PLUGINS: dict[str, dict[str, str]] = {
    "agent_loop": {
        "caption_reasoner": "agentrl.agent_loops.caption_reasoner:CaptionReasoner",
        "debate": "agentrl.agent_loops.debate:Debate",
        "external": "agentrl.agent_loops.external:External",
        "memory": "agentrl.agent_loops.memory:Memory",
        "planner_worker": "agentrl.agent_loops.planner_worker:PlannerWorker",
        "propose_solve": "agentrl.agent_loops.propose_solve:ProposeSolve",
        "react_text": "agentrl.agent_loops.react_text:ReactText",
        "self_described": "agentrl.agent_loops.self_described:SelfDescribed",
        "self_play": "agentrl.agent_loops.self_play:SelfPlay",
        "single_turn": "agentrl.agent_loops.single_turn:SingleTurn",
        "step_independent": "agentrl.agent_loops.step_independent:StepIndependent",
        "tool_calling": "agentrl.agent_loops.tool_calling:ToolCalling",
    }
}
