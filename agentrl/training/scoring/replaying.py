"""Router replay for a model's forward passes, tried before it is relied on."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.training.models.router_replay import RouterReplay
from agentrl.training.ranks.sharding import reshard, within_forward
from agentrl.training.scoring.layout import Layout
from agentrl.training.scoring.sequences import ScoredSequence

TOKENS = 8


@torch.no_grad()
def replaying(model: PreTrainedModel, layout: Layout) -> Layout:
    """The layout of a model, with a replay that all of its routers were seen to follow.

    Args:
        model: A mixture; ranks that share it call together.
        layout: How its sequences lie.

    Raises:
        ConfigError: it is no mixture, or one whose routers cannot be told.
    """
    replay = RouterReplay(model)
    layers, chosen = replay.shape
    ids, targets = torch.arange(TOKENS) % model.config.vocab_size, torch.zeros(0, dtype=torch.long)
    routes = torch.arange(chosen, dtype=torch.uint8).repeat(TOKENS, layers)
    told = ScoredSequence(input_ids=ids, positions=targets, targets=targets, routes=routes)
    with replay.counted() as count:
        within_forward(model, Layout(replay=replay).read, [told], 0, None)
    reshard(model)
    if [differing.numel() for differing in count.differing] != [TOKENS] * layers:
        raise ConfigError(
            "this model cannot replay routes",
            got=f"{type(model).__name__}, whose layers are not told them",
            hint="set trainer.mixture.replay=false",
        )
    return replace(layout, replay=replay)
