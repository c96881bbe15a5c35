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


async def test_pages_of_other_sites_are_refused(runs: Path) -> None:
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


async def test_a_token_becomes_a_cookie(runs: Path) -> None:
    async with open_viewer(runs, token=TOKEN) as viewer:
        assert (await viewer.refuse("/api/sources"))[0] == 401
        assert (await viewer.refuse("/?token=wrong"))[0] == 401
        assert (await viewer.refuse("/api/sources", headers={"Cookie": "agentrl_view=wrong"}))[0] == 401
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert await viewer.get("/api/sources", headers=bearer)
        assert (await viewer.refuse("/api/sources", headers={**bearer, "Origin": "https://evil.example"}))[0] == 403
        answer, _ = await viewer.answer(f"/r/first/episodes?task=x&token={TOKEN}")
        assert (answer.status, answer.headers["Location"]) == (303, "/r/first/episodes?task=x")
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


async def test_odd_texts_are_only_data(runs: Path) -> None:
    async with open_viewer(runs) as viewer:
        await viewer.indexed("first")
        for text in ("%", "_", "'", '"; --', "\x00", "<script>", "\N{PILE OF POO}", "*"):
            for name in ("text", "task", "environment", "role", "group", "task_type", "split"):
                found = await viewer.get("/api/r/first/episodes", params={name: text})
                assert found["rows"] == [] or name == "text"


async def test_a_query_of_a_megabyte_is_refused(runs: Path) -> None:
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
        assert "leads out of the opened folders" in line["problem"]
        for path in ("metrics", "episodes", "outcomes", "episode/x", "group/x"):
            status, error = await viewer.refuse(f"/api/r/first/{path}")
            assert (status, "leads out" in error["message"]) == (400, True)
            assert "agentrl view" in error["hint"]
    async with open_viewer(runs, tmp_path) as viewer:  # now it is an opened folder, too
        keys = [source["key"] for source in (await viewer.get("/api/sources"))["sources"]]
        assert await viewer.get(f"/api/r/{keys[0]}/metrics")
    (file, *_) = sorted(outside.glob("step-*.jsonl"))
    (runs / "first" / "trajectories").unlink()
    (runs / "first" / "trajectories").mkdir()
    (runs / "first" / "trajectories" / file.name).symlink_to(file)
    async with open_viewer(runs) as viewer:
        assert "leads out" in (await viewer.refuse("/api/r/first/episodes"))[1]["message"]


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
