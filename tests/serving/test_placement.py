"""Which GPUs a run's processes and servers get, and what a dry run says of it."""

import json

import pytest

from agentrl.config import load_config, shipped_configs
from agentrl.config.estimate import derive
from agentrl.errors import ConfigError, UsageError
from agentrl.runs.dry_run import describe_run, training_rows
from agentrl.serving.launch.placement import check_cores, check_machine, core_warnings, gpu_rows, place_on_gpus

QWEN_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TRAIN = ("environment=household", "model.path=some/model")


def config_of(*overrides):
    return load_config(None, [*TRAIN, *overrides])


@pytest.mark.parametrize(
    ("overrides", "count", "trainer", "servers"),
    [
        ((), 0, (), []),
        ((), 8, (0,), []),
        (("trainer.processes=4",), 8, (0, 1, 2, 3), []),
        (("model.device=cuda:3",), 8, (3,), []),
        (("model.device=cpu",), 8, (), []),
        (("engine=vllm",), 0, (), [()]),
        (("engine=vllm",), 1, (0,), [(0,)]),
        (("engine=vllm",), 2, (0,), [(1,)]),
        (("engine=vllm", "trainer.processes=4", "engine.replicas=4"), 8, (0, 1, 2, 3), [(4,), (5,), (6,), (7,)]),
        (("engine=sglang", "trainer.processes=4", "engine.tensor_parallel=4"), 8, (0, 1, 2, 3), [(4, 5, 6, 7)]),
        (("engine=vllm", "trainer.processes=8", "engine.replicas=8"), 8, tuple(range(8)), [(k,) for k in range(8)]),
        (("engine=vllm", "engine.gpus=[0]"), 8, (0,), [(0,)]),
        (("engine=vllm", "engine.transport=cuda_ipc"), 8, (0,), [(0,)]),
        (("engine=vllm", "model.device=cuda:1"), 3, (1,), [(0,)]),
    ],
)
def test_servers_get_the_gpus_that_the_trainer_leaves(overrides, count, trainer, servers):
    placed = place_on_gpus(config_of(*overrides), count)
    assert (placed.trainer, placed.servers) == (trainer, servers)


@pytest.mark.parametrize(
    ("overrides", "count", "message"),
    [
        (("engine=vllm", "engine.tensor_parallel=8"), 0, "this process cannot use any: got 8, expected 1"),
        (("engine=vllm", "engine.tensor_parallel=8"), 4, "got 4 for 1 servers with 8 each"),
        (("engine=vllm", "engine.gpus=[9]"), 8, r"does not exist: got \[9\]"),
        (("trainer.processes=4",), 2, "got trainer.processes 4 and 2 GPUs"),
        (("model.device=cuda:2",), 2, "expected cuda:0 to cuda:1"),
        (("model.device=cuda",), 0, "torch cannot use a GPU here"),
    ],
)
def test_a_machine_with_too_few_gpus_is_refused(overrides, count, message):
    with pytest.raises((ConfigError, UsageError), match=message):
        place_on_gpus(config_of(*overrides), count)


def test_a_torch_for_the_cpu_trains_there_while_servers_use_the_gpus():
    placed = place_on_gpus(config_of("engine=vllm"), 2, torch_count=0)
    assert placed.trainer == ()
    assert placed.servers == [(0,)]


def test_the_rows_name_shared_and_idle_gpus():
    rows = {name: value for name, value, _ in gpu_rows(config_of("engine=vllm", "trainer.processes=2"), 4)}
    assert rows == {
        "GPUs": "4",
        "trainer": "2 processes on GPU 0, 1",
        "server-0": "GPU 2",
        "idle GPUs": "3",
    }
    shared = {name: (value, how) for name, value, how in gpu_rows(config_of("engine=vllm", "engine.sleep=true"), 1)}
    assert shared["shared GPUs"][0] == "0"
    assert "engine.sleep" in shared["shared GPUs"][1]
    unlimited = {name: (value, how) for name, value, how in gpu_rows(config_of("engine=vllm"), 1)}
    assert "set engine.sleep=true" in unlimited["shared GPUs"][1]


@pytest.mark.parametrize("hardware", [name for name in shipped_configs() if name.startswith("hardware/")])
def test_the_shipped_hardware_configs_use_every_gpu(hardware):
    count = 8 if "8gpu" in hardware else 1
    config = load_config(["tasks/math", hardware])
    placed = place_on_gpus(config, count)
    used = [*placed.trainer, *(position for server in placed.servers for position in server)]
    assert sorted(set(used)) == list(range(count))
    assert bool(placed.shared) == config.engine.sleep == (count == 1)


def test_the_largest_shipped_hardware_config_fits_into_80_gib(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen2.5-7B-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    config = load_config(["tasks/tool_calling", "hardware/qwen2.5-7b_8gpu_vllm"])
    amounts = derive(config)
    assert 7.5e9 < amounts.model.parameters < 7.7e9
    assert amounts.memory.training_state / config.trainer.processes + amounts.memory.logits < 60 * 2**30


def test_a_cluster_places_the_run_itself():
    assert gpu_rows(config_of("cluster={}"), 8) == []


def test_a_model_larger_than_the_memory_is_refused():
    with pytest.raises(ConfigError, match=r"does not fit into this machine's memory.*weights, gradients and optimizer"):
        check_machine(config_of("model.path=scratch", "model.scratch={layers: 100000, hidden_size: 4096}"))


@pytest.mark.parametrize(("count", "is_warned"), [(2, False), (64, True)])
def test_more_processes_than_cores_are_warned_of(monkeypatch, count, is_warned):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 5}, raising=False)
    config = load_config("quickstart", ["trainer.lanes=1", f"trainer.processes={count}"])
    said = []
    describe_run(config, [], check=lambda config, *, fetch, say: None, say=said.append)
    assert [text for text in said if "cores" in text] == [f"warning: {text}" for text in core_warnings(config)]
    assert bool(core_warnings(config)) == is_warned
    if is_warned:
        assert "trainer.processes is 64, but this machine has 2 CPU cores" in core_warnings(config)[0]
    assert (
        core_warnings(load_config("quickstart", ["trainer.lanes=1", f"trainer.processes={count}", "cluster={}"])) == []
    )


ASYNC = ("rollout.max_staleness=1", "trainer.cpus=[0]")


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.cpus=[0]",), "trainer.cpus needs asynchronous training"),
        ((*ASYNC, "cluster={}"), "trainer.cpus has no effect: got cluster"),
        ((*ASYNC, "engine.cpus=[0, 1]"), r"name cores twice: got \[0\]"),
        (("rollout.max_staleness=1", "engine.cpus=[1]"), "engine.cpus of a local engine needs trainer.cpus"),
        ((*ASYNC, "trainer.processes=2"), r"too few cores: got \[0\], expected at least 2, as trainer.processes is 2"),
        ((*ASYNC, "engine=vllm", "engine.replicas=2", "engine.cpus=[1]"), "engine.replicas is 2"),
        (("rollout.max_staleness=1", "trainer.cpus=[]"), "too few cores"),
    ],
)
def test_cores_that_engine_and_trainer_cannot_have_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_cores(config_of(*overrides))


def test_torchrun_and_cores_contradict_each_other(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match=r"trainer.cpus has no effect: got torchrun"):
        check_cores(config_of(*ASYNC))


def test_cores_that_do_not_exist_are_refused(eight_cores):
    config = config_of(*ASYNC, "engine=vllm", "engine.cpus=[5, 8, 9]")
    with pytest.raises(ConfigError, match=r"engine.cpus names cores .*: got 8, 9, expected cores among 0 to 7"):
        check_machine(config)
    with pytest.raises(ConfigError, match=r"engine.cpus names cores"):
        training_rows(config)
    assert training_rows(config, gpus=2), "the placement on another machine"


def test_the_rows_show_the_cores(eight_cores):
    config = config_of(*ASYNC, "engine=vllm", "engine.cpus=[1, 2, 3, 5]")
    rows = {name: (value, how) for name, value, how in gpu_rows(config, 0)}
    assert rows["trainer cores"] == ("0", "trainer.cpus")
    assert rows["engine cores"] == ("1, 2, 3, 5", "engine.cpus")
