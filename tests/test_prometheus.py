"""The endpoint that Prometheus reads: its values are those of the run, also while the run hangs."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl.errors import UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.observe.run_status import RunSnapshot
from agentrl.runs import prometheus
from agentrl.runs.prometheus import metric_name
from agentrl.runs.rl import train
from agentrl.runs.status_writer import StatusWriter

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana.json"


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def families(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def scrape(port):
    return {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "run")): sample.value
        for family in families(port)
        for sample in family.samples
    }


class Scraping(RunWatcher):
    """Scrapes the run after each step, in its event loop: the endpoint answers although that is blocked."""

    def __init__(self, port):
        self.port, self.seen, self.names = port, [], set()

    def on_step(self, step, metrics):
        self.seen.append(scrape(self.port))
        found = families(self.port)
        self.names = {f"{family.name}_total" if family.type == "counter" else family.name for family in found}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "127.0.0.1:9"}, 200),
        ({"Host": "rebound.example.com"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://site.example.com"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_cannot_read_the_endpoint(free_port, headers, status):
    asked = urllib.request.Request(f"http://127.0.0.1:{free_port}/metrics", headers=headers)
    with prometheus.prometheus_endpoint(free_port, "r", RunStatus(), lambda: RunSnapshot(pid=1)):
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                found, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                found, text = error.status, error.read()
    assert (found, b"agentrl_" in text) == (status, status == 200)


@pytest.mark.slow
def test_the_endpoint_has_the_metrics_and_the_state_of_a_run(tiny_run, free_port):
    run = tiny_run("trainer.steps=2", f"observe.prometheus_port={free_port}")
    watcher = Scraping(free_port)
    train(run, watcher=watcher)
    lines = read_metrics(run.folder.metrics_file)
    for seen, line in zip(watcher.seen, lines, strict=True):
        assert seen["agentrl_finished_steps",] == line["step"]
        assert seen["agentrl_planned_steps",] == 2
        values = {name: value for name, value in line.items() if name != "step"}
        assert {name: seen[metric_name(name),] for name in values} == pytest.approx(values)
        assert seen["agentrl_memory_bytes",] > 1e7
        assert ("agentrl_engine_queue", "engine") in seen
    assert 0 < watcher.seen[0]["agentrl_sampled_tokens_total",] < watcher.seen[1]["agentrl_sampled_tokens_total",]
    with pytest.raises(OSError, match="refused"):
        scrape(free_port)


def test_metrics_with_one_name_in_prometheus_are_served_once(tmp_path):
    status = RunStatus(metrics={"tool/look up/calls": 1.0, "tool/look_up/calls": 2.0})
    collector = prometheus.RunCollector("run", status, StatusWriter(tmp_path, status).snapshot)
    names = [family.name for family in collector.collect()]
    assert len(names) == len(set(names))
    assert metric_name("tool/look up/calls") in names


def test_a_port_in_use_is_an_error_before_the_run_begins(tiny_run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        run = tiny_run(f"observe.prometheus_port={other.getsockname()[1]}")
        with pytest.raises(UsageError, match="Choose another port"):
            train(run)


def test_a_missing_package_is_named_with_how_to_install_it(tiny_run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(UsageError, match="pip install prometheus-client"):
        tiny_run("observe.prometheus_port=9400")
    prometheus.check_prometheus(None)


def expressions(panel):
    return [target["expr"] for target in panel.get("targets", ())]


@pytest.mark.slow
def test_the_dashboard_asks_only_for_metrics_that_a_run_has(tiny_run, free_port):
    watcher = Scraping(free_port)
    evaluations = "evaluation={every: 1, tasks: 2, split: test}"
    train(tiny_run("trainer.steps=1", f"observe.prometheus_port={free_port}", evaluations), watcher=watcher)
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {
        word
        for panel in dashboard["panels"]
        for expression in expressions(panel)
        for word in expression.replace("(", " ").replace("{", " ").replace("[", " ").split()
        if word.startswith("agentrl_")
    }
    assert len(asked) > 15
    assert asked - watcher.names == set()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed: make prometheus")
@pytest.mark.slow
def test_a_real_prometheus_server_reads_a_run(tiny_run, free_port, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = probe.getsockname()[1]
    scrapes = {
        "job_name": "agentrl",
        "scrape_interval": "100ms",
        "static_configs": [{"targets": [f"127.0.0.1:{free_port}"]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrapes]}))
    command = [
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{own}",
    ]

    def ask(expression):
        address = f"http://127.0.0.1:{own}/api/v1/query?query={quote(expression)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return [found["value"][1] for found in json.load(answer)["data"]["result"]]

    class Waiting(RunWatcher):
        """Waits in the event loop until Prometheus has read the step."""

        def on_step(self, step, metrics):
            self.reward, until = None, time.monotonic() + 60
            while time.monotonic() < until and self.reward != metrics["reward/mean"]:
                time.sleep(0.1)
                found = ask(metric_name("reward/mean"))
                self.reward = float(found[0]) if found else None
            self.planned = ask('agentrl_planned_steps{run="run"}')

    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    ask("up")
                    break
                except OSError:
                    time.sleep(0.1)
            run, watcher = tiny_run("trainer.steps=1", f"observe.prometheus_port={free_port}"), Waiting()
            train(run, watcher=watcher)
            assert watcher.reward == read_metrics(run.folder.metrics_file)[0]["reward/mean"]
            assert watcher.planned == ["1"]
        finally:
            server.terminate()
