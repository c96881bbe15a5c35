"""A check of the token tables of any run against its store and its metrics."""

import pyarrow.parquet as pq
import pytest

from agentrl.observe.metrics import read_metrics
from agentrl.observe.token_table import read_episode_rows, steps, token_file
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex


def check_token_tables(folder, episodes=None):
    """Check a run with ``observe.tokens=all``: each token that the trainer saw has one row, with its values.

    `episodes` are the stored episodes by id, if those of another run were trained on.
    """
    lines = {line["step"]: line for line in read_metrics(folder / "metrics.jsonl")}
    if episodes is None:
        with TrajectoryIndex(folder / "trajectories") as index:
            episodes = {row.id: index.read(row).trajectory for row in index.select(EpisodeFilter())}
    assert steps(folder) == sorted(lines)
    for step, line in lines.items():
        tokens, rows = pq.read_table(token_file(folder, step)).to_pylist(), read_episode_rows(folder, step).to_pylist()
        places = {(row["episode"], row["sequence"], row["position"]) for row in tokens}
        assert len(places) == len(tokens) == line["train/tokens"]
        for row in tokens:
            sequence = episodes[row["episode"]].sequences[row["sequence"]]
            assert sequence.token_ids[row["position"]] == row["token"]
            if row["engine_logprob"] is not None:
                assert sequence.logprobs[row["position"]] == pytest.approx(row["engine_logprob"], abs=1e-6)
        computed = [row["entropy"] for row in tokens if row["entropy"] is not None]
        assert sum(computed) / len(computed) == pytest.approx(line["train/entropy"], rel=1e-4)
        assert sum(abs(row["advantage"]) for row in tokens) / len(tokens) == pytest.approx(
            line["train/advantage_abs_mean"], rel=1e-4
        )
        assert {row["episode"] for row in rows if row["has_tokens"]} == {row["episode"] for row in tokens}
        assert all(row["trained_tokens"] <= row["sampled_tokens"] for row in rows)
    return lines
