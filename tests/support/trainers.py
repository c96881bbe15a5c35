"""Looks into a trainer without other ranks: log-probabilities under its weights, and all of its state at once."""

import torch

from agentrl.training.forward.sequences import scored_sequence


def compute_logprobs(trainer, sequences):
    """Of the sampled tokens of each sequence at temperature 1: float32 [sampled] each."""
    policy = trainer._policy
    scored = [
        scored_sequence(s.token_ids, s.loss_mask, s.images, s.routes.experts if policy.replays_routes else None)
        for s in sequences
    ]
    flat = policy.logprobs(scored, temperature=1.0)
    return list(torch.split(flat.logp, [sequence.targets.numel() for sequence in scored]))


def state_of(trainer):
    """Weights, optimizer, schedule and generator; the tensors are the live ones."""
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.checkpoint.state.state_dict()}
    return {**state, **trainer._progress()}


def restore(trainer, state):
    """Take what `state_of` gave."""
    trainer.model.load_state_dict(state["model"])
    trainer.checkpoint.state.load_state_dict(state["optimizer"])
    trainer._restore_progress(state)


def learn_all(learner, progress=lambda _: None, *, until=None):
    """Make a learner's updates, and return the last one's progress."""
    while learner.done < (until or learner.updates):
        last = learner.learn()
        progress(last)
    return last
