"""A judge's service for tests: real HTTP in a thread, with answers from a function of the question."""

import json
import re
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.waiting import join

ATTEMPT = re.compile(
    r"^--- (?:transcript|attempt \d+) begins (#\w+)$(.*?)^--- (?:transcript|attempt \d+) ends \1$", re.M | re.S
)


def attempts_in(question):
    """The transcripts of a question, as a judge that minds the marks reads them."""
    return [found[2].strip() for found in ATTEMPT.finditer(question)]


def agents_words(attempt, mark):
    """What the agent wrote in a transcript."""
    parts = re.split(rf"^\[(agent|world)\] {re.escape(mark)}$", attempt, flags=re.M)
    return "".join(text for author, text in zip(parts[1::2], parts[2::2], strict=True) if author == "agent")


def mark_of(question):
    """The mark of a question."""
    return ATTEMPT.search(question)[1]


class JudgeService:
    """Answers questions with `says(question, body)`: a text, an object for JSON, or an HTTP status, with its error."""

    def __init__(self, says, *, guided=True, usage=(100, 10), delay_s=0.0, finish="stop", thinks=False):
        self.says, self.guided, self.usage, self.delay_s, self.finish = says, guided, usage, delay_s, finish
        self.thinks = thinks
        self.bodies = []
        self.asked = threading.Event()
        self.running = self.most_at_once = 0
        self._lock = threading.Lock()
        self.url = ""

    @property
    def questions(self):
        return [body["messages"][0]["content"] for body in self.bodies]

    def answer(self, body):
        """The status and the body of an answer."""
        with self._lock:
            self.bodies.append(body)
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        self.asked.set()
        try:
            time.sleep(self.delay_s)
            if not self.guided and "response_format" in body:
                return 400, {"error": {"message": "response_format is not supported"}}
            said = self.says(body["messages"][0]["content"], body)
            if isinstance(said, int | tuple):
                status, error = said if isinstance(said, tuple) else (said, "no")
                return status, {"error": {"message": error}}
            text = said if isinstance(said, str) else json.dumps(said)
            message = {"role": "assistant", "content": text}
            if self.thinks:
                message = {"role": "assistant", "content": None, "reasoning_content": text}
            choice = {"message": message, "finish_reason": self.finish}
            usage = {"prompt_tokens": self.usage[0], "completion_tokens": self.usage[1]} if self.usage else {}
            return 200, {"choices": [choice], "usage": usage}
        finally:
            with self._lock:
                self.running -= 1


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.server.service.answer(body)
        data = json.dumps(answer).encode()
        with suppress(ConnectionError):  # the asker may be gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *arguments):
        """Say nothing."""


@contextmanager
def judge_service(says, **options):
    """Serve a judge on this machine."""
    service = JudgeService(says, **options)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.service = service
        service.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            join(thread)
