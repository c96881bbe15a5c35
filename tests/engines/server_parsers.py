"""Runs one server's own parsers on outputs of models, in the server's environment: python server_parsers.py FOLDER.

The folder holds ``jobs.json``: the server, the offered tools, and per family the name of the server's parser, a folder
with a tokenizer, and the outputs. Written is ``SERVER.json``: per family and output the calls, as pairs of a name and
JSON arguments as the server wrote them, and the content; or what the parser raised. Nothing of agentrl is imported.
"""

import json
import logging
import signal
import sys
import time
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
LIMIT_S, LONGER_S = 0.3, 2.0
"""Processor seconds that a parser may take for one output, at first and when it is repeated: some search with patterns
that take exponential time, and others import modules for their first outputs."""
MAX_REPEATED = 5
"""Outputs of a family that are repeated in vain; later ones are not repeated."""


def vllm_parsers(tools):
    """A function from a job to a function from an output to calls and content."""
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], model="policy", tools=tools)

    def open_job(job):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(job["tokenizer"])
        if job["parser"] == "openai":
            return vllm_harmony(tokenizer, request)
        parser_class = ToolParserManager.get_tool_parser(job["parser"])

        def parse(text):
            found = parser_class(tokenizer, request.tools).extract_tool_calls(text, request)
            calls = [[call.function.name, call.function.arguments] for call in found.tool_calls]
            return {"calls": calls, "content": found.content or ""}

        return parse

    return open_job


def vllm_harmony(tokenizer, request):
    """Harmony is parsed from tokens, by OpenAI's library."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.harmony import HarmonyParser
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    encoding = get_encoding()

    class Decoder:
        """The tokens of the library's own vocabulary."""

        def decode(self, ids):
            return encoding.decode(ids)

    def parse(text):
        HarmonyParser.tool_parser_cls, HarmonyParser.reasoning_parser_cls = GptOssToolParser, GptOssReasoningParser
        parser = HarmonyParser(tokenizer, request.tools)
        parser.model_tokenizer = Decoder()
        ids = encoding.encode(text, allowed_special="all")
        reasoning, content, calls = parser.parse(text, request, model_output_token_ids=ids)
        pairs = [[call.name, call.arguments] for call in calls or ()]
        return {"calls": pairs, "content": content or "", "reasoning": reasoning}

    return parse


def sglang_parsers(tools):
    """A function from a job to a function from an output to calls and content."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    offered = [Tool.model_validate(tool) for tool in tools]

    def open_job(job):
        def parse(text):
            content, calls = FunctionCallParser(offered, job["parser"]).parse_non_stream(text)
            return {"calls": [[call.name, call.parameters] for call in calls], "content": content}

        return parse

    return open_job


def guarded(parse, text, limit_s):
    """What the parser found, or raised, or that it took too long."""
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        return parse(text)
    except TooLong:
        return {"raised": "TooLong"}
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"[:300]}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def read_all(parse, texts):
    """What the parser made of each output."""
    found, repeated_in_vain = [], 0
    for text in texts:
        answer = guarded(parse, text, LIMIT_S)
        if answer.get("raised") == "TooLong" and repeated_in_vain < MAX_REPEATED:
            answer = guarded(parse, text, LONGER_S)
            repeated_in_vain += answer.get("raised") == "TooLong"
        found.append(answer)
    return found


class TooLong(BaseException):
    """The time is over; no handler of a parser's own catches it."""


def stop(*_):
    raise TooLong


def main(folder):
    asked = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    server = asked["server"]
    open_job = {"vllm": vllm_parsers, "sglang": sglang_parsers}[server](asked["tools"])
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGVTALRM, stop)
    answers, started = {}, time.monotonic()
    for family, job in asked["jobs"].items():
        parse = open_job(job)
        answers[family] = read_all(parse, job["outputs"])
        print(f"{family}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    (folder / f"{server}.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
