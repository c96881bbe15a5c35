"""Who may use the viewer, and which files it reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.viewer import open_viewer

from agentrl.errors import UsageError
from agentrl.viewer import server as viewer_server
from agentrl.viewer.server import ViewerServer, ViewerSettings

TOKEN = "a-token-of-some-length"


async def test_pages_of_other_sites_are_rejected(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Host": "evil.example", "Origin": "http://evil.example"},
        ):
            status, error = await viewer.refuse("/api/sources", headers=headers)
            assert (status, "only requests to this machine" in error["message"]) == (403, True)
        assert await viewer.get("/api/sources", headers={"Origin": "http://localhost:8800"})


async def test_every_answer_has_a_strict_content_policy(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        for path in (
            "/api/sources",
            "/",
            "/api/nothing",
            "/r/first",
            "/assets/none.js",
            "/api/r/first/episodes?limit=x",
        ):
            answer, _ = await viewer.answer(path)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'self'; img-src 'self' data:" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in answer.headers
        answer, _ = await viewer.answer("/api/sources")
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.content_type == "application/json"


async def test_token_is_exchanged_for_a_cookie(runs: Path) -> None:
    async with open_viewer(runs, token=TOKEN) as viewer:
        assert (await viewer.refuse("/api/sources"))[0] == 401
        assert (await viewer.refuse("/?token=wrong"))[0] == 401
        assert (await viewer.refuse("/api/sources", headers={"Cookie": "agentrl_view=wrong"}))[0] == 401
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert await viewer.get("/api/sources", headers=bearer)
        assert (await viewer.refuse("/api/sources", headers={**bearer, "Origin": "https://evil.example"}))[0] == 403
        answer, _ = await viewer.answer(f"/r/first/episodes?task=x&token={TOKEN}")
        assert (answer.status, answer.headers["Location"]) == (303, "./episodes?task=x")
        cookie = answer.headers["Set-Cookie"]
        assert TOKEN not in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        sent = {"Cookie": cookie.partition(";")[0]}
        assert await viewer.get("/api/sources", headers=sent)
        address = f"{viewer.client.make_url('/')}/evil.example?token={TOKEN}"
        async with viewer.client.session.get(address, allow_redirects=False) as answer:
            assert not answer.headers.get("Location", "/").startswith("//")


def test_other_machines_need_a_token(runs: Path) -> None:
    with pytest.raises(UsageError, match="needs a token"):
        ViewerServer(ViewerSettings(folders=[runs], host="0.0.0.0"))


@pytest.mark.parametrize(
    "path",
    [
        "/api/r/..%2f..%2fetc%2fpasswd",
        "/api/r/%00",
        "/api/r/first/episode/..%2F..%2F..%2Fetc%2Fpasswd",
        "/api/r/first/episode/%00",
        "/api/r/first/episode/%FF%FE",
        "/api/r/first/episode/' OR 1=1 --",
        "/api/r/first/episode/" + "x" * 5000,
        "/api/r/first/episode/x/image/..%2F..%2Fconfig.yaml",
        "/api/r/first/episode/..%2Fconfig.yaml/raw",
        "/api/r/first%2F..%2F..",
        "/api/r/..%2Ffirst/metrics",
        "/api/compare?a=..%2Ffirst&b=%2Fetc",
        "/api/compare/episodes?a=first&b=first&task=x&episode_a=..%2F..%2Fetc%2Fpasswd",
        "/api/r/first/group/%00",
        "/api/r/first/group/..",
        "/..%2f..%2fpyproject.toml",
        "/assets/..%2F..%2Fserver.py",
        "/assets/%00.js",
        "/static/../server.py",
        "/%2e%2e/server.py",
        "/api/",
    ],
)
async def test_hostile_addresses_find_nothing(runs: Path, path: str) -> None:
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        status, error = await viewer.refuse(path)
        assert status in (400, 404), error
        assert "root:" not in str(error)


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=-1", "limit=1e9", "limit=nan", "cursor=x", "cursor=-1", "cursor=99999999", "order=id; DROP",
        "outcome=none", "success=1", "reward_from=nan", "reward_to=inf", "step_from=" + "9" * 400, "text=" + "x" * 1001,
        "turns_from=1.5", "task=" + "x" * 2000,
    ],
)  # fmt: skip
async def test_wrong_queries_are_explained(runs: Path, query: str) -> None:
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        status, error = await viewer.refuse(f"/api/r/first/episodes?{query}")
        assert status == 400
        assert error["got"] is not None
        assert error["expected"] or error["hint"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/api/r/first/episodes?environmnet=x", "did you mean environment?"),
        ("/api/r/first/episodes?reward_form=1", "did you mean reward_from?"),
        ("/api/r/first/outcomes?limit=3", None),
        ("/api/r/first/metrics?step=3", None),
        ("/api/r/first/episode/x/tokens?seqence=1", "did you mean sequence?"),
        ("/api/compare?a=first&b=first&tasks=x", "did you mean task?"),
        ("/api/sources?token=x", None),
        ("/api/events?sources=first", "did you mean source?"),
        ("/api/r/first/episode/x/image/y?size=1", None),
    ],
)
async def test_error_names_unknown_parameters(runs: Path, path: str, hint: str | None) -> None:
    async with open_viewer(runs) as viewer:
        status, error = await viewer.refuse(path)
        assert (status, error["message"], error["hint"]) == (400, "the address has no such parameter", hint)
        assert error["got"] in path


async def test_repeated_parameter_is_an_error(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        status, error = await viewer.refuse("/api/r/first/episodes?task=a&task=b")
        assert (status, error["message"], error["got"]) == (400, "task is given twice", "a, b")
        assert await viewer.get("/api/r/first/episodes?outcome=finished&outcome=truncated_turns")


async def test_odd_texts_are_only_data(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        for text in ("%", "_", "'", '"; --', "\x00", "<script>", "\N{PILE OF POO}", "*"):
            for name in ("text", "task", "environment", "role", "group", "task_type", "split"):
                found = await viewer.get("/api/r/first/episodes", params={name: text})
                assert found["rows"] == [] or name == "text"


async def test_odd_tokens_are_only_wrong(runs: Path) -> None:
    async with open_viewer(runs, token=TOKEN) as viewer:
        for shown in (
            "",
            "%00",
            "%ED%A0%80",
            "%FF",
            "%F0%9F%92%A9",
            TOKEN.upper(),
            TOKEN + "%00",
            f"{TOKEN}x",
            "x" * 7000,
        ):
            assert (await viewer.refuse(f"/api/sources?token={shown}"))[0] == 401
        assert (await viewer.refuse(f"/api/sources?token=x&token={TOKEN}"))[0] == 401
        for header in ("Bearer", "Bearer ", f"bearer {TOKEN}", f"Basic {TOKEN}", "Bearer \xff", TOKEN):
            assert (await viewer.refuse("/api/sources", headers={"Authorization": header}))[0] == 401
        async with viewer.client.post(f"/api/r/first/notes?token={TOKEN}", json={}) as answer:
            assert answer.status == 401  # the address does not admit a change


async def test_only_the_viewers_pages_may_make_changes(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        row = (await viewer.rows("first"))[0]
        note = {"episode": row["id"], "turn": None, "text": "x"}
        async with viewer.client.post("/api/r/first/notes", json=note) as answer:
            identity = (await answer.json())["id"]
        for headers in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Host": "rebound.example"},
            {"Host": "127.0.0.1.evil.example"},
            {"Host": "localhost.evil.example:80"},
        ):
            async with viewer.client.post("/api/r/first/notes", json=note, headers=headers) as answer:
                assert answer.status == 403
            async with viewer.client.delete(f"/api/r/first/notes/{identity}", headers=headers) as answer:
                assert answer.status == 403
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            async with viewer.client.post("/api/r/first/notes", data=b"{}", headers={"Content-Type": kind}) as answer:
                assert answer.status == 400
        for method in ("PUT", "PATCH", "OPTIONS", "TRACE"):
            async with viewer.client.request(method, "/api/r/first/notes") as answer:
                assert answer.status == 405
                assert "Access-Control-Allow-Methods" not in answer.headers
        assert [one["id"] for one in (await viewer.get("/api/r/first/notes"))["notes"]] == [identity]


@pytest.mark.parametrize(
    ("name", "path", "secret"),
    [
        ("diagnosis.json", "", b'{"problems": [{"problem": "SECRET", "kind": "x"}]}'),
        ("config.yaml", "", b"environment: SECRET/train\n"),
        ("status.json", "/in-flight", b'{"pid": 1, "phase": "SECRET", "in_flight": []}'),
        ("notes.jsonl", "/notes", b'{"id": "1", "episode": "e", "turn": null, "text": "SECRET", "time": 1.0}\n'),
        ("metrics.jsonl", "/metrics", b'{"step": 1, "SECRET": 1.0}\n'),
    ],
)
async def test_no_file_of_a_run_may_lead_out(runs: Path, tmp_path: Path, name: str, path: str, secret: bytes) -> None:
    outside = tmp_path / "outside" / name
    outside.parent.mkdir()
    outside.write_bytes(secret)
    (runs / "first" / name).unlink(missing_ok=True)
    (runs / "first" / name).symlink_to(outside)
    async with open_viewer(runs) as viewer:
        answer, body = await viewer.answer(f"/api/r/first{path}")
        assert (answer.status, b"is outside" in body) == (400, True)
        assert b"SECRET" not in body + (await viewer.answer("/api/sources"))[1]


async def test_tables_that_lead_out_are_not_read(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    for name in ("step-000001.parquet", "episodes-000001.parquet"):
        (tmp_path / "outside" / name).write_bytes(b"SECRET")
    (runs / "first" / "tokens").symlink_to(tmp_path / "outside")
    async with open_viewer(runs) as viewer:
        row = (await viewer.rows("first", "step_from=1&step_to=1"))[0]
        found = await viewer.get(f"/api/r/first/episode/{row['id'].replace('/', '%2F')}/tokens")
        assert "is outside" in found["overlay_problem"]
        assert found["advantage"] is None


async def test_query_of_a_megabyte_is_rejected(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        answer, _ = await viewer.answer(f"/api/r/first/episodes?text={'x' * 2**20}")
        assert answer.status == 400


async def test_links_out_of_the_opened_folders_are_not_followed(runs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    os.rename(runs / "first" / "trajectories", outside)
    (runs / "first" / "trajectories").symlink_to(outside)
    metrics = tmp_path / "metrics.jsonl"
    os.rename(runs / "first" / "metrics.jsonl", metrics)
    (runs / "first" / "metrics.jsonl").symlink_to(metrics)
    (runs / "linked").symlink_to(tmp_path)
    async with open_viewer(runs) as viewer:
        (line,) = (await viewer.get("/api/sources"))["sources"]
        assert "is outside the opened folders" in line["problem"]
        for path in ("metrics", "episodes", "outcomes", "episode/x", "group/x"):
            status, error = await viewer.refuse(f"/api/r/first/{path}")
            assert (status, "is outside" in error["message"]) == (400, True)
            assert "agentrl view" in error["hint"]
    async with open_viewer(runs, tmp_path) as viewer:  # now it is an opened folder, too
        keys = [source["key"] for source in (await viewer.get("/api/sources"))["sources"]]
        assert await viewer.get(f"/api/r/{keys[0]}/metrics")
    (file, *_) = sorted(outside.glob("step-*.jsonl"))
    (runs / "first" / "trajectories").unlink()
    (runs / "first" / "trajectories").mkdir()
    (runs / "first" / "trajectories" / file.name).symlink_to(file)
    async with open_viewer(runs) as viewer:
        assert "is outside" in (await viewer.refuse("/api/r/first/episodes"))[1]["message"]


async def test_assets_are_kept_and_pages_are_not(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer_server, "STATIC", tmp_path / "static")
    async with open_viewer(runs) as viewer:
        answer, body = await viewer.answer("/r/first")
        assert answer.status == 503
        assert b"make viewer" in body
        (tmp_path / "static" / "assets").mkdir(parents=True)
        (tmp_path / "static" / "index.html").write_text("<!doctype html><title>viewer</title>")
        (tmp_path / "static" / "assets" / "index-B4kq9xYz.js").write_text("1")
        (tmp_path / "static" / "secret.py").write_text("1")
        (tmp_path / "static" / "assets" / "link.js").symlink_to(tmp_path / "runs" / "first" / "config.yaml")
        for path in ("/", "/r/first", "/r/first/episode/7%2F0.0?turn=3", "/compare?a=x&b=y"):
            answer, body = await viewer.answer(path)
            assert (answer.status, body) == (200, b"<!doctype html><title>viewer</title>")
            assert answer.headers["Cache-Control"] == "no-cache"
        answer, _ = await viewer.answer("/assets/index-B4kq9xYz.js")
        assert answer.headers["Content-Type"] == "text/javascript; charset=utf-8"
        assert "immutable" in answer.headers["Cache-Control"]
        for path in ("/secret.py", "/assets/link.js", "/assets", "/index"):
            assert (await viewer.answer(path))[0].status == 404
