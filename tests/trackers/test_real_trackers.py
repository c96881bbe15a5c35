"""What MLflow, SwanLab, Trackio, Weights & Biases, TensorBoard and OpenTelemetry themselves read of a run."""

import json
import math
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support.waiting import join

from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories

MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("agentrl").experiment_id])
history = [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, "reward/mean")]
tables = [file.path for file in client.list_artifacts(run.info.run_id, "episodes")]
path = client.download_artifacts(run.info.run_id, tables[0])
print(json.dumps({
    "name": run.data.tags["mlflow.runName"], "status": run.info.status, "history": history, "tables": tables,
    "steps": run.data.params["trainer.tasks_per_step"], "table": json.load(open(path)),
}))
"""

TRACKIO = """
import json
import trackio
run = next(iter(trackio.Api().runs("agentrl")))
print(json.dumps({"name": run.name, "logs": run.metrics() if hasattr(run, "metrics") else None}, default=str))
"""


def values(folder, name):
    return [[line["step"], line[name]] for line in read_metrics(RunDirectory(folder).metrics_file)]


def ended(folder, step):
    stored = read_trajectories(RunDirectory(folder).trajectories)
    return {found.trajectory.id: found.trajectory for found in stored if found.step == step}


def test_mlflow_has_config_metrics_and_episodes(tracked_run, read_with):
    folder = tracked_run("mlflow")
    found = json.loads(read_with(MLFLOW, folder / "logs" / "mlflow"))
    assert (found["name"], found["status"], found["steps"]) == ("run", "FINISHED", "2")
    assert found["history"] == values(folder, "reward/mean"), "both parts of the resumed run are one history"
    assert found["tables"] == ["episodes/step-000001.json", "episodes/step-000002.json"]
    rows = [dict(zip(found["table"]["columns"], row, strict=True)) for row in found["table"]["data"]]
    stored = ended(folder, 1)
    assert {row["episode"] for row in rows} == stored.keys()
    for row in rows:
        trajectory = stored[row["episode"]]
        assert (row["reward"], row["turns"]) == (trajectory.reward, len(trajectory.turns))
        assert row["sampled_tokens"] == trajectory.sampled_tokens


def test_swanlab_writes_files_that_it_can_upload(tracked_run):
    folder = tracked_run("swanlab")
    files = [path for path in (folder / "logs" / "swanlab").rglob("*") if path.is_file()]
    assert any(path.suffix == ".swanlab" for path in files)
    config = next(path.read_text() for path in files if path.name == "config.yaml")
    assert "tasks_per_step" in config
    data = b"".join(path.read_bytes() for path in files if path.suffix == ".swanlab")
    assert b"reward/mean" in data
    tables = "".join(path.read_text() for path in files if "echarts" in str(path))
    assert all(name in tables for name in ended(folder, 1))


def test_trackio_has_metrics_and_episodes(tracked_run, read_with, tmp_path):
    own = {"TRACKIO_DIR": str(tmp_path)}
    folder = tracked_run("trackio", variables=own)
    found = read_with(TRACKIO, variables=own)
    assert '"name": "run"' in found
    database = b"".join(path.read_bytes() for path in tmp_path.rglob("*.db*"))
    assert b"reward/mean" in database
    assert all(name.encode() in database for name in ended(folder, 1))


def test_wandb_works_offline(tracked_run):
    folder = tracked_run("wandb", variables={"WANDB_MODE": "offline"})
    files = list((folder / "logs" / "wandb").rglob("*.wandb"))
    assert files
    assert all(b"reward/mean" in path.read_bytes() for path in files)


MLFLOW_STATUS = """
import sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("agentrl").experiment_id])
print(run.info.status, run.data.tags["error"])
"""
FAILING = "train_failing.py"


def test_mlflow_shows_a_failed_run_as_failed(tracked_run, read_with):
    folder = tracked_run("mlflow", program=FAILING)
    assert read_with(MLFLOW_STATUS, folder / "logs" / "mlflow").startswith("FAILED TrainingError: the numbers are not")


WANDB_EXIT = """
import sys
from wandb.proto.wandb_internal_pb2 import Record
data, at, part = open(sys.argv[1], "rb").read(), 7, b""
while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:
        at += left
        continue
    size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    part = (part if kind in (3, 4) else b"") + data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4) and (record := Record.FromString(part)).WhichOneof("record_type") == "exit":
        print("exit code", record.exit.exit_code)
"""
"""Reads the file of an offline run, whose records are framed as in LevelDB's log."""


@pytest.mark.parametrize(("program", "code"), [(FAILING, 1), ("train_tiny.py", 0)])
def test_wandb_shows_a_failed_run_as_failed(tracked_run, read_with, program, code):
    folder = tracked_run("wandb", variables={"WANDB_MODE": "offline"}, program=program)
    file = next((folder / "logs" / "wandb").rglob("*.wandb"))
    assert read_with(WANDB_EXIT, file).splitlines()[-1] == f"exit code {code}"


def test_swanlab_shows_a_failed_run_as_failed(tracked_run):
    folder = tracked_run("swanlab", program=FAILING)
    files = [path for path in (folder / "logs" / "swanlab").rglob("*") if path.is_file()]
    assert any(b"the numbers are not finite" in path.read_bytes() for path in files)


MLFLOW_ODDITIES = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("agentrl").experiment_id])
print(json.dumps({
    "status": run.info.status, "metrics": run.data.metrics, "params": run.data.params,
    "history": [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, "reward/mean")],
    "tables": len(client.list_artifacts(run.info.run_id, "episodes")),
}))
"""
REPEATED = [[1, 1.0], [2, 2.0], [3, 3.0], [2, 2.25], [3, 3.25], [4, 4.25]]


def test_mlflow_takes_odd_names_values_and_settings(log_oddities, read_with):
    found = json.loads(read_with(MLFLOW_ODDITIES, log_oddities("mlflow")))
    assert (found["status"], found["history"], found["tables"]) == ("FINISHED", REPEATED, 4)
    assert len(found["metrics"]) == 1208
    assert found["metrics"]["eval/pass_8 _greedy_"] == 0.25
    assert math.isnan(found["metrics"]["train/kl"])
    assert found["metrics"]["train/ratio"] > 1e300
    assert len(found["params"]["agent.tools"]) == 500
    assert found["params"]["agent.options.mean_8 _greedy_.a/_/b"] == "1"
    assert found["params"]["key249"] == "249"


MLFLOW_RACE = """
import sys
from pathlib import Path
from mlflow import MlflowClient
from agentrl.observe.experiment_trackers import MLflowTracker

folder = Path(sys.argv[1])
real, calls = MlflowClient.get_experiment_by_name, []

def unknown_at_first(self, name):
    calls.append(name)
    return None if len(calls) == 1 else real(self, name)

MLflowTracker(folder / "a", "a", {}).close()
MlflowClient.get_experiment_by_name = unknown_at_first
MLflowTracker(folder / "b", "b", {}).close()
(folder / "a" / "run_id").write_text("0" * 32)
MLflowTracker(folder / "a", "a", {}).close()
client = MlflowClient()
print(sorted(run.data.tags["mlflow.runName"] for run in client.search_runs([real(client, "agentrl").experiment_id])))
"""


def test_mlflow_runs_that_begin_together_or_go_on_at_another_server(read_with, tmp_path):
    server = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/server.db"}
    assert read_with(MLFLOW_RACE, tmp_path, variables=server).splitlines()[-1] == "['a', 'a', 'b']"


def test_swanlab_takes_odd_names_values_and_settings(log_oddities):
    files = [path for path in log_oddities("swanlab").rglob("*") if path.is_file()]
    data = b"".join(path.read_bytes() for path in files if path.suffix == ".swanlab")
    assert all(name in data for name in (b"pass@8", b"many/1199", b"train/ratio"))


TRACKIO_ODDITIES = """
import json, sqlite3, sys
rows = sqlite3.connect(sys.argv[1] + "/agentrl.db").execute("select run_id, step, metrics from metrics")
print(json.dumps([[run, step, json.loads(metrics)["reward/mean"]] for run, step, metrics in rows]))
"""


def test_trackio_continues_its_run_and_no_other_of_the_same_name(log_oddities, read_with, tmp_path):
    own = {"TRACKIO_DIR": str(tmp_path / "db")}
    shutil.rmtree(log_oddities("trackio", **own))
    log_oddities("trackio", **own)  # a new run of the same name
    found = json.loads(read_with(TRACKIO_ODDITIES, tmp_path / "db"))
    runs = {run: [row[1:] for row in found if row[0] == run] for run, _, _ in found}
    assert list(runs.values()) == [REPEATED, REPEATED]


def test_wandb_takes_odd_names_values_and_settings(log_oddities):
    folder = log_oddities("wandb", WANDB_MODE="offline")
    data = b"".join(path.read_bytes() for path in folder.rglob("*.wandb"))
    assert all(value in data for value in (b"3.25", b"2.25", b"many/1199"))
    tables = [json.loads(path.read_text()) for path in folder.rglob("*.table.json")]
    assert {row[0] for table in tables for row in table["data"]} == {f"step{step}/0.0" for step in range(1, 5)}


CUT_SHORT = """
import sys
from pathlib import Path
from agentrl.observe.experiment_trackers import MLflowTracker, SwanLabTracker, WandbTracker

for kind in (MLflowTracker, WandbTracker, SwanLabTracker):
    folder = Path(sys.argv[1]) / kind.package
    folder.mkdir()
    (folder / "run_id").touch()
    kind(folder, "mine", {}).close()
"""


def test_an_identity_that_a_full_disk_cut_short_is_replaced(read_with, tmp_path):
    read_with(CUT_SHORT, tmp_path, variables={"WANDB_MODE": "offline"})
    assert [len(path.read_text()) for path in tmp_path.glob("*/run_id")] == [32, 32, 32]


PROJECTS = """
import json, os, sys
from pathlib import Path
from agentrl.observe.experiment_trackers import MLflowTracker, WandbTracker

folder = Path(sys.argv[1])
MLflowTracker(folder / "mlflow", "mine", {}).close()
WandbTracker(folder / "wandb", "mine", {}).close()
"""


def test_runs_go_to_the_projects_that_the_services_variables_name(read_with, tmp_path):
    names = {"MLFLOW_EXPERIMENT_NAME": "mine", "WANDB_PROJECT": "my-project", "WANDB_MODE": "offline"}
    read_with(PROJECTS, tmp_path, variables=names)
    found = read_with(MLFLOW_ODDITIES.replace('"agentrl"', '"mine"'), tmp_path / "mlflow")
    assert json.loads(found)["status"] == "FINISHED"
    (data,) = (path.read_bytes() for path in tmp_path.rglob("*.wandb"))
    assert b"my-project" in data


class Collector(BaseHTTPRequestHandler):
    """Receiver of OTLP requests."""

    def do_POST(self):
        self.server.requests.append((self.path, self.rfile.read(int(self.headers["Content-Length"])), self.headers))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def collector():
    server = HTTPServer(("127.0.0.1", 0), Collector)
    server.requests = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    join(thread)
    server.server_close()


SPANS = """
import gzip, json, sys
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
found = []
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    request = ExportTraceServiceRequest.FromString(gzip.decompress(data) if data[:2] == b"\\x1f\\x8b" else data)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                found.append({
                    "name": span.name, "id": span.span_id.hex(), "parent": span.parent_span_id.hex(),
                    "trace": span.trace_id.hex(), "began": span.start_time_unix_nano, "ended": span.end_time_unix_nano,
                    "attributes": {a.key: (a.value.string_value or a.value.int_value or a.value.double_value)
                                   for a in span.attributes},
                })
print(json.dumps(found))
"""


def test_spans_reach_an_otlp_collector(tracked_run, read_with, collector, tmp_path):
    address = f"http://127.0.0.1:{collector.server_address[1]}"
    folder = tracked_run("opentelemetry", variables={"OTEL_EXPORTER_OTLP_ENDPOINT": address})
    assert {path for path, _, _ in collector.requests} == {"/v1/traces"}
    files = []
    for number, (_, data, _) in enumerate(collector.requests):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(data)
    spans = json.loads(read_with(SPANS, *files))
    roots = {span["attributes"]["gen_ai.conversation.id"]: span for span in spans if not span["parent"]}
    stored = ended(folder, 1) | ended(folder, 2)
    assert roots.keys() == stored.keys()
    by_id = {span["id"]: span for span in spans}
    for name, root in roots.items():
        tree = [span for span in spans if span["trace"] == root["trace"]]
        chats = [span for span in tree if span["name"].startswith("chat ")]
        sizes = [turn.end - turn.start for turn in stored[name].turns]
        answers = sorted(chats, key=lambda chat: chat["began"])
        assert [chat["attributes"]["gen_ai.usage.output_tokens"] for chat in answers] == sizes
        assert all(by_id[chat["parent"]]["name"].startswith("turn ") for chat in chats)
        assert all(by_id[span["parent"]]["began"] <= span["began"] <= span["ended"] for span in tree if span["parent"])
        assert root["name"] == "invoke_agent letters:Letters"
