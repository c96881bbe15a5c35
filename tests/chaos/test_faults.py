"""Faults: their choice, what each does, and the notice of runs that hang or end without a message."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from agentrl.engine import Capabilities, GenerateRequest, Generation, SamplingParams, StopReason
from agentrl.engine.answer_check import check_answer
from agentrl.errors import EngineError
from agentrl.observe.checkpoints import Checkpoints, damage
from agentrl.observe.files import JsonLinesWriter, read_json_lines
from agentrl.observe.run_folder import RunDirectory
from agentrl.testing.chaos.damage import Damage, damage_files
from agentrl.testing.chaos.disturbed_run import (
    TRACEBACK,
    UNEXPECTED,
    CampaignSettings,
    DisturbedRun,
    Patience,
    is_clear_end,
)
from agentrl.testing.chaos.plan import GARBLED, WAYS, PlannedFault, Target, plan_faults
from agentrl.testing.chaos.program import garbled_fields
from agentrl.testing.chaos.result import CampaignResult
from agentrl.testing.chaos.scenarios import LOCAL_SCENARIOS
from agentrl.testing.chaos.servers import FaultyProxy, garble_json
from agentrl.testing.chaos.world import Ledger, LedgerEnv, read_ledger


def fault(target: Target, way: str, draw: int = 0) -> PlannedFault:
    return PlannedFault(target=target, way=way, after_events=1, delay_s=0.0, draw=draw)


def test_a_seed_gives_the_same_faults_and_every_way_occurs() -> None:
    ways = {target: WAYS[target] for target in (Target.TRAINER, Target.ANSWER, Target.DISK)}
    first, again, other = (list(itertools.islice(plan_faults(seed, ways), 100)) for seed in ("1", "1", "2"))
    assert first == again != other
    assert {(planned.target, planned.way) for planned in first} == {(t, way) for t in ways for way in ways[t]}


@pytest.mark.parametrize("way", GARBLED)
def test_every_garbled_answer_is_rejected(way: str) -> None:
    request = GenerateRequest(prompt_ids=[1, 2], params=SamplingParams(max_tokens=8), session_id="s", request_id="r")
    limits = Capabilities(max_context=64, vocab_size=50)
    answer = Generation(token_ids=[3, 4, 5], logprobs=[-1.0] * 3, versions=[2] * 3, stop_reason=StopReason.STOP)
    check_answer(answer, request, limits, version=2, engine="e")
    changed = replace(answer, **garbled_fields(way, answer, vocab_size=50, version=2, max_tokens=8, draw=1))
    with pytest.raises((EngineError, TypeError)):  # of a missing list; the caller classifies it
        check_answer(changed, request, limits, version=2, engine="e")


def test_any_field_of_json_is_garbled() -> None:
    answer = {"choices": [{"token_ids": [1, 2], "logprobs": [-0.5, -1.0], "stop": None}], "id": "x"}
    seen = {json.dumps(garble_json(answer, random.Random(seed))) for seed in range(300)}
    assert json.dumps(answer) not in seen
    assert any('"token_ids": [1]' in text or '"token_ids": [2]' in text for text in seen)
    assert any("10000000" in text for text in seen)
    assert any('"choices"' not in text for text in seen)


@pytest.mark.parametrize("way", WAYS[Target.STORE])
@pytest.mark.parametrize("target", [Target.STORE, Target.METRICS])
def test_damaged_records_are_known(target: Target, way: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    file = run.trajectories / "step-000001.jsonl" if target is Target.STORE else run.metrics_file
    writer = JsonLinesWriter(file)
    for number in range(40):
        writer.append({"kind": "group", "id": f"{number}"} if target is Target.STORE else {"step": number})
    writer.close()
    known = Damage()
    assert file.name in damage_files(fault(target, way, draw=7), run, known)
    left = {str(record.get("id", record.get("step"))) for record in read_json_lines(file)}
    destroyed = set(map(str, range(40))) - left
    assert destroyed
    assert destroyed <= (known.ids if target is Target.STORE else set(map(str, known.steps)))


@pytest.mark.parametrize("way", WAYS[Target.CHECKPOINT])
def test_only_the_newest_of_several_checkpoints_is_damaged(way: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    checkpoints = Checkpoints(run.checkpoints, keep=2)
    checkpoints.save(1, lambda folder: (folder / "trainer.pt").write_bytes(b"12345678") and None)
    assert damage_files(fault(Target.CHECKPOINT, way), run, Damage()) == ""
    checkpoints.save(2, lambda folder: (folder / "trainer.pt").write_bytes(b"12345678") and None)
    assert damage_files(fault(Target.CHECKPOINT, way), run, Damage()).startswith("step-000002/")
    first, second = checkpoints.present()
    assert damage(first.path) is None
    assert damage(second.path) is not None


def test_episodes_in_the_ledger_have_unique_exact_returns(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    env, totals = LedgerEnv(ledger=str(file)), []
    for _ in range(20):
        env.reset(seed=3)
        rewards = []
        done = False
        while not done:
            _, reward, done, _, _ = env.step("aeb")
            rewards.append(float(reward))
        totals.append(sum(rewards))
    assert len(set(totals)) == 20
    ended = [event["total"] for event in read_ledger(file) if event["event"] == "step" and event["terminated"]]
    assert ended == totals
    assert all(sum(reversed(rewards)) == total for total in totals[-1:]), "the order does not change the sum"


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"token_ids": [1, 2, 3]}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        proxy = FaultyProxy("http://127.0.0.1:{1}".format(*server.server_address), note=lambda way: None)
        yield proxy
        proxy.close()
        server.shutdown()


def ask(proxy: FaultyProxy) -> bytes:
    with urllib.request.urlopen(f"{proxy.url}/generate", timeout=30) as answer:
        body: bytes = answer.read()
        return body


def test_proxy_garbles_one_answer_and_refuses_connections(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(proxy)
    proxy.inject(fault(Target.ANSWER, "truncated"))
    assert len(ask(proxy)) < len(whole)
    assert ask(proxy) == whole
    proxy.inject(fault(Target.ANSWER, "a garbled field"))
    assert ask(proxy) != whole
    proxy.inject(fault(Target.ANSWER, "failed"))
    with pytest.raises(urllib.error.HTTPError):
        ask(proxy)
    proxy.inject(fault(Target.CONNECTION, "refused"))
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        ask(proxy)
    monkeypatch.setattr(proxy, "_refuses_until", 0.0)
    assert ask(proxy) == whole


SLEEP = "import signal, subprocess, sys, time\nprint('hello', flush=True)\n"
IGNORE = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
FOR_EVER = "while True: time.sleep(1)\n"
PROGRESS = "for n in range(1000):\n    open(sys.argv[2], 'a').write('{}\\n'); time.sleep(0.01)\n"
CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"


def disturbed(folder: Path, program: str, **patience: float) -> tuple[DisturbedRun, CampaignResult, list[str]]:
    """A run whose program is another one."""
    settings = CampaignSettings(
        folder=folder,
        program=(sys.executable, "-c", SLEEP + program),
        patience=Patience(**{"stall_s": 0.5, "end_s": 0.5, "end_twice_s": 0.5, **patience}),
        most_events=1,
    )
    result, said = CampaignResult(0), list[str]()
    run = DisturbedRun(settings, LOCAL_SCENARIOS[0], 0, "model", result, time.monotonic(), said.append)
    return run, result, said


@pytest.mark.slow
def test_a_run_without_progress_is_hung(tmp_path: Path) -> None:
    run, result, _ = disturbed(tmp_path, IGNORE + FOR_EVER)
    assert not run._reach(fault(Target.TRAINER, "SIGKILL"))
    run.close()
    assert "no progress for 0.5 s" in result.hung[0]
    assert "it said: hello" in result.hung[0]
    assert "it did not end in 0.5 s after SIGINT and SIGINT" in result.hung[1]


def test_run_that_ignores_signals_is_hung(tmp_path: Path) -> None:
    run, result, said = disturbed(tmp_path, IGNORE + PROGRESS + FOR_EVER, stall_s=60)
    assert run._reach(fault(Target.TRAINER, "SIGINT"))
    assert run._inject(fault(Target.TRAINER, "SIGINT"))
    run.close()
    assert [finding.partition("; ")[0] for finding in result.hung] == [
        "00-synchronous, output 1: it did not end in 0.5 s after SIGINT after trainer: SIGINT"
    ]
    assert "trainer: SIGINT -> SIGKILL" in said[0]


@pytest.mark.slow
def test_processes_that_outlive_a_run_make_it_hung(tmp_path: Path) -> None:
    run, result, _ = disturbed(tmp_path, CHILD + PROGRESS, stall_s=60)
    assert run._reach(fault(Target.TRAINER, "SIGKILL"))
    assert run._inject(fault(Target.TRAINER, "SIGKILL"))
    run.close()
    assert "1 processes are left 0.5 s after its end" in result.hung[0]
    assert not result.unclear


@pytest.mark.parametrize(
    ("program", "is_clear"),
    [
        ("print('error: the disk is full'); sys.exit(2)", True),
        ("print('oh'); sys.exit(2)", False),
        ("print('error: x', flush=True); raise ValueError", False),
        ("sys.exit(130)", False),
        ("time.sleep(0.1); __import__('os').kill(__import__('os').getpid(), 11)", False),
    ],
)
def test_a_run_that_ends_by_itself_must_say_why(tmp_path: Path, program: str, is_clear: bool) -> None:
    run, result, _ = disturbed(tmp_path, program, stall_s=60)
    assert not run._reach(fault(Target.TRAINER, "SIGKILL"))
    run.close()
    assert bool(result.unclear) != is_clear
    assert not result.hung


@pytest.mark.parametrize(
    ("code", "told", "text", "is_clear"),
    [
        (0, "", "done", True),
        (130, "SIGINT", "resume with: agentrl train --resume run", True),
        (130, "SIGINT", TRACEBACK, False),
        (130, "", "interrupted", False),
        (-2, "SIGINT and SIGINT", "stopping", True),
        (-15, "SIGTERM", "stopping", False),
        (1, "", f"{TRACEBACK} of a worker\nerror: the run failed", True),
        (1, "", f"error: OSError: x\n{UNEXPECTED}", False),
        (1, "", f"error: x\n{TRACEBACK}\n    print('error: x'); raise ValueError", False),  # as of Python 3.13
        (-11, "", "error: x", False),
    ],
)
def test_ends_that_are_clear(code: int, told: str, text: str, is_clear: bool) -> None:
    assert is_clear_end(code, told, text) == is_clear


def test_the_ledger_ignores_a_line_that_was_not_finished(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    Ledger(file).append("reset", episode="a")
    with file.open("a") as opened:
        opened.write('{"event": "st')
    assert [event["event"] for event in read_ledger(file)] == ["reset"]
