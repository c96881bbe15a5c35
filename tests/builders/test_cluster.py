"""Requirements of a cluster config, and that only one folder imports Ray; runs without Ray."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from agentrl.builders.checks import check_training
from agentrl.builders.environment_nodes import check_environment_nodes
from agentrl.builders.ray.actors import check_shared
from agentrl.builders.ray.connection import ClusterNode, ClusterPlace, gloo_variables, interface_of
from agentrl.config import dump_config, load_config
from agentrl.config.derived import ResourceBundle, engine_bundles, rank_bundles
from agentrl.config.estimate import rows
from agentrl.errors import ConfigError, UsageError
from agentrl.evaluation.settings import evaluation_config
from agentrl.runs.sft import check_warm_start

QUICK = ("trainer.optimizer=adamw", "trainer.lanes=1")


def quickstart(*overrides):
    return load_config("quickstart", [*QUICK, *overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster=slurm", "cluster.type.*'ray'"),
        ("cluster.address=here", "here is not a cluster address: write auto, HOST:PORT or ray://HOST:PORT"),
        ("cluster.rank={CPU: 1.5}", "1.5 CPU cannot be reserved: write a whole number, or a share below 1"),
        ("cluster.rank={cpu: 1}", "cpu is written CPU"),
        ("cluster.engine={GPU: 0}", "no resources"),
        ("cluster.engines=0", "at least 1"),
        ("cluster.adress=auto", "unknown key cluster.adress; did you mean cluster.address?"),
    ],
)
def test_a_cluster_that_cannot_be_meant(override, message):
    with pytest.raises(ConfigError, match=message):
        quickstart(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=vllm", "engine.transport=cuda_ipc"], "assigns separate GPUs"),
        (["engine=vllm", "engine.gpus=[0]"], "engine.gpus is ignored on a cluster"),
        (["engine=vllm", "cluster.engines=2"], "cluster.engines is ignored with engine vllm: got 2"),
        (["engine=vllm", "engine.servers=[http://a:1]", "cluster.engine={CPU: 1}"], "cluster.engine is ignored"),
        (["engine=vllm", "engine.tensor_parallel=2", "cluster.engine={GPU: 1}"], "expected GPU 2"),
        (["model.device=cuda:1"], "model.device names a GPU"),
    ],
)
def test_what_a_cluster_makes_meaningless(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_training(quickstart("cluster=ray", *overrides))


def test_what_runs_on_this_machine_refuses_a_cluster(tmp_path):
    with pytest.raises(ConfigError, match="a warm start runs on this machine"):
        check_warm_start(quickstart("cluster=ray"))
    with pytest.raises(ConfigError, match="an evaluation runs on this machine"):
        evaluation_config(env="household/test_unseen", model="some/model", overrides=["cluster=ray"])
    (tmp_path / "config.yaml").write_text(dump_config(quickstart("cluster=ray")))
    assert evaluation_config(model=str(tmp_path)).cluster is None


def test_resources_by_default_and_by_choice():
    config = quickstart("cluster=ray", "trainer.processes=2", "cluster.engines=2")
    section = config.cluster
    ranks = [ResourceBundle(f"rank {rank}", {"CPU": 1}) for rank in range(2)]
    assert rank_bundles(config, section, gpus=False) == ranks
    assert [bundle.resources for bundle in rank_bundles(config, section, gpus=True)] == [{"CPU": 1, "GPU": 1}] * 2
    assert [bundle.name for bundle in engine_bundles(config, section, gpus=True)] == ["server-0", "server-1"]
    servers = quickstart("cluster.address=auto", "engine=vllm", "engine.replicas=3", "engine.tensor_parallel=4")
    assert engine_bundles(servers, servers.cluster, gpus=True)[2] == ResourceBundle("server-2", {"CPU": 1, "GPU": 4})
    attached = quickstart("cluster=ray", "engine=vllm", "engine.servers=[http://a:1]")
    assert engine_bundles(attached, attached.cluster, gpus=True) == []
    chosen = quickstart("cluster.rank={CPU: 4, node_a: 1}", "model.device=cpu")
    assert rank_bundles(chosen, chosen.cluster, gpus=True)[0].in_words == "CPU 4, node_a 1"


def test_a_dry_run_shows_where_everything_will_be():
    config = quickstart("cluster={address: auto, engine: {CPU: 2, engine: 1}}", "trainer.processes=3")
    found = {name: (value, how) for name, value, how in rows(config)}
    assert found["cluster"] == ("Ray at auto", "cluster.address; pack (cluster.strategy)")
    assert found["rank 0"] == ("this process, with CPU 1, and GPUs if there are any", "cluster.rank")
    assert found["rank 1 to rank 2"][0].startswith("an actor each, with CPU 1")
    assert found["server-0"] == ("an actor each, with CPU 2, engine 1", "cluster.engine")
    assert "cluster" not in {name for name, _, _ in rows(quickstart())}
    spread = {name: value for name, value, _ in rows(quickstart("cluster.environments=2"))}
    assert spread["environments-0 to environments-1"] == "an actor each, with CPU 1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("cluster.environments=1", "environment.isolation=thread"),
            r"environment\.isolation contradicts cluster\.environments: got thread",
        ),
        (("cluster.environment={CPU: 2}",), r"cluster\.environment is ignored without cluster\.environments"),
    ],
)
def test_environments_that_cannot_be_placed_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        check_environment_nodes(quickstart("cluster=ray", *words))


def test_what_a_node_does_not_see_is_refused(tmp_path):
    place = ClusterPlace(
        bundle=ResourceBundle("rank 1", {"CPU": 1}), index=1, node=ClusterNode("abcdef0123", "10.0.0.2"), group=None
    )
    mark = str(tmp_path / ".cluster-0")
    check_shared({mark: "share it"}, place, [])
    said = rf"rank 1 does not see {tmp_path}: got nothing at this path on node 10.0.0.2 \(abcdef01\).*Share it"
    with pytest.raises(UsageError, match=said):
        check_shared({mark: "share it"}, place, [mark])


def test_gloo_meets_at_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert gloo_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_of("203.0.113.77") is None
    assert gloo_variables("203.0.113.77") == {}


WHOLE_RUN = """
import sys
sys.path.insert(0, {worlds!r})
import agentrl.cli, agentrl.builders.ray
from agentrl.runs.start import start_run
from agentrl.config import load_config
from agentrl.runs.rl import train
train(start_run(load_config(None, {overrides!r}), kind="test"))
print([name for name in sys.modules if name.partition(".")[0] == "ray"])
"""


@pytest.mark.slow
def test_a_run_of_one_machine_imports_no_ray(tmp_path, tiny_words):
    program = WHOLE_RUN.format(**tiny_words(f"run.directory={tmp_path}", "trainer.steps=1"))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named():
    with pytest.raises(UsageError, match=r'the extra ray is not installed.*pip install "agentrl\[ray\]"'):
        check_training(quickstart("cluster=ray"))
