"""A DSPy program, which writes its own prompts, answers a question. It needs `pip install dspy`.

agent:
  loop: external
  options:
    command: "python examples/agents/dspy_question.py"
    variables: {LITELLM_LOCAL_MODEL_COST_MAP: "True"}

Without `cache=False`, DSPy would repeat the answers of an earlier episode. An answer that is not in DSPy's format is
the policy's error. By default, DSPy would ask once more with a JSON schema, which the option `forms: free` allows.
"""

import sys

import dspy


def main():
    dspy.configure(
        lm=dspy.LM("openai/policy", cache=False, num_retries=0),
        adapter=dspy.ChatAdapter(use_json_adapter_fallback=False),
    )
    answer = dspy.ChainOfThought("question -> answer")
    print(answer(question=sys.stdin.read()).answer)


if __name__ == "__main__":
    main()
