"""The tool fetch_page shows pages of listed hosts, and never leaves them."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.builders.tools import find_tool
from agentrl.errors import UsageError

PAGE = """<html><head><title>x</title><style>p {}</style></head><body><h2>Ferns</h2>
<p>They   like <a href="/shade">shade</a>.<ul><li>wet<li>cool</ul><script>alert(1)</script>
<pre>a  b
 c</pre></body></html>"""


@pytest.fixture
async def site():
    app = web.Application()

    async def answer(request):
        match request.path:
            case "/page":
                return web.Response(text=PAGE, content_type="text/html")
            case "/long":
                return web.Response(text="0123456789" * 30)
            case "/large":
                return web.Response(text="x" * 5000)
            case "/picture":
                return web.Response(body=b"x", content_type="image/png")
            case "/inside":
                raise web.HTTPFound("/page")
            case "/outside":
                raise web.HTTPFound("http://elsewhere.example/page")
            case "/local":
                raise web.HTTPFound("file:///etc/passwd")
            case "/round":
                raise web.HTTPFound("/round")
        raise web.HTTPNotFound

    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield server


@pytest.fixture
def entry(site):
    return {
        "name": "fetch_page",
        "hosts": [f"127.0.0.1:{site.port}", f"localhost:{site.port}", "*.example.org"],
        "networks": ["127.0.0.0/8", "::1"],
        "max_bytes": 2000,
        "page_characters": 120,
    }


async def test_pages_are_shown_as_text(desk, entry, site):
    async with desk() as tools:
        base = f"http://127.0.0.1:{site.port}"
        text = f"## Ferns\n\nThey like [shade]({base}/shade).\n\n- wet\n- cool\n\na  b\nc"
        assert await tools.text(entry, url=f"{base}/page") == text
        assert await tools.text(entry, url=f"http://localhost:{site.port}/inside") == text.replace(
            "127.0.0.1", "localhost"
        )
        first = await tools.text(entry, url=f"{base}/long")
        assert first.endswith("9\n[characters 0 to 120 of 300; continue with start=120]")
        assert await tools.text(entry, url=f"{base}/long", start=240) == "0123456789" * 6


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/outside", "elsewhere.example is not among the allowed hosts"),
        ("/local", "not the address of a page"),
        ("/round", "5 redirects"),
        ("/nothing", "status 404"),
        ("/large", "more than 2000 bytes"),
        ("/picture", "is not a text page: got image/png"),
    ],
)
async def test_what_a_host_must_not_do_is_told(desk, entry, site, path, words):
    async with desk() as tools:
        assert words in await tools.error(entry, url=f"http://127.0.0.1:{site.port}{path}")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://elsewhere.example/", "not among the allowed hosts"),
        ("http://127.0.0.1:1/", "not among the allowed hosts"),
        ("http://example.org/", "not among the allowed hosts"),
        ("http://user@a.example.org/", "not the address of a page"),
        ("ftp://a.example.org/", "not the address of a page"),
        ("http://[::1/", "not the address of a page"),
        ("http://a.example.org:99999/", "not the address of a page"),
        ("page", "not the address of a page"),
    ],
)
async def test_other_addresses_are_rejected(desk, entry, url, words):
    async with desk() as tools:
        assert words in await tools.error(entry, url=url)


async def test_private_addresses_are_refused_unless_they_are_listed(desk, site):
    hosts = [f"127.0.0.1:{site.port}", f"localhost:{site.port}", f"[::ffff:7f00:1]:{site.port}"]
    async with desk() as tools:
        for host in (f"127.0.0.1:{site.port}", f"localhost:{site.port}"):
            told = await tools.error({"name": "fetch_page", "hosts": hosts}, url=f"http://{host}/page")
            assert "address that is not allowed" in told


@pytest.mark.parametrize(
    "options", [{"hosts": []}, {"hosts": ["http://a.org/"]}, {"hosts": ["a.org"], "networks": ["x"]}, {}]
)
def test_wrong_options_are_found_before_the_run(options):
    with pytest.raises(UsageError):
        find_tool({"name": "fetch_page", **options})
