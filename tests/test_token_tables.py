"""Token tables of real runs: what the trainer computed for each sampled token, and what became of each episode."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from agentrl.errors import Outcome, UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.observe.token_table import EPISODES, TOKENS, episode_file, read_episode_rows, read_token_rows, token_file
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.runs import token_tables
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run
from agentrl.runs.token_tables import choose_episodes
from agentrl.trajectory import Trajectory


@pytest.fixture
def run_with(tiny_run):
    """Train a tiny run with some overrides; return its folder."""

    def run(*overrides):
        return train(tiny_run("trainer.steps=2", *overrides)).folder

    return run


def tables(folder, step):
    """The tokens and the episodes of a step as lists of rows."""
    return pq.read_table(token_file(folder, step)).to_pylist(), read_episode_rows(folder, step).to_pylist()


def stored(folder):
    with TrajectoryIndex(folder / "trajectories") as index:
        return {row.id: index.read(row).trajectory for row in index.select(EpisodeFilter())}


def mean(rows, name):
    return math.fsum(value for row in rows if (value := row[name]) is not None) / len(rows)


@pytest.mark.slow
def test_the_rows_are_the_sampled_tokens_and_agree_with_the_metrics(run_with):
    folder = run_with("observe.tokens=all")
    episodes = stored(folder)
    for metrics in read_metrics(folder / "metrics.jsonl"):
        tokens, rows = tables(folder, metrics["step"])
        for row in tokens:
            sequence = episodes[row["episode"]].sequences[row["sequence"]]
            assert sequence.loss_mask[row["position"]]
            assert sequence.token_ids[row["position"]] == row["token"]
            assert sequence.logprobs[row["position"]] == pytest.approx(row["engine_logprob"], abs=1e-6)
        assert len(tokens) == sum(episodes[row["episode"]].sampled_tokens for row in rows) == metrics["train/tokens"]
        assert np.mean([abs(row["advantage"]) for row in tokens]) == pytest.approx(metrics["train/advantage_abs_mean"])
        computed = [row for row in tokens if row["entropy"] is not None]
        assert mean(computed, "entropy") == pytest.approx(metrics["train/entropy"], rel=1e-5)
        assert mean(computed, "clipped") == pytest.approx(metrics["train/clip_share"])
        apart = [abs(math.exp(row["trainer_logprob"]) - math.exp(row["engine_logprob"])) for row in computed]
        assert np.mean(apart) == pytest.approx(metrics["mismatch/prob_abs_mean"], rel=1e-3, abs=1e-8)
        assert {row["masked_by"] for row in tokens} <= {None, "group equal", "zero advantage"}
        assert all((row["masked_by"] is None) == (row["advantage"] != 0) for row in tokens)


def test_the_episodes_sum_up_their_tokens(run_with):
    folder = run_with("observe.tokens=all")
    tokens, rows = tables(folder, 2)
    for row in rows:
        own = [token for token in tokens if token["episode"] == row["episode"]]
        assert row["sampled_tokens"] == len(own)
        assert row["trained_tokens"] == sum(token["masked_by"] is None for token in own)
        assert row["clipped_tokens"] == sum(token["clipped"] for token in own)
        assert row["advantage_mean"] == pytest.approx(mean(own, "advantage"))
        assert row["advantage_max"] == pytest.approx(max(token["advantage"] for token in own))
        assert {token["episode_return"] for token in own} == {np.float32(row["episode_return"])}
        assert (row["oldest_version"], row["newest_version"], row["staleness"]) == (1, 1, 0)
        assert row["has_tokens"]
        assert row["dropped"] is None
    for group in {row["group"] for row in rows}:
        members = [row for row in rows if row["group"] == group]
        assert sorted(row["member"] for row in members) == [0, 1, 2]
        assert members[0]["group_mean"] == pytest.approx(np.mean([row["episode_return"] for row in members]))
        assert members[0]["group_std"] == pytest.approx(np.std([row["episode_return"] for row in members]))


@pytest.mark.slow
def test_the_reader_returns_the_rows_of_one_episode_in_order(run_with):
    folder = run_with()
    episode = read_episode_rows(folder, 1).to_pylist()[0]["episode"]
    rows = read_token_rows(folder, 1, episode)
    assert rows.schema.names == TOKENS.names
    assert set(rows["episode"].to_pylist()) == {episode}
    places = list(zip(rows["sequence"].to_pylist(), rows["position"].to_pylist(), strict=True))
    assert places == sorted(places)
    assert read_token_rows(folder, 1, "no such episode") is None
    assert read_token_rows(folder, 9, episode) is None
    assert read_episode_rows(folder, 9) is None
    token_file(folder, 1).write_bytes(b"damaged")
    with pytest.raises(UsageError, match="cannot be read"):
        read_token_rows(folder, 1, episode)


def test_a_number_of_episodes_bounds_the_tokens_and_none_writes_nothing(run_with, tmp_path):
    folder = run_with("observe.tokens=3")
    tokens, rows = tables(folder, 1)
    chosen = {row["episode"] for row in tokens}
    assert len(rows) == 6
    assert len(chosen) == 3
    assert chosen == {row["episode"] for row in rows if row["has_tokens"]}
    assert len({row["group"] for row in rows if row["has_tokens"]}) == 1


def test_no_tables_if_the_setting_says_so(run_with):
    assert not (run_with("observe.tokens=none") / "tokens").exists()


def group(name, *rewards):
    return [
        Trajectory(id=f"{name}/{member}.0", task_id="t", environment="e", seed=0, group_id=name, reward=reward)
        for member, reward in enumerate(rewards)
    ]


def test_the_most_mixed_the_best_and_the_worst_group_are_chosen():
    groups = [group("plain", 0.5, 0.5), group("best", 1, 0.9), group("worst", 0, 0.1), group("mixed", 0, 1)]
    assert {name.partition("/")[0] for name in choose_episodes(groups, 6)} == {"mixed", "best", "worst"}
    assert len(choose_episodes(groups, 100)) == 8
    assert choose_episodes([group("large", 3, 1, 2, 0)], 2) == {"large/0.0", "large/3.0"}
    assert choose_episodes([], 2) == set()


FILTER = "algorithm.filters={k3: {limit: 0.0}}"
REASONS = [
    (("algorithm.correction.mode=icepop", "algorithm.correction.band=[1.0000001, 5.0]"), "correction:icepop"),
    (("algorithm.filters={top_entropy: {share: 0.2}}",), "filter:top_entropy"),
    (("algorithm.loss=m2po", "algorithm.loss_options={tau: 1.0e-30}"), "loss:m2po"),
    (("algorithm.shaping={pf_ppo: {}}",), "shaping:pf_ppo"),
    (("trainer.max_kl=1e-9", "trainer.epochs=2", "trainer.learning_rate=0.05"), None),
]


@pytest.mark.parametrize(("overrides", "reason"), REASONS)
def test_what_masked_a_token_is_named(run_with, overrides, reason):
    folder = run_with("observe.tokens=all", "trainer.steps=1", *overrides)
    (metrics,) = read_metrics(folder / "metrics.jsonl")
    tokens, _ = tables(folder, 1)
    found = {row["masked_by"] for row in tokens}
    assert reason in found, found
    if "train/dropped_share" in metrics:
        dropped = sum(str(row["masked_by"]).startswith(("correction", "filter", "loss")) for row in tokens)
        assert dropped / len(tokens) <= metrics["train/dropped_share"] + 1e-9


@pytest.mark.slow
def test_the_ratio_is_that_of_the_latest_update(run_with):
    folder = run_with("observe.tokens=all", "trainer.epochs=3", "trainer.steps=1", "trainer.learning_rate=0.1")
    tokens, _ = tables(folder, 1)
    ratios = [row["ratio"] for row in tokens if row["ratio"] is not None]
    assert max(ratios) > 1.001
    assert any(row["clipped"] for row in tokens)
    single = run_with("observe.tokens=all", "trainer.mini_batches=1", "trainer.steps=1", "run.name=single")
    assert {row["ratio"] for row in tables(single, 1)[0]} <= {1.0, None}


def test_dropped_groups_are_listed_with_the_reason(run_with):
    folder = run_with("algorithm.dynamic_sampling=true")
    rows = [row for step in (1, 2) for row in tables(folder, step)[1]]
    dropped = [row for row in rows if row["dropped"]]
    assert all(row["dropped"] == "filtered" and not row["has_tokens"] for row in dropped)
    assert all(row["trained_tokens"] == 0 and row["advantage_mean"] is None for row in dropped)
    filtered = sum(line["rollout/groups_filtered"] for line in read_metrics(folder / "metrics.jsonl"))
    assert len(dropped) == 3 * filtered


def test_a_failed_member_of_a_trained_group_is_listed(tiny_run, monkeypatch):
    import letters

    real, calls = letters.Letters.step, []

    def step(self, action):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return real(self, action)

    monkeypatch.setattr(letters.Letters, "step", step)
    folder = train(tiny_run("trainer.steps=1", "rollout.retries=0")).folder
    failed = [row for row in tables(folder, 1)[1] if row["dropped"]]
    assert [row["dropped"] for row in failed] == [str(Outcome.ENVIRONMENT_ERROR)]


@pytest.mark.slow
def test_a_resumed_run_replaces_the_tables_of_repeated_steps(tiny_run):
    class Stop(RunWatcher):
        def on_step(self, step, metrics):
            if step == 3:
                raise KeyboardInterrupt

    run = tiny_run()  # saves checkpoints 2 and 4
    with pytest.raises(KeyboardInterrupt):
        train(run, watcher=Stop())
    folder = run.folder.path
    before = token_file(folder, 2).read_bytes()
    token_file(folder, 3).write_bytes(b"an earlier attempt")
    token_file(folder, 7).write_bytes(b"an earlier attempt")
    episode_file(folder, 7).write_bytes(b"an earlier attempt")
    assert train(resume_run(folder)).step == 4
    assert sorted(file.name for file in (folder / "tokens").iterdir()) == [
        *(f"episodes-{step:06d}.parquet" for step in range(1, 5)),
        *(f"step-{step:06d}.parquet" for step in range(1, 5)),
    ]
    assert token_file(folder, 2).read_bytes() == before
    assert tables(folder, 3)[0]


@pytest.mark.slow
def test_a_table_that_cannot_be_written_costs_a_warning(tiny_run, monkeypatch):
    class Messages(RunWatcher):
        def __init__(self):
            self.messages = []

        def on_message(self, text):
            self.messages.append(text)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_tables, "write_step", fail)
    watcher = Messages()
    assert train(tiny_run(), watcher=watcher).step == 4
    (message,) = (text for text in watcher.messages if "token table" in text)
    assert "token table of step 1" in message
    assert "No space left" in message


def test_the_files_hold_the_documented_columns(run_with):
    folder = run_with()
    assert pq.read_schema(token_file(folder, 1)).names == TOKENS.names
    assert pq.read_schema(episode_file(folder, 1)).names == EPISODES.names
    assert pq.ParquetFile(token_file(folder, 1)).metadata.row_group(0).column(0).compression == "ZSTD"
