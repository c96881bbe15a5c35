"""Settings: models, files, overrides."""

from agentrl.config.loading import config_from as config_from
from agentrl.config.loading import dump_config as dump_config
from agentrl.config.loading import load_config as load_config
from agentrl.config.loading import shipped_configs as shipped_configs
from agentrl.config.schema import Config as Config

__all__ = ["Config", "config_from", "dump_config", "load_config", "shipped_configs"]
