"""Two simulated nodes on this machine, for tests of runs on a cluster; without Ray they are skipped."""

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-cluster")


@pytest.fixture(scope="session", autouse=True)
def _quiet_ray():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture(scope="session")
def nodes():
    """A cluster whose first node trains and whose second one has room for engines."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "resources": {"trainer": 4}, "include_dashboard": False},
    )
    cluster.add_node(num_cpus=4, resources={"engine": 4})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def placed(nodes):
    """Overrides of a run on them."""
    return (
        f"cluster={{address: '{nodes.address}', rank: {{CPU: 1, trainer: 1}}, engine: {{CPU: 1, engine: 1}}}}",
        "cluster.timeout_s=120",
    )
