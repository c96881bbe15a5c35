"""A LangGraph agent that acts through a tool. It needs `pip install langgraph langchain-openai requests`.

agent:
  loop: external
  options: {command: "python examples/agents/langgraph_agent.py", answer: none}
"""

import json
import os

import requests
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def act(action: str) -> str:
    """Take one action and return the observation."""
    key = {"Authorization": f"Bearer {os.environ['AGENTRL_SECRET']}"}
    taken = requests.post(f"{os.environ['AGENTRL_URL']}/step", json={"action": action}, headers=key, timeout=600)
    return taken.json()["observation"] if taken.ok else "It is over: say goodbye."


def main():
    with open(os.environ["AGENTRL_TASK"]) as file:
        task = json.load(file)
    model = ChatOpenAI(model="policy").bind_tools([act])

    def answer(state: MessagesState):
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([act]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    messages = [("system", task["instructions"]), ("user", task["prompt"])]
    last = graph.compile().invoke({"messages": messages}, {"recursion_limit": 100})["messages"][-1]
    print(last.content)


if __name__ == "__main__":
    main()
