"""The tool search finds passages in a file, or asks a retriever."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.builders.tools import find_tool
from agentrl.errors import EnvironmentFailure, UsageError

PASSAGES = [
    {"contents": '"Fern"\nFerns like shade and water.'},
    {"title": "Cactus", "text": "A cactus likes sun."},
    {"title": "Moss", "text": "Moss grows on stones in the shade."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "plants.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PASSAGES))
    return str(path)


async def test_words_find_passages(desk, corpus):
    async with desk() as tools:
        entry = {"name": "search", "corpus": corpus, "topk": 2}
        found = await tools.text(entry, query="shade water")
        assert found.splitlines() == [
            'Doc 1(Title: "Fern") Ferns like shade and water.',
            'Doc 2(Title: "Moss") Moss grows on stones in the shade.',
        ]
        assert await tools.text(entry, query="bicycle") == "Nothing was found."
        assert "the query is empty" in await tools.error(entry, query="  ")


async def test_a_retriever_is_asked_and_its_failure_is_no_text(desk):
    broken = False

    async def retrieve(request):
        body = await request.json()
        if broken:
            return web.Response(status=500)
        documents = [{"document": {"contents": f"{body['queries'][0]}\nfound"}} for _ in range(body["topk"])]
        return web.json_response({"result": [documents]})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    async with TestServer(app) as server, desk() as tools:
        entry = {"name": "search", "url": str(server.make_url("/")), "topk": 1}
        assert await tools.text(entry, query="fern") == 'Doc 1(Title: "fern") found'
        broken = True
        with pytest.raises(EnvironmentFailure, match=r"the retriever at .* failed: got status 500"):
            await tools.call(entry, query="fern")


@pytest.mark.parametrize("options", [{"corpus": "nowhere.jsonl"}, {"topk": 3}, {"corpus": "a", "url": "b"}])
def test_wrong_options_are_found_before_the_run(options):
    with pytest.raises(UsageError):
        find_tool({"name": "search", **options})
