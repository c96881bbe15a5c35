"""Config models, config files and overrides."""

from agentrl.config.config import Config as Config
from agentrl.config.load import config_from as config_from
from agentrl.config.load import dump_config as dump_config
from agentrl.config.load import load_config as load_config
from agentrl.config.load import shipped_configs as shipped_configs

__all__ = ["Config", "config_from", "dump_config", "load_config", "shipped_configs"]
