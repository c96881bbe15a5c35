import subprocess
import sys

import pytest

from agentrl.config import Config, config_from, dump_config, load_config, number_format, shipped_configs
from agentrl.config.derived import per_environment_configs
from agentrl.config.keys import OTHER_NAMES, WHOLE_KEYS, all_keys, key_words, models_of, own_fields
from agentrl.config.load import names_environment
from agentrl.config.overrides import parse_override, prompts_words, task_words, text_override, warn_repeated
from agentrl.config.reference import config_reference
from agentrl.env.lookup import parse_env_name
from agentrl.errors import ConfigError, UsageError


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "my.yaml"
        path.write_text(text)
        return path

    return write


HARDWARE = [name for name in shipped_configs() if name.startswith("hardware/")]
TASKS = [name for name in shipped_configs() if name.startswith("tasks/")]


@pytest.mark.parametrize("name", [name for name in shipped_configs() if name not in HARDWARE])
def test_shipped_configs_load_and_survive_a_round_trip(name, config_file):
    config = load_config(name)
    assert load_config(config_file(dump_config(config))) == config


@pytest.mark.parametrize("hardware", HARDWARE)
def test_every_task_runs_on_every_hardware(hardware):
    for task in TASKS:
        alone, config = load_config(task), load_config([task, hardware])
        assert config.environment == alone.environment
        assert config.algorithm == alone.algorithm
        assert config.engine.type in hardware
        assert (config.model.lora is not None) == ("lora" in hardware)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["trainer.steps=5", "trainer.steps=7"], "trainer.steps"),
        (["trainer={steps: 5, epochs: 2}", "trainer.steps=7"], "trainer.steps"),
        (["trainer.steps=5", "trainer={steps: 7}"], "trainer.steps"),
        (["environment=household/train", "environment.split=valid_seen"], "environment.split"),
        (["model=a", "model.path=b"], "model.path"),
        (["agent.options={format: plain}", "agent.options={explain: false}"], "agent.options.format"),
        (["model.lora=null", "model.lora.rank=4"], "model.lora"),
    ],
)
def test_a_key_with_two_values_is_told_with_the_one_that_counts(words, key, caplog):
    warn_repeated(words)
    assert caplog.messages == [f"{key} is given twice: {words[0]}, and then {words[1]}, which counts"]


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.steps=5", "trainer.steps=5"],
        ["trainer={steps: 5}", "trainer={epochs: 2}", "trainer.seed=1"],
        ["agent.options={format: plain}", "agent.options.explain=false"],
        [*prompts_words("a.jsonl"), "agent.loop=react_text"],
    ],
)
def test_keys_with_one_value_are_not_told(words, caplog):
    warn_repeated(words)
    assert caplog.messages == []


def test_dates_times_and_leading_zeros_are_text(config_file):
    config = load_config(
        config_file("environment: {name: a, options: {day: 2026-01-31, at: 1:30, code: 010, size: 1_000, sign: -3}}\n"),
        ["run.name=2026-01-31", "agent.options={at: 12:30:45, mask: 0x1f}"],
    )
    assert config.environment.options == {"day": "2026-01-31", "at": "1:30", "code": "010", "size": 1000, "sign": -3}
    assert config.run.name == "2026-01-31"
    assert config.agent.options == {"at": "12:30:45", "mask": 31}
    assert load_config(config_file(dump_config(config))) == config


@pytest.mark.parametrize(
    "text", ["a/b", "my #1 model", "a: b", "12", "~", "1e3", "null", "it's", "[x", "2026-01-31", ""]
)
def test_the_text_of_an_option_stays_text(text):
    assert parse_override(text_override("model.path", text)).value == text


def test_a_section_whose_keys_are_comments_has_its_defaults(config_file):
    config = load_config(config_file("environment: a\ntrainer:\n  # steps: 3\nmodel:\nengine:\nsampling:\n"))
    assert config == load_config(None, ["environment=a"])


def test_a_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    words = ["environment=a", "run.directory=~/runs", 'model.path="~/m"', "trainer.episodes=~/runs/old"]
    config = load_config(None, words)
    assert (config.run.directory, config.model.path) == ("/home/me/runs", "/home/me/m")
    assert config.trainer.episodes == "/home/me/runs/old"


def test_later_configs_are_put_on_top_of_earlier_ones(config_file, tmp_path):
    base = config_file(
        "environment: {name: a, options: {size: 1, rooms: [x]}}\nengine: {max_num_seqs: 8}\ntrainer: {steps: 3}\n"
    )
    top = tmp_path / "top.yaml"
    top.write_text("environment: {options: {size: 2}}\nengine: vllm\nmodel: {lora: {}}\n")
    config = load_config([base, top], ["trainer.steps=5"])
    assert config.environment.options == {"size": 2, "rooms": ["x"]}
    assert config.engine.type == "vllm"
    assert config.model.lora is not None
    assert config.trainer.steps == 5
    top.write_text("model: {path: x}\ntrainer: {stepz: 3}\n")
    with pytest.raises(ConfigError, match=r"top\.yaml line 2: unknown key trainer\.stepz; did you mean trainer\.steps"):
        load_config([base, top])


def test_a_hardware_config_names_no_environment():
    assert names_environment(["tasks/math", HARDWARE[0]])
    assert not names_environment(HARDWARE[0])
    assert not names_environment(None)


def test_numbers_among_a_servers_arguments_are_words():
    config = load_config(None, ["environment=a", "engine={type: vllm, arguments: [--gpu-memory-utilization, 0.5]}"])
    assert config.engine.arguments == ["--gpu-memory-utilization", "0.5"]


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"environment: a\xba\n")
    with pytest.raises(ConfigError, match=r"config\.yaml is not a text file"):
        load_config(tmp_path / "config.yaml")


def test_shipped_names_may_be_given_as_paths():
    assert load_config("configs/quickstart.yaml") == load_config("quickstart")


@pytest.mark.parametrize(
    "source", ["./configs/quickstart.yaml", "./quickstart", "../quickstart.yaml", "/no/quickstart"]
)
def test_an_explicit_path_never_means_a_shipped_config(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no config file {source}, .*comes with agentrl: quickstart$"):
        load_config(source)


def test_the_file_is_read_then_overrides_win_in_order(config_file):
    path = config_file("environment: household/valid_seen\ntrainer:\n  steps: 3\n  learning_rate: 1e-3\n")
    config = load_config(path, ["trainer.steps=4", "trainer.steps=5", "algorithm.loss_options.clip_high=2e-1"])
    assert (config.environment.name, config.environment.split) == ("household", "valid_seen")
    assert (config.trainer.steps, config.trainer.learning_rate) == (5, 1e-3)
    assert config.algorithm.loss_options == {"clip_high": 0.2}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("environment: a\ntrainr:\n  steps: 3\n", [], "my.yaml line 2: unknown key trainr; did you mean trainer?"),
        (
            "environment: a\ntrainer:\n  stepps: 3\n",
            [],
            "my.yaml line 3: unknown key trainer.stepps; did you mean trainer.steps?",
        ),
        (
            "environment: a\n",
            ["engine.max_num_seq=3"],
            "override 'engine.max_num_seq=3': unknown key engine.max_num_seq; did you mean engine.max_num_seqs?",
        ),
        ("environment: a\n", ["group_size=3"], "unknown key group_size; did you mean algorithm.group_size?"),
        ("environment: a\n", ["algorithm.clip_high=0.3"], "did you mean algorithm.loss_options.clip_high?"),
        ("environment: a\n", ["algorithm.clip_hihg=0.3"], "did you mean algorithm.loss_options.clip_high?"),
        ("environment: a\n", ["algorithm.gamma=0.9"], "did you mean algorithm.advantage_options.gamma?"),
        ("environment: a\n", ["algorithm.adv_estimator=grpo"], "did you mean algorithm.advantage?"),
        ("environment: a\n", ["adv_estimator=grpo"], "did you mean algorithm.advantage?"),
        ("environment: a\n", ["sampling.max_tokens=64"], "did you mean agent.max_answer_tokens?"),
        ("environment: a\n", ["agent.temperature=1"], "did you mean sampling.temperature?"),
        ("environment: a\n", ["trainer.lr=1e-5"], "did you mean trainer.learning_rate?"),
        ("environment: a\n", ["actor_rollout_ref.rollout.n=4"], "rollout.n; did you mean algorithm.group_size?"),
        (
            "environment: a\n",
            ["data.train_batch_size=4"],
            "data.train_batch_size; did you mean trainer.tasks_per_step?",
        ),
        ("environment: a\n", ["nothing={known: 1}"], "unknown key nothing; known keys here: adapters"),
        ("environment: a\n", ["trainer.steps=true"], "trainer.steps: got 'true', expected a whole number"),
        ("environment: a\n", ["trainer.learning_rate=true"], "got 'true', expected a number"),
        ("environment: a\n", ["engine.group_sizes=4"], "did you mean algorithm.group_size?"),
        (
            "environment: a\ntrainer:\n  steps: many\n",
            [],
            "my.yaml line 3: trainer.steps: got 'many', expected a whole number",
        ),
        ("environment: a\ntrainer:\n  steps: 0\n", [], "trainer.steps: got 0, expected at least 1"),
        ("environment: a\n", ["trainer.tasks_per_step=1e11"], "tasks_per_step: got 100,000,000,000, expected at most"),
        ("environment: a\n", ["trainer.tasks_per_step=200000"], "are 1,600,000 episodes per training step"),
        ("environment: a\n", ["trainer.learning_rate=1e30"], "got 1e+30, expected at most 1: an update moves each"),
        ("environment: a\n", ["sft.learning_rate=1.5"], "sft.learning_rate: got 1.5, expected at most 1"),
        ("environment: a\n", ["engine.timeout_s=1e30"], "engine.timeout_s: got 1e+30 seconds, expected at most"),
        ("environments: {a: {step_timeout_s: 1e9}}\n", [], "environments.a.step_timeout_s: got 1e+09 seconds"),
        ("environment: a\n", ["trainer.processes=100000"], "trainer.processes: got 100000, expected at most 4096"),
        ("environment: a\nengine:\n  max_num_seqs: 0\n", [], "engine.max_num_seqs: got 0, expected at least 1"),
        ("environment: {name: a, workers: 0}\n", [], "environment.workers: got 0, expected at least 1"),
        ("environment: a\n", ["rollout.stall_report_s=0"], "rollout.stall_report_s: got 0, expected greater than 0"),
        ("environment: a\n", ["algorithm.correction={mode: icepop, band: [2, 1]}"], "band is [2.0, 1.0]"),
        ("environment: a\n", ["engine=slang"], "unknown engine: got 'slang', expected 'local', 'scripted', 'openai'"),
        (
            "environment: a\ntrainer: {steps: 100}\n",
            ["trainer.steps.x=1"],
            "sets a key of steps, which is not a section: got 100",
        ),
        ("trainer:\n  steps: 3\n", [], "no environment is set"),
        ("environment: a\nenvironment: b\n", [], "my.yaml line 2: environment is given twice"),
        ("- a\n- b\n", [], "is not a config: got a YAML sequence"),
        ("environment: [a\n", [], "is not valid YAML"),
        ("environment: a\n", ["trainer"], "expected key=value"),
        ("environment: a\n", ["trainer={steps: 3, steps: 4}"], "line 1: trainer.steps is given twice"),
        (
            "environment: a\n",
            ["agent.reward=[{name: x, weight: 1, weight: 2}]"],
            "agent.reward.0.weight is given twice",
        ),
        ("environment: a\n", ["run.name=12"], """got 12, expected text; in quotes, it is text: run.name='"12"'"""),
        ("environment: a\nrun: {name: 12}\n", [], 'got 12, expected text; in quotes, it is text: name: "12"'),
        ("environment: a\n", ["engine=VLLM"], "'sglang'; did you mean 'vllm'?"),
        ("environment: a\n", ["model.device=gpu"], "model.device: got 'gpu', expected auto, cpu, cuda or cuda:N"),
        ("environment: a\n", ["+trainer.steps=5"], "is not valid, expected trainer.steps=5"),
        ("environment: a\ntrainer:\n\tsteps: 3\n", [], "got a tab, where YAML allows only spaces in line 3, column 1"),
        (
            "environment: a\ntrainer.steps: 3\n",
            [],
            "unknown key trainer.steps: in a file, a section holds",
        ),
        ("environment: a\nmodel: {lora.rank: 3}\n", [], "write model: {lora: {rank: …}}"),
        ("environment: a\nrun: {directory: $HOME/runs}\n", [], "line 2: run.directory has an environment variable"),
        ("environment: a\nmodel: '${oc.env:M}/m'\n", [], "line 2: model.path has an environment variable"),
        ("environment: a\n", ["agent.options=&a {b: *a}"], "is not valid YAML: got"),
        ("environment: &a {b: *a}\n", [], "my.yaml is not valid YAML: got"),
    ],
)
def test_a_mistake_is_named_with_its_place(config_file, text, overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(config_file(text), overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=x", "model.scratch.layers=3"], "model.scratch is ignored with model.path x"),
        (["algorithm.norm_length=3"], "algorithm.norm_length is ignored with aggregation token-mean"),
        (["algorithm.aggregation=seq-mean-token-sum-norm"], "set it, in tokens"),
        (["algorithm.correction.band=[0.5, 2]"], "band is ignored with mode token"),
        (["algorithm.correction={mode: off, cap: 2}"], "cap is ignored with mode off"),
        (["algorithm.correction={mode: icepop, cap: 2}"], "cap is ignored with mode icepop"),
        (["algorithm.correction={proximal: behaviour, cap: 2}"], "cap is ignored"),
        (["algorithm.correction={proximal: behaviour, mode: icepop}"], "mode icepop is ignored"),
        (["algorithm.correction={proximal: loglinear, mode: icepop}"], "the forward pass that mode icepop needs"),
        (["algorithm.reference.kl_estimator=k1"], "kl_estimator is ignored while algorithm.kl_coef is 0"),
        (["environment.tasks=x.jsonl", "environment.split=test"], "environment.split is ignored"),
        (["environment.isolation=inline", "environment.workers=2"], "environment.workers is ignored"),
        (["sft.check_every=5"], "sft.check_every is ignored without sft.stop_at"),
        (["engine={type: vllm, servers: []}"], "engine.servers is empty"),
        (
            ["engine={type: vllm, servers: ['localhost:8000']}"],
            "localhost:8000 is not an address: write http://HOST:PORT",
        ),
        (["engine={type: openai, url: localhost, model: m}"], "localhost is not an address"),
        (["engine={type: vllm, transport: tensor}"], "engine.transport tensor needs SGLang"),
        (["engine={type: vllm, transport: cuda_ipc, tensor_parallel: 2}"], "with engine.tensor_parallel 2"),
        (["engine={type: sglang, transport: cuda_ipc, replicas: 2}"], "with 2 engine.replicas"),
        (["engine.transport=disk"], "unknown key engine.transport for this type of engine: another type has it"),
        (["engine={type: vllm, bucket_mib: 8}"], "engine.bucket_mib is ignored with engine.transport shared_memory"),
        (["engine={type: sglang, sleep: true}", "rollout.max_staleness=1"], "engine.sleep suspends the servers"),
        (["rollout.batch_order=greedy"], "rollout.batch_order greedy is ignored with rollout.max_staleness 0"),
        (["engine={type: vllm, servers: [http://a:1], replicas: 2}"], "engine.replicas is ignored with addresses"),
        (["engine={type: sglang, adapter_rank: 8}"], "engine.adapter_rank needs vLLM"),
        (["engine={type: vllm, adapter_rank: 8, transport: collective}"], "servers read adapters from files"),
        (["engine={type: vllm, adapter_rank: 8, sleep: true}"], "engine.adapter_rank is set with engine.sleep"),
        (
            ["engine.lanes=9"],
            "engine.lanes is 9 with engine.max_num_seqs 64: each lane needs 8 sequences; set at most 8 lanes",
        ),
        (["agent.tools=[a, b, a]"], "agent.tools names a more than once"),
        (["trainer.min_lr_ratio=0.5"], "min_lr_ratio is ignored with schedule constant"),
        (
            ["trainer.gradient_checkpointing=half"],
            "trainer.gradient_checkpointing: got 'half', expected true or false, or 'full', 'selective' or 'offload'",
        ),
        (["trainer.processes=2", "trainer.lanes=2"], "needs a single process"),
        (["trainer.processes=3", "trainer.fsdp={replicas: 2}"], "must divide trainer.processes"),
        (["trainer.critic={kind: shared, path: a}"], "trainer.critic.path is ignored with kind shared"),
        (["trainer.critic={coef: 0.1}"], "trainer.critic.coef is ignored with kind own"),
        (["trainer.critic={pretrain_steps: 100}"], "leaves none of the 100 trainer.steps to the policy"),
        (["trainer.max_kl=0.1"], "trainer.max_kl is ignored with one update per step"),
        (["algorithm={dynamic_sampling: true, group_size: 1}"], "always true of a group of one"),
        (["trainer.processes=3", "trainer.context_parallel=2"], "trainer.context_parallel (2) times"),
        (
            ["trainer.processes=4", "trainer.tensor_parallel=2", "trainer.fsdp={replicas: 4}"],
            "divided by trainer.tensor",
        ),
        (["trainer.fsdp={shards: 2}"], "unknown key trainer.fsdp.shards; known keys here: replicas, reshard"),
        (["trainer.mini_batches=1000"], "exceeds the 128 episodes of a step"),
        (["trainer={mini_batches: 2, mini_batch_rows: 64}"], "both divide a step into updates"),
        (["trainer={schedule: cosine, mini_batch_rows: 64}"], "needs the number of updates"),
        (["trainer={process_reward: {}, mini_batch_rows: 64}"], "learns from whole episodes"),
        (["trainer.mini_batch_rows=64", "algorithm.aggregation=prompt-mean"], "whole episodes or groups"),
        (["agent.max_tokens=100"], "an answer could never fit"),
    ],
)
def test_a_key_that_would_be_ignored_is_an_error(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["environment=a", *overrides])
    assert message in str(caught.value)


def test_environments_stand_under_labels(config_file):
    text = (
        "environments:\n  maze:\n  small: {name: sokoban, weight: 2, options: {size: 5}}\n  unseen: household/valid\n"
    )
    config = load_config(config_file(text), ["environments.maze.weight=3"])
    assert [(e.name, e.split, e.weight) for e in config.environments.values()] == [
        ("maze", "train", 3),
        ("sokoban", "train", 2),
        ("household", "valid", 1),
    ]
    assert config.environment is None
    assert load_config(config_file(dump_config(config))) == config
    assert list(load_config(None, ["environments=[maze/valid, sokoban]"]).environments) == ["maze", "sokoban"]


def test_each_environment_has_the_agent_with_its_changes():
    agent = "agent={loop: react_text, options: {format: plain}, max_turns: 9, system_prompt: all}"
    changed = "environments={a: {agent: {max_turns: 5, system_prompt: own}}, b: {agent: {loop: tool_calling}}, c: {}}"
    config = load_config(None, [agent, changed, "evaluation.split=x", "environments.b.evaluation_split=y"])
    first, second, third = per_environment_configs(config)
    assert (first.config.agent.max_turns, first.config.agent.system_prompt) == (5, "own")
    assert first.config.agent.options == third.config.agent.options == {"format": "plain"}
    assert (second.config.agent.loop, second.config.agent.options) == ("tool_calling", {})
    assert third.config.agent == config.agent
    assert [part.config.evaluation.split for part in (first, second, third)] == ["x", "y", "x"]
    assert [part.config.sole_environment.name for part in (first, second, third)] == ["a", "b", "c"]


def test_one_environment_is_the_config_itself():
    config = load_config(None, ["environment=a"])
    (part,) = per_environment_configs(config)
    assert (part.label, part.config) == ("", config)


def test_naming_one_environment_takes_the_place_of_several_and_back():
    config = load_config(None, ["environments=[a, b]", "environment=c"])
    assert (config.sole_environment.name, config.environments) == ("c", {})
    config = load_config(None, ["environment=c", "environments=[x]", "environments=[a, b]"])
    with pytest.raises(ConfigError, match="this needs exactly one environment: got the environments a, b"):
        _ = config.sole_environment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("environment: a\nenvironments: {b: {}, c: {}}", "environment (a) and environments (b, c) are both given"),
        ("environments:\n  a: {}\n  a: {}\n", "my.yaml line 3: environments.a is given twice"),
        (
            "agent:\n  reward:\n  - {name: x,\n     weight: 1, weight: 2}\n",
            "my.yaml line 4: agent.reward.0.weight is given",
        ),
        ("environments: [a, a]", "environments names a twice"),
        ("environments: [a, {name: b}]", "is a list that holds more than names: got {'name': 'b'}"),
        (
            "environments:\n  a:\n    weight: 0\n",
            "my.yaml line 3: environments.a.weight: got 0, expected greater than 0",
        ),
        ("environments: {a: {weight: -1}}", "environments.a.weight: got -1, expected greater than 0"),
        ("environments: {a: {weight: .inf}}", "environments.a.weight: got inf, expected a finite number"),
        ("environments: {'a/b': {}}", "'a/b' is not a label"),
        ("environments: {a: {wieght: 1}}", "unknown key environments.a.wieght; did you mean environments.a.weight?"),
        ("environments: {a: {splt: x}}", "did you mean environments.a.split?"),
        ("environments: {a: {agent: {max_turn: 1}}}", "did you mean environments.a.agent.max_turns?"),
        ("environments: {a: 3}", "environments.a: got 3, expected a section with keys"),
        ("environments: {a: {agent: {max_answer_tokens: 99999}}}", "exceeds agent.max_tokens (16384)"),
        ("environments: {}", "no environment is set"),
    ],
)
def test_mistakes_in_environments_are_named(config_file, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(config_file(text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("curriculum.pools={easy_above: 0.2, hard_below: 0.3}", "hard_below (0.3) must be below"),
        ("curriculum.pools={revisit: 0}", "curriculum.pools.revisit: got 0, expected greater than 0"),
        ("curriculum.pools={by: tasks}", "curriculum.pools.by: got 'tasks', expected 'task', 'type' or 'environment'"),
        ("curriculum.horizon={at_steps: [0, 1]}", "curriculum.horizon.turns is missing"),
        ("curriculum.horizon={turns: [5, 5], at_steps: [0, 1]}", "expected increasing numbers"),
        ("curriculum.horizon={turns: [0, 5], at_steps: [0, 1]}", "from at least 1"),
        ("curriculum.horizon={turns: [5], at_steps: [0]}", "curriculum.horizon.turns"),
        ("curriculum.horizon={turns: [5, 6]}", "set one of them"),
        ("curriculum.horizon={turns: [5, 6], at_steps: [0, 9], success_above: 0.5}", "set one of them"),
        ("curriculum.horizon={turns: [5, 6], at_steps: [0, 9], over_steps: 3}", "over_steps is ignored"),
        ("curriculum.horizon={turns: [5, 6], at_steps: [0]}", "has 1 steps for 2 stages"),
        ("curriculum.horizon={turns: [5, 6], at_steps: [1, 9]}", "the first one 0"),
        ("curriculum.horizon={turns: [5, 6], at_steps: [0, 0]}", "expected increasing numbers"),
        ("curriculum.horizn={}", "did you mean curriculum.horizon?"),
    ],
)
def test_mistakes_in_a_curriculum_are_named(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["environment=a", override])
    assert message in str(caught.value)


def test_several_mistakes_are_reported_together():
    with pytest.raises(ConfigError, match="2 problems in the config") as caught:
        load_config(None, ["environment=a", "trainer.stps=3", "engine.max_num_seqs=x"])
    assert "trainer.steps?" in str(caught.value)
    assert "override 'engine.max_num_seqs=x'" in str(caught.value)


def test_the_same_environment_keeps_its_options():
    config = load_config(None, ["environment.name=a", "environment.options.size=3", "environment=a/test"])
    assert (config.environment.split, config.environment.options) == ("test", {"size": 3})


@pytest.mark.parametrize(
    ("text", "name", "split"),
    [
        ("household", "household", None),
        ("household/train", "household", "train"),
        ("my_game:GuessNumber-v0", "my_game:GuessNumber-v0", None),
        ("my_game:GuessNumber-v0/test", "my_game:GuessNumber-v0", "test"),
        ("agentrl/Household-v0", "agentrl/Household-v0", None),
        ("agentrl/Household-v0/train", "agentrl/Household-v0", "train"),
    ],
)
def test_environment_names(text, name, split):
    assert parse_env_name(text) == (name, split)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("off", "off"), ("1e-3", 1e-3), ("true", True), ("[1, 2]", [1, 2]), ("null", None), ("", None)],
)
def test_values_of_overrides(value, expected):
    parsed = parse_override(f"a.b={value}")
    assert (parsed.path, parsed.value) == (("a", "b"), expected)


def test_plain_data_makes_a_config():
    assert config_from({"environment": "a/test", "engine": "local"}) == Config(
        environment={"name": "a", "split": "test"}
    )


def test_options_given_before_a_loop_are_that_loop_s():
    agent = load_config(None, ["environment=a", "agent.options.format=plain", "agent.loop=react_text"]).agent
    assert agent.options == {"format": "plain"}


def optional_sections(model, path=()):
    """The paths of the sections that are left out unless somebody asks for what they configure."""
    for name in own_fields(model):
        field = model.model_fields[name]
        inner = models_of(field.annotation)
        if inner and field.default is None:
            yield (*path, name)
        else:
            for section in inner:
                yield from optional_sections(section, (*path, *key_words(name)))


def test_there_are_fewer_than_180_keys_where_a_part_that_is_left_out_counts_as_one():
    optional = [section for section in optional_sections(Config) if section != ("environment",)]
    assert ("model", "scratch") in optional
    keys = {next((part for part in optional if key[: len(part)] == part), key) for key in all_keys()}
    assert 100 < len(keys) < 180


def test_the_reference_explains_every_key():
    text = config_reference()
    assert not [name for name in ("Annotated", "Undefined", "FieldInfo", "<", " at 0x") if name in text]
    lines = text.replace(".NAME", "").replace(".KEY", "").splitlines()
    for key in all_keys():
        line = next(line for line in lines if f"`{'.'.join(key)}`" in line)
        assert not line.endswith("|  |"), f"{line} has no meaning"


def test_reading_a_config_imports_no_torch():
    code = "import sys, agentrl.config.estimate as a; from agentrl.config import load_config; "
    code += "a.rows(load_config('quickstart')); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("engine", ["local", "vllm", "sglang"])
def test_a_context_below_the_chosen_budget_is_an_error(engine):
    words = ["environment=a", f"engine={{type: {engine}, max_context: 100}}", "agent.max_answer_tokens=8"]
    with pytest.raises(ConfigError, match=r"agent.max_tokens \(1536\) exceeds engine.max_context \(100\)"):
        load_config(None, [*words, "agent.max_tokens=1536"])
    assert load_config(None, [*words, "agent.max_tokens=100"])


def test_a_context_below_the_budget_that_nobody_chose_survives_a_round_trip(config_file):
    config = load_config(None, ["environment=a", "engine.max_context=2048"])
    assert load_config(config_file(dump_config(config))) == config


def test_a_part_that_a_runs_own_config_leaves_out_can_be_given(tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_config(load_config("quickstart")))
    assert "teacher: null" in saved.read_text()
    config = load_config(
        saved, ["algorithm.teacher.path=a/b", "preferences.epochs=3", "agent.reward_model={path: c/d}"]
    )
    assert (config.algorithm.teacher.path, config.preferences.epochs) == ("a/b", 3)
    assert config.agent.reward_model.path == "c/d"


def test_a_system_prompt_is_read_from_a_file_and_kept_as_text(tmp_path):
    (tmp_path / "prompt.txt").write_text("Play well.\n")
    config = load_config(None, ["environment=a", f"agent.system_prompt=file:{tmp_path}/prompt.txt"])
    assert config.agent.system_prompt == "Play well.\n"
    assert config_from(config.model_dump(mode="json")).agent.system_prompt == "Play well.\n"
    with pytest.raises(ConfigError, match=r"agent.system_prompt: cannot read none.txt: .*No such file"):
        load_config(None, ["environment=a", "agent.system_prompt=file:none.txt"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", "bfloat16"),
        ("flags\t\t: fpu avx2 avx512f\n", "float32"),
        ("Features\t: fp asimd bf16\n", "bfloat16"),
        ("", "float32"),
    ],
)
def test_auto_is_the_format_that_the_processor_computes_fastest_in(flags, expected, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr(number_format, "CPU_INFO", tmp_path / "cpuinfo")
    on_cpu = load_config("quickstart", ["model.dtype=auto", "model.device=cpu"])
    assert on_cpu.model.dtype == expected, "the record of a run says which"
    assert load_config("quickstart", ["model.dtype=auto", "model.device=cuda"]).model.dtype == "bfloat16"


def test_auto_asks_for_gpus_that_are_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(number_format, "CPU_INFO", tmp_path / "none")
    monkeypatch.setattr(number_format, "GPU_DRIVERS", (tmp_path,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert load_config("quickstart", ["model.dtype=auto"]).model.dtype == "bfloat16"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert load_config("quickstart", ["model.dtype=auto"]).model.dtype == "float32"


def test_every_name_of_another_framework_leads_to_a_key():
    known = {".".join(key) for key in all_keys()}
    options = {"algorithm.loss_options.clip_low", "algorithm.loss_options.clip_high", "preferences.loss_options.beta"}
    assert {*OTHER_NAMES.values(), *WHOLE_KEYS.values()} <= known | options


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("4.096e3", 4096), ("2048.0", 2048)])
def test_a_whole_number_may_be_written_with_an_exponent(text, value):
    config = load_config(None, ["environment=guess_number", f"agent.max_tokens={text}"])
    assert config.agent.max_tokens == value
    assert isinstance(config.agent.max_tokens, int)


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "a/../../b"])
def test_the_name_of_a_run_is_no_path_outside_the_folder_of_runs(name):
    with pytest.raises(ConfigError, match=r"a path outside run\.directory"):
        load_config("quickstart", [f"run.name={name}"])


@pytest.mark.parametrize(("word", "words"), [("trainer.steps:5", "trainer.steps=5"), ("~run.seed", "run.seed=VALUE")])
def test_a_word_that_begins_with_a_key_is_no_file(word, words):
    with pytest.raises(ConfigError, match=f"An override has an equals sign: {words}"):
        load_config(["quickstart", word])


def test_a_number_of_tasks_is_not_a_file() -> None:
    with pytest.raises(UsageError, match=r"--tasks is a file of tasks here: got 2, .*trainer.tasks_per_step=2"):
        task_words("2", has_environment=True)
    assert task_words("tasks.jsonl", has_environment=True) == ['environment.tasks="tasks.jsonl"']


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
def test_a_seed_that_no_generator_takes_is_an_error(seed):
    with pytest.raises(ConfigError, match=r"run.seed: got -?\d+, expected"):
        load_config(None, [f"run.seed={seed}"])
    assert load_config(None, ["environment=a", f"run.seed={2**63 - 1}"]).run.seed == 2**63 - 1
