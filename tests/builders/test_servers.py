"""The transport that a config selects."""

import pytest

from agentrl.builders.servers import make_transport
from agentrl.config.engines import SGLangEngineConfig
from agentrl.weights import CollectiveTransport, FolderTransport, IpcTransport, TensorTransport


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("shared_memory", FolderTransport),
        ("disk", FolderTransport),
        ("collective", CollectiveTransport),
        ("cuda_ipc", IpcTransport),
        ("tensor", TensorTransport),
    ],
)
async def test_every_transport_of_the_config_is_made(name, kind, tmp_path):
    transport = make_transport(SGLangEngineConfig(transport=name), tmp_path / "shared")
    assert isinstance(transport, kind)
    assert (tmp_path / "shared").is_dir() == (name == "disk")
    await transport.close()
