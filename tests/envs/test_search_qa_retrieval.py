"""Retrieval, files and scores of the search environment."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.search_qa.environment import RemoteSearchQA, SearchQA, make_search_qa
from agentrl.envs.search_qa.protocol import BRACKETS, TAGS, MoveKind, Protocol, read_passages
from agentrl.envs.search_qa.scoring import exact_match, f1, normalize
from agentrl.envs.search_qa.spec import SPEC
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.remote.retrieval import BM25Index, Passage, list_passages, load_corpus, words

WORDS = st.lists(st.sampled_from(["ash", "birch", "cedar", "elm", "fir", "oak", "pine", "yew"]), max_size=8).map(
    " ".join
)


def naive_scores(passages: list[Passage], query: str) -> list[float]:
    """BM25 from its formula, a passage at a time."""
    texts = [words(f"{passage.title} {passage.text}") for passage in passages]
    mean = max(sum(map(len, texts)) / len(texts), 1)
    scores = []
    for text in texts:
        score, counts = 0.0, Counter(text)
        for term in words(query):
            holding = sum(term in other for other in texts)
            if counts[term]:
                idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
                score += idf * counts[term] * 1.9 / (counts[term] + 0.9 * (0.6 + 0.4 * len(text) / mean))
        scores.append(score)
    return scores


@given(st.lists(st.tuples(WORDS, WORDS).map(lambda pair: Passage(*pair)), min_size=1, max_size=12), WORDS)
@settings(max_examples=40, deadline=None)
def test_index_ranks_by_the_formula(passages: list[Passage], query: str) -> None:
    found = BM25Index(passages).search(query, topk=5)
    scores = naive_scores(passages, query)
    best = sorted((score for score in scores if score > 0), reverse=True)[:5]
    assert [scores[passages.index(passage)] for passage in found] == pytest.approx(best, rel=1e-5)


def test_equal_passages_keep_their_order_and_strangers_stay_out() -> None:
    index = BM25Index([Passage("a", "oak"), Passage("b", "elm"), Passage("c", "oak"), Passage("d", "oak")])
    assert [passage.title for passage in index.search("Oak!", topk=2)] == ["a", "c"]
    assert index.search("yew", topk=3) == ()
    assert len(index.search("oak elm", topk=9)) == 4


@pytest.mark.parametrize(
    ("text", "normal"),
    [("The  Beatles!", "beatles"), ("an U.S. Navy", "us navy"), ("a-b", "ab"), ("theatre", "theatre"), ("", "")],
)
def test_answers_are_normalized(text: str, normal: str) -> None:
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("answer", "golden", "match", "overlap"),
    [
        ("the Eiffel Tower.", ["Eiffel tower"], 1.0, 1.0),
        ("Eiffel", ["Eiffel Tower", "La tour"], 0.0, 2 / 3),
        ("red red blue", ["red blue blue"], 0.0, 2 / 3),
        ("Paris", ["Rome"], 0.0, 0.0),
        ("the", ["a"], 0.0, 0.0),
        ("", ["a"], 0.0, 0.0),
        ("A", ["a"], 1.0, 1.0),
        ("Paris", [], 0.0, 0.0),
    ],
)
def test_exact_match_and_f1(answer: str, golden: list[str], match: float, overlap: float) -> None:
    assert exact_match(answer, golden) == match
    assert f1(answer, golden) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("protocol", "action", "kind", "text"),
    [
        (TAGS, "<search> a\nb </search>", MoveKind.SEARCH, "a\nb"),
        (TAGS, "<think>x</think><answer>42</answer>", MoveKind.ANSWER, "42"),
        (TAGS, "<search>a</search><information>b</information><answer>c</answer>", MoveKind.SEARCH, "a"),
        (TAGS, "<search>a</answer>", MoveKind.NOTHING, ""),
        (TAGS, "<answer>  </answer>", MoveKind.NOTHING, ""),
        (BRACKETS, "search[mayor of Oslo]", MoveKind.SEARCH, "mayor of Oslo"),
        (BRACKETS, "I know.\n finish[Oslo [Norway]]", MoveKind.ANSWER, "Oslo [Norway]"),
        (BRACKETS, "search[a]\nfinish[b]", MoveKind.SEARCH, "a"),
        (BRACKETS, "<search>a</search>", MoveKind.NOTHING, ""),
        (BRACKETS, "do not search[a]", MoveKind.NOTHING, ""),
        (BRACKETS, "finish[ ]", MoveKind.NOTHING, ""),
        (TAGS, "finish[a]", MoveKind.NOTHING, ""),
        (TAGS, "42", MoveKind.NOTHING, ""),
    ],
)
def test_actions_are_read(protocol: Protocol, action: str, kind: MoveKind, text: str) -> None:
    assert protocol.read(action) == (kind, text)


@pytest.mark.parametrize("protocol", [TAGS, BRACKETS])
def test_moves_that_are_written_are_read(protocol: Protocol) -> None:
    assert protocol.read(protocol.search("a b")) == (MoveKind.SEARCH, "a b")
    assert protocol.read(protocol.answer("a b")) == (MoveKind.ANSWER, "a b")


def test_passages_are_shown_and_read_back() -> None:
    passages = [Passage("One", "First text."), Passage("Two (film)", "Second text.")]
    shown = TAGS.show(passages)
    assert (
        shown == '<information>Doc 1(Title: "One") First text.\nDoc 2(Title: "Two (film)") Second text.</information>'
    )
    assert read_passages(shown) == read_passages(list_passages(passages)) == passages
    assert TAGS.show([]) == "<information>Nothing was found.</information>"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A corpus in both shapes of documents, and questions for the split train."""
    corpus = [{"id": "0", "contents": '"Fern"\nThe fern is green.'}, {"title": "Rose", "text": "The rose is red."}]
    questions = [
        {"id": "x1", "question": "What colour is the rose?", "golden_answers": ["red", "crimson"]},
        {"question": "What colour is the fern?", "answer": "green", "type": "easy"},
    ]
    for name, rows in (("corpus", corpus), ("train", questions)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return {"corpus": str(tmp_path / "corpus.jsonl"), "questions": str(tmp_path / "{split}.jsonl")}


def test_questions_and_passages_come_from_files(files: dict[str, str]) -> None:
    source = SPEC.tasks("train", **files)
    assert [(task.id, task.type) for task in map(source.__getitem__, range(2))] == [
        ("train-0", "file"),
        ("train-1", "easy"),
    ]
    env = SearchQA(**files)
    assert env.reset(options=dict(source[0].options))[0] == "Question: What colour is the rose?"
    assert env.step("<search>rose</search>")[0].startswith('<information>Doc 1(Title: "Rose") The rose is red.')
    assert env.step("<answer>Crimson.</answer>")[1:4] == (1.0, True, False)
    assert env.reset(seed=4)[0].startswith("Question: What colour")


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "is not valid JSON"), ("[1]", "is not an object"), ('{"id": 1}', "is not a passage"), ("", "is empty")],
)
def test_broken_corpora_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(line)
    with pytest.raises(UsageError, match=message):
        load_corpus(str(path))


def test_broken_question_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Why?", "golden_answers": []}')
    with pytest.raises(UsageError, match='"golden_answers", a list of texts'):
        SPEC.tasks("train", questions={"train": str(path)}, url="http://127.0.0.1:1")
    with pytest.raises(UsageError, match="cannot read question file"):
        SPEC.tasks("train", questions=str(tmp_path / "{split}.jsonl"), url="http://127.0.0.1:1")


def test_a_question_keeps_its_id_after_an_empty_line_and_in_a_compressed_file(tmp_path: Path) -> None:
    text = '{"question": "Why?", "answer": "so"}\n\n{"question": "How?", "answer": "so"}\n'
    (tmp_path / "train.jsonl").write_bytes(gzip.compress(text.encode()))
    source = SPEC.tasks("train", questions=str(tmp_path / "{split}.jsonl"), url="http://127.0.0.1:1")
    assert [source[number].id for number in range(len(source))] == ["train-0", "train-2"]


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ("q.jsonl", "all splits would share the questions of search_qa: got q.jsonl"),
        ({"train": "q.jsonl", "test": "./q.jsonl"}, "train and test share the questions"),
        ({"dev": "q.jsonl"}, "name an unknown split: got dev, expected train, valid, test"),
        ({}, "name an unknown split"),
        ({"valid": "q.jsonl"}, "split train has no file with questions of search_qa: got valid"),
    ],
)
def test_no_two_splits_share_a_file_of_questions(questions: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SPEC.tasks("train", questions=questions, url="http://127.0.0.1:1")


Answer = Callable[[web.Request], Any]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Answer], Any]]:
    """Starts a retriever that answers as told; its address."""
    servers: list[TestServer] = []

    async def start(answer: Answer) -> str:
        app = web.Application()
        app.router.add_post("/retrieve", answer)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("/"))

    yield start
    for server in servers:
        await server.close()


@pytest.mark.parametrize("scored", [True, False])
async def test_http_retriever_is_queried(serve: Callable[[Answer], Any], scored: bool) -> None:
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        documents = [{"id": str(i), "contents": f'"Title {i}"\nText {i}.'} for i in range(4)]
        hits = [{"document": document, "score": 1.0} for document in documents] if scored else documents
        return web.json_response({"result": [hits]})

    url = await serve(answer)
    env = make_search_qa(url=f"{url}retrieve" if scored else url, topk=2)
    assert isinstance(env, RemoteSearchQA)
    await env.reset(options={"task_id": "valid-3"})
    text, _, _, _, info = await env.step("<search>who</search>")
    assert asked == [{"queries": ["who"], "topk": 2, "return_scores": True}]
    assert text == '<information>Doc 1(Title: "Title 0") Text 0.\nDoc 2(Title: "Title 1") Text 1.</information>'
    assert info["valid"]
    assert await env.search("who else") == 'Doc 1(Title: "Title 0") Text 0.\nDoc 2(Title: "Title 1") Text 1.'
    assert env.snapshot()["queries"] == ["who", "who else"]
    await env.close()


async def _fail(request: web.Request) -> web.Response:
    raise web.HTTPServiceUnavailable(text="index is loading")


async def _no_json(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def _other_json(request: web.Request) -> web.Response:
    return web.json_response({"result": [[{"document": {"id": "0"}}]]})


async def _two_results(request: web.Request) -> web.Response:
    return web.json_response({"result": [[], []]})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_fail, "status 503: index is loading"),
        (_no_json, "JSONDecodeError"),
        (_other_json, "'result'"),
        (_two_results, "'result'"),
    ],
)
async def test_a_failing_retriever_is_the_machinery_s_fault(
    serve: Callable[[Answer], Any], answer: Answer, message: str
) -> None:
    env = RemoteSearchQA(url=await serve(answer))
    await env.reset(seed=1)
    with pytest.raises(EnvironmentFailure, match=message):
        await env.step("<search>who</search>")
    await env.close()


async def test_a_search_is_sent_again_if_the_retriever_has_closed_an_idle_connection() -> None:
    # NVIDIA-NeMo/Gym#1555: uvicorn closes connections after 5 s, and clients keep them for longer
    asked = 0

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        for is_first in (True, False):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            asked += 1
            if is_first:
                body = json.dumps({"result": [[{"title": "A", "text": f"answer {asked}"}]]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    env = RemoteSearchQA(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await env.reset(seed=1)
    assert [await env.search("who") for _ in range(2)] == [f'Doc 1(Title: "A") answer {number}' for number in (1, 3)]
    await env.close()
    server.close()


async def test_a_missing_or_silent_retriever_is_named(serve: Callable[[Answer], Any]) -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    gone = await serve(never)
    env = RemoteSearchQA(url=gone, timeout_s=0.05)
    await env.reset(seed=1)
    with pytest.raises(EnvironmentFailure, match=r"no answer in 0.05 s"):
        await env.step("<search>who</search>")
    await env.close()
    refused = RemoteSearchQA(url="http://127.0.0.1:1")
    await refused.reset(seed=1)
    with pytest.raises(EnvironmentFailure, match=r"http://127.0.0.1:1/retrieve failed.*POST /retrieve"):
        await refused.search("who")
    await refused.close()


@pytest.mark.parametrize("protocol", [TAGS, BRACKETS])
@pytest.mark.parametrize("piece", ["<search>", "\n", "finish["])
def test_long_answers_are_read_in_time_that_grows_with_their_length(protocol: Protocol, piece: str) -> None:
    assert protocol.read(piece * 40_000).kind is MoveKind.NOTHING  # minutes where a pattern begins anew at each place
