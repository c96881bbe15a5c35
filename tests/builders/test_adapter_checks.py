"""Configs whose adapters can be sent to servers without the base weights."""

import pytest

from agentrl.builders.adapter_checks import check_adapter_sync, sends_adapters
from agentrl.config.config import Config
from agentrl.errors import ConfigError


def config_of(lora, rank):
    engine = {"type": "vllm", "adapter_rank": rank}
    return Config(environment={"name": "maze"}, model={"path": "m", "lora": lora}, engine=engine)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        (None, "got no model.lora"),
        ({"rank": 9}, "model.lora.rank 9 with engine.adapter_rank 8.*engine.adapter_rank=9"),
        ({"rank": 8, "modules_to_save": ["embed_tokens"]}, "modules are trained whole"),
        ({"rank": 8, "quantize": "nf4"}, "trainer's are in 4 bits"),
    ],
)
def test_more_than_an_adapter_is_refused(lora, told):
    with pytest.raises(ConfigError, match=told):
        check_adapter_sync(config_of(lora, 8))


def test_adapters_are_sent_alone_where_the_config_says_so():
    for lora, rank in [(None, None), ({"rank": 8}, None), ({"rank": 8}, 8)]:
        config = config_of(lora, rank)
        check_adapter_sync(config)
        assert sends_adapters(config.engine) == (rank is not None)
