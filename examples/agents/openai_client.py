"""An agent that plays any environment with OpenAI's own package, unchanged. It needs `pip install openai`.

    agentrl eval --model smollm2-135m-instruct --env guess_number agent.loop=external \\
        'agent.options={function: "openai_client:play", answer: none}'

run in this folder. The policy answers, and every token is recorded: `agentrl train` trains it with the same options.
"""

import re
import ssl

import openai

TLS = ssl.create_default_context()
"""Shared TLS context; otherwise, the client creates one in each episode, which takes longer than the episode."""
FORM = "Answer with one action inside <action> </action>."


async def play(task):
    """Ask for an action, take it, and show the observation, until the environment is done."""
    http = openai.DefaultAsyncHttpxClient(verify=TLS)
    async with openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, http_client=http) as client:
        messages = [
            {"role": "system", "content": f"{task.instructions}\n\n{FORM}"},
            {"role": "user", "content": task.prompt},
        ]
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, stop=["</action>"])
            answer = reply.choices[0].message
            messages.append(answer)
            found = re.search(r"<action>(.*)", answer.content or "", re.DOTALL)
            if found is None:
                if reply.choices[0].finish_reason == "length" and not answer.content:
                    return  # the episode's budget is spent
                messages.append({"role": "user", "content": FORM})
                continue
            result = await task.step(found[1].strip())
            if result.done:
                return
            messages.append({"role": "user", "content": result.observation})
