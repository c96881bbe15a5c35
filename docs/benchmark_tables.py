"""Tables of docs/benchmarks.md: the recorded comparisons with other frameworks, and the stored ratios."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

DOCS = Path(__file__).parent
RECORDED = DOCS / "comparisons.json"
NOT_MEASURED = "Not measured yet."
NAMES = {
    "agentrl": "agentrl",
    "agentrl_in_process": "agentrl, engine in the same process",
    "agentrl_async": "agentrl, asynchronous",
    "bare": "bare client",
    "trl": "TRL 1.16.0",
    "verifiers": "verifiers 0.4.0",
    "verifiers_classic": "verifiers 0.3.1, classic `ToolEnv`",
    "agentlightning": "agentlightning 0.3.0",
    "litellm": "litellm 1.106.12",
    "rllm": "rllm-model-gateway 0.1.0",
}
OWN = ("agentrl", "agentrl_in_process", "agentrl_async")
LIMITS = ("bare",)
"""Sides that are neither agentrl nor a framework."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a comparison."""

    key: str
    title: str
    form: str
    """Format of a value."""
    less_is_better: bool


ROLLOUT = (
    Figure("cpu_ms_per_turn", "CPU ms per turn", "{:.2f}", True),
    Figure("turns_per_s", "turns/s", "{:,.0f}", False),
    Figure("tokens_per_s", "tokens/s", "{:,.0f}", False),
    Figure("kb_per_episode", "KB per episode", "{:,.0f}", True),
)
GATEWAY = (
    Figure("cpu_ms_per_request", "CPU ms per request", "{:.2f}", True),
    Figure("requests_per_s", "requests/s", "{:,.0f}", False),
    Figure("first_text_ms_median", "first text of a stream, ms", "{:,.0f}", True),
)
E2E = (
    Figure("seconds", "seconds", "{:,.0f}", True),
    Figure("cpu_s", "CPU seconds", "{:,.0f}", True),
    Figure("sampled_tokens", "sampled tokens", "{:,.0f}", True),
    Figure("steps", "steps", "{:,.0f}", True),
    Figure("cpu_s_per_step", "CPU seconds per step", "{:,.1f}", True),
    Figure("cpu_ms_per_token", "CPU ms per sampled token", "{:,.2f}", True),
)

COMPARED = (("rollout", "instant"), ("rollout", "vllm"), ("gateway", None), ("e2e", None), ("e2e_llm", None))
"""Comparisons whose newest figures are shown: the benchmark, and its server."""


def read_recorded(path: Path = RECORDED) -> list[dict[str, Any]]:
    """Return all recorded comparisons, oldest first."""
    found: list[dict[str, Any]] = json.loads(path.read_bytes()) if path.is_file() else []
    return found


def newest(entries: Sequence[Mapping[str, Any]], benchmark: str, server: str | None = None) -> Mapping[str, Any] | None:
    """Return the newest comparison of a benchmark, on a server if it names one."""
    wanted = [
        entry
        for entry in entries
        if entry["benchmark"] == benchmark and server in (None, entry["conditions"].get("server"))
    ]
    return wanted[-1] if wanted else None


def rows_of(entry: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Yield each side of a comparison, a setting such as the number of episodes at once, and its figures."""
    if entry["benchmark"] == "gateway":
        for name, row in entry.items():
            if name in NAMES:
                yield name, "", row
        return
    for name, rows in entry["sides"].items():
        if entry["benchmark"] == "rollout":
            for setting, row in rows.items():
                yield name, setting, row
        elif rows:
            runs = [_with_rates(row) for row in rows.values()]
            found = {"reached": sum(run["reached"] for run in runs), "seeds": len(runs)}
            for figure in E2E:
                values = [run[figure.key] for run in runs]
                found |= {figure.key: median(values), f"{figure.key}_lowest": min(values)}
                found[f"{figure.key}_highest"] = max(values)
            yield name, "", found


def _with_rates(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run that learned, with its CPU time per step after the first one, and per sampled token."""
    first, last = run["curve"][0], run["curve"][-1]
    per_step = (last[1] - first[1]) / max(1, len(run["curve"]) - 1)
    per_token = 1000 * run["steps"] * per_step / max(1, run["sampled_tokens"])
    return dict(run) | {"cpu_s_per_step": per_step, "cpu_ms_per_token": per_token}


def figures_of(benchmark: str) -> tuple[Figure, ...]:
    """Return the figures of a benchmark."""
    return {"rollout": ROLLOUT, "gateway": GATEWAY}.get(benchmark, E2E)


def conditions_text(entry: Mapping[str, Any]) -> str:
    """Return the conditions of a comparison as a sentence."""
    found = entry["conditions"]
    processor = found["processor"] or "unknown processor"
    rounds = f"{found['rounds']} seeds" if "success" in found else f"medians of {found['rounds']} rounds"
    cores = found.get("threads", found["cores"])
    names = "1 core" if cores == 1 else f"{cores} cores"
    measured = f"Measured on {found['date']}: {names} of {processor}, load {found['load']}, {rounds}."
    unfinished = [f"{NAMES.get(side, side)} with {count:,}" for side, count in found.get("unfinished", {}).items()]
    return measured + (f" Did not finish its episodes: {', '.join(unfinished)} at once." if unfinished else "")


def comparison_table(entries: Sequence[Mapping[str, Any]], benchmark: str, server: str | None = None) -> str:
    """Return the table of the newest comparison of a benchmark."""
    entry = newest(entries, benchmark, server)
    if entry is None:
        return NOT_MEASURED
    figures, rows = figures_of(benchmark), list(rows_of(entry))
    settings = any(setting for _, setting, _ in rows)
    heads = ["side", *(["episodes at once"] if settings else []), *(figure.title for figure in figures)]
    if benchmark.startswith("e2e"):
        heads.append("seeds that succeeded")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, setting, row in rows:
        cells = [NAMES.get(name, name), *([setting] if settings else [])]
        cells += [figure.form.format(row[figure.key]) for figure in figures]
        if "cpu_ms_lowest" in row:
            at = heads.index(figures[0].title)
            cells[at] += f" ({row['cpu_ms_lowest']:.2f} to {row['cpu_ms_highest']:.2f})"
        for at, figure in enumerate(figures, heads.index(figures[0].title)):
            if f"{figure.key}_lowest" in row:
                low, high = (figure.form.format(row[f"{figure.key}_{end}"]) for end in ("lowest", "highest"))
                cells[at] += f" ({low} to {high})"
        if "seeds" in row:
            cells.append(f"{row['reached']} of {row['seeds']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([conditions_text(entry), "", *lines, *_ratio_lines(entry)])


def _ratio_lines(entry: Mapping[str, Any]) -> list[str]:
    """Return a sentence with the ratios of TRL's figures to agentrl's, if an end-to-end comparison has both."""
    sides = entry.get("sides", {})
    if not (entry["benchmark"].startswith("e2e") and sides.get("agentrl") and sides.get("trl")):
        return []
    own, peer = sides["agentrl"], sides["trl"]
    texts = []
    for figure in E2E:
        pairs = [(_with_rates(peer[seed]), _with_rates(own[seed])) for seed in own if seed in peer]
        ratios = [theirs[figure.key] / ours[figure.key] for theirs, ours in pairs]
        texts.append(f"{figure.title} {median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")
    return ["", f"TRL divided by agentrl, median over the seeds (lowest to highest): {', '.join(texts)}."]


def ahead_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return every figure of the newest comparisons in which a peer is better than agentrl."""
    found = [entry for name, server in COMPARED if (entry := newest(entries, name, server)) is not None]
    if not found:
        return NOT_MEASURED
    lines = []
    for entry in found:
        rows = list(rows_of(entry))
        for figure in figures_of(entry["benchmark"]):
            for setting in dict.fromkeys(setting for _, setting, _ in rows):
                here = {name: row[figure.key] for name, at, row in rows if at == setting}
                lines += _ahead(_title(entry, setting), figure, here)
    if not lines:
        return "In none of the figures above."
    heads = "| comparison | figure | peer | its value | agentrl |"
    return "\n".join([heads, "|---|---|---|---|---|", *lines])


def _title(entry: Mapping[str, Any], setting: str) -> str:
    """Return the name of a comparison, with the server if that computes answers, and the number of episodes at once."""
    server = entry["conditions"].get("server")
    parts = [entry["benchmark"], "on vLLM" if server == "vllm" else "", f"{setting} at once" if setting else ""]
    return ", ".join(filter(None, parts))


def _ahead(title: str, figure: Figure, here: Mapping[str, float]) -> list[str]:
    if "agentrl" not in here:
        return []
    own, sign = here["agentrl"], 1 if figure.less_is_better else -1
    return [
        f"| {title} | {figure.title} | {NAMES[name]} | {figure.form.format(value)} | {figure.form.format(own)} |"
        for name, value in here.items()
        if name not in (*OWN, *LIMITS) and sign * value < sign * own
    ]


def history_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return one row per recorded comparison: its first figure of agentrl, and that of the best peer."""
    if not entries:
        return NOT_MEASURED
    lines = ["| date | comparison | figure | agentrl | best peer | times | load |", "|---|---|---|---|---|---|---|"]
    for entry in entries:
        figure, rows = figures_of(entry["benchmark"])[0], list(rows_of(entry))
        for setting in dict.fromkeys(setting for _, setting, _ in rows):
            here = {name: row[figure.key] for name, at, row in rows if at == setting}
            peers = {name: value for name, value in here.items() if name not in (*OWN, *LIMITS)}
            if "agentrl" in here and peers:
                lines.append(_history_row(entry, figure, setting, here["agentrl"], peers))
    return "\n".join(lines)


def _history_row(entry: Mapping[str, Any], figure: Figure, setting: str, own: float, peers: Mapping[str, float]) -> str:
    best = min(peers, key=lambda name: peers[name])
    cells = [
        entry["conditions"]["date"],
        _title(entry, setting),
        figure.title,
        figure.form.format(own),
        f"{figure.form.format(peers[best])} ({NAMES[best]})",
        f"{peers[best] / own:.1f}",
        str(entry["conditions"]["load"]),
    ]
    return f"| {' | '.join(cells)} |"


def ratios_table(path: Path = DOCS / "benchmarks.json") -> str:
    """Return the stored ratios, which `make bench-check` measures again."""
    lines = ["| benchmark | ratio | stored | conditions |", "|---|---|---|---|"]
    for run in json.loads(path.read_bytes()):
        lines += [
            f"| {run['benchmark']} | {ratio['name']} | {ratio['stored']:g} | {run['conditions']} |"
            for ratio in run["ratios"]
        ]
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "comparison rollout": lambda: comparison_table(read_recorded(), "rollout", "instant"),
    "comparison rollout vllm": lambda: comparison_table(read_recorded(), "rollout", "vllm"),
    "comparison gateway": lambda: comparison_table(read_recorded(), "gateway"),
    "comparison e2e": lambda: comparison_table(read_recorded(), "e2e"),
    "comparison e2e llm": lambda: comparison_table(read_recorded(), "e2e_llm"),
    "comparison ahead": lambda: ahead_table(read_recorded()),
    "comparison history": lambda: history_table(read_recorded()),
    "stored ratios": ratios_table,
}
"""Tables by the names of their markers."""
