"""Your own training loop for a model that `agentrl serve-training` serves; the same file runs against Tinker.

Start the server, and this file in another terminal:

    agentrl serve-training model.path=smollm2-135m-instruct
    TINKER_BASE_URL=http://127.0.0.1:8400 TINKER_API_KEY=tml-local python examples/12_own_training_loop.py

Prints the loss of a sentence that a LoRA adapter memorizes, and the reward of a policy that prefers even token ids.
"""

import argparse
import os

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from tinker import types


def learn_a_sentence(trainer: tinker.TrainingClient, text: str, *, steps: int) -> list[float]:
    """Train on a text until it is memorized; return the loss per token of each step."""
    ids = trainer.get_tokenizer().encode(text)
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    losses = []
    for _ in range(steps):
        passed = trainer.forward_backward([datum], "cross_entropy")
        updated = trainer.optim_step(types.AdamParams(learning_rate=5e-3))  # sent before the pass has finished
        losses.append(passed.result().metrics["loss:sum"] / (len(ids) - 1))
        updated.result()
    return losses


def prefer_even_ids(trainer: tinker.TrainingClient, prompt: list[int], *, steps: int) -> list[float]:
    """Reinforce answers by their share of tokens with even ids; return the mean reward of each step."""
    rewards = []
    for _ in range(steps):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, stop=[])
        answers = sampler.sample(types.ModelInput.from_ints(prompt), 32, params).result().sequences
        scores = [sum(token % 2 == 0 for token in answer.tokens) / len(answer.tokens) for answer in answers]
        mean = sum(scores) / len(scores)
        data = [make_datum(prompt, answer, score - mean) for answer, score in zip(answers, scores, strict=True)]
        passed = trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        passed.result()
        rewards.append(mean)
    return rewards


def make_datum(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """Convert an answer to training data: the prompt, the sampled tokens, and their advantage."""
    ids, before = [*prompt, *answer.tokens], len(prompt) - 1
    inputs = {
        "target_tokens": ids[1:],
        "logprobs": [0.0] * before + list(answer.logprobs or []),
        "advantages": [0.0] * before + [advantage] * len(answer.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the server's name of the model")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tinker.ServiceClient() as service:
        trainer = service.create_lora_training_client(base_model=options.model, rank=8, seed=0).result()
        losses = learn_a_sentence(trainer, "The cat sat on the mat.", steps=options.steps)
        print(f"loss per token {losses[0]:.2f}, then {losses[-1]:.2f}")
        path = trainer.save_state("sentence", overwrite=True).result().path
        print(f"saved as {path}")
        again = service.create_training_client_from_state_with_optimizer(path).result()
        prompt = again.get_tokenizer().encode("Once upon a time")
        rewards = prefer_even_ids(again, prompt, steps=options.steps)
        print(f"reward {rewards[0]:.2f}, then {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
